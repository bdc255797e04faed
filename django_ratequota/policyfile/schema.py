"""The sections of a file, made from the models: their fields, and the values of these in the file and the models."""

from __future__ import annotations

from collections.abc import Iterator
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
from .document import isoformat_utc, problem

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

    @cached_property
    def audience(self) -> list[str]:
        """The fields of which an entry has only one."""
        return [name for name in ("user", "subject", "subject_list", "plan") if name in self.defaults]

    def without_defaults(self, values: Values) -> Values:
        """Return the values that an entry has to name."""
        return {name: value for name, value in values.items() if (name, value) not in self.defaults.items()}

    def identity_of(self, values: Values) -> tuple[Any, ...]:
        """Return the values of the ``identity`` fields."""
        return tuple(values[name] for name in self.identity)

    def title(self, values: Values) -> str:
        """Return a name for the object in messages."""
        listed = values.get("subject_list") and f"list {values['subject_list']}"
        who = values.get("subject") or (values.get("user") and f"user {values['user']}")
        if self is POLICIES:
            text = f"policy {who or listed or values['plan'] or 'everyone'} × {values['endpoint'] or 'all endpoints'}"
            text += "" if values["counted_per"] == "caller" else f" per {values['counted_per']}"
        elif self is ASSIGNMENTS:
            text = f"assignment {who} × {values['plan']}"
        elif self is MEMBERS:
            text = f"member {who} of {listed}"
        else:
            text = f"{self.singular} {values[self.identity[0]]}"
        for word, name in (("from", "starts_at"), ("until", "ends_at")):
            if name in self.identity and values[name] is not None:
                text += f" {word} {isoformat_utc(values[name])}"
        return one_line(text)

    def unique_values(self, values: Values) -> Iterator[tuple[str, Any]]:
        """Yield what only one object of the section may have, each with the field that messages name."""
        if self is POLICIES:
            if values["starts_at"] is None and values["ends_at"] is None:
                yield "", (*self.identity_of(values), is_log_only(values))
        elif self is not ASSIGNMENTS:
            yield self.identity[0], self.identity_of(values)
        for name in ("name", "default_for") if self is PLANS else ():
            if values[name]:
                yield name, values[name]


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


@dataclass(slots=True, kw_only=True)
class Item:
    """An entry of a file, or an object of the database."""

    section: Section
    values: Values
    #: Primary key of an object of the database.
    pk: Any = None
    #: Such as ``policies[3]``.
    path: str = ""
    line: int = 0
    #: The lines of the fields that are in the file.
    lines: dict[str, int] = field(default_factory=dict)
    #: Fields that have problems.
    bad: set[str] = field(default_factory=set)

    def problem(self, text: object, name: str = "") -> FileProblem:
        """Return a problem at the entry's line, or at that of a field."""
        return problem(self.lines.get(name, self.line), f"{self.path}.{name}" if name else self.path, text)


#: Entries or objects by section.
Items = dict[Section, list[Item]]


def by_identity(section: Section, items: Items) -> dict[tuple[Any, ...], list[Item]]:
    """Return the items of a section by identity, in their order."""
    found: dict[tuple[Any, ...], list[Item]] = {}
    for item in items.get(section, ()):
        found.setdefault(section.identity_of(item.values), []).append(item)
    return found


def is_log_only(values: Values) -> bool:
    """Whether it is a policy that is judged next to the enforced one of the same identity."""
    return bool(values.get("mode") == "log")


def name_lookup(name: str) -> str:
    """Return the lookup of the name by which the file calls the object that a field refers to."""
    key = get_user_model().USERNAME_FIELD if name == "user" else REFERRED[name].identity[0]
    return f"{name}__{key}"


def file_value(name: str, value: Any) -> Any:
    """Convert a model field's value to the file's; references are names already."""
    if name in LIST_FIELDS:
        words = value.split("\n") if name == "routes" else value.replace(",", " ").split()
        return tuple(word.strip() for word in words if word.strip())
    if name == "user" and value is not None:
        return str(value)
    if isinstance(value, datetime):
        aware = value if timezone.is_aware(value) else timezone.make_aware(value, timezone.get_default_timezone())
        return aware.astimezone(UTC)
    return value


def model_value(name: str, value: Any) -> Any:
    """Convert a file's value to the model field's; not for references."""
    if name in LIST_FIELDS:
        return LIST_FIELDS[name].join(value)
    if isinstance(value, datetime) and not settings.USE_TZ:
        return timezone.make_naive(value, timezone.get_default_timezone())
    return value
