"""Recorded changes in a few words, for a cell of a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import Count
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..models import PolicyChange
from ..operations.recorded import KINDS, Words, name_users
from .formatting import isolated

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
