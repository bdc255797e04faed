"""Compare a file with the database, and show what an import would change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from typing import Any

from .document import one_line
from .export import load
from .parser import check_sections, parse
from .schema import MEMBERS, OF_ONE, POLICIES, REFERRED, SECTIONS, Entry, Item, Section, Stored
from .validator import Groups, ValidEntries, add_to_group, by_identity
from .writer import isoformat_utc

#: Characters of text that a change shows.
_MOST_SHOWN = 60
_EMPTY = (None, "", ())


@dataclass(frozen=True, slots=True)
class Change:
    """One object that is created (``before`` is None), changed, or deleted (``after`` is None)."""

    section: Section
    before: Stored | None
    after: Item | None

    def lines(self) -> Iterator[str]:
        """Yield the change in words: one line per changed field."""
        if self.before is not None and self.after is not None:
            old, new = self.before.entry, self.after.entry
            for name in self.section.fields:
                if old[name] != new[name]:
                    yield f"~ {_title(self.section, old)}: {name} {' -> '.join(_pair(old[name], new[name]))}"
            return
        sign, one = ("+", self.after) if self.before is None else ("-", self.before)
        if one is not None:
            defaults = self.section.defaults()
            fields = ", ".join(
                f"{name} {_shown(value)}"
                for name, value in one.entry.items()
                if name not in self.section.identity and value not in (*_EMPTY, defaults.get(name))
            )
            yield f"{sign} {_title(self.section, one.entry)}" + (f": {fields}" if fields else "")


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
        return [change for change in self.changes if change.before is None]

    @property
    def changed(self) -> list[Change]:
        """Objects whose fields change."""
        return [change for change in self.changes if change.before is not None and change.after is not None]

    @property
    def deleted(self) -> list[Change]:
        """Objects that are deleted."""
        return [change for change in self.changes if change.after is None]


def compare(texts: list[str], prune: bool, using: str, lock: bool = False) -> tuple[Diff, dict[str, dict[str, Any]]]:
    """Return what the file would change, and the primary keys of objects that entries refer to, by field and name.

    ``texts`` holds the text of the file, and is emptied to free its memory. Raises ``InvalidFile``.
    """
    # The database is read first, so that entries which equal its rows can share their values in memory.
    likely = [section for section in SECTIONS if section.name in texts[0]]
    # Deleting a plan, endpoint or list deletes what refers to it.
    stored = load(SECTIONS if prune and not set(REFERRED).isdisjoint(likely) else (*likely, POLICIES), using, lock)
    root, entries = parse(texts.pop(), stored)
    sections = check_sections(root, entries)
    for section in sections:
        if section.name not in stored:  # the file writes its name with escapes
            stored[section.name] = load((section,), using, lock)[section.name]
    valid = ValidEntries(sections, entries, stored, prune, using)
    diff = Diff()
    keys = {
        section.singular: {section.identity_of(row.values): row.pk for row in stored[section.name]}
        for section in REFERRED
    }
    deleted: dict[str, set[str]] = {section.singular: set() for section in REFERRED}
    for section in SECTIONS:
        if section.name not in stored:
            continue
        groups = valid.items.pop(section.name, None)
        pairs, extra, new = _match(section, stored.pop(section.name), {} if groups is None else groups)
        if groups is not None and not prune:
            diff.unnamed[section] = len(extra)
        if groups is None or not prune:
            extra = [row for row in extra if any(row.entry.get(name) in names for name, names in deleted.items())]
        if section in REFERRED:
            deleted[section.singular] = {section.identity_of(row.values) for row in extra}
        diff.changes += [Change(section, row, None) for row in extra]
        diff.changes += [Change(section, *pair) for pair in pairs]
        diff.changes += [Change(section, None, item) for item in new]
    return diff, {**keys, "user": valid.users}


def _match(
    section: Section, rows: list[Stored], groups: Groups
) -> tuple[list[tuple[Stored, Item]], list[Stored], list[Item]]:
    """Return pairs of a row and the entry that changes it, then the rows and the entries without a counterpart.

    Of several rows with one identity, those that equal an entry are kept. Kept rows are paired with the entries in
    the file's order, because of policies that are equal in rank the last one wins.
    """
    changed: list[Stored] = []
    for row in rows:
        key = hash(section.identity_of(row.values))
        item = groups.get(key)
        if isinstance(item, Item) and item.values == row.values:
            del groups[key]
        else:
            add_to_group(groups, row)
            changed.append(row)
    pairs: list[tuple[Stored, Item]] = []
    extra: list[Stored] = []
    new: list[Item] = []
    # In the order of the rows, then of the file.
    mixed = [groups.pop(key) for key in dict.fromkeys(hash(section.identity_of(row.values)) for row in changed)]
    for group in (group for shared in chain(mixed, groups.values()) for group in by_identity(section, shared)):
        present = [one for one in group if isinstance(one, Stored)]
        items = [one for one in group if isinstance(one, Item)]
        if section is not POLICIES:  # the order of others means nothing
            present.sort(key=_order)
            items.sort(key=_order)
        unequal, missing = list(present), 0
        for item in items:
            equal = next((at for at, row in enumerate(unequal) if row.values == item.values), None)
            if equal is None:
                missing += 1
            else:
                del unequal[equal]
        surplus = {row.pk for row in unequal[missing:]}
        kept = [row for row in present if row.pk not in surplus]
        pairs += [pair for pair in zip(kept, items, strict=False) if pair[0].values != pair[1].values]
        extra += [row for row in present if row.pk in surplus]
        new += items[len(kept) :]
    return pairs, extra, new


def _order(one: Stored | Item) -> tuple[str, ...]:
    return tuple(map(str, one.values))


def _title(section: Section, entry: Entry) -> str:
    """Return a name for the object in messages."""
    if section is POLICIES:
        listed = entry["subject_list"] and f"list {entry['subject_list']}"
        user = entry["user"] and f"user {entry['user']}"
        audience = entry["plan"] or listed or entry["subject"] or user or "everyone"
        text = f"policy {audience} × {entry['endpoint'] or 'all endpoints'}"
        text += "" if entry["counted_per"] == "caller" else f" per {entry['counted_per']}"
    elif section in OF_ONE:
        who = entry["subject"] or f"user {entry['user']}"
        where = f"of list {entry['subject_list']}" if section is MEMBERS else f"× {entry['plan']}"
        text = f"{section.singular} {who} {where}"
    else:
        text = f"{section.singular} {entry[section.identity[0]]}"
    for word, name in (("from", "starts_at"), ("until", "ends_at")):
        if name in section.identity and entry[name] is not None:
            text += f" {word} {isoformat_utc(entry[name])}"
    return one_line(text)


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _text(value: Any) -> str:
    if value in _EMPTY:
        return "none"
    if isinstance(value, datetime):
        return isoformat_utc(value)
    if isinstance(value, bool):
        return str(value).lower()
    return one_line(" ".join(value) if isinstance(value, tuple) else str(value))


def _pair(old: Any, new: Any) -> tuple[str, str]:
    """Return both values, cut before the first difference when they are long."""
    texts = _text(old), _text(new)
    if max(map(len, texts)) <= _MOST_SHOWN:
        return texts
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, same - _MOST_SHOWN // 4)
    return tuple(("…" if start else "") + _shown(text[start:]) for text in texts)  # type: ignore[return-value]
