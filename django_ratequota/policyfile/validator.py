"""Validate the entries of a file against each other, the models and the database; problems are collected."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import MultipleObjectsReturned, ObjectDoesNotExist, ValidationError

from ..engine.rates import show
from ..exceptions import FileProblem, InvalidFile
from ..recording.recorder import in_batches
from .parser import Entries
from .schema import (
    ASSIGNMENTS,
    OF_ONE,
    PLANS,
    POLICIES,
    REFERENCES,
    REFERRED,
    Entry,
    Item,
    Section,
    Stored,
    Values,
    file_value,
    model_value,
)

#: Hash of an identity -> the item or row that has it, or a list of several.
#: Hashes take a third of the memory of identities; ``by_identity`` tells apart what shares a hash.
Groups = dict[int, Any]
_AUDIENCE = ("user", "subject", "subject_list", "plan")


def add_to_group(groups: Groups, one: Item | Stored) -> None:
    """Add an item or row to those with the same identity."""
    key = hash(one.section.identity_of(one.values))
    present = groups.get(key)
    if present is None:
        groups[key] = one
    elif isinstance(present, list):
        present.append(one)
    else:
        groups[key] = [present, one]


def by_identity(section: Section, group: Any) -> Iterable[list[Any]]:
    """Split a group, whose hashes are equal, by identity."""
    if not isinstance(group, list):
        return [[group]]
    found: dict[Any, list[Any]] = {}
    for one in group:
        found.setdefault(section.identity_of(one.values), []).append(one)
    return found.values()


class ValidEntries:
    """The entries of these sections in canonical form; raises ``InvalidFile`` with all problems of the file.

    ``stored`` is what the database holds. ``prune``: what the file leaves out will be deleted.
    """

    def __init__(
        self,
        sections: list[Section],
        entries: Entries,
        stored: dict[str, list[Stored]],
        prune: bool,
        using: str | None,
    ) -> None:
        #: By section; without sections that the file does not have.
        self.items: dict[str, Groups] = {}
        self._problems = entries.problems
        #: Slugs of plans and names of endpoints and lists that entries may refer to, and those that will be pruned.
        self._known: dict[str, Collection[str]] = {}
        self._pruned: dict[str, set[str]] = {}
        for section in REFERRED:
            present = {row.entry[section.identity[0]] for row in stored[section.name]}
            # Bad ones too, because an entry that refers to one has no problem of its own.
            named = entries.names[section.singular] if section in sections else present
            self._pruned[section.singular] = present - named if prune else set()
            self._known[section.singular] = (present - self._pruned[section.singular]) | named
        #: Primary keys of the users in the file, by the name they log in with.
        self.users, self._other_users = _find_users(_named_users(entries), using)
        for item, bad in entries.bad:
            self._check_references(item, bad)
            self._problems += _model_problems(item, _instance(item), bad)
        for section in sections:
            # Stored values are not validated again, even if the rules have changed since.
            same = entries.stored.pop(section.name, {})
            groups: Groups = {}
            items = entries.items[section.name]
            items[:] = [item for item in items if self._check(item, same)]
            for item in items:
                add_to_group(groups, item)
            self._problems += _duplicates(section, groups)
            self.items[section.name] = groups
            if section is PLANS:
                named = entries.names[PLANS.singular]
                unnamed = [row.entry for row in stored["plans"] if not prune and row.entry["slug"] not in named]
                self._problems += _name_conflicts(items, unnamed)
            items.clear()
        if self._problems:
            raise InvalidFile(sorted(self._problems, key=lambda problem: problem.line))

    def _check(self, item: Item, stored: dict[Values, Values]) -> bool:
        """Bring the values of the entry into canonical form; False where it has problems."""
        before = len(self._problems)
        bad: set[str] = set()
        self._check_references(item, bad)
        if bad or item.values not in stored:
            instance = _instance(item)
            self._problems += _model_problems(item, instance, bad)
            item.values = tuple(
                value if name in REFERENCES or name in bad else file_value(name, getattr(instance, name))
                for name, value in item.entry.items()
            )
        item.values = stored.get(item.values, item.values)
        return len(self._problems) == before

    def _check_references(self, item: Item, bad: set[str]) -> None:
        """Look up the objects that the entry refers to; adds fields with problems to ``bad``."""
        for at, name in enumerate(item.section.fields):
            text = item.values[at]
            if name not in REFERENCES or text is None or name in bad:
                continue
            if name == "user":
                found = self._other_users.get(text, [])
                if text in self.users and not found:
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
                # Of 500 names only: among very many, the search would take longer than all else.
                near = get_close_matches(text[:100], sorted(self._known[name])[:500], n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                problem = f"there is no {name} {show(text)}, neither in this file nor in the database{hint}"
            self._problems.append(item.problem(problem, name))
            bad.add(name)


def _instance(item: Item) -> Any:
    """Return the entry as an unsaved object, without its references."""
    return item.section.model(
        **{
            name: model_value(name, value)
            for name, value in item.entry.items()
            if name not in REFERENCES and (value is not None or name not in item.section.required)
        }
    )


def _model_problems(item: Item, instance: Any, bad: Collection[str] = ()) -> Iterator[FileProblem]:
    """Validate the item's object, except for fields in ``bad``; brings it into canonical form.

    Uniqueness is left out, because the database does not hold the file's other entries yet.
    """
    messages: dict[str, list[str]] = {}
    references = set(item.section.fields) & set(REFERENCES)
    for check in (lambda: instance.clean_fields(exclude=references | set(bad)), instance.clean):
        try:
            check()
        except ValidationError as error:
            for name, errors in error.error_dict.items():
                if name not in bad:
                    messages.setdefault(name, [_message(item.section, instance, name, one) for one in errors])
    for name, texts in messages.items():
        yield from (item.problem(text, name) for text in texts)
    audience = [name for name in _AUDIENCE if item.section is POLICIES and name not in bad and item.entry[name]]
    if len(audience) > 1:
        yield _violated(item, "_one_audience")
    if item.section in OF_ONE and not bad and bool(item.entry["user"]) is bool(item.entry["subject"]):
        yield _violated(item, "_one_subject")


def _violated(item: Item, name: str) -> FileProblem:
    """Return the message of the model's constraint whose name ends so."""
    rule = next(rule for rule in item.section.model._meta.constraints if rule.name.endswith(name))
    return item.problem(rule.violation_error_message)


def _message(section: Section, instance: Any, name: str, error: ValidationError) -> str:
    if error.code != "invalid_choice":
        return " ".join(error.messages)
    value = getattr(instance, name)
    meta: Any = section.model._meta
    choices = [str(key) for key, _label in meta.get_field(name).flatchoices if key]
    near = get_close_matches(str(value)[:40].lower(), choices, n=1)
    return f"{show(value)} must be one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")


def _named_users(entries: Entries) -> set[str]:
    found = set()
    for section in (POLICIES, *OF_ONE):
        user = section.getter("user")
        found |= {user(item.values) for item in entries.items[section.name]}
        found |= {user(item.values) for item, _bad in entries.bad if item.section is section}
    return found - {None}


def _find_users(names: set[str], using: str | None) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the primary keys of users by login name, and names that mean another login name or several users.

    One query per 500 names, and one for each name that only the manager's ``get_by_natural_key`` finds.
    """
    model = get_user_model()
    keys: dict[str, Any] = {}
    others: dict[str, list[str]] = {}
    valid = [name for name in sorted(names) if _is_valid(model._meta.get_field(model.USERNAME_FIELD), name)]
    names.clear()  # frees the memory of 100,000 names
    for batch in in_batches(valid):
        users = model._base_manager.using(using).filter(**{f"{model.USERNAME_FIELD}__in": batch})
        interned = {name: name for name in batch}
        for login, pk in users.values_list(model.USERNAME_FIELD, "pk"):
            name = interned.get(str(login), str(login))
            if name in keys:
                others[name] = [name, name]
            keys[name] = pk
    find: Any = getattr(model._default_manager.db_manager(using), "get_by_natural_key", None)
    for name in valid:
        if find and name not in keys:
            try:
                user = find(name)  # a manager may ignore case, for one
            except (ObjectDoesNotExist, MultipleObjectsReturned):
                continue
            others[name] = [str(user.get_username())]
            keys[others[name][0]] = user.pk
    return keys, others


def _is_valid(field: Any, text: str) -> bool:
    try:
        field.to_python(text)
    except ValidationError:
        return False
    return True


def _duplicates(section: Section, groups: Groups) -> Iterator[FileProblem]:
    """Yield problems of entries with one identity and no dates."""
    if section is ASSIGNMENTS:
        return
    shared = (group for group in groups.values() if isinstance(group, list))
    for items in (items for group in shared for items in by_identity(section, group)):
        dates = ("starts_at", "ends_at") if section is POLICIES else ()
        undated = [item for item in items if not any(item.entry.get(name) for name in dates)]
        for item in undated[1:]:
            if section is POLICIES:
                yield item.problem(
                    f"line {undated[0].line} has a policy of the same audience, endpoint and counted_per, and "
                    "neither has dates: merge them, or give one dates"
                )
            else:
                yield item.problem(f"is already used at line {undated[0].line}", section.identity[0])


def _name_conflicts(items: Iterable[Item], unnamed: list[Entry]) -> Iterator[FileProblem]:
    """Yield problems of plans whose name or default is another's; ``unnamed``: stored plans not in the file."""
    holders = {
        (name, entry[name]): f"plan {show(entry['slug'])}, which this file does not name"
        for entry in unnamed
        for name in ("name", "default_for")
    }
    for item in items:
        for name in ("name", "default_for"):
            value = item.entry[name]
            if (name, value) in holders and value:
                yield item.problem(f"{show(value)} is taken by {holders[name, value]}", name)
            holders[name, value] = f"the plan of line {item.line}"
