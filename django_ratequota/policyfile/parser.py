"""From a file to the values of objects that could be saved; collects everything that is wrong with the file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import MultipleObjectsReturned, ObjectDoesNotExist, ValidationError

from ..engine.rates import show
from ..exceptions import FileProblem, InvalidFile
from ..recording.recorder import in_batches
from .document import Node, read
from .fields import WrongValue, problems_of, text_of, value_of
from .schema import (
    ASSIGNMENTS,
    ENDPOINTS,
    PLANS,
    POLICIES,
    REFERENCES,
    SECTIONS,
    VERSION,
    Entry,
    Item,
    Same,
    Section,
    Stored,
    Values,
    held,
    plain,
)

_BY_NAME = {section.name: section for section in SECTIONS}
#: Hash of who an entry is about -> what the file and the database hold of that: one thing, or a list.
#: The hashes alone take a third of the memory, and ``alike`` tells apart what they do not.
Groups = dict[int, Any]


@dataclass(slots=True)
class Reading:
    """What a file says."""

    #: By section, by whom or what they are about; sections that the file does not have are missing here, too.
    items: dict[str, Groups] = field(default_factory=dict)
    #: The users that it names, as they log in: their primary keys.
    users: dict[str, Any] = field(default_factory=dict)


class Entries:
    """Takes the entries of a file one by one, as far as each can be read by itself."""

    def __init__(self, stored: dict[str, dict[Values, Values]]) -> None:
        self.items: dict[str, list[Item]] = {section.name: [] for section in SECTIONS}
        #: What the database holds, by section.
        self.stored = stored
        #: Entries with problems, and which fields have them.
        self.bad: list[tuple[Item, set[str]]] = []
        self.problems: list[FileProblem] = []
        #: The slugs of the plans and the names of the endpoints.
        self.names: dict[str, set[str]] = {PLANS.word: set(), ENDPOINTS.word: set()}
        self._defaults = {
            section.name: [section.defaults().get(name) for name in section.fields] for section in SECTIONS
        }
        self._same = Same()
        self._repeated = False

    def take(self, name: str, node: Node, number: int) -> None:
        """Take one entry of the list of this name."""
        section = _BY_NAME.get(name)
        if number == 0 and section is not None:
            self._repeated = bool(self.items[name])
        if section is None or self._repeated:  # said of the list
            return
        if node.kind != "a mapping":
            text = f"a {section.word} is a mapping of fields to values, not {node.kind}"
            self.problems.append(node.problem(text))
            return
        key = section.identity[0]
        if section.word in self.names and key in node.entries:
            self.names[section.word].add(node.entries[key].text)
        article = "an" if section.word[0] in "aeiou" else "a"
        problems, meant = check_keys(node, section.fields, f"{article} {section.word}")
        self.problems += problems
        values, bad = list(self._defaults[name]), set()
        for at, field_name in enumerate(section.fields):
            child = node.entries.get(field_name)
            if child is None or child.kind == "nothing":
                if field_name in section.required:
                    bad.add(field_name)
                    line = node.line if child is None else child.line
                    missing = FileProblem(line, f"{node.path}.{field_name}", "is missing")
                    self.problems += [] if field_name in meant else [missing]
                continue
            try:
                values[at] = self._same.of(_value(field_name, child))
            except WrongValue as wrong:
                bad.add(field_name)
                self.problems.append(wrong.node.problem(wrong))
        places = tuple(
            node.entries[name].line - node.line if name in node.entries else None for name in section.fields
        )
        whole = tuple(values)
        # What the database holds as well is held once.
        whole = self.stored.get(name, {}).get(whole, whole)
        item = Item(section, number, node.line, self._same.of(places), whole)
        if bad or problems:
            self.bad.append((item, bad))
        else:
            self.items[name].append(item)


def put(groups: Groups, section: Section, one: Item | Stored) -> None:
    """Add an entry or a row to those that are about the same."""
    key = hash(section.who()(one.values))
    there = groups.get(key)
    if there is None:
        groups[key] = one
    elif isinstance(there, list):
        there.append(one)
    else:
        groups[key] = [there, one]


def alike(section: Section, group: Any) -> Iterable[list[Any]]:
    """What a group holds, by whom or what it is about."""
    if not isinstance(group, list):
        return [[group]]
    found: dict[Any, list[Any]] = {}
    for one in group:
        found.setdefault(section.who()(one.values), []).append(one)
    return found.values()


def parse(text: str, stored: dict[str, list[Stored]]) -> tuple[Node, Entries]:
    """Read a file: the document without the entries of its lists, and these; raises ``InvalidFile``."""
    taken: list[Entries] = []
    values = {name: {row.values: row.values for row in rows} for name, rows in stored.items()}

    def begin() -> Callable[[str, Node, int], None]:
        taken[:] = [Entries(values)]
        return taken[0].take

    root, problems = read(text, begin)
    taken[0].problems += problems
    return root, taken[0]


def check_keys(node: Node, known: Collection[str], what: str) -> tuple[list[FileProblem], set[str]]:
    """The problems of unknown keys, and the known ones that were meant."""
    problems, meant = [], set()
    for key, child in node.entries.items():
        if key not in known:
            near = get_close_matches(key.lower(), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            problems.append(child.problem(f"{what} has no such field; {hint}"))
            meant.update(near)
    return problems, meant


def sections_of(root: Node, entries: Entries) -> list[Section]:
    """The sections that the document has; notes what is wrong with it but for its entries."""
    if root.kind != "a mapping":
        entries.problems.append(root.problem(f"the file begins with version: {VERSION}, not with {root.kind}"))
        return []
    entries.problems += check_keys(root, ("version", *_BY_NAME), "a file")[0]
    version = root.entries.get("version")
    if version is None:
        entries.problems.append(root.problem(f"version is missing: write version: {VERSION}"))
    elif version.text != str(VERSION):
        wrong = f"version {VERSION} is all that can be read, not {show(version.text)}"
        entries.problems.append(version.problem(wrong))
    found = []
    for section in SECTIONS:
        node = root.entries.get(section.name)
        if node is not None and node.kind != "a list":
            hint = "write [] for none, or leave the section out to leave all as it is"
            entries.problems.append(node.problem(f"a list is wanted, not {node.kind}; {hint}"))
        elif node is not None:
            found.append(section)
    return found


def judge(
    sections: list[Section], entries: Entries, stored: dict[str, list[Stored]], *, prune: bool, using: str | None
) -> Reading:
    """What the file says of these sections; raises ``InvalidFile`` with all that is wrong with it.

    ``stored`` is what the database holds, and ``prune`` whether what the file leaves out will be deleted.
    """
    return _Reader(sections, entries, stored, prune, using).reading


class _Reader:
    def __init__(
        self,
        sections: list[Section],
        entries: Entries,
        stored: dict[str, list[Stored]],
        prune: bool,
        using: str | None,
    ) -> None:
        self.reading = Reading()
        self._problems = entries.problems
        self._known: dict[str, Collection[str]] = {}
        self._pruned: dict[str, set[str]] = {}
        for section in (PLANS, ENDPOINTS):
            there = {row.entry[section.identity[0]] for row in stored[section.name]}
            self._known[section.word], self._pruned[section.word] = there, set()
            if section in sections:
                # Those with problems too: who names them has no problem of its own.
                named = entries.names[section.word]
                self._pruned[section.word] = there - named if prune else set()
                self._known[section.word] = (there - self._pruned[section.word]) | named
        self.reading.users, self._other_users = _users(_named_users(entries), using)
        for item, bad in entries.bad:
            self._refer(item, bad)
            self._problems += problems_of(item, _instance(item), bad)
        for section in sections:
            # What the database holds already is no problem, even where it would be refused today.
            same = entries.stored.pop(section.name, {})
            groups: Groups = {}
            items = entries.items[section.name]
            items[:] = [item for item in items if self._checked(item, same)]
            for item in items:
                put(groups, section, item)
            self._problems += _twice(section, groups)
            self.reading.items[section.name] = groups
            if section is PLANS:
                named = entries.names[PLANS.word]
                others = [row.entry for row in stored["plans"] if not prune and row.entry["slug"] not in named]
                self._problems += _rivals(items, others)
            items.clear()
        if self._problems:
            raise InvalidFile(sorted(self._problems, key=lambda problem: problem.line))

    def _checked(self, item: Item, stored: dict[Values, Values]) -> bool:
        """Bring the values of the entry into canonical form; False where it has problems."""
        before = len(self._problems)
        bad: set[str] = set()
        self._refer(item, bad)
        if bad or item.values not in stored:
            instance = _instance(item)
            self._problems += problems_of(item, instance, bad)
            item.values = tuple(
                value if name in REFERENCES or name in bad else plain(name, getattr(instance, name))
                for name, value in item.entry.items()
            )
        item.values = stored.get(item.values, item.values)
        return len(self._problems) == before

    def _refer(self, item: Item, bad: set[str]) -> None:
        """Look up what the entry refers to; adds fields to ``bad``."""
        for at, name in enumerate(item.section.fields):
            text = item.values[at]
            if name not in REFERENCES or text is None or name in bad:
                continue
            if name == "user":
                found = self._other_users.get(text, [])
                if text in self.reading.users and not found:
                    continue
                if len(found) == 1:
                    item.values = (*item.values[:at], found[0], *item.values[at + 1 :])
                    continue
                problem = f"{'more than one' if found else 'no'} user has the name {show(text)}"
            elif text in self._pruned[name]:
                problem = f"the file does not have the {name} {show(text)}, so it would be pruned"
            elif text in self._known[name]:
                continue
            else:
                # Among very many names the search would take longer than all else.
                near = get_close_matches(text[:100], sorted(self._known[name])[:500], n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                problem = f"there is no {name} {show(text)}, neither in this file nor elsewhere{hint}"
            self._problems.append(item.problem(problem, name))
            bad.add(name)


def _value(name: str, node: Node) -> Any:
    """The value of a field as the file says it; raises ``WrongValue``."""
    return text_of(node) if name in REFERENCES else plain(name, held(name, value_of(name, node)))


def _instance(item: Item) -> Any:
    """The entry as an object, without what it refers to."""
    given = item.entry.items()
    return item.section.model(
        **{
            n: held(n, v)
            for n, v in given
            if n not in REFERENCES and (v is not None or n not in item.section.required)
        }
    )


def _named_users(entries: Entries) -> set[str]:
    found = set()
    for section in (POLICIES, ASSIGNMENTS):
        user = section.getter("user")
        found |= {user(item.values) for item in entries.items[section.name]}
        found |= {user(item.values) for item, _bad in entries.bad if item.section is section}
    return found - {None}


def _users(names: set[str], using: str | None) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The primary keys of the users of these names, as they log in; and who else a name may mean.

    One query for 500 names, and one for each that needs the manager's own way to find it.
    """
    model = get_user_model()
    keys: dict[str, Any] = {}
    others: dict[str, list[str]] = {}
    valid = [name for name in sorted(names) if _readable(model._meta.get_field(model.USERNAME_FIELD), name)]
    names.clear()  # of 100,000, its memory is wanted
    for batch in in_batches(valid):
        users = model._base_manager.using(using).filter(**{f"{model.USERNAME_FIELD}__in": batch})
        held_once = {name: name for name in batch}
        for login, pk in users.values_list(model.USERNAME_FIELD, "pk"):
            name = held_once.get(str(login), str(login))
            if name in keys:
                others[name] = [name, name]
            keys[name] = pk
    find: Any = getattr(model._default_manager.db_manager(using), "get_by_natural_key", None)
    for name in valid:
        if find and name not in keys:
            try:
                user = find(name)  # one that folds case, say
            except (ObjectDoesNotExist, MultipleObjectsReturned):
                continue
            others[name] = [str(user.get_username())]
            keys[others[name][0]] = user.pk
    return keys, others


def _readable(field: Any, text: str) -> bool:
    try:
        field.to_python(text)
    except ValidationError:
        return False
    return True


def _twice(section: Section, groups: Groups) -> Iterator[FileProblem]:
    """Entries of which there can be only one, and are two."""
    if section is ASSIGNMENTS:
        return
    crowds = (group for group in groups.values() if isinstance(group, list))
    for group in (each for crowd in crowds for each in alike(section, crowd)):
        alone = [item for item in group if not any(item.entry.get(name) for name in ("starts_at", "ends_at"))]
        for item in alone[1:]:
            if section is POLICIES:
                yield item.problem(
                    f"line {alone[0].line} has a policy of the same audience, endpoint and counted_per, and neither "
                    "has dates: make them one, or give one dates"
                )
            else:
                yield item.problem(f"is the one of line {alone[0].line} already", section.identity[0])


def _rivals(items: Iterable[Item], others: list[Entry]) -> Iterator[FileProblem]:
    """Plans that want a name, or to be a default, that is another's."""
    holders = {
        (name, entry[name]): f"plan {show(entry['slug'])}, which this file does not name"
        for entry in others
        for name in ("name", "default_for")
    }
    for item in items:
        for name in ("name", "default_for"):
            value = item.entry[name]
            if (name, value) in holders and value:
                yield item.problem(f"{show(value)} is taken by {holders[name, value]}", name)
            holders[name, value] = f"the plan of line {item.line}"
