"""What happened, in a few words for lists, and the page of a save with all changes, who made them, when and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.core.paginator import Paginator
from django.db.models import Count
from django.http import Http404, HttpResponseRedirect
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..models import PolicyChange
from ..operations.recorded import KINDS, Words, name_users
from ..operations.revert import of_save
from .formatting import isolated, moment
from .pages import AdminPage, page_numbers

#: Objects of a page.
_PAGE = 50
#: Fields that a cell shows, and characters of each value; the page of the save shows all.
_FIELDS = 2
_CHARACTERS = 40


def describe(changes: Sequence[Any]) -> None:
    """Set what lists show of changes of different saves: ``what`` in a few words, and ``more``, how many others.

    The texts get the names that users have today.
    """
    rows = PolicyChange.objects.filter(change_id__in=[change.change_id for change in changes]).order_by()
    sizes = dict(rows.values_list("change_id").annotate(Count("pk")))
    words = Words(changes)
    name_users(changes)
    for change in changes:
        change.what, change.more = _summary(change, words), sizes[change.change_id] - 1


def _summary(change: PolicyChange, words: Words) -> str:
    """Return what changed in a few words; "" for objects that were created or deleted."""
    if change.model != "counter" and change.action != PolicyChange.Action.UPDATE:
        return ""
    rows = words.table(change)
    # Both isolated together from left to right: else the arrow would point the wrong way after an Arabic name.
    parts = [
        gettext("%(field)s: %(before)s → %(after)s")
        % {
            "field": label,
            "before": f"\N{LEFT-TO-RIGHT ISOLATE}{_short(before)}",
            "after": f"{_short(after)}\N{POP DIRECTIONAL ISOLATE}",
        }
        for label, before, after in rows[:_FIELDS]
    ]
    more = len(rows) - _FIELDS
    if more > 0:
        parts.append(ngettext("and %(count)d more field", "and %(count)d more fields", more) % {"count": more})
    return "; ".join(parts)


def _short(value: str) -> str:
    return isolated(Truncator(value or gettext("empty")).chars(_CHARACTERS))


def kinds() -> dict[str, Any]:
    """Return the names of the values of ``PolicyChange.model``."""
    names = {kind: model._meta.verbose_name for kind, model in KINDS.items()}
    return {**names, "counter": _("counter"), "*": _("everything")}


def kind_name(kind: str) -> str:
    """Return the name of a kind of object."""
    return str(kinds().get(kind, kind))


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
