"""Validate the entries of a file against the models, the database and each other; problems are collected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.core.exceptions import ValidationError

from ..changes.writer import users_by_login
from ..engine.rates import show
from ..exceptions import FileProblem
from .parser import did_you_mean
from .schema import POLICIES, REFERRED, Item, Items, Section, by_identity, file_value, is_log_only, model_value

#: Field -> name -> how many objects have it.
_Known = dict[str, dict[str, int]]


def check(
    items: Items, stored: Items, prune: bool, only_new: bool, using: str
) -> tuple[list[FileProblem], dict[str, Any]]:
    """Bring the entries into canonical form.

    Returns their problems, and the primary keys of the users by the name they log in with.
    """
    users = users_by_login(
        {item.values.get("user") for entries in items.values() for item in entries} - {None}, using
    )
    known: _Known = {"user": {name: len(pks) for name, pks in users.items()}}
    for name, section in REFERRED.items():
        # Bad ones too, because an entry that refers to one has no problem of its own.
        there = [item.values[section.identity[0]] for item in items.get(section, ())]
        if section not in items or not prune:
            there += [row.values[section.identity[0]] for row in stored[section]]
        known[name] = dict.fromkeys(there, 1)
    pruned = {name for name, section in REFERRED.items() if prune and section in items}
    problems: list[FileProblem] = []
    for section, entries in items.items():
        rows = by_identity(section, stored)
        for item in entries:
            problems += _missing(item, known, pruned)
            # Stored values are not validated again, even if the rules have changed since.
            equals = rows.get(section.identity_of(item.values), ())
            if item.bad or not any(row.values == item.values for row in equals):
                problems += _validate(item)
        named = by_identity(section, items)
        stay = (key for key in rows if not prune and (only_new or key not in named))
        left = {item.path for _row, item in pairs(section, stored, items)} if only_new else set()
        written = [item for item in entries if item.path not in left]
        problems += _conflicts(section, written, (row for key in stay for row in rows[key]))
    return problems, {name: pks[0] for name, pks in users.items()}


def pairs(section: Section, stored: Items, items: Items) -> Iterator[tuple[Item, Item]]:
    """Yield each stored object that has an entry with that entry.

    In their order, because of policies that are equals the last one wins. A log-only policy and another one are two
    objects, unless the mode is all that tells the entries from the stored objects.
    """
    entries = by_identity(section, items)
    for key, same in by_identity(section, stored).items():
        sides = same, entries.get(key, [])
        by_mode = [
            [[one for one in side if is_log_only(one.values) is logs] for side in sides] for logs in (False, True)
        ]
        found = [pair for rows, named in by_mode for pair in zip(rows, named, strict=False)]
        yield from found or zip(*sides, strict=False)


def _missing(item: Item, known: _Known, pruned: set[str]) -> Iterator[FileProblem]:
    """Yield problems of names that not exactly one object has."""
    for name in item.section.references:
        text = item.values[name]
        found = known[name].get(text, 0)
        if text is None or name in item.bad or found == 1:
            continue
        item.bad.add(name)
        # Of 500 names only: among very many, the search would take longer than all else.
        hint = did_you_mean(text, sorted(filter(None, known[name]))[:500])
        where = " in this file, and others would be pruned" if name in pruned else ""
        count = "more than one" if found else "no"
        yield item.problem(f"{count} {name} has the name {show(text)}{where}{hint}", name)


def _validate(item: Item) -> Iterator[FileProblem]:
    """Validate the entry as an object of its model, which also brings its values into canonical form.

    Uniqueness is left out, because the database does not hold the file's other entries yet.
    """
    section, values = item.section, item.values
    own = {name for name in section.fields if name not in section.references and name not in item.bad}
    chosen = [name for name in section.audience if values[name] or name in item.bad]
    instance: Any = section.model(**{name: model_value(name, values[name]) for name in own})
    try:
        others = {field.name for field in section.model._meta.fields} - own
        instance.full_clean(exclude=others, validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        for name, texts in error.message_dict.items():
            if name not in item.bad:
                yield from (item.problem(text, name) for text in dict.fromkeys(texts))
        item.bad.update(error.message_dict)
    values |= {name: file_value(name, getattr(instance, name)) for name in own}
    if len(chosen) > 1 or (section.audience and not chosen and section is not POLICIES):
        rules = (rule for rule in section.model._meta.constraints if rule.name.endswith(("_audience", "_subject")))
        yield item.problem(next(rules).violation_error_message)


def _conflicts(section: Section, entries: Iterable[Item], stay: Iterable[Item]) -> Iterator[FileProblem]:
    """Yield problems of entries that share what is unique with an entry above them, or with a row that stays."""
    holders: dict[tuple[str, Any], str] = {}
    for row in stay:
        holder = f"by {section.singular} {show(row.values[section.identity[0]])}, which this import does not change"
        holders |= dict.fromkeys(section.unique_values(row.values), holder)
    for item in entries:
        here = f"by {item.path} at line {item.line}"
        said = {here}
        for name, value in () if item.bad else section.unique_values(item.values):
            holder = holders.setdefault((name, value), here)
            if holder not in said:  # an entry twice is one problem
                said.add(holder)
                what = "" if name else "this audience, endpoint and counted_per without dates "
                yield item.problem(f"{what}is already used {holder}. Change one or merge them", name)
