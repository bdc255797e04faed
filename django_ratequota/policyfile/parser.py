"""Parse a file into the values of its entries, each by itself; problems are collected."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any

from ..engine.rates import show
from ..exceptions import FileProblem
from .document import EntryHandler, Node, read
from .schema import (
    LISTS,
    REFERRED,
    SECTIONS,
    VERSION,
    Interner,
    Item,
    Section,
    Stored,
    Values,
    file_value,
    model_value,
)

_SECTION_BY_NAME = {section.name: section for section in SECTIONS}
#: At most 18 digits: far above any cost, and Python refuses to read thousands of digits.
_WHOLE_NUMBER = re.compile("0|[1-9][0-9]{0,17}")
_EXAMPLE = "write one such as 2026-01-31T12:00:00Z"


class WrongValue(Exception):
    """A value that its field cannot hold."""

    def __init__(self, node: Node, text: str) -> None:
        super().__init__(text)
        self.node = node


class Entries:
    """The entries of a file as far as each can be read by itself, and the problems found."""

    def __init__(self, stored: dict[str, dict[Values, Values]]) -> None:
        #: Entries without problems, by section.
        self.items: dict[str, list[Item]] = {section.name: [] for section in SECTIONS}
        #: What the database holds, by section.
        self.stored = stored
        #: Entries with problems, and their fields that have them.
        self.bad: list[tuple[Item, set[str]]] = []
        self.problems: list[FileProblem] = []
        #: The slugs of the plans and the names of the endpoints and lists, those of bad entries too.
        self.names: dict[str, set[str]] = {section.singular: set() for section in REFERRED}
        self._defaults = {
            section.name: [section.defaults().get(name) for name in section.fields] for section in SECTIONS
        }
        self._interner = Interner()
        self._repeated = False

    def add(self, name: str, node: Node, number: int) -> None:
        """Add one entry of the list of this name; an ``EntryHandler``."""
        section = _SECTION_BY_NAME.get(name)
        if number == 0 and section is not None:
            self._repeated = bool(self.items[name])
        if section is None or self._repeated:  # reported for the list itself
            return
        if node.kind != "a mapping":
            text = f"a {section.singular} must be a mapping of fields to values, not {node.kind}"
            self.problems.append(node.problem(text))
            return
        key = section.identity[0]
        if section.singular in self.names and key in node.entries:
            self.names[section.singular].add(node.entries[key].text)
        article = "an" if section.singular[0] in "aeiou" else "a"
        problems, misspelt = check_keys(node, section.fields, f"{article} {section.singular}")
        self.problems += problems
        values, bad = list(self._defaults[name]), set()
        for at, field_name in enumerate(section.fields):
            child = node.entries.get(field_name)
            if child is None or child.kind == "nothing":
                if field_name in section.required:
                    bad.add(field_name)
                    if field_name not in misspelt:
                        line = node.line if child is None else child.line
                        self.problems.append(FileProblem(line, f"{node.path}.{field_name}", "is missing"))
                continue
            try:
                values[at] = self._interner.intern(_value(field_name, child))
            except WrongValue as wrong:
                bad.add(field_name)
                self.problems.append(wrong.node.problem(wrong))
        offsets = tuple(
            node.entries[name].line - node.line if name in node.entries else None for name in section.fields
        )
        # Equal values of the database are kept instead of the file's, so that they are in memory once.
        kept = self.stored.get(name, {}).get(tuple(values)) or tuple(values)
        item = Item(section, kept, number, node.line, self._interner.intern(offsets))
        if bad or problems:
            self.bad.append((item, bad))
        else:
            self.items[name].append(item)


def parse(text: str, stored: dict[str, list[Stored]]) -> tuple[Node, Entries]:
    """Return the document without the entries of its lists, and these entries; raises ``InvalidFile``."""
    values = {name: {row.values: row.values for row in rows} for name, rows in stored.items()}
    entries = Entries(values)

    def start_over() -> EntryHandler:
        nonlocal entries
        entries = Entries(values)
        return entries.add

    root, problems = read(text, start_over)
    entries.problems += problems
    return root, entries


def check_keys(node: Node, known: Collection[str], what: str) -> tuple[list[FileProblem], set[str]]:
    """Return the problems of unknown keys, and the known keys that they are probably misspellings of."""
    problems, misspelt = [], set()
    for key, child in node.entries.items():
        if key not in known:
            near = get_close_matches(key.lower(), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            problems.append(child.problem(f"{what} has no such field; {hint}"))
            misspelt.update(near)
    return problems, misspelt


def check_sections(root: Node, entries: Entries) -> list[Section]:
    """Return the sections that the document has; adds problems of the document itself to ``entries``."""
    if root.kind != "a mapping":
        entries.problems.append(root.problem(f"the file must begin with version: {VERSION}, not with {root.kind}"))
        return []
    entries.problems += check_keys(root, ("version", *_SECTION_BY_NAME), "a file")[0]
    version = root.entries.get("version")
    if version is None:
        entries.problems.append(root.problem(f"version is missing: write version: {VERSION}"))
    elif version.text != str(VERSION):
        wrong = f"only version {VERSION} is supported, not {show(version.text)}"
        entries.problems.append(version.problem(wrong))
    found = []
    for section in SECTIONS:
        node = root.entries.get(section.name)
        if node is not None and node.kind != "a list":
            hint = "write [] for none, or leave the section out to change nothing in it"
            entries.problems.append(node.problem(f"this must be a list, not {node.kind}; {hint}"))
        elif node is not None:
            found.append(section)
    return found


def _value(name: str, node: Node) -> Any:
    """Return a field's value as the file represents it; raises ``WrongValue``."""
    # There and back, because without USE_TZ the model field holds fewer times.
    return file_value(name, model_value(name, _READERS.get(name, _text)(node)))


def _text(node: Node) -> str:
    """Return the text of the node; raises ``WrongValue`` where YAML reads it as something else."""
    if node.kind == "text":
        return node.text
    if node.kind in ("a mapping", "a list", "nothing"):
        raise WrongValue(node, f"this must be text, not {node.kind}")
    raise WrongValue(node, f"this must be text, but YAML reads {show(node.text)} as {node.kind}: put it in quotes")


def _words(node: Node) -> tuple[str, ...]:
    if node.kind != "a list":
        raise WrongValue(node, f"this must be a list, such as [{node.text[:40] or '...'}], not {node.kind}")
    for item in node.items:
        if len(_text(item).split()) != 1:
            raise WrongValue(item, f"this must be one word without spaces, not {_shown(item)}")
    return tuple(item.text.strip() for item in node.items)


def _whole_number(node: Node) -> int:
    if node.kind != "a number" or not _WHOLE_NUMBER.fullmatch(node.text):
        raise WrongValue(node, f"this must be a whole number, not {_shown(node)}")
    return int(node.text)


def _boolean(node: Node) -> bool:
    if node.kind != "true or false":
        raise WrongValue(node, f"this must be true or false, not {_shown(node)}")
    return node.text.lower() in ("true", "yes", "on")


def _time(node: Node) -> datetime:
    if node.kind not in ("text", "a date"):
        raise WrongValue(node, f"this must be a time, not {_shown(node)}; {_EXAMPLE}")
    try:
        at = datetime.fromisoformat(node.text)
        if at.tzinfo is not None:
            return at.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise WrongValue(node, f"{_shown(node)} is not a time; {_EXAMPLE}") from error
    raise WrongValue(node, f"{_shown(node)} has no time zone; {_EXAMPLE}")


def _shown(node: Node) -> str:
    return show(node.text) if node.text else node.kind


_READERS: dict[str, Callable[[Node], Any]] = {
    **dict.fromkeys(LISTS, _words),
    **dict.fromkeys(("cost", "position", "anchor"), _whole_number),
    "exempt": _boolean,
    "starts_at": _time,
    "ends_at": _time,
}
