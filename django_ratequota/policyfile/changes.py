"""What a file would change, and changing it: one transaction, recorded and published like any edit."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.db import models, router, transaction

from ..exceptions import InvalidFile
from ..models import Plan
from ..recording import acting, record, stored
from .reading import Item, judge
from .sections import ENDPOINTS, PLANS, POLICIES, SECTIONS, Entry, Section, Stored, load
from .text import moment, one_line, read

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
    using = router.db_for_write(Plan)
    if dry_run:
        return _compare(text, prune, using)[0]
    with transaction.atomic(using=using), acting(None, reason):
        comparison, held = _compare(text, prune, using, lock=True)
        _apply(comparison, held, using)
    return comparison


def _compare(text: str, prune: bool, using: str, lock: bool = False) -> tuple[Comparison, dict[str, list[Stored]]]:
    root, problems = read(text)
    wanted = tuple(section for section in SECTIONS if section.name in root.entries)
    # What is deleted takes along what refers to it.
    held = load(SECTIONS if prune and PLANS in wanted else (*wanted, POLICIES), using, lock)
    reading = judge(root, held, prune=prune, using=using)
    problems += reading.problems
    if problems:
        raise InvalidFile(sorted(problems, key=lambda problem: problem.line))
    comparison = Comparison()
    gone: dict[str, set[str]] = {"plan": set(), "endpoint": set()}
    for section in SECTIONS:
        if section.name not in held:
            continue
        items = reading.items.get(section.name)
        pairs, extra, new = _match(section, held[section.name], items or [])
        if items is not None and not prune:
            comparison.left[section] = len(extra)
        if items is None or not prune:
            extra = [one for one in extra if any(one.entry.get(name) in names for name, names in gone.items())]
        if section in (PLANS, ENDPOINTS):
            gone[section.word] = {one.entry[section.identity[0]] for one in extra}
        comparison.changes += [Change(section, one, None) for one in extra]
        comparison.changes += [Change(section, *pair) for pair in pairs if pair[0].entry != pair[1].entry]
        comparison.changes += [Change(section, None, item) for item in new]
    return comparison, held


def _match(
    section: Section, rows: list[Stored], items: list[Item]
) -> tuple[list[tuple[Stored, Item]], list[Stored], list[Item]]:
    """Which entry is about which row; the rows and the entries that are left.

    Of several rows of one identity those are kept that the file has as they are. They take the entries in the
    file's order, as of policies that are equal in rank the last one wins.
    """
    by_who: dict[Any, tuple[list[Stored], list[Item]]] = {}
    for row in rows:
        by_who.setdefault(section.who(row.entry), ([], []))[0].append(row)
    for item in items:
        by_who.setdefault(section.who(item.entry), ([], []))[1].append(item)
    pairs, extra, new = [], [], []
    for there, wanted in by_who.values():
        if section is not POLICIES:  # the order of others means nothing
            there.sort(key=_order)
            wanted.sort(key=_order)
        unlike, lacking = list(there), 0
        for item in wanted:
            twin = next((at for at, row in enumerate(unlike) if row.entry == item.entry), None)
            if twin is None:
                lacking += 1
            else:
                del unlike[twin]
        gone = {row.instance.pk for row in unlike[lacking:]}
        kept = [row for row in there if row.instance.pk not in gone]
        pairs += list(zip(kept, wanted, strict=False))
        extra += [row for row in there if row.instance.pk in gone]
        new += wanted[len(kept) :]
    return pairs, extra, new


def _order(one: Stored | Item) -> tuple[str, ...]:
    return tuple(map(str, one.entry.values()))


def _apply(comparison: Comparison, held: dict[str, list[Stored]], using: str) -> None:
    """Deletions, changes, creations: so no step meets a constraint that the end does not."""
    for change in reversed(comparison.deleted):
        if change.before is not None:
            change.before.instance.delete(using=using)
    _save_plans([change for change in comparison.changed if change.section is PLANS], using)
    for change in comparison.changed:
        if change.section is not PLANS:
            _save(change, using)
    known = {
        section.word: {one.entry[section.identity[0]]: one.instance for one in held[section.name]}
        for section in (PLANS, ENDPOINTS)
    }
    for change in comparison.created:
        if change.after is not None:
            entry, instance = change.after.entry, change.after.instance
            for name in known.keys() & entry.keys():
                setattr(instance, name, known[name].get(entry[name]))
            instance.save(using=using, force_insert=True)
            if change.section.word in known:
                known[change.section.word][entry[change.section.identity[0]]] = instance


def _values(change: Change) -> dict[str, Any]:
    """The fields that change, as the model holds them."""
    if change.before is None or change.after is None:
        return {}
    old, new = change.before.entry, change.after.entry
    return {name: getattr(change.after.instance, name) for name in change.section.fields if old[name] != new[name]}


def _save(change: Change, using: str) -> None:
    if change.before is not None:
        values = _values(change)
        for name, value in values.items():
            setattr(change.before.instance, name, value)
        change.before.instance.save(using=using, update_fields=list(values))


def _save_plans(changes: list[Change], using: str) -> None:
    """Save plans in an order in which each name is free when it is taken; where they swap, by a detour."""
    unrecorded: Any = models.QuerySet(Plan, using=using)
    waiting = {change.before.instance.pk: change for change in changes if change.before is not None}
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
            before: Any = stored(Plan, [pk], using, lock=True)[pk]
            aside.append((before, {"name": before.name, "default_for": before.default_for, **_values(change)}))
            unrecorded.filter(pk=pk).update(name=secrets.token_hex(16), default_for="")
    for before, values in aside:
        unrecorded.filter(pk=before.pk).update(**values)
        record(before, stored(Plan, [before.pk], using)[before.pk], using)


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
