"""Import a file: compare it with the database, show the changes, and write them in one transaction, like any edit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import models

from ..changes.databases import policy_alias, saving
from ..changes.writer import in_batches, rows_by_pk, write_changes
from ..exceptions import InvalidFile
from ..models import Plan
from ..utils.escaping import one_line
from .document import isoformat_utc
from .export import load
from .parser import parse
from .schema import PLANS, REFERRED, SECTIONS, Section, Values, is_log_only, model_value
from .validator import check, pairs

_EMPTY = (None, "", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One object that is created (``before`` is None), changed, or deleted (``after`` is None)."""

    section: Section
    #: Primary key of the stored object.
    pk: Any = None
    before: Values | None = None
    after: Values | None = None
    #: The object stays as it is, because of ``only_new``.
    left: bool = False

    @property
    def new_values(self) -> Values:
        """The values of the fields that change."""
        old, new = self.before or {}, self.after or {}
        return {name: value for name, value in new.items() if name not in old or old[name] != value}

    @property
    def verb(self) -> str:
        """``create``, ``change`` or ``delete``."""
        return "create" if not self.before else "change" if self.after else "delete"

    def lines(self) -> list[str]:
        """Return the change in words: one line per changed field."""
        title = self.section.title(self.before or self.after or {})
        if self.before and self.after:
            title += " (log only)" if is_log_only(self.before) else ""
            sign, template = ("=", "{} (file: {})") if self.left else ("~", "{} -> {}")
            texts = {
                name: template.format(_text(self.before[name]), _text(value))
                for name, value in self.new_values.items()
            }
            return [f"{sign} {title}: {name} {text}" for name, text in texts.items()]
        values = self.section.without_defaults(self.before or self.after or {})
        own = {name: value for name, value in values.items() if name not in self.section.identity}
        fields = ", ".join(f"{name} {_text(value)}" for name, value in own.items() if value not in _EMPTY)
        return [f"{'-' if self.before else '+'} {title}" + (f": {fields}" if fields else "")]


@dataclass(slots=True)
class Diff:
    """The changes that an import of a file makes."""

    #: By section in the order of the file; within one: deletions, changes, creations.
    changes: list[Change] = field(default_factory=list)
    #: How many stored objects the file's sections leave out; without ``prune`` they stay.
    unnamed: dict[Section, int] = field(default_factory=dict)
    #: The changes that ``only_new`` leaves out.
    left: list[Change] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield the changes in words, those left out first."""
        for change in (*self.left, *self.changes):
            yield from change.lines()

    def of(self, verb: str, section: Section | None = None) -> list[Change]:
        """Return the changes of this kind, see ``Change.verb``, in all sections or in one."""
        return [one for one in self.changes if one.verb == verb and section in (None, one.section)]


def apply_file(text: str, *, prune: bool = False, only_new: bool = False, dry_run: bool = False) -> Diff:
    """Import the text of a file; returns what that changed, or with ``dry_run`` would change.

    ``prune`` deletes the objects that the file's sections leave out; ``only_new`` creates objects and changes none.
    Raises ``InvalidFile`` with all problems of the file; then nothing has changed.
    """
    using = policy_alias(Plan)
    if dry_run:
        return _compare(text, prune, only_new, using)[0]
    with saving(Plan):
        diff, users = _compare(text, prune, only_new, using, lock=True)
        _write(diff, users, using)
    return diff


def _compare(text: str, prune: bool, only_new: bool, using: str, lock: bool = False) -> tuple[Diff, dict[str, Any]]:
    """Return what the file would change, and the primary keys of its users by login name; raises ``InvalidFile``."""
    items, problems = parse(text)
    # Deleting a plan, endpoint or list deletes what refers to it.
    stored = load(SECTIONS if prune else {*items, *REFERRED.values()}, using, lock)
    found, users = check(items, stored, prune, only_new, using)
    problems += found
    if problems:
        raise InvalidFile(sorted(problems, key=lambda problem: problem.line))
    diff = Diff()
    deleted: set[tuple[str, Any]] = set()
    for section, rows in stored.items():
        known = list(pairs(section, stored, items))
        kept, used = {row.pk for row, _item in known}, {item.path for _row, item in known}
        extra = [row for row in rows if row.pk not in kept]
        if section not in items or not prune:
            if section in items:
                diff.unnamed[section] = len(extra)
            extra = [row for row in extra if not deleted.isdisjoint(row.values.items())]
        deleted |= {(section.singular, row.values[section.identity[0]]) for row in extra}
        diff.changes += [Change(section=section, pk=row.pk, before=row.values) for row in extra]
        for row, item in known:
            if row.values != item.values:
                change = Change(section=section, pk=row.pk, before=row.values, after=item.values, left=only_new)
                (diff.left if only_new else diff.changes).append(change)
        new = (item.values for item in items.get(section, ()) if item.path not in used)
        diff.changes += [Change(section=section, after=values) for values in new]
    return diff, users


def _write(diff: Diff, users: dict[str, Any], using: str) -> None:
    """Delete, change, create: in this order no step meets a constraint that the result meets not."""
    for section in reversed(SECTIONS):
        for batch in in_batches([change.pk for change in diff.of("delete", section)]):
            section.model._base_manager.using(using).filter(pk__in=batch).delete()
    for section in SECTIONS:
        changed = {change.pk: change.new_values for change in diff.of("change", section)}
        if section is PLANS:
            _change_plans(changed, using)
        else:
            _change(section, changed, using)
    keys: dict[str, dict[Any, Any]] = {"user": users}
    for section in SECTIONS:
        rows: Any = section.model._base_manager.using(using)
        for batch in in_batches(diff.of("create", section)):
            rows.bulk_create([_new(section, change.new_values, keys) for change in batch])
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


def _text(value: Any) -> str:
    if value in _EMPTY:
        return "none"
    if isinstance(value, datetime):
        return isoformat_utc(value)
    if isinstance(value, bool):
        return str(value).lower()
    return one_line(" ".join(value) if isinstance(value, tuple) else str(value))
