"""Single values of a file, and what a model says of an object made of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from django.core.exceptions import ValidationError

from ..engine.rates import show
from ..exceptions import FileProblem
from ..models import RatePolicy
from .document import Node
from .schema import LISTS, POLICIES, REFERENCES, Item, Section

_AUDIENCE = ("user", "subject", "plan")
#: At most 18 digits: far above any cost, and no number that Python refuses to read.
_WHOLE_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_EXAMPLE = "write one with its zone, such as 2026-01-31T12:00:00Z"


class WrongValue(Exception):
    """A value that its field cannot hold."""

    def __init__(self, node: Node, text: str) -> None:
        super().__init__(text)
        self.node = node


def value_of(name: str, node: Node) -> Any:
    """The value of a field that names no other object; raises ``WrongValue``."""
    if name in LISTS:
        return _words(node)
    if name == "cost":
        if node.kind != "a number" or not _WHOLE_NUMBER.fullmatch(node.text):
            raise WrongValue(node, f"a whole number is wanted, not {_shown(node)}")
        return int(node.text)
    if name in ("starts_at", "ends_at"):
        return _moment(node)
    return text_of(node)


def text_of(node: Node) -> str:
    """The text; raises ``WrongValue`` where YAML takes it for something else."""
    if node.kind == "text":
        return node.text
    if node.kind in ("a mapping", "a list", "nothing"):
        raise WrongValue(node, f"text is wanted, not {node.kind}")
    raise WrongValue(node, f"text is wanted, and YAML takes {show(node.text)} for {node.kind}: put it in quotes")


def _words(node: Node) -> tuple[str, ...]:
    if node.kind != "a list":
        raise WrongValue(node, f"a list is wanted, such as [{node.text[:40] or '...'}], not {node.kind}")
    for item in node.items:
        if len(text_of(item).split()) != 1:
            raise WrongValue(item, f"one word is wanted, without spaces, not {_shown(item)}")
    return tuple(item.text.strip() for item in node.items)


def _moment(node: Node) -> datetime:
    if node.kind not in ("text", "a date"):
        raise WrongValue(node, f"a time is wanted, not {_shown(node)}; {_EXAMPLE}")
    try:
        at = datetime.fromisoformat(node.text)
        if at.tzinfo is not None:
            return at.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise WrongValue(node, f"{_shown(node)} is no time; {_EXAMPLE}") from error
    raise WrongValue(node, f"{_shown(node)} may be many times; {_EXAMPLE}")


def _shown(node: Node) -> str:
    return show(node.text) if node.text else node.kind


def problems_of(item: Item, instance: Any, bad: Collection[str] = ()) -> Iterator[FileProblem]:
    """What the model says of the item's object, which it brings into canonical form; fields in ``bad`` excepted.

    What only the database can tell, that one is unique, is not asked: the database has not got there yet.
    """
    wrong: dict[str, list[str]] = {}
    references = set(item.section.fields) & set(REFERENCES)
    for check in (lambda: instance.clean_fields(exclude=references | set(bad)), instance.clean):
        try:
            check()
        except ValidationError as error:
            for name, errors in error.error_dict.items():
                if name not in bad:
                    wrong.setdefault(name, [_message(item.section, instance, name, one) for one in errors])
    for name, messages in wrong.items():
        yield from (item.problem(message, name) for message in messages)
    audience = [name for name in _AUDIENCE if item.section is POLICIES and name not in bad and item.entry[name]]
    if len(audience) > 1:
        rule = next(rule for rule in RatePolicy._meta.constraints if rule.name == "ratequota_policy_one_audience")
        yield item.problem(rule.violation_error_message)


def _message(section: Section, instance: Any, name: str, error: ValidationError) -> str:
    if error.code != "invalid_choice":
        return " ".join(error.messages)
    value = getattr(instance, name)
    field: Any = section.model._meta.get_field(name)
    choices = [str(key) for key, _label in field.flatchoices if key]
    near = get_close_matches(str(value)[:40].lower(), choices, n=1)
    return f"{show(value)} is none of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
