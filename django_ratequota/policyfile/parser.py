"""Parse a file into the values of its entries, each by itself; problems are collected."""

from __future__ import annotations

import re
from collections.abc import Collection
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

import yaml
from django.db import models

from ..engine.rates import show
from ..exceptions import FileProblem
from ..models.fields import RatesField
from .document import kind_of, line_of, problem, read
from .schema import LIST_FIELDS, SECTIONS, VERSION, Item, Items, Section

#: At most 18 digits: far above any cost, and Python refuses to read thousands of digits.
_WHOLE_NUMBER = re.compile("0|[1-9][0-9]{0,17}")


class _WrongValue(Exception):
    """A value that its field cannot hold."""


def parse(text: str) -> tuple[Items, list[FileProblem]]:
    """Return the entries of the sections that the file has, and its problems.

    Raises ``InvalidFile`` where reading must stop.
    """
    problems: list[FileProblem] = []
    known = ("version", *(section.name for section in SECTIONS))
    pairs = _pairs(read(text), "", known, problems)
    line, version = pairs.get("version", (1, None))
    if version is None or version.value != str(VERSION):
        problems.append(problem(line, "version", f"enter version: {VERSION}, the only one there is"))
    found: Items = {}
    for section in SECTIONS:
        line, node = pairs.get(section.name, (0, None))
        if isinstance(node, yaml.SequenceNode):
            found[section] = [_item(section, at, entry, problems) for at, entry in enumerate(node.value)]
        elif node is not None:
            hint = "Enter [] for none or leave out the section to keep its objects"
            problems.append(problem(line, section.name, f"this must be a list, not {kind_of(node)}. {hint}."))
    return found, problems


def _pairs(node: Any, path: str, known: Collection[str], problems: list[FileProblem]) -> dict[str, tuple[int, Any]]:
    """Return the values of a mapping by key, each with the line of its key; adds problems of the keys."""
    found: dict[str, tuple[int, Any]] = {}
    if not isinstance(node, yaml.MappingNode):
        text = f"this must be a mapping of fields to values, not {kind_of(node)}"
        problems.append(problem(line_of(node), path, text))
        return found
    for key, value in node.value:
        line, name = line_of(key), key.value if isinstance(key, yaml.ScalarNode) else kind_of(key)
        place = f"{path}.{name[:40]}".lstrip(".")
        if name in found:
            problems.append(problem(line, place, f"is already set at line {found[name][0]}"))
        elif name in known:
            found[name] = line, value
        else:
            choices = did_you_mean(name, known) or f". Choose from {', '.join(known)}"
            if name == "exempt" and "limits" in known:
                choices = ". For an exempt endpoint write limits: none"
            problems.append(problem(line, place, f"there is no such field{choices}"))
    return found


def did_you_mean(text: str, known: Collection[str]) -> str:
    """Return a question if one of the known words is similar, else ""."""
    near = get_close_matches(text[:100].lower(), known, n=1)
    return f". Did you mean {near[0]}?" if near else ""


def _item(section: Section, at: int, node: Any, problems: list[FileProblem]) -> Item:
    """Return an entry; adds its problems."""
    count, path = len(problems), f"{section.name}[{at}]"
    pairs = _pairs(node, path, section.fields, problems)
    lines = {name: line for name, (line, _node) in pairs.items()}
    values = dict.fromkeys(section.fields) | section.defaults
    item = Item(section=section, values=values, path=path, line=line_of(node), lines=lines)
    misspelt = len(problems) > count
    for name, model_field in section.fields.items():
        value = pairs[name][1] if name in pairs else None
        if value is not None and kind_of(value) != "nothing":
            try:
                item.values[name] = _value(model_field, value)
            except _WrongValue as wrong:
                problems.append(item.problem(wrong, name))
                item.bad.add(name)
        elif name not in section.defaults:
            item.bad.add(name)
            problems += [] if misspelt else [item.problem("is missing", name)]
    return item


def _value(model_field: Any, node: Any) -> Any:
    """Return the node's value as the file represents it; raises ``_WrongValue``."""
    kind = kind_of(node)
    shown = show(node.value) if isinstance(node, yaml.ScalarNode) else kind
    if model_field.name in LIST_FIELDS:
        words = [_text(child) for child in node.value] if kind == "a list" else []
        wrong = [show(word) for word in words if len(word.split()) != 1]
        if kind != "a list" or wrong:
            raise _WrongValue(f"this must be a list of words, such as [a, b], not {wrong[0] if wrong else shown}")
        return tuple(word.strip() for word in words)
    if isinstance(model_field, models.BooleanField):
        if kind != "true or false":
            raise _WrongValue(f"this must be true or false, not {shown}")
        return node.value.lower() in ("true", "yes", "on")
    if isinstance(model_field, models.IntegerField):
        if kind != "a number" or not _WHOLE_NUMBER.fullmatch(node.value):
            raise _WrongValue(f"this must be a whole number, not {shown}")
        return int(node.value)
    if isinstance(model_field, models.DateTimeField):
        try:
            at = datetime.fromisoformat(node.value)
            if at.tzinfo is not None:
                return at.astimezone(UTC)
        except (TypeError, ValueError, OverflowError):
            pass
        raise _WrongValue(f"{shown} is not a time with a time zone such as 2026-01-31T12:00:00Z")
    # The number 60 is no rate, with or without quotes: the error of the rate says what to write.
    text = node.value if isinstance(model_field, RatesField) and kind == "a number" else _text(node)
    choices = [key for key, _label in model_field.flatchoices if key]
    if text and choices and text not in choices:
        raise _WrongValue(f"{show(text)} must be one of {', '.join(choices)}{did_you_mean(text, choices)}")
    return text


def _text(node: Any) -> str:
    kind = kind_of(node)
    if kind != "text":
        quotes = f", but YAML reads {show(node.value)} as {kind}. Put it in quotes"
        raise _WrongValue(f"this must be text{quotes if isinstance(node, yaml.ScalarNode) else f', not {kind}'}")
    if "\x00" in node.value:
        raise _WrongValue("text must not contain NUL characters")
    return str(node.value)
