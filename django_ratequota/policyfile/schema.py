"""The sections of a file, the fields of each in their order, and their values in the file and in the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from operator import itemgetter
from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone

from ..exceptions import FileProblem
from ..models import Endpoint, ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from .document import one_line

VERSION = 1
#: Fields that are text in the database and lists in the file.
LISTS = ("routes", "methods")
#: Fields that refer to another object.
REFERENCES = ("endpoint", "plan", "user", "subject_list")
#: Different values that an ``Interner`` keeps.
_MOST_INTERNED = 5000

#: An object as the file represents it, defaults included: text, numbers, tuples of text, times in UTC, None.
Entry = dict[str, Any]
#: The same without the field names, in the order of the section's fields.
Values = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One list of the file."""

    name: str
    #: What messages call one entry.
    singular: str
    model: type[models.Model]
    #: In the order of the file.
    fields: tuple[str, ...]
    #: Fields that every entry must have.
    required: tuple[str, ...]
    #: Fields that identify the stored object of an entry.
    identity: tuple[str, ...]

    def defaults(self) -> Entry:
        """Return the values of fields that the file leaves out."""
        meta: Any = self.model._meta
        optional = (name for name in self.fields if name not in self.required)
        return {name: () if name in LISTS else meta.get_field(name).get_default() for name in optional}

    def getter(self, *names: str) -> Callable[[Values], Any]:
        """Return a function that takes these fields out of values: one value, or a tuple."""
        return itemgetter(*map(self.fields.index, names))

    def identity_of(self, values: Values) -> Any:
        """Return the values of the ``identity`` fields."""
        return _identity_getter(self.name)(values)


PLANS = Section(
    name="plans",
    singular="plan",
    model=Plan,
    fields=("slug", "name", "position", "default_for", "description"),
    required=("slug", "name"),
    identity=("slug",),
)
ENDPOINTS = Section(
    name="endpoints",
    singular="endpoint",
    model=Endpoint,
    fields=("name", "routes", "methods", "cost", "charged_statuses", "exempt", "description"),
    required=("name",),
    identity=("name",),
)
SUBJECT_LISTS = Section(
    name="subject_lists",
    singular="subject_list",
    model=SubjectList,
    fields=("name", "description"),
    required=("name",),
    identity=("name",),
)
MEMBERS = Section(
    name="members",
    singular="member",
    model=ListMember,
    fields=("subject_list", "user", "subject", "starts_at", "ends_at", "reason"),
    required=("subject_list",),
    identity=("subject_list", "user", "subject"),
)
POLICIES = Section(
    name="policies",
    singular="policy",
    model=RatePolicy,
    fields=(
        *("endpoint", "plan", "subject_list", "subject", "user", "counted_per", "rates", "algorithm", "mode"),
        *("on_error", "durable", "starts_at", "ends_at", "reason"),
    ),
    required=("rates",),
    identity=("endpoint", "plan", "subject_list", "subject", "user", "counted_per", "starts_at", "ends_at"),
)
ASSIGNMENTS = Section(
    name="assignments",
    singular="assignment",
    model=PlanAssignment,
    fields=("user", "subject", "plan", "starts_at", "ends_at", "anchor", "reason"),
    required=("plan", "starts_at"),
    # Ending an assignment is a change to it.
    identity=("user", "subject", "plan", "starts_at"),
)
#: In the order of the file, which is one in which objects can be created.
SECTIONS = (PLANS, ENDPOINTS, SUBJECT_LISTS, MEMBERS, POLICIES, ASSIGNMENTS)
#: Sections whose entries each have a user or a subject.
OF_ONE = (MEMBERS, ASSIGNMENTS)
#: Those that others refer to, by fields named like their ``singular``.
REFERRED = (PLANS, ENDPOINTS, SUBJECT_LISTS)


@cache
def _identity_getter(name: str) -> Callable[[Values], Any]:
    (section,) = (section for section in SECTIONS if section.name == name)
    return section.getter(*section.identity)


@dataclass(slots=True)
class _Values:
    """An object as a file represents it: up to 100,000 of these are in memory."""

    section: Section
    values: Values

    @property
    def entry(self) -> Entry:
        """The values by field name."""
        return dict(zip(self.section.fields, self.values, strict=True))


@dataclass(slots=True)
class Stored(_Values):
    """An object of the database."""

    pk: Any


class Interner:
    """Keeps one copy of equal values, as names and rates repeat in many rows; of the first thousands only."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def intern(self, value: Any) -> Any:
        """Return the first value that was equal to this one."""
        if isinstance(value, bool):  # because True equals 1
            return value
        if len(self._values) < _MOST_INTERNED:
            return self._values.setdefault(value, value)
        return self._values.get(value, value)


@dataclass(slots=True)
class Item(_Values):
    """One entry of a file."""

    #: Position in the section's list, from 0.
    number: int
    line: int
    #: The line of each field, counted from ``line``, in the order of the section's fields; None = not in the file.
    offsets: tuple[int | None, ...]

    def problem(self, text: object, name: str = "") -> FileProblem:
        """Return a problem at the entry's line, or at that of a field."""
        path = f"{self.section.name}[{self.number}]"
        if not name:
            return FileProblem(self.line, path, one_line(str(text)))
        offset = self.offsets[self.section.fields.index(name)] if name in self.section.fields else None
        return FileProblem(self.line + (offset or 0), f"{path}.{name}", one_line(str(text)))


def file_value(name: str, value: Any) -> Any:
    """Convert a model field's value to the file's; references are names already."""
    if name == "routes":
        return tuple(line.strip() for line in value.splitlines() if line.strip())
    if name == "methods":
        return tuple(value.replace(",", " ").split())
    if value is None:
        return None
    if name == "user":
        return str(value)
    if isinstance(value, datetime):
        aware = value if timezone.is_aware(value) else timezone.make_aware(value, timezone.get_default_timezone())
        return aware.astimezone(UTC)
    return value


def model_value(name: str, value: Any) -> Any:
    """Convert a file's value to the model field's; not for references."""
    if name == "routes":
        return "\n".join(value)
    if name == "methods":
        return " ".join(value)
    if isinstance(value, datetime) and not settings.USE_TZ:
        return timezone.make_naive(value, timezone.get_default_timezone())
    return value
