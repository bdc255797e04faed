"""Pages that apply pasted lines, or a file of them: members of a subject list, or the customers of a plan."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import quote
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..exceptions import InvalidFile
from ..models import ListMember, SubjectList
from ..operations.pasted_lines import Line, add_members, assign, lines_of, remove_members
from ..policyfile.document import MAX_BYTES, decode
from .base import REASON_FIELD, ChangeReasonForm
from .formatting import shown
from .pages import AdminPage, may_view, model_url
from .permissions import check_subject, may_edit_members

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
        help_text=_(
            "A .txt file with the same lines or a .csv file that names its columns in the first line, such as email, "
            "end and reason."
        ),
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
                for line in form.cleaned_data["lines"]:
                    check_subject(request.user, line.who)
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
            "back": self.back(request, obj),
        }
        return self.render(request, "lines.html", context, form)


class AssignPage(LinesPage):
    """Assigns the plan to customers from now on."""

    path = "<path:object_id>/assign/"
    name = "assign"
    title = _("Assign customers to plan %(name)s")
    link = _("Assign customers")
    label = _("Customers, one per line")
    help_text = _(
        "A user name, an email address or a subject such as user:42 or tenant:acme, optionally followed by until "
        "2026-12-31 and # reason. Choose a file for more than 2 MB."
    )

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may add assignments, and see the plan."""
        may_add = request.user.has_perm("django_ratequota.add_planassignment")
        return bool(may_add and self.admin.has_view_permission(request, obj))

    def apply(self, request: Any, obj: Any, lines: list[Line], reason: str) -> str:
        """Assign the plan; the reason of the change is that of lines without one."""
        done = assign(obj, lines, reason=reason, created_by=request.user)
        return _in_words(
            (done.new, ngettext_lazy("%d customer was assigned.", "%d customers were assigned.")),
            (
                done.later,
                ngettext_lazy(
                    "%d stays on another plan until the assignment there ends.",
                    "%d stay on another plan until the assignment there ends.",
                ),
            ),
            (done.present, ngettext_lazy("%d was on this plan already.", "%d were on this plan already.")),
        )


class AddMembersPage(LinesPage):
    """Adds members to a list."""

    path = "<path:object_id>/add-members/"
    name = "add_members"
    verb = "add"
    title = _("Add members to %(name)s")
    link = _("Add members")
    label = _("Members, one per line")
    help_text = _(
        "203.0.113.7, 203.0.113.0/24, tenant:acme, user:42, a user name or an email address, optionally followed by "
        "until 2026-12-31 and # reason. Choose a file for more than 2 MB."
    )

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may add (or remove) members."""
        return may_edit_members(request.user, self.verb)

    def apply(self, request: Any, obj: Any, lines: list[Line], reason: str) -> str:
        """Add the members."""
        done = add_members(obj, lines, may_change=may_edit_members(request.user, "change"))
        return _in_words(
            (done.added, ngettext_lazy("%d member was added.", "%d members were added.")),
            (
                done.changed,
                ngettext_lazy("The dates of %d member were changed.", "The dates of %d members were changed."),
            ),
            (done.present, ngettext_lazy("%d was in the list already.", "%d were in the list already.")),
        )

    def back(self, request: Any, obj: Any) -> str:
        """Return the address of the list's members; of the list where the operator may not see these."""
        sees = may_view(self.site, ListMember, request)
        return members_url(self.site, obj) if sees else super().back(request, obj)


class RemoveMembersPage(AddMembersPage):
    """Removes members from a list, and links to all of them."""

    path = "<path:object_id>/remove-members/"
    name = "remove_members"
    verb = "delete"
    title = _("Remove members from %(name)s")
    link = _("Remove members")

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the links to this page, and to the list's members."""
        found = super().links(request, obj)
        if may_view(self.site, ListMember, request):
            found.append((members_url(self.site, obj), _("Members")))
        return found

    def apply(self, request: Any, obj: Any, lines: list[Line], reason: str) -> str:
        """Remove the members."""
        removed = remove_members(obj, lines)
        return _in_words(
            (removed, ngettext_lazy("%d member was removed.", "%d members were removed.")),
            (len(lines) - removed, ngettext_lazy("%d was not in the list.", "%d were not in the list.")),
        )


def members_url(site: Any, subject_list: SubjectList) -> str:
    """Return the address of the list's members."""
    return model_url(site, ListMember, "changelist", query={"subject_list__id__exact": subject_list.pk})


def _in_words(*counts: tuple[int, Any]) -> str:
    """Return a sentence for each number that is not 0, of a ``ngettext_lazy`` text."""
    words = [str(text % count) for count, text in counts if count]
    return " ".join(words) or gettext("No changes were made.")


def _first(problems: list[str]) -> list[str]:
    more = len(problems) - _SHOWN_PROBLEMS
    counted = [ngettext("and %d more", "and %d more", more) % more] if more > 0 else []
    return [*problems[:_SHOWN_PROBLEMS], *counted]
