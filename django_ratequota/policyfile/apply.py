"""Import a file: one transaction, recorded and published like any edit."""

from __future__ import annotations

import secrets
from typing import Any

from django.db import models

from ..changes.databases import policy_alias, saving
from ..changes.writer import in_batches, rows_by_pk, write_changes
from ..models import Plan
from .comparison import Diff, compare
from .schema import PLANS, REFERRED, SECTIONS, Section, Values, model_value


def apply_file(text: str, *, prune: bool = False, dry_run: bool = False) -> Diff:
    """Import the text of a file; returns what that changed, or with ``dry_run`` would change.

    ``prune`` deletes the objects that the file's sections leave out. Raises ``InvalidFile`` with all problems of the
    file; then nothing has changed.
    """
    using = policy_alias(Plan)
    if dry_run:
        return compare(text, prune, using)[0]
    with saving(Plan):
        diff, users = compare(text, prune, using, lock=True)
        _write(diff, users, using)
    return diff


def _write(diff: Diff, users: dict[str, Any], using: str) -> None:
    """Delete, change, create: in this order no step meets a constraint that the result meets not."""
    for section in reversed(SECTIONS):
        pks = [change.pk for change in diff.deleted if change.section is section]
        for batch in in_batches(pks):
            section.model._base_manager.using(using).filter(pk__in=batch).delete()
    for section in SECTIONS:
        changed = {change.pk: change.new_values for change in diff.changed if change.section is section}
        if section is PLANS:
            _change_plans(changed, using)
        else:
            _change(section, changed, using)
    keys: dict[str, dict[Any, Any]] = {"user": users}
    for section in SECTIONS:
        rows: Any = section.model._base_manager.using(using)
        created = [change.new_values for change in diff.created if change.section is section]
        for batch in in_batches(created):
            rows.bulk_create([_new(section, values, keys) for values in batch])
        if section.singular in REFERRED:
            keys[section.singular] = dict(rows.values_list(section.identity[0], "pk"))


def _new(section: Section, values: Values, keys: dict[str, dict[Any, Any]]) -> models.Model:
    """Return the object of an entry, not saved."""
    references = {f"{name}_id": keys[name][values[name]] for name in section.references if values[name] is not None}
    own = {name: model_value(name, value) for name, value in values.items() if name not in section.references}
    return section.model(**own, **references)


def _change(section: Section, changed: dict[Any, Values], using: str) -> None:
    """Update the objects by primary key, with one statement per set of fields.

    References never change, because they are part of identity.
    """
    by_fields: dict[tuple[str, ...], list[models.Model]] = {}
    for pk, values in changed.items():
        own = {name: model_value(name, value) for name, value in values.items()}
        by_fields.setdefault(tuple(own), []).append(section.model(pk=pk, **own))
    for names, rows in by_fields.items():
        section.model._base_manager.using(using).bulk_update(rows, names)


def _change_plans(changed: dict[Any, Values], using: str) -> None:
    """Update plans, which may swap names and defaults: free all of these first, then set the new ones.

    The history gets one entry per plan, from its old state to its new one.
    """
    unrecorded: Any = models.QuerySet(Plan, using=using)
    before: dict[Any, Any] = {}
    for pks in in_batches(list(changed)):
        before |= rows_by_pk(Plan, pks, using, lock=True)
    for pk in before:
        unrecorded.filter(pk=pk).update(name=secrets.token_hex(16), default_for="")
    for pk, old in before.items():
        unrecorded.filter(pk=pk).update(**{"name": old.name, "default_for": old.default_for, **changed[pk]})
        write_changes([(old, rows_by_pk(Plan, [pk], using)[pk])], using)
