"""Import a file: compare it with the database, show the changes, and write them in one transaction, like any edit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from operator import attrgetter
from typing import Any

from django.db import models

from ..changes.databases import policy_alias, saving
from ..changes.writer import BATCH, in_batches, rows_by_pk, write_changes
from ..exceptions import InvalidFile
from ..models import Plan
from ..utils.escaping import one_line
from .document import isoformat_utc
from .entries import Names, check, names_of, parse, refuse_conflicts
from .export import load
from .schema import PLANS, REFERRED, SECTIONS, Item, Section, Values, by_identity

_EMPTY = (None, "", ())


@dataclass(frozen=True, slots=True)
class Change:
    """What an import makes of a stored object, of an entry, or of the two together."""

    #: ``create``, ``change``, ``delete``; the object stays: ``leave`` because of ``only_new``, ``keep`` although the
    #: section does not name it, "" = nothing differs.
    verb: str
    section: Section
    #: None = there is none.
    row: Any
    entry: Any

    @property
    def new_values(self) -> Values:
        """The values of the fields that change."""
        return {name: value for name, value in self.entry.values.items() if value != self.row.values[name]}

    def lines(self) -> list[str]:
        """Return the change in words: one line per changed field."""
        if self.row and self.entry:
            title = self.row.title + (" (log only)" if self.row.log_only else "")
            line = "= {}: {} {} (file: {})" if self.verb == "leave" else "~ {}: {} {} -> {}"
            old = self.row.values
            return [line.format(title, name, _text(old[name]), _text(new)) for name, new in self.new_values.items()]
        item = self.row or self.entry
        values = item.without_defaults().items()
        own = [(name, value) for name, value in values if name not in self.section.identity and value not in _EMPTY]
        fields = ", ".join(f"{name} {_text(value)}" for name, value in own)
        return [f"{'-' if self.row else '+'} {item.title}" + (f": {fields}" if fields else "")]


class Diff(list[Change]):
    """What an import does: by section in the order of the file; within one deletions, changes, creations."""

    def of(self, verb: str, section: Section | None = None) -> list[Change]:
        """Return the changes with this verb, in all sections or in one."""
        return [change for change in self if change.verb == verb and section in (None, change.section)]

    @property
    def changes(self) -> list[Change]:
        """The changes that are written."""
        return [change for change in self if change.verb in ("delete", "change", "create")]

    def lines(self) -> Iterator[str]:
        """Yield the changes in words, those left out first."""
        return chain.from_iterable(change.lines() for change in (*self.of("leave"), *self.changes))


def apply_file(text: str, *, prune: bool = False, only_new: bool = False, dry_run: bool = False) -> Diff:
    """Import the text of a file; returns what that changed, or with ``dry_run`` would change.

    ``prune`` deletes the objects that the file's sections leave out; ``only_new`` creates objects and changes none.
    Raises ``InvalidFile`` with all problems of the file; then nothing has changed.
    """
    using = policy_alias(Plan)
    with nullcontext() if dry_run else saving(Plan):
        diff, names = _compare(text, prune, only_new, using, lock=not dry_run)
        if not dry_run:
            _write(diff, names, using)
    return diff


def _compare(text: str, prune: bool, only_new: bool, using: str, lock: bool) -> tuple[Diff, Names]:
    """Return what the file would change, and the names that it may refer to; raises ``InvalidFile``."""
    entries, file = parse(text)
    # Deleting a plan, endpoint or list deletes what refers to it.
    stored = load(SECTIONS if prune else {*entries, *REFERRED.values()}, using, lock)
    names = names_of(entries, stored, prune, using)
    pruned = {name for name, section in REFERRED.items() if prune and section in entries}
    diff, deleted = Diff(), set[tuple[str, Any]]()
    for section, rows in stored.items():
        known, own, stay = by_identity(rows), entries.get(section, []), set[Any]()
        for entry in own:
            check(entry, names, pruned, known.get(entry.identity, ()))
        for row, entry in _matched(known, own):
            if not row:
                verb = "create"
            elif entry:
                verb = "" if row.values == entry.values else "leave" if only_new else "change"
            elif (prune and section in entries) or not deleted.isdisjoint(row.values.items()):
                verb = "delete"
                deleted.add((section.singular, row.name))
            else:
                verb = "keep" if section in entries else ""
            diff.append(Change(verb, section, row, entry))
            stay |= {row, entry} if verb in ("keep", "leave") else set()
        refuse_conflicts([row for row in rows if row in stay], [entry for entry in own if entry not in stay])
    problems = [each for item in (file, *chain.from_iterable(entries.values())) for each in item.problems]
    if problems:
        raise InvalidFile(sorted(problems, key=attrgetter("line")))
    return diff, names


def _matched(rows: dict[Any, list[Item]], entries: list[Item]) -> Iterator[tuple[Any, Any]]:
    """Yield each stored object of a section, by identity, and each entry, with the one that is the same.

    In their order, because of policies that are equals the last one wins. A log-only policy and another one are two
    objects, unless the mode is all that tells the entries from the stored objects.
    """
    named, pairs = by_identity(entries), list[tuple[Any, Any]]()
    for key, same in rows.items():
        sides = same, named.get(key, [])
        by_mode = [[[one for one in side if one.log_only is logs] for side in sides] for logs in (False, True)]
        found = [pair for one in by_mode for pair in zip(*one, strict=False)]
        pairs += found or zip(*sides, strict=False)
    used = set(chain(*pairs))
    yield from ((row, None) for row in chain(*rows.values()) if row not in used)
    yield from pairs
    yield from ((None, entry) for entry in entries if entry not in used)


def _write(diff: Diff, names: Names, using: str) -> None:
    """Delete, change, create: in this order no step meets a constraint that the result meets not."""
    rows: dict[Section, Any] = {section: section.model._base_manager.using(using) for section in SECTIONS}
    for section in reversed(SECTIONS):
        for batch in in_batches(diff.of("delete", section)):
            rows[section].filter(pk__in=[change.row.pk for change in batch]).delete()
    for section in SECTIONS:
        _change(section, diff.of("change", section), using)
    for section in SECTIONS:
        for batch in in_batches(diff.of("create", section)):
            rows[section].bulk_create([_new(change.entry, names) for change in batch])
        if section.singular in REFERRED:
            pairs = rows[section].values_list(section.identity[0], "pk")
            names[section.singular] = {name: [pk] for name, pk in pairs}


def _change(section: Section, changes: list[Change], using: str) -> None:
    """Update objects. Plans may swap names and defaults: free all of these first, then set the new ones.

    The history gets one entry per object, from its old state to its new one. References never change, because they
    are part of identity.
    """
    unrecorded: Any = models.QuerySet(section.model, using=using)
    before: dict[Any, models.Model] = {}
    for batch in in_batches([change.row.pk for change in changes]):
        before |= rows_by_pk(section.model, batch, using, lock=True)
    freed = {"name", "default_for"} if section is PLANS else set[str]()
    for pk in before if freed else ():
        unrecorded.filter(pk=pk).update(name=secrets.token_hex(16), default_for="")
    by_fields: dict[tuple[str, ...], list[Any]] = {}
    for change in changes:
        values = change.entry.model_values(sorted(freed | change.new_values.keys()))
        by_fields.setdefault(tuple(values), []).append(section.model(pk=change.row.pk, **values))
    for fields, rows in by_fields.items():
        unrecorded.bulk_update(rows, fields, batch_size=BATCH)
    for batch in in_batches(list(before)):
        after = rows_by_pk(section.model, batch, using)
        write_changes([(before[pk], row) for pk, row in after.items()], using)


def _new(entry: Item, names: Names) -> models.Model:
    """Return the object of an entry, not saved."""
    own = {name: entry.values[name] for name in entry.section.references}
    keys = {f"{name}_id": names[name][value][0] for name, value in own.items() if value is not None}
    return entry.section.model(**entry.model_values(entry.section.fields), **keys)  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    if value in _EMPTY:
        return "none"
    if isinstance(value, datetime):
        return isoformat_utc(value)
    if isinstance(value, bool):
        return str(value).lower()
    return one_line(" ".join(value) if isinstance(value, tuple) else str(value))
