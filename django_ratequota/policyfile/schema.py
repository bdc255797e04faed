"""The sections of a file, made from the models: their fields, and the values of these in the file and the models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import models
from django.utils import timezone

from ..exceptions import FileProblem
from ..models import Endpoint, ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from ..utils.escaping import one_line
from .document import isoformat_utc

VERSION = 1
#: Text fields of the models that are lists in the file: what stands between the words.
LIST_FIELDS = {"routes": "\n", "methods": " "}

#: An object as the file represents it, by field and with defaults: text, numbers, tuples of text, times in UTC, None.
Values = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Section:
    """One list of the file: the objects of one model."""

    name: str
    #: What messages call one entry, and the field of others that refers to one.
    singular: str
    model: type[models.Model]
    _: KW_ONLY
    #: Fields that identify the stored object of an entry; the first one begins the entry.
    identity: tuple[str, ...]
    #: What entries are sorted by; () = their identity.
    order: tuple[str, ...] = ()

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The editable fields of the model by name, in the order of the file."""
        found = [one for one in self.model._meta.concrete_fields if one.editable and not one.primary_key]
        found.sort(key=lambda one: (one.name != self.identity[0], one.name == "description"))
        return {one.name: one for one in found}

    @cached_property
    def references(self) -> list[str]:
        """The fields that refer to another object, by its name."""
        return [name for name, one in self.fields.items() if one.is_relation]

    @cached_property
    def defaults(self) -> Values:
        """The values of fields that an entry may leave out; a default that is computed is none."""
        return {
            name: file_value(name, one.get_default())
            for name, one in self.fields.items()
            if one.blank or (one.has_default() and not callable(one.default))
        }


PLANS = Section("plans", "plan", Plan, identity=("slug",), order=("position", "slug"))
ENDPOINTS = Section("endpoints", "endpoint", Endpoint, identity=("name",))
LISTS = Section("subject_lists", "subject_list", SubjectList, identity=("name",))
MEMBERS = Section("members", "member", ListMember, identity=("subject_list", "user", "subject"))
POLICIES = Section(
    "policies",
    "policy",
    RatePolicy,
    identity=("endpoint", "user", "subject", "subject_list", "plan", "counted_per", "starts_at", "ends_at"),
    # All lists are equals.
    order=("endpoint", "user", "subject", "listed", "plan", "counted_per", "starts_at", "dated", "log_only"),
)
ASSIGNMENTS = Section(
    "assignments",
    "assignment",
    PlanAssignment,
    # Ending an assignment is a change to it.
    identity=("user", "subject", "plan", "starts_at"),
    order=("user", "subject", "starts_at", "dated"),
)
#: In the order of the file, which is one in which objects can be created.
SECTIONS = (PLANS, ENDPOINTS, LISTS, MEMBERS, POLICIES, ASSIGNMENTS)
#: Those that others refer to, by the field that does.
REFERRED = {section.singular: section for section in (PLANS, ENDPOINTS, LISTS)}


@dataclass(slots=True, eq=False)
class Item:
    """An object of the database, an entry of a file, or the file itself."""

    #: None for the file itself.
    section: Any
    values: Values
    #: Primary key of an object of the database.
    pk: Any = None
    _: KW_ONLY
    #: The place in the file, such as ``policies[3]``; "" for the file itself.
    path: str = ""
    line: int = 1
    #: The lines of its fields.
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[FileProblem] = field(default_factory=list)
    #: The fields that have problems.
    bad: set[str] = field(default_factory=set)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The values of the section's ``identity`` fields."""
        return tuple([self.values[name] for name in self.section.identity])

    @property
    def name(self) -> Any:
        """What others refer to it by."""
        return self.values[self.section.identity[0]]

    @property
    def dated(self) -> bool:
        """Whether it outranks an open one of the same kind."""
        ends = self.values.get("ends_at") is not None
        return ends or (self.section is POLICIES and self.values["starts_at"] is not None)

    @property
    def log_only(self) -> bool:
        """Whether it is a policy that is judged next to the enforced one of the same identity."""
        return bool(self.values.get("mode") == "log")

    @property
    def order(self) -> list[tuple[bool, Any]]:
        """Its place in the file. Text is compared by code points, because collations differ.

        Policies and assignments that are equals in precedence share a place, so they keep the order of their keys, by
        which the last one wins. An import creates them in that order.
        """
        order, values = self.section.order or self.section.identity, self.values
        if "dated" in order:
            listed = values.get("subject_list") is not None
            values = {**values, "dated": self.dated, "listed": listed, "log_only": self.log_only}
        return [(values[name] is not None, values[name]) for name in order]

    @property
    def title(self) -> str:
        """Its name in messages."""
        section, values = self.section, self.values
        kinds = (("subject", ""), ("user", "user "), ("subject_list", "list "), ("plan", ""))
        words = [f"{kind}{values[name]}" for name, kind in kinds if values.get(name)]
        if section is POLICIES:
            words = [*(words or ["everyone"]), values["endpoint"] or "all endpoints"]
        text = (" of " if section is MEMBERS else " × ").join(words) or self.name
        if values.get("counted_per", "caller") != "caller":
            text += f" per {values['counted_per']}"
        for word, name in (("from", "starts_at"), ("until", "ends_at")):
            if name in section.identity and values[name] is not None:
                text += f" {word} {isoformat_utc(values[name])}"
        return one_line(f"{section.singular} {text}")

    def without_defaults(self) -> Values:
        """Return the values that an entry has to name."""
        defaults = self.section.defaults.items()
        return {name: value for name, value in self.values.items() if (name, value) not in defaults}

    def unique_values(self) -> Iterator[tuple[str, Any]]:
        """Yield what only one object of the section may have, each with the field that messages name."""
        of_policies = self.section is POLICIES
        if self.section is not ASSIGNMENTS and not (of_policies and self.dated):
            yield "" if of_policies else self.section.identity[0], (*self.identity, self.log_only)
        for name in ("name", "default_for") if self.section is PLANS else ():
            if self.values[name]:
                yield name, self.values[name]

    def model_values(self, names: Iterable[str]) -> Values:
        """Return the values of these fields as the model holds them, without references."""
        own = (name for name in names if name not in self.section.references)
        return {name: model_value(name, self.values[name]) for name in own}

    def refuse(self, text: object, name: str = "", line: int = 0) -> None:
        """Add a problem of a field, or of the item itself; ``line`` 0 = the field's line."""
        path = ".".join(filter(None, (self.path, name[:40])))
        at = line or self.lines.get(name, self.line)
        self.problems.append(FileProblem(at, one_line(path), one_line(str(text))))
        self.bad.add(name)


#: Entries or objects by section.
Items = dict[Section, list[Item]]


def by_identity(items: Iterable[Item]) -> dict[tuple[Any, ...], list[Item]]:
    """Return the items of a section by identity, in their order."""
    found: dict[tuple[Any, ...], list[Item]] = {}
    for item in items:
        found.setdefault(item.identity, []).append(item)
    return found


def name_lookup(name: str) -> str:
    """Return the lookup of the name by which the file calls the object that a field refers to."""
    key = get_user_model().USERNAME_FIELD if name == "user" else REFERRED[name].identity[0]
    return f"{name}__{key}"


def file_value(name: str, value: Any) -> Any:
    """Convert a model field's value to the file's; references are names already."""
    if name in LIST_FIELDS:
        return tuple(value.split())
    if name == "user" and value is not None:
        return str(value)
    if isinstance(value, datetime):
        return (value if timezone.is_aware(value) else timezone.make_aware(value)).astimezone(UTC)
    return value


def model_value(name: str, value: Any) -> Any:
    """Convert a file's value to the model field's; not for references."""
    if name in LIST_FIELDS:
        return LIST_FIELDS[name].join(value)
    if isinstance(value, datetime) and not settings.USE_TZ:
        return timezone.make_naive(value)
    return value
