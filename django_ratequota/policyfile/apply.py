"""What a file would change, and changing it: one transaction, recorded and published like any edit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import models, transaction

from ..models import Plan
from ..recording.databases import policy_alias
from ..recording.recorder import acting, in_batches, record, rows_by_pk
from .document import moment, one_line
from .parser import Groups, alike, judge, parse, put, sections_of
from .schema import ENDPOINTS, PLANS, POLICIES, REFERENCES, SECTIONS, Entry, Item, Section, Stored, held, load

#: Text is cut at this length where a change is shown.
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Change:
    """One object that is created (no ``before``), changed, or deleted (no ``after``)."""

    section: Section
    before: Stored | None
    after: Item | None

    def lines(self) -> Iterator[str]:
        """The change in words: a line for each field that changes."""
        if self.before is not None and self.after is not None:
            old, new = self.before.entry, self.after.entry
            for name in self.section.fields:
                if old[name] != new[name]:
                    yield f"~ {_title(self.section, old)}: {name} {' -> '.join(_pair(old[name], new[name]))}"
            return
        sign, one = ("+", self.after) if self.before is None else ("-", self.before)
        if one is not None:
            said = {n: v for n, v in one.entry.items() if n not in self.section.identity and v not in _NOTHING}
            defaults = self.section.defaults()
            fields = ", ".join(f"{n} {_shown(v)}" for n, v in said.items() if v != defaults.get(n, ()))
            yield f"{sign} {_title(self.section, one.entry)}" + (f": {fields}" if fields else "")


@dataclass(slots=True)
class Comparison:
    """What a file would change."""

    #: By section in the order of the file; in each, deletions, changes and creations.
    changes: list[Change] = field(default_factory=list)
    #: How many objects the file does not name in the sections that it has; they stay.
    left: dict[Section, int] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """The changes in words."""
        for change in self.changes:
            yield from change.lines()

    @property
    def created(self) -> list[Change]:
        """The objects that are new."""
        return [change for change in self.changes if change.before is None]

    @property
    def changed(self) -> list[Change]:
        """The objects that stay, with other fields."""
        return [change for change in self.changes if change.before is not None and change.after is not None]

    @property
    def deleted(self) -> list[Change]:
        """The objects that go."""
        return [change for change in self.changes if change.after is None]


def bring(text: str, *, prune: bool = False, dry_run: bool = False, reason: str = "") -> Comparison:
    """Bring the database to what the text of a file says; returns what that changed, or would.

    What the file does not name stays, unless ``prune`` says otherwise. Raises ``InvalidFile`` with all that is
    wrong with the file; then nothing has changed.
    """
    using = policy_alias(Plan)
    # Handed on, not held: once it is read, its memory is needed.
    texts = [text]
    del text
    if dry_run:
        return _compare(texts, prune, using)[0]
    with transaction.atomic(using=using), acting(None, reason):
        comparison, keys = _compare(texts, prune, using, lock=True)
        _apply(comparison, keys, using)
    return comparison


def _compare(
    texts: list[str], prune: bool, using: str, lock: bool = False
) -> tuple[Comparison, dict[str, dict[str, Any]]]:
    """What the file would change; and the primary keys of what can be referred to, by field and name."""
    # Read first, so that an entry that the database holds as well is in memory once.
    likely = [section for section in SECTIONS if section.name in texts[0]]
    # What is deleted takes along what refers to it.
    there = load(SECTIONS if prune and PLANS in likely else (*likely, POLICIES), using, lock)
    root, entries = parse(texts.pop(), there)
    sections = sections_of(root, entries)
    for section in sections:
        if section.name not in there:  # its name is written with escapes
            there[section.name] = load((section,), using, lock)[section.name]
    reading = judge(sections, entries, there, prune=prune, using=using)
    comparison = Comparison()
    keys = {
        section.word: {section.getter(section.identity[0])(row.values): row.pk for row in there[section.name]}
        for section in (PLANS, ENDPOINTS)
    }
    gone: dict[str, set[str]] = {"plan": set(), "endpoint": set()}
    for section in SECTIONS:
        if section.name not in there:
            continue
        groups = reading.items.pop(section.name, None)
        pairs, extra, new = _match(section, there.pop(section.name), {} if groups is None else groups)
        if groups is not None and not prune:
            comparison.left[section] = len(extra)
        if groups is None or not prune:
            extra = [one for one in extra if any(one.entry.get(name) in names for name, names in gone.items())]
        if section in (PLANS, ENDPOINTS):
            gone[section.word] = {one.entry[section.identity[0]] for one in extra}
        comparison.changes += [Change(section, one, None) for one in extra]
        comparison.changes += [Change(section, *pair) for pair in pairs]
        comparison.changes += [Change(section, None, item) for item in new]
    return comparison, {**keys, "user": reading.users}


def _match(
    section: Section, rows: list[Stored], groups: Groups
) -> tuple[list[tuple[Stored, Item]], list[Stored], list[Item]]:
    """Which entry changes which row; the rows and the entries that are left.

    Of several rows of one identity those are kept that the file has as they are. They take the entries in the
    file's order, as of policies that are equal in rank the last one wins.
    """
    who = section.who()
    changed: list[Stored] = []
    for row in rows:
        key = hash(who(row.values))
        one = groups.get(key)
        if isinstance(one, Item) and one.values == row.values:
            del groups[key]
        else:
            put(groups, section, row)
            changed.append(row)
    pairs: list[tuple[Stored, Item]] = []
    extra: list[Stored] = []
    new: list[Item] = []
    # In the order of the rows, then of the file.
    mixed = [groups.pop(key) for key in dict.fromkeys(hash(who(row.values)) for row in changed)]
    for group in (each for some in (mixed, groups.values()) for found in some for each in alike(section, found)):
        there = [one for one in group if isinstance(one, Stored)]
        wanted = [one for one in group if isinstance(one, Item)]
        if section is not POLICIES:  # the order of others means nothing
            there.sort(key=_order)
            wanted.sort(key=_order)
        unlike, lacking = list(there), 0
        for item in wanted:
            twin = next((at for at, row in enumerate(unlike) if row.values == item.values), None)
            if twin is None:
                lacking += 1
            else:
                del unlike[twin]
        gone = {row.pk for row in unlike[lacking:]}
        kept = [row for row in there if row.pk not in gone]
        pairs += [pair for pair in zip(kept, wanted, strict=False) if pair[0].values != pair[1].values]
        extra += [row for row in there if row.pk in gone]
        new += wanted[len(kept) :]
    return pairs, extra, new


def _order(one: Stored | Item) -> tuple[str, ...]:
    return tuple(map(str, one.values))


def _apply(comparison: Comparison, keys: dict[str, dict[str, Any]], using: str) -> None:
    """Deletions, changes, creations: so no step meets a constraint that the end does not."""
    for section in reversed(SECTIONS):
        gone = [one.before.pk for one in comparison.deleted if one.section is section and one.before is not None]
        for pks in in_batches(gone):
            section.model._base_manager.using(using).filter(pk__in=pks).delete()
    _save_plans([change for change in comparison.changed if change.section is PLANS], using)
    for section in SECTIONS[1:]:
        _change([one for one in comparison.changed if one.section is section], section, using)
    for section in SECTIONS:
        created = [one.after for one in comparison.created if one.section is section and one.after is not None]
        for items in in_batches(created):
            rows = [_new(item, keys) for item in items]
            section.model._base_manager.using(using).bulk_create(rows)
        if created and section in (PLANS, ENDPOINTS):
            names = section.model._base_manager.using(using).values_list(section.identity[0], "pk")
            keys[section.word] = dict(names)


def _new(item: Item, keys: dict[str, dict[str, Any]]) -> models.Model:
    """The object of an entry, not saved."""
    given = {}
    for name, value in item.entry.items():
        if name not in REFERENCES:
            given[name] = held(name, value)
        elif value is not None:
            given[f"{name}_id"] = keys[name][value]
    return item.section.model(**given)


def _change(changes: list[Change], section: Section, using: str) -> None:
    """Update the objects, those together that change the same fields."""
    alike: dict[tuple[str, ...], list[models.Model]] = {}
    for change in changes:
        if change.before is not None:
            values = _values(change)
            alike.setdefault(tuple(values), []).append(section.model(pk=change.before.pk, **values))
    for names, rows in alike.items():
        section.model._base_manager.using(using).bulk_update(rows, names)


def _values(change: Change) -> dict[str, Any]:
    """The fields that change, as the model holds them; none of them refers to another object."""
    if change.before is None or change.after is None:
        return {}
    old, new = change.before.entry, change.after.entry
    return {name: held(name, new[name]) for name in change.section.fields if old[name] != new[name]}


def _save(change: Change, using: str) -> None:
    if change.before is not None:
        values = _values(change)
        row: Any = change.section.model._base_manager.using(using).get(pk=change.before.pk)
        for name, value in values.items():
            setattr(row, name, value)
        row.save(using=using, update_fields=list(values))


def _save_plans(changes: list[Change], using: str) -> None:
    """Save plans in an order in which each name is free when it is taken; where they swap, by a detour."""
    unrecorded: Any = models.QuerySet(Plan, using=using)
    waiting = {change.before.pk: change for change in changes if change.before is not None}
    aside: list[tuple[Any, dict[str, Any]]] = []
    while waiting:
        taken = {(n, v): pk for pk, one in waiting.items() if one.before for n, v in one.before.entry.items() if v}
        free = [
            pk
            for pk, change in waiting.items()
            if all(taken.get((n, v), pk) == pk for n, v in _values(change).items() if n in ("name", "default_for"))
        ]
        for pk in free:
            _save(waiting.pop(pk), using)
        if not free:
            # Set aside under a name that nobody has. The history shall not tell of it, only of the end.
            pk, change = waiting.popitem()
            before: Any = rows_by_pk(Plan, [pk], using, lock=True)[pk]
            aside.append((before, {"name": before.name, "default_for": before.default_for, **_values(change)}))
            unrecorded.filter(pk=pk).update(name=secrets.token_hex(16), default_for="")
    for before, values in aside:
        unrecorded.filter(pk=before.pk).update(**values)
        record(before, rows_by_pk(Plan, [before.pk], using)[before.pk], using)


_NOTHING = (None, "", ())


def _title(section: Section, entry: Entry) -> str:
    """The object in words, told from its like."""
    if section is POLICIES:
        audience = entry["plan"] or entry["subject"] or (entry["user"] and f"user {entry['user']}") or "everyone"
        text = f"policy {audience} × {entry['endpoint'] or 'all endpoints'}"
        text += "" if entry["counted_per"] == "caller" else f" per {entry['counted_per']}"
    elif section in (PLANS, ENDPOINTS):
        text = f"{section.word} {entry[section.identity[0]]}"
    else:
        text = f"{section.word} {entry['user']} × {entry['plan']}"
    for word, name in (("from", "starts_at"), ("until", "ends_at")):
        if name in section.identity and entry[name] is not None:
            text += f" {word} {moment(entry[name])}"
    return one_line(text)


def _shown(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _text(value: Any) -> str:
    if value in _NOTHING:
        return "none"
    if isinstance(value, datetime):
        return moment(value)
    return one_line(" ".join(value) if isinstance(value, tuple) else str(value))


def _pair(old: Any, new: Any) -> tuple[str, str]:
    """Both values, from where they begin to differ when they are long."""
    texts = _text(old), _text(new)
    if max(map(len, texts)) <= _SHOWN:
        return texts
    same = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, same - _SHOWN // 4)
    return tuple(("…" if start else "") + _shown(text[start:]) for text in texts)  # type: ignore[return-value]
