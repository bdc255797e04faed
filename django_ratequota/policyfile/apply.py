"""Import a file: one transaction, recorded and published like any edit."""

from __future__ import annotations

import secrets
from typing import Any

from django.db import models, transaction

from ..models import Plan
from ..recording.databases import policy_alias
from ..recording.recorder import in_batches, record, recorded_as, rows_by_pk
from .diff import Change, Diff, compare
from .schema import PLANS, REFERENCES, REFERRED, SECTIONS, Item, Section, model_value

#: Unique fields whose values plans may swap.
_SWAPPED = frozenset({"name", "default_for"})


def apply_file(text: str, *, prune: bool = False, dry_run: bool = False, reason: str = "") -> Diff:
    """Import the text of a file; returns what that changed, or with ``dry_run`` would change.

    ``prune`` deletes the objects that the file's sections leave out. Raises ``InvalidFile`` with all problems of the
    file; then nothing has changed.
    """
    using = policy_alias(Plan)
    # In a list that ``compare`` empties, because a large text's memory is needed once it is parsed.
    texts = [text]
    del text
    if dry_run:
        return compare(texts, prune, using)[0]
    with transaction.atomic(using=using), recorded_as(None, reason):
        diff, keys = compare(texts, prune, using, lock=True)
        _write(diff, keys, using)
    return diff


def _write(diff: Diff, keys: dict[str, dict[str, Any]], using: str) -> None:
    """Delete, change, create: in this order no step meets a constraint that the result meets not."""
    for section in reversed(SECTIONS):
        pks = [change.before.pk for change in diff.deleted if change.section is section and change.before is not None]
        for batch in in_batches(pks):
            section.model._base_manager.using(using).filter(pk__in=batch).delete()
    for section in SECTIONS:
        changed = {
            change.before.pk: _changed_values(change)
            for change in diff.changed
            if change.section is section and change.before is not None
        }
        (_change_plans if section is PLANS else _change)(section, changed, using)
    for section in SECTIONS:
        created = [change.after for change in diff.created if change.section is section and change.after is not None]
        for items in in_batches(created):
            section.model._base_manager.using(using).bulk_create([_new(item, keys) for item in items])
        if created and section in REFERRED:
            names = section.model._base_manager.using(using).values_list(section.identity[0], "pk")
            keys[section.singular] = dict(names)


def _new(item: Item, keys: dict[str, dict[str, Any]]) -> models.Model:
    """Return the object of an entry, not saved."""
    values = {}
    for name, value in item.entry.items():
        if name not in REFERENCES:
            values[name] = model_value(name, value)
        elif value is not None:
            values[f"{name}_id"] = keys[name][value]
    return item.section.model(**values)


def _changed_values(change: Change) -> dict[str, Any]:
    """Return the fields that change, as the model holds them; references never change, they are part of identity."""
    if change.before is None or change.after is None:
        return {}
    old, new = change.before.entry, change.after.entry
    return {name: model_value(name, new[name]) for name in change.section.fields if old[name] != new[name]}


def _change(section: Section, changed: dict[Any, dict[str, Any]], using: str) -> None:
    """Update the objects by primary key, with one statement per set of fields."""
    by_fields: dict[tuple[str, ...], list[models.Model]] = {}
    for pk, values in changed.items():
        by_fields.setdefault(tuple(values), []).append(section.model(pk=pk, **values))
    for names, rows in by_fields.items():
        section.model._base_manager.using(using).bulk_update(rows, names)


def _change_plans(section: Section, changed: dict[Any, dict[str, Any]], using: str) -> None:
    """Update plans, which may swap names and defaults: free all of these first, then set the new ones.

    The history gets one entry per plan, from its old state to its new one.
    """
    moved = {pk: values for pk, values in changed.items() if not _SWAPPED.isdisjoint(values)}
    _change(section, {pk: values for pk, values in changed.items() if pk not in moved}, using)
    unrecorded: Any = models.QuerySet(Plan, using=using)
    before: dict[Any, Any] = {}
    for pks in in_batches(list(moved)):
        before |= rows_by_pk(Plan, pks, using, lock=True)
    for pk in before:
        unrecorded.filter(pk=pk).update(name=secrets.token_hex(16), default_for="")
    for pk, old in before.items():
        unrecorded.filter(pk=pk).update(**{"name": old.name, "default_for": old.default_for, **moved[pk]})
        record(old, rows_by_pk(Plan, [pk], using)[pk], using)
