"""Recorded changes in words: the fields that differ, their values, and the names of related objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db import models
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..changes.validators import visible
from ..models import PolicyChange
from ..operations.differences import Difference, differences, label, related_names
from ..operations.states import KINDS
from .formatting import isolated, moment
from .names import deleted

#: Fields that a cell of the list shows, and characters of each value; the change's own page shows all.
_FIELDS = 2
_CHARACTERS = 40


def as_table(rows: Sequence[Difference], heads: tuple[Any, Any, Any], empty: Any, names: RelatedNames) -> str:
    """Return the differences as an HTML table, with ``empty`` for missing values."""
    cells = (
        (label(name, field), *(names.whole(field, value) or empty for value in values))
        for name, field, *values in rows
    )
    return format_html(
        '<table class="ratequota-difference"><thead><tr><th scope="col">{}</th><th scope="col">{}</th>'
        '<th scope="col">{}</th></tr></thead><tbody>{}</tbody></table>',
        *heads,
        format_html_join("", '<tr><th scope="row">{}</th><td>{}</td><td>{}</td></tr>', cells),
    )


def in_words(field: Any, value: Any) -> str:
    """Return a recorded value that is not a related object as text; "" for a missing value."""
    if value is None or value == "":
        return ""
    if isinstance(value, dict) and value.keys() >= {"used", "remaining"}:
        return gettext("%(used)s used, %(remaining)s left") % value
    if field is None:  # a field of an earlier version
        return str(value)
    if isinstance(field, models.DateTimeField):
        return moment(parse_datetime(value)) or str(value)
    if isinstance(value, bool):
        return gettext("yes") if value else gettext("no")
    return str(dict(field.flatchoices).get(value, value))


class RelatedNames:
    """Today's names of the related objects in differences, looked up in one query per model."""

    def __init__(self, rows: Iterable[Difference]) -> None:
        self._found = related_names(rows)

    @classmethod
    def of_summaries(cls, changes: Iterable[PolicyChange]) -> RelatedNames:
        """Return the names that ``summary`` needs of these changes."""
        edits = (change for change in changes if change.action == PolicyChange.Action.UPDATE)
        return cls(row for change in edits for row in differences(change)[:_FIELDS])

    def whole(self, field: Any, value: Any) -> str:
        """Return a value as text, a related object with its id; "" for a missing value."""
        if field is not None and field.is_relation and value not in (None, ""):
            name = self._found.get(field.related_model, {}).get(str(value))
            words = {"object": name, "pk": value}
            return visible(deleted(value) if name is None else gettext("%(object)s (id %(pk)s)") % words)
        return visible(in_words(field, value))

    def summary(self, change: PolicyChange) -> str:
        """Return what changed in a few words; "" for objects that were created or deleted."""
        if change.model == "counter":
            count = len(change.before or {})
            return ngettext("%(count)d counter", "%(count)d counters", count) % {"count": count}
        if change.action != PolicyChange.Action.UPDATE:
            return ""
        rows = differences(change)
        # Both isolated together from left to right: else the arrow would point the wrong way after an Arabic name.
        parts = [
            gettext("%(field)s: %(before)s → %(after)s")
            % {
                "field": label(name, field),
                "before": f"\N{LEFT-TO-RIGHT ISOLATE}{self._short(field, before)}",
                "after": f"{self._short(field, after)}\N{POP DIRECTIONAL ISOLATE}",
            }
            for name, field, before, after in rows[:_FIELDS]
        ]
        more = len(rows) - _FIELDS
        if more > 0:
            parts.append(ngettext("and %(count)d more field", "and %(count)d more fields", more) % {"count": more})
        return "; ".join(parts)

    def _short(self, field: Any, value: Any) -> str:
        if field is not None and field.is_relation and value not in (None, ""):
            text = self._found.get(field.related_model, {}).get(str(value))
            text = text or deleted(value)
        else:
            text = in_words(field, value) or gettext("empty")
        return isolated(Truncator(visible(text)).chars(_CHARACTERS))


def kinds() -> dict[str, Any]:
    """Return the names of the values of ``PolicyChange.model``."""
    names = {kind: model._meta.verbose_name for kind, model in KINDS.items()}
    return {**names, "counter": _("counter"), "*": _("everything")}


def kind_name(kind: str) -> str:
    """Return the name of a value of ``PolicyChange.model``."""
    return str(kinds().get(kind, kind))
