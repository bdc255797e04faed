"""From a file to model objects that could be saved; collects everything that is wrong with the file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import MultipleObjectsReturned, ObjectDoesNotExist, ValidationError

from ..exceptions import FileProblem
from ..rates import show
from .sections import (
    ASSIGNMENTS,
    ENDPOINTS,
    PLANS,
    POLICIES,
    REFERENCES,
    SECTIONS,
    VERSION,
    Entry,
    Section,
    Stored,
    held,
)
from .text import Node
from .values import WrongValue, problems_of, text_of, value_of

_BATCH = 500


@dataclass(slots=True)
class Item:
    """One entry of the file, as an object that is not saved."""

    node: Node
    instance: Any
    entry: Entry


@dataclass(slots=True)
class Reading:
    """What a file says."""

    #: By section; sections that the file does not have are missing here, too.
    items: dict[str, list[Item]] = field(default_factory=dict)
    problems: list[FileProblem] = field(default_factory=list)


def judge(root: Node, stored: dict[str, list[Stored]], *, prune: bool, using: str | None) -> Reading:
    """What the document says, and all that is wrong with it.

    ``stored`` is what the database holds, and ``prune`` whether what the file leaves out will be deleted.
    """
    return _Reader(root, stored, prune, using).reading


class _Reader:
    def __init__(self, root: Node, stored: dict[str, list[Stored]], prune: bool, using: str | None) -> None:
        self.reading = Reading()
        self._problems = self.reading.problems
        #: What the database holds already is no problem, even where it would be refused today.
        self._stored = {name: {_key(one.entry) for one in rows} for name, rows in stored.items()}
        lists = dict(self._lists(root))
        self._known: dict[str, dict[str, Any]] = {}
        self._pruned: dict[str, set[str]] = {}
        for section in (PLANS, ENDPOINTS):
            self._known[section.word] = self._referable(section, lists.get(section.name), stored, prune)
        self._users = _users(self._named_users(lists), using)
        for section in SECTIONS:
            if section.name in lists:
                nodes = lists[section.name].items
                items = [item for node in nodes if (item := self._item(section, node)) is not None]
                self._problems += _twice(section, items)
                self.reading.items[section.name] = items
        if "plans" in lists:
            named = _names(PLANS, lists["plans"])
            others = [one.entry for one in stored["plans"] if not prune and one.entry["slug"] not in named]
            self._problems += _rivals(self.reading.items["plans"], others)

    def _lists(self, root: Node) -> Iterator[tuple[str, Node]]:
        """The sections of the document."""
        if root.kind != "a mapping":
            self._problems.append(root.problem(f"the file begins with version: {VERSION}, not with {root.kind}"))
            return
        self._check_keys(root, ("version", *(section.name for section in SECTIONS)), "a file")
        version = root.entries.get("version")
        if version is None:
            self._problems.append(root.problem(f"version is missing: write version: {VERSION}"))
        elif version.text != str(VERSION):
            wrong = f"version {VERSION} is all that can be read, not {show(version.text)}"
            self._problems.append(version.problem(wrong))
        for section in SECTIONS:
            node = root.entries.get(section.name)
            if node is not None and node.kind != "a list":
                hint = "write [] for none, or leave the section out to leave all as it is"
                self._problems.append(node.problem(f"a list is wanted, not {node.kind}; {hint}"))
            elif node is not None:
                yield section.name, node

    def _check_keys(self, node: Node, known: Collection[str], what: str) -> set[str]:
        """Tells of unknown keys; returns the known ones that were meant."""
        meant = set()
        for key, child in node.entries.items():
            if key not in known:
                near = get_close_matches(key.lower(), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                self._problems.append(child.problem(f"{what} has no such field; {hint}"))
                meant.update(near)
        return meant

    def _referable(self, section: Section, node: Node | None, stored: dict[str, list[Stored]], prune: bool) -> Any:
        """The plans or endpoints that other entries may name, by slug or name."""
        there = {one.entry[section.identity[0]]: one.instance for one in stored[section.name]}
        if node is None:
            return there
        named = _names(section, node)
        self._pruned[section.word] = there.keys() - named if prune else set()
        # Those with problems too: who names them has no problem of its own.
        new = {name: section.model(**{section.identity[0]: name}) for name in named}
        return new | {name: row for name, row in there.items() if name not in self._pruned[section.word]}

    def _named_users(self, lists: dict[str, Node]) -> set[str]:
        nodes = (item.entries.get("user") for node in lists.values() for item in node.items)
        return {node.text for node in nodes if node is not None and node.kind == "text"}

    def _item(self, section: Section, node: Node) -> Item | None:
        """The entry as an object; None where its problems leave none to compare."""
        if node.kind != "a mapping":
            self._problems.append(node.problem(f"a {section.word} is a mapping of fields to values, not {node.kind}"))
            return None
        article = "an" if section.word[0] in "aeiou" else "a"
        meant = self._check_keys(node, section.fields, f"{article} {section.word}")
        before = len(self._problems)
        values: dict[str, Any] = {}
        bad = set()
        for name in section.fields:
            child = node.entries.get(name)
            if child is None or child.kind == "nothing":
                if name in section.required:
                    bad.add(name)
                    line = node.line if child is None else child.line
                    missing = FileProblem(line, f"{node.path}.{name}", "is missing")
                    self._problems += [] if name in meant else [missing]
                continue
            try:
                values[name] = held(name, self._value(name, child))
            except WrongValue as wrong:
                bad.add(name)
                self._problems.append(wrong.node.problem(wrong))
        instance = section.model(**values)
        if bad:
            self._problems += problems_of(section, instance, node, bad)
            return None
        entry = section.entry(instance)
        if _key(entry) not in self._stored[section.name]:
            self._problems += problems_of(section, instance, node, bad)
            entry = section.entry(instance)
        return Item(node, instance, entry) if len(self._problems) == before else None

    def _value(self, name: str, node: Node) -> Any:
        """The value of a field; raises ``WrongValue``."""
        if name not in REFERENCES:
            return value_of(name, node)
        text = text_of(node)
        if name == "user":
            return self._user(text, node)
        if text in self._pruned.get(name, ()):
            raise WrongValue(node, f"the file does not have the {name} {show(text)}, so it would be pruned")
        if text not in self._known[name]:
            # Among very many names the search would take longer than all else.
            near = get_close_matches(text[:100], list(self._known[name])[:500], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise WrongValue(node, f"there is no {name} {show(text)}, neither in this file nor elsewhere{hint}")
        return self._known[name][text]

    def _user(self, text: str, node: Node) -> Any:
        found = self._users[text]
        if len(found) != 1:
            raise WrongValue(node, f"{'more than one' if found else 'no'} user has the name {show(text)}")
        return found[0]


def _names(section: Section, node: Node) -> set[str]:
    """The slugs or names of the section's entries."""
    key = section.identity[0]
    return {item.entries[key].text for item in node.items if key in item.entries}


def _key(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry.values())


def _users(names: set[str], using: str | None) -> dict[str, list[Any]]:
    """The users of these names; one query for 500, and one for each that needs the manager's own way to find it."""
    model = get_user_model()
    found: dict[str, list[Any]] = {name: [] for name in names}
    valid = [name for name in sorted(names) if _readable(model._meta.get_field(model.USERNAME_FIELD), name)]
    for start in range(0, len(valid), _BATCH):
        batch = {f"{model.USERNAME_FIELD}__in": valid[start : start + _BATCH]}
        for user in model._base_manager.using(using).filter(**batch):
            found.setdefault(str(user.get_username()), []).append(user)
    find: Any = getattr(model._default_manager.db_manager(using), "get_by_natural_key", None)
    for name in valid:
        if find and not found[name]:
            try:
                found[name] = [find(name)]  # one that folds case, say
            except (ObjectDoesNotExist, MultipleObjectsReturned):
                continue
    return found


def _readable(field: Any, text: str) -> bool:
    try:
        field.to_python(text)
    except ValidationError:
        return False
    return True


def _twice(section: Section, items: list[Item]) -> Iterator[FileProblem]:
    """Entries of which there can be only one, and are two."""
    seen: dict[Any, Item] = {}
    for item in items:
        dates = [item.entry.get(name) for name in ("starts_at", "ends_at")]
        if section is ASSIGNMENTS or any(dates):
            continue
        first = seen.setdefault(section.who(item.entry), item)
        if first is not item and section is POLICIES:
            yield item.node.problem(
                f"line {first.node.line} has a policy of the same audience, endpoint and counted_per, and neither "
                "has dates: make them one, or give one dates"
            )
        elif first is not item:
            yield item.node.entries[section.identity[0]].problem(f"is the one of line {first.node.line} already")


def _rivals(items: list[Item], others: list[Entry]) -> Iterator[FileProblem]:
    """Plans that want a name, or to be a default, that is another's."""
    for name in ("name", "default_for"):
        holders = {entry[name]: f"plan {show(entry['slug'])}, which this file does not name" for entry in others}
        for item in items:
            value = item.entry[name]
            if value in holders and value:
                yield item.node.entries[name].problem(f"{show(value)} is taken by {holders[value]}")
            holders[value] = f"the plan of line {item.node.line}"
