"""Recorded changes in words: the fields that differ, their values, and the names of related objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.apps import apps
from django.db import models
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.text import Truncator
from django.utils.translation import gettext, ngettext

from ..models import PolicyChange
from ..recording.validators import visible
from .formatting import isolated, moment
from .names import deleted, object_name, object_names

#: Fields that a cell of the list shows, and characters of each value; the change's own page shows all.
_FIELDS = 2
_CHARACTERS = 40

#: (field name, the field or None if the model no longer has it, before, after)
Difference = tuple[str, Any, Any, Any]


def fields_of(kind: str) -> dict[str, Any]:
    """Return the fields of the model by name; empty for ``*``."""
    try:
        model = apps.get_model("django_ratequota", kind)
    except (LookupError, ValueError):
        return {}
    return {field.name: field for field in model._meta.concrete_fields}


def differences(change: PolicyChange) -> list[Difference]:
    """Return the fields that the change changed, or every counter of a reset or grant."""
    before, after = change.before or {}, change.after or {}
    known = fields_of(change.model)
    counted = change.model == "counter"
    found = []
    # In the model's order, because PostgreSQL keeps no order of JSON keys.
    for name in dict.fromkeys([*known, *before, *after]):
        field = known.get(name)
        states = [state.get(name) for state in (before, after)]
        changed = (states[0] or "") != (states[1] or "") and not (field and field.primary_key)
        if changed or counted:
            found.append((name, field, states[0], states[1]))
    return found


def as_table(rows: Iterable[Difference], heads: tuple[Any, Any, Any], empty: Any) -> str:
    """Return the differences as an HTML table, with ``empty`` for missing values."""
    cells = (
        (label(name, field), *(_whole(field, value) or empty for value in values)) for name, field, *values in rows
    )
    return format_html(
        '<table class="ratequota-difference"><thead><tr><th scope="col">{}</th><th scope="col">{}</th>'
        '<th scope="col">{}</th></tr></thead><tbody>{}</tbody></table>',
        *heads,
        format_html_join("", '<tr><th scope="row">{}</th><td>{}</td><td>{}</td></tr>', cells),
    )


def label(name: str, field: Any) -> Any:
    """Return the field's verbose name."""
    return field.verbose_name if field else name


def in_words(field: Any, value: Any) -> str:
    """Return a recorded value that is not a related object as text; "" for a missing value."""
    if value is None or value == "":
        return ""
    if isinstance(value, dict) and value.keys() == {"used", "remaining"}:
        return gettext("%(used)s used, %(remaining)s left") % value
    if field is None:  # a field of an earlier version
        return str(value)
    if isinstance(field, models.DateTimeField):
        return moment(parse_datetime(value)) or str(value)
    if isinstance(value, bool):
        return gettext("yes") if value else gettext("no")
    return str(dict(field.flatchoices).get(value, value))


def _whole(field: Any, value: Any) -> str:
    if field is not None and field.is_relation and value not in (None, ""):
        return visible(object_name(field.related_model, value))
    return visible(in_words(field, value))


class RelatedNames:
    """Today's names of the related objects in a list of changes, looked up in one query per model."""

    def __init__(self, changes: Iterable[PolicyChange]) -> None:
        wanted: dict[Any, set[Any]] = {}
        for field, value in _related(changes):
            wanted.setdefault(field.related_model, set()).add(value)
        self._found = {model: object_names(model, values) for model, values in wanted.items()}

    def summary(self, change: PolicyChange) -> str:
        """Return what changed in a few words; "" for objects that were created or deleted."""
        if change.model == "counter":
            count = len(change.before or {})
            return ngettext("%(count)d counter", "%(count)d counters", count) % {"count": count}
        if change.action != PolicyChange.Action.UPDATE:
            return ""
        rows = differences(change)
        parts = [
            gettext("%(field)s: %(before)s → %(after)s")
            % {"field": label(name, field), "before": self._short(field, before), "after": self._short(field, after)}
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


def _related(changes: Iterable[PolicyChange]) -> Iterator[tuple[Any, Any]]:
    for change in changes:
        if change.action == PolicyChange.Action.UPDATE:
            for _name, field, *values in differences(change)[:_FIELDS]:
                if field is not None and field.is_relation:
                    yield from ((field, value) for value in values if value not in (None, ""))
