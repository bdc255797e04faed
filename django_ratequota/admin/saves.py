"""The page that shows what happened: all changes of a save, who made them, when and why."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.paginator import Paginator
from django.http import Http404, HttpResponseRedirect
from django.utils.translation import gettext

from ..models import PolicyChange
from ..operations.recorded import KINDS, Words, name_users
from ..operations.revert import of_save
from .diff import kind_name
from .formatting import moment
from .pages import AdminPage, page_numbers

#: Objects of a page.
_PAGE = 50


class SavePage(AdminPage):
    """Shows what a save changed, and links to the page that undoes it."""

    path = "save/<uuid:change_id>/"
    name = "save"

    def view(self, request: Any, change_id: UUID) -> Any:
        """Show all changes of the save."""
        rows = PolicyChange.objects.filter(change_id=change_id)
        page = Paginator(rows.select_related("actor").order_by("pk"), _PAGE).get_page(request.GET.get("p"))
        changes = list(page)
        if not changes:
            raise Http404
        first = changes[0]
        self._describe(request, changes)
        undid = first.undoes and PolicyChange.objects.filter(change_id=first.undoes).first()
        # By object, which has an index.
        own = PolicyChange.objects.filter(model__in=KINDS, object_id__in=[change.object_id for change in changes])
        undone = own.filter(undoes=first.change_id).select_related("actor").first()
        context = {
            "title": gettext("Change of %(date)s") % {"date": moment(first.at)},
            "first": first,
            "undid": undid,
            "undone": undone,
            "changes": changes,
            "numbers": page_numbers(page, lambda number: f"?p={number}"),
            "undo": self.admin.page_url("revert", first.pk, "save") if of_save(first.change_id).exists() else "",
        }
        return self.render(request, "save.html", context)

    def _describe(self, request: Any, changes: list[Any]) -> None:
        """Set what the page shows of each change besides its fields, with a fixed number of queries."""
        name_users(changes)
        words = Words(changes)
        for change in changes:
            known = change.model in KINDS
            exists = known and change.action != PolicyChange.Action.DELETE
            change.kind, change.table = kind_name(change.model), words.table(change)
            change.url = self.object_url(request, KINDS[change.model], change.object_id) if exists else ""
            change.restore = self.admin.page_url("revert", change.pk, "object") if known and change.before else ""


class ChangePage(AdminPage):
    """Leads from the address of Django's own page of a change to the save that it is part of."""

    path = "<path:object_id>/change/"
    name = "change"

    def view(self, request: Any, change: PolicyChange) -> Any:
        """Redirect to the save."""
        return HttpResponseRedirect(self.admin.page_url("save", change.change_id))
