"""Pages that add members to a subject list, or remove them: pasted lines, or a file of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import quote
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import InvalidFile
from ..models import ListMember, SubjectList
from ..operations.list_members import Line, add_members, lines_of, remove_members
from ..policyfile.document import decode
from .base import REASON_FIELD, ChangeReasonForm
from .formatting import shown
from .pages import AdminPage, may_view, model_url
from .permissions import may_edit_members

#: Most bad lines that the page lists; more are counted.
_SHOWN_PROBLEMS = 500


class LinesForm(ChangeReasonForm):
    """Members as lines of text, or a file of them, and the reason of the change."""

    text = forms.CharField(
        label=_("Members, one a line"),
        required=False,
        strip=False,
        widget=forms.Textarea(attrs={"rows": 12, "cols": 80, "spellcheck": "false", "class": "vLargeTextField"}),
        help_text=_(
            "203.0.113.7, 203.0.113.0/24, tenant:acme or user:alice (the login name), then optionally until "
            "2026-12-31 and # reason. More than 2 MB: choose a file."
        ),
    )
    file = forms.FileField(
        label=_("Or a file"),
        required=False,
        help_text=_("The same lines (.txt), or columns: member, end, reason (.csv)."),
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
                text = decode(upload.read())
            except InvalidFile as error:
                raise ValidationError({"file": error.problems[0].text}) from error
        values["lines"] = lines_of(text, columns=str(upload or "").lower().endswith(".csv"))
        if not values["lines"] and not self.errors:
            raise ValidationError(_("Paste at least one line, or choose a file."))
        return values


class AddMembersPage(AdminPage):
    """Adds members to a list."""

    path = "<path:object_id>/add-members/"
    name = "add_members"
    verb: ClassVar[str] = "add"
    title: ClassVar[Any] = _("Add members to %(list)s")
    button: ClassVar[Any] = _("Add members")

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may add (or remove) members."""
        return may_edit_members(request.user, self.verb)

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link to this page."""
        return [(self.url(obj), self.button)] if self.has_permission(request) else []

    def view(self, request: Any, subject_list: SubjectList) -> Any:
        """GET asks for the lines, POST applies all of them, or lists the bad ones and changes nothing."""
        form = LinesForm(*((request.POST, request.FILES) if request.method == "POST" else ()))
        problems: list[str] = []
        if request.method == "POST" and form.is_valid():
            try:
                text = self.apply(request, subject_list, form.cleaned_data["lines"])
            except ValidationError as error:
                problems = error.messages
            else:
                self.admin.log_change(request, subject_list, text)
                self.admin.message_user(request, f"{shown(subject_list)}: {text}", messages.SUCCESS)
                return HttpResponseRedirect(self._back(request, subject_list))
        context = {
            "title": self.title % {"list": shown(subject_list)},
            "original": str(self.button),
            "button": self.button,
            "form": form,
            "errors": form.errors,
            "problems": problems[:_SHOWN_PROBLEMS],
            "more": max(0, len(problems) - _SHOWN_PROBLEMS),
            "back": self._back(request, subject_list),
        }
        return self.render(request, "members.html", context, form)

    def apply(self, request: Any, subject_list: SubjectList, lines: list[Line]) -> str:
        """Add the members, and return what happened in words; raises ``ValidationError``."""
        done = add_members(subject_list, lines, may_change=may_edit_members(request.user, "change"))
        return _words(
            (done.added, lambda n: ngettext("%d member was added.", "%d members were added.", n)),
            (done.changed, lambda n: ngettext("%d has other dates now.", "%d have other dates now.", n)),
            (done.present, lambda n: ngettext("%d was there already.", "%d were there already.", n)),
        )

    def _back(self, request: Any, subject_list: SubjectList) -> str:
        """Return the address of the list's members; of the list where the operator may not see these."""
        if may_view(self.site, ListMember, request):
            return members_url(self.site, subject_list)
        return str(self.admin.page_url("change", quote(subject_list.pk)))


class RemoveMembersPage(AddMembersPage):
    """Removes members from a list, and links to all of them."""

    path = "<path:object_id>/remove-members/"
    name = "remove_members"
    verb = "delete"
    title = _("Remove members from %(list)s")
    button = _("Remove members")

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the links to this page, and to the list's members."""
        found = super().links(request, obj)
        if may_view(self.site, ListMember, request):
            found.append((members_url(self.site, obj), _("Members")))
        return found

    def apply(self, request: Any, subject_list: SubjectList, lines: list[Line]) -> str:
        """Remove the members, and return what happened in words; raises ``ValidationError``."""
        done = remove_members(subject_list, lines)
        return _words(
            (done.removed, lambda n: ngettext("%d member was removed.", "%d members were removed.", n)),
            (done.absent, lambda n: ngettext("%d was not in the list.", "%d were not in the list.", n)),
        )


def members_url(site: Any, subject_list: SubjectList) -> str:
    """Return the address of the list's members."""
    return model_url(site, ListMember, "changelist", query={"subject_list__id__exact": subject_list.pk})


def _words(*counts: tuple[int, Callable[[int], str]]) -> str:
    words = [text(count) % count for count, text in counts if count]
    return " ".join(words) or gettext("Nothing was changed.")
