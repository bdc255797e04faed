"""Pages that add members to a subject list, or remove them."""

from __future__ import annotations

from typing import Any, ClassVar

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from ..models import ListMember, SubjectList
from ..operations.list_members import add_members, remove_members
from ..operations.pasted_lines import Line
from .pages import may_view, model_url
from .pasted_lines import LinesPage, in_words
from .permissions import check_subject, may_edit_members


class AddMembersPage(LinesPage):
    """Adds members to a list."""

    path = "<path:object_id>/add-members/"
    name = "add_members"
    verb: ClassVar[str] = "add"
    title = _("Add members to %(name)s")
    link = _("Add members")
    label = _("Members, one per line")
    help_text = _(
        "203.0.113.7, 203.0.113.0/24, tenant:acme or a login name, optionally followed by until 2026-12-31 and # "
        "reason. Choose a file for more than 2 MB."
    )

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may add (or remove) members."""
        return may_edit_members(request.user, self.verb)

    def apply(self, request: Any, obj: Any, lines: list[Line], reason: str) -> str:
        """Add the members."""
        for line in lines:
            check_subject(request.user, line.who)
        done = add_members(obj, lines, may_change=may_edit_members(request.user, "change"))
        return in_words(
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
        return in_words(
            (removed, ngettext_lazy("%d member was removed.", "%d members were removed.")),
            (len(lines) - removed, ngettext_lazy("%d was not in the list.", "%d were not in the list.")),
        )


def members_url(site: Any, subject_list: SubjectList) -> str:
    """Return the address of the list's members."""
    return model_url(site, ListMember, "changelist", query={"subject_list__id__exact": subject_list.pk})
