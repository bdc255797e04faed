"""Read the entries of a file and validate them by the models, the database and each other; problems are collected."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models

from ..changes.writer import users_by_login
from ..engine.rates import show
from .document import kind_of, line_of, read
from .schema import LIST_FIELDS, POLICIES, REFERRED, SECTIONS, VERSION, Item, Items, Section, file_value

#: At most 18 digits: far above any cost, and Python refuses to read thousands of digits.
_WHOLE_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
#: Field -> name -> primary keys of the objects that have it; None = one that the file creates.
Names = dict[str, dict[Any, list[Any]]]


def parse(text: str) -> tuple[Items, Item]:
    """Return the entries of the sections that the file has, and the file as an item with the other problems.

    Raises ``InvalidFile`` where reading must stop.
    """
    file, found = Item(None, {}), Items()
    nodes = _pairs(file, read(text), ("version", *(section.name for section in SECTIONS)))
    if "version" not in nodes or nodes["version"].value != str(VERSION):
        file.refuse(f"enter version: {VERSION}, the only one there is", "version")
    for section in (section for section in SECTIONS if section.name in nodes):
        node = nodes[section.name]
        if kind_of(node) == "a list":
            found[section] = [_entry(section, f"{section.name}[{at}]", each) for at, each in enumerate(node.value)]
        else:
            hint = "Enter [] for none or leave out the section to keep its objects"
            file.refuse(f"this must be a list, not {kind_of(node)}. {hint}.", section.name)
    return found, file


def _pairs(item: Item, node: Any, known: Collection[str]) -> dict[str, Any]:
    """Return the values of a mapping by key; refuses keys, and what is no mapping."""
    found: dict[str, Any] = {}
    if kind_of(node) != "a mapping":
        item.refuse(f"this must be a mapping of fields to values, not {kind_of(node)}")
        return found
    for key, value in node.value:
        line, name = line_of(key), key.value if key.id == "scalar" else kind_of(key)
        if name in found:
            item.refuse(f"is already set at line {item.lines[name]}", name, line)
        elif name in known:
            found[name], item.lines[name] = value, line
        else:
            choices = did_you_mean(name, known) or f". Choose from {', '.join(known)}"
            item.refuse(f"there is no such field{choices}", name, line)
    return found


def did_you_mean(text: str, known: Collection[str]) -> str:
    """Return a question if one of the known words is similar, else ""."""
    near = get_close_matches(text[:100].lower(), known, n=1)
    return f". Did you mean {near[0]}?" if near else ""


def _entry(section: Section, path: str, node: Any) -> Item:
    entry = Item(section, dict.fromkeys(section.fields) | section.defaults, path=path, line=line_of(node))
    nodes = _pairs(entry, node, section.fields)
    given = {name: value for name, value in nodes.items() if kind_of(value) != "nothing"}
    missing = [name for name in section.fields if name not in section.defaults and name not in given]
    for name in missing if not entry.problems else ():  # a misspelt field may be the missing one
        entry.refuse("is missing", name)
    entry.bad.update(missing)
    for name, value in given.items():
        try:
            entry.values[name] = _value(section.fields[name], value)
        except ValidationError as error:
            entry.refuse(error.message, name)
    return entry


def _value(field: Any, node: Any) -> Any:
    """Return the node's value as the file represents it; raises ``ValidationError``."""
    if field.name in LIST_FIELDS:
        words = node.value if kind_of(node) == "a list" else [node]
        return tuple(" ".join(map(_text, words)).split())
    text = _text(node)
    if isinstance(field, models.DateTimeField):
        with suppress(ValueError, OverflowError):
            at = datetime.fromisoformat(text)
            if at.tzinfo is not None:
                return at.astimezone(UTC)
        raise ValidationError(f"{show(text)} is not a time with a time zone such as 2026-01-31T12:00:00Z")
    if isinstance(field, models.IntegerField):
        if _WHOLE_NUMBER.fullmatch(text):
            return int(text)
        raise ValidationError(f"this must be a whole number, not {show(text)}")
    is_switch = isinstance(field, models.BooleanField)
    choices = ("true", "false") if is_switch else [key for key, _label in field.flatchoices if key]
    if choices and text not in choices and (text or is_switch):
        raise ValidationError(f"{show(text)} must be one of {', '.join(choices)}{did_you_mean(text, choices)}")
    return text == "true" if is_switch else text


def _text(node: Any) -> str:
    if node.id != "scalar":
        raise ValidationError(f"this must be text, not {kind_of(node)}")
    if "\x00" in node.value:
        raise ValidationError("text must not contain NUL characters")
    return str(node.value)


def names_of(entries: Items, stored: Items, prune: bool, using: str) -> Names:
    """Return the names that entries may refer to."""
    users = {entry.values.get("user") for section in entries.values() for entry in section} - {None}
    names: Names = {"user": users_by_login(users, using)}
    for name, section in REFERRED.items():
        # Bad ones too, because an entry that refers to one has no problem of its own.
        there = [*entries.get(section, ()), *(() if section in entries and prune else stored[section])]
        names[name] = {item.name: [item.pk] for item in there}
    return names


def check(entry: Item, names: Names, pruned: Collection[str], same: Iterable[Item]) -> None:
    """Refuse what is wrong with an entry by itself, and bring its values into canonical form.

    ``same`` are the stored objects of its identity.
    """
    section, values = entry.section, entry.values
    for name in section.references:
        text = values[name]
        found = names[name].get(text, ())
        if text is not None and len(found) != 1:
            # Of 500 names only: among very many, the search would take longer than all else.
            hint = did_you_mean(text, sorted(filter(None, names[name]))[:500])
            where = " in this file, and others would be pruned" if name in pruned else ""
            count = "more than one" if found else "no"
            entry.refuse(f"{count} {name} has the name {show(text)}{where}{hint}", name)
    # Stored values are not validated again, even if the rules have changed since.
    if not entry.bad and any(row.values == values for row in same):
        return
    own = section.fields.keys() - section.references - entry.bad
    audience = [name for name in ("user", "subject", "subject_list", "plan") if name in section.defaults]
    chosen = [name for name in audience if values[name] or name in entry.bad]
    instance: Any = section.model(**entry.model_values(own))
    try:
        # Uniqueness is left out, because the database does not hold the file's other entries yet.
        others = {field.name for field in section.model._meta.fields} - own
        instance.full_clean(exclude=others, validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        for name, texts in error.message_dict.items():
            for text in dict.fromkeys(texts) if name not in entry.bad else ():
                entry.refuse(text, name)
    values |= {name: file_value(name, getattr(instance, name)) for name in own}
    if len(chosen) > 1 or (audience and not chosen and section is not POLICIES):
        rules = (rule for rule in section.model._meta.constraints if rule.name.endswith(("_audience", "_subject")))
        entry.refuse(next(rules).violation_error_message)


def refuse_conflicts(stay: Iterable[Item], written: Iterable[Item]) -> None:
    """Refuse entries of a section that share what is unique with one above them, or with a row that stays."""
    holders: dict[tuple[str, Any], str] = {}
    for item in (*stay, *written):
        here = f"by {item.path} at line {item.line}"
        if item.pk is not None:
            here = f"by {item.section.singular} {show(item.name)}, which this import does not change"
        clashes: dict[str, str] = {}
        for value in () if item.bad else item.unique_values():
            if (holder := holders.setdefault(value, here)) != here:
                clashes.setdefault(holder, value[0])  # an entry twice is one problem
        for holder, name in clashes.items():
            what = "" if name else "this audience, endpoint and counted_per without dates "
            item.refuse(f"{what}is already used {holder}. Change one or merge them", name)
