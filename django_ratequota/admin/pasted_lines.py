"""Pages that apply pasted lines, or a file of them: members of a subject list, or the customers of a plan."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import quote
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import InvalidFile
from ..operations.pasted_lines import Line, lines_of
from ..policyfile.document import MAX_BYTES, decode
from .base import REASON_FIELD, ChangeReasonForm
from .formatting import shown
from .pages import AdminPage

#: Maximum number of bad lines that the page lists; more are counted.
_SHOWN_PROBLEMS = 500


class LinesForm(ChangeReasonForm):
    """Lines of text, or a file of them, and the reason of the change."""

    text = forms.CharField(
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 12, "cols": 80, "spellcheck": "false", "class": "vLargeTextField"}),
    )
    file = forms.FileField(
        label=_("Or a file"),
        required=False,
        help_text=_("A .txt file with the same lines or a .csv file with the columns who, end and reason."),
    )
    field_order = ["text", "file", REASON_FIELD]

    def clean(self) -> Any:
        """Read the lines; refuse none, and text beside a file."""
        values: dict[str, Any] = super().clean() or {}
        upload, text = values.get("file"), values.get("text") or ""
        if upload and text.strip():
            raise ValidationError(_("Paste lines or choose a file, not both."))
        if upload:
            try:
                text = decode(upload.read(MAX_BYTES + 1))
            except InvalidFile as error:
                raise ValidationError({"file": error.problems[0].text}) from error
        values["lines"] = lines_of(text, columns=str(upload or "").lower().endswith(".csv"))
        if not values["lines"] and not self.errors:
            raise ValidationError(_("Paste at least one line or choose a file."))
        return values


class LinesPage(AdminPage):
    """Applies all of the lines, or lists the bad ones and changes nothing."""

    #: ``title`` has a place for the ``name`` of the object that the page is about; ``link`` is its button, too.
    title: ClassVar[Any]
    label: ClassVar[Any]
    help_text: ClassVar[Any]

    def apply(self, request: Any, obj: Any, lines: list[Line], reason: str) -> str:
        """Apply the lines, and return what happened in words; raises ``ValidationError``."""
        raise NotImplementedError

    def back(self, request: Any, obj: Any) -> str:
        """Return the address of the page to go on with."""
        return str(self.admin.page_url("change", quote(obj.pk)))

    def view(self, request: Any, obj: Any) -> Any:
        """GET asks for the lines, POST applies them."""
        form = LinesForm(*((request.POST, request.FILES) if request.method == "POST" else ()))
        form.fields["text"].label, form.fields["text"].help_text = self.label, self.help_text
        if form.is_valid():
            try:
                text = self.apply(request, obj, form.cleaned_data["lines"], form.cleaned_data[REASON_FIELD])
            except ValidationError as error:
                form.add_error(None, _first(error.messages))
            else:
                self.admin.log_change(request, obj, text)
                self.admin.message_user(request, f"{shown(obj)}: {text}", messages.SUCCESS)
                return HttpResponseRedirect(self.back(request, obj))
        context = {
            "title": self.title % {"name": shown(obj)},
            "original": str(self.link),
            "button": self.link,
            "form": form,
            "back": self.back(request, obj),
        }
        return self.render(request, "lines.html", context, form)


def in_words(*counts: tuple[int, Any]) -> str:
    """Return a sentence for each number that is not 0, of a ``ngettext_lazy`` text."""
    words = [str(text % count) for count, text in counts if count]
    return " ".join(words) or gettext("No changes were made.")


def _first(problems: list[str]) -> list[str]:
    more = len(problems) - _SHOWN_PROBLEMS
    counted = [ngettext("and %d more", "and %d more", more) % more] if more > 0 else []
    return [*problems[:_SHOWN_PROBLEMS], *counted]
