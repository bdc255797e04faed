"""Compare a file with the database, and show what an import would change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..exceptions import InvalidFile
from ..utils.escaping import one_line
from .document import isoformat_utc
from .export import load
from .parser import parse
from .schema import ASSIGNMENTS, MEMBERS, POLICIES, REFERRED, SECTIONS, Section, Values, by_identity
from .validator import check

_EMPTY = (None, "", ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One object that is created (``before`` is None), changed, or deleted (``after`` is None)."""

    section: Section
    #: Primary key of the stored object.
    pk: Any = None
    before: Values | None = None
    after: Values | None = None

    @property
    def new_values(self) -> Values:
        """The values of the fields that change."""
        old, new = self.before or {}, self.after or {}
        return {name: value for name, value in new.items() if name not in old or old[name] != value}

    def lines(self) -> list[str]:
        """Return the change in words: one line per changed field."""
        title = _title(self.section, self.before or self.after or {})
        if self.before and self.after:
            texts = {name: f"{_text(self.before[name])} -> {_text(value)}" for name, value in self.new_values.items()}
            return [f"~ {title}: {name} {text}" for name, text in texts.items()]
        values = self.section.without_defaults(self.before or self.after or {})
        fields = ", ".join(
            f"{name} {_text(value)}"
            for name, value in values.items()
            if name not in self.section.identity and value not in _EMPTY
        )
        return [f"{'-' if self.before else '+'} {title}" + (f": {fields}" if fields else "")]


@dataclass(slots=True)
class Diff:
    """The changes that an import of a file makes."""

    #: By section in the order of the file; within one: deletions, changes, creations.
    changes: list[Change] = field(default_factory=list)
    #: How many stored objects the file's sections leave out; without ``prune`` they stay.
    unnamed: dict[Section, int] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield the changes in words."""
        for change in self.changes:
            yield from change.lines()

    @property
    def created(self) -> list[Change]:
        """Objects that are created."""
        return [change for change in self.changes if not change.before]

    @property
    def changed(self) -> list[Change]:
        """Objects whose fields change."""
        return [change for change in self.changes if change.before and change.after]

    @property
    def deleted(self) -> list[Change]:
        """Objects that are deleted."""
        return [change for change in self.changes if not change.after]


def compare(text: str, prune: bool, using: str, lock: bool = False) -> tuple[Diff, dict[str, Any]]:
    """Return what the file would change, and the primary keys of its users by login name; raises ``InvalidFile``."""
    items, problems = parse(text)
    # Deleting a plan, endpoint or list deletes what refers to it.
    stored = load(SECTIONS if prune else {*items, *REFERRED.values()}, using, lock)
    found, users = check(items, stored, prune, using)
    problems += found
    if problems:
        raise InvalidFile(sorted(problems, key=lambda problem: problem.line))
    diff = Diff()
    deleted: set[tuple[str, Any]] = set()
    for section, rows in stored.items():
        entries = by_identity(section, items)
        # In their order, because of policies that are equals the last one wins.
        pairs = [
            pair
            for key, same in by_identity(section, stored).items()
            for pair in zip(same, entries.get(key, ()), strict=False)
        ]
        kept, used = {row.pk for row, _item in pairs}, {item.path for _row, item in pairs}
        extra = [row for row in rows if row.pk not in kept]
        if section not in items or not prune:
            if section in items:
                diff.unnamed[section] = len(extra)
            extra = [row for row in extra if not deleted.isdisjoint(row.values.items())]
        deleted |= {(section.singular, row.values[section.identity[0]]) for row in extra}
        diff.changes += [Change(section=section, pk=row.pk, before=row.values) for row in extra]
        diff.changes += [
            Change(section=section, pk=row.pk, before=row.values, after=item.values)
            for row, item in pairs
            if row.values != item.values
        ]
        new = (item.values for item in items.get(section, ()) if item.path not in used)
        diff.changes += [Change(section=section, after=values) for values in new]
    return diff, users


def _title(section: Section, values: Values) -> str:
    """Return a name for the object in messages."""
    listed = values.get("subject_list") and f"list {values['subject_list']}"
    who = values.get("subject") or (values.get("user") and f"user {values['user']}")
    if section is POLICIES:
        text = f"policy {who or listed or values['plan'] or 'everyone'} × {values['endpoint'] or 'all endpoints'}"
        text += "" if values["counted_per"] == "caller" else f" per {values['counted_per']}"
    elif section is ASSIGNMENTS:
        text = f"assignment {who} × {values['plan']}"
    else:
        text = (
            f"member {who} of {listed}" if section is MEMBERS else f"{section.singular} {values[section.identity[0]]}"
        )
    for word, name in (("from", "starts_at"), ("until", "ends_at")):
        if name in section.identity and values[name] is not None:
            text += f" {word} {isoformat_utc(values[name])}"
    return one_line(text)


def _text(value: Any) -> str:
    if value in _EMPTY:
        return "none"
    if isinstance(value, datetime):
        return isoformat_utc(value)
    if isinstance(value, bool):
        return str(value).lower()
    return one_line(" ".join(value) if isinstance(value, tuple) else str(value))
