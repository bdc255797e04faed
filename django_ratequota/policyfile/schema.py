"""What a file holds: which sections, which fields of which models, in which order; and writing it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from operator import itemgetter
from typing import Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import models, transaction
from django.utils import timezone

from ..exceptions import FileProblem
from ..models import Endpoint, Plan, PlanAssignment, RatePolicy
from .document import json_pieces, one_line, write_json, write_yaml, yaml_pieces

VERSION = 1
#: Fields that the database holds as text and the file as lists.
LISTS = ("routes", "methods")
#: Fields that name another object, and what names it.
REFERENCES = {"endpoint": "name", "plan": "slug", "user": "USERNAME_FIELD"}
FORMATS = {"yaml": write_yaml, "json": write_json}
_PIECES = {"yaml": yaml_pieces, "json": json_pieces}
#: Values that are looked for among those to come.
_HELD_ONCE = 5000
_BEGINNING = datetime.min.replace(tzinfo=UTC)

#: An object as the file says it, all fields, defaults too: text, numbers, tuples of text, moments in UTC, None.
Entry = dict[str, Any]
#: The same without the names, in the order of the section's fields.
Values = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One list of the file."""

    name: str
    #: What one entry is called.
    word: str
    model: type[models.Model]
    #: In the order of the file.
    fields: tuple[str, ...]
    #: Always written, and never left out.
    required: tuple[str, ...]
    #: The fields that tell which stored object an entry is about.
    identity: tuple[str, ...]

    def defaults(self) -> Entry:
        """What a field holds that the file leaves out."""
        return {name: self._default(name) for name in self.fields if name not in self.required}

    def _default(self, name: str) -> Any:
        field: Any = self.model._meta.get_field(name)
        return () if name in LISTS else field.get_default()

    def entry(self, instance: models.Model) -> Entry:
        """The object as the file says it."""
        return {name: plain(name, _own(name, getattr(instance, name))) for name in self.fields}

    def named(self, values: Values) -> Entry:
        """The values by their names."""
        return dict(zip(self.fields, values, strict=True))

    def getter(self, *names: str) -> Callable[[Values], Any]:
        """What takes these fields out of values: the one, or a tuple."""
        return itemgetter(*map(self.fields.index, names))

    def who(self) -> Callable[[Values], Any]:
        """What takes ``identity`` out of values."""
        return _who(self.name)


PLANS = Section(
    name="plans",
    word="plan",
    model=Plan,
    fields=("slug", "name", "default_for", "description"),
    required=("slug", "name"),
    identity=("slug",),
)
ENDPOINTS = Section(
    name="endpoints",
    word="endpoint",
    model=Endpoint,
    fields=("name", "routes", "methods", "cost", "charged_statuses", "description"),
    required=("name",),
    identity=("name",),
)
POLICIES = Section(
    name="policies",
    word="policy",
    model=RatePolicy,
    fields=(
        *("endpoint", "plan", "subject", "user", "counted_per", "rates", "algorithm", "mode", "on_error"),
        *("starts_at", "ends_at", "reason"),
    ),
    required=("rates",),
    identity=("endpoint", "plan", "subject", "user", "counted_per", "starts_at", "ends_at"),
)
ASSIGNMENTS = Section(
    name="assignments",
    word="assignment",
    model=PlanAssignment,
    fields=("user", "plan", "starts_at", "ends_at", "reason"),
    required=("user", "plan", "starts_at"),
    # Ending an assignment is a change to it.
    identity=("user", "plan", "starts_at"),
)
#: In the order of the file, which is one in which objects can be created.
SECTIONS = (PLANS, ENDPOINTS, POLICIES, ASSIGNMENTS)


@cache
def _who(name: str) -> Callable[[Values], Any]:
    (section,) = (section for section in SECTIONS if section.name == name)
    return section.getter(*section.identity)


@dataclass(slots=True)
class Stored:
    """An object of the database, and what a file would say of it: 100,000 of these are held at a time."""

    section: Section
    pk: Any
    values: Values

    @property
    def entry(self) -> Entry:
        """What a file would say of it."""
        return self.section.named(self.values)


class Same:
    """Has equal values of many rows or entries held once; of the first thousands, as names and rates repeat."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def of(self, value: Any) -> Any:
        """The first value that is equal to this one."""
        if len(self._values) < _HELD_ONCE:
            return self._values.setdefault(value, value)
        return self._values.get(value, value)


@dataclass(slots=True)
class Item:
    """One entry of a file: 100,000 of these are held at a time."""

    section: Section
    #: Its place in the section's list.
    number: int
    line: int
    #: How many lines below its own each field stands, in the order of the section's fields; None = it does not.
    places: tuple[int | None, ...]
    values: Values

    @property
    def entry(self) -> Entry:
        """The fields by their names."""
        return self.section.named(self.values)

    def problem(self, text: object, name: str = "") -> FileProblem:
        """What is wrong with the entry, or with one of its fields."""
        path = f"{self.section.name}[{self.number}]"
        if not name:
            return FileProblem(self.line, path, one_line(str(text)))
        below = self.places[self.section.fields.index(name)] if name in self.section.fields else None
        return FileProblem(self.line + (below or 0), f"{path}.{name}", one_line(str(text)))


def load(sections: tuple[Section, ...], using: str | None = None, lock: bool = False) -> dict[str, list[Stored]]:
    """What the database holds, by section in the order of the file; one query a section.

    Plans and endpoints are always among it. ``lock`` keeps others from changing them until the transaction ends,
    where the database can, by another query.
    """
    wanted = {section.name: section for section in (*sections, PLANS, ENDPOINTS)}
    rows = {
        # Those that refer to others first: what they refer to can then only be missing if it is being deleted.
        section.name: _rows(section.model, using, lock)
        for section in reversed(SECTIONS)
        if section.name in wanted
    }
    referred = {
        "plan": {pk: slug for pk, slug, *_ in rows["plans"]},
        "endpoint": {pk: name for pk, name, *_ in rows["endpoints"]},
    }
    return {
        section.name: _ordered(section, list(_whole(section, rows[section.name], referred)))
        for section in SECTIONS
        if section.name in wanted
    }


def _rows(model: type[models.Model], using: str | None, lock: bool) -> list[Any]:
    """Primary keys and values of all rows; of plans and endpoints that they refer to, the primary keys."""
    (section,) = (one for one in SECTIONS if one.model is model)
    rows: Any = model._base_manager.using(using).order_by("pk")
    if lock and transaction.get_connection(using).features.has_select_for_update:
        list(rows.select_for_update().values_list("pk", flat=True))
    user = f"user__{get_user_model().USERNAME_FIELD}"
    names = (user if name == "user" else f"{name}_id" if name in REFERENCES else name for name in section.fields)
    same = Same()
    return [(pk, *(same.of(value) for value in values)) for pk, *values in rows.values_list("pk", *names).iterator()]


def _whole(section: Section, rows: list[Any], referred: dict[str, dict[Any, str]]) -> Iterator[Stored]:
    """The rows with the names of what they refer to, but for those that refer to what was deleted meanwhile."""
    named = [referred.get(name) for name in section.fields]
    rows.reverse()
    while rows:  # not held twice
        pk, *held = rows.pop()
        values = [
            plain(name, value) if names is None or value is None else names.get(value)
            for name, names, value in zip(section.fields, named, held, strict=True)
        ]
        if not any(value is None and was is not None for value, was in zip(values, held, strict=True)):
            yield Stored(section, pk, tuple(values))


def _ordered(section: Section, rows: list[Stored]) -> list[Stored]:
    """Sort the rows in the order of the file: by code points, not by a collation, of which every server has another.

    Policies that are equal but for that win by their ids: an import creates them in this order again.
    """
    for name in reversed(_ORDERS[section.name]):
        missing: Any = _BEGINNING if name in ("starts_at", "ends_at") else ""
        if name == "dated":
            starts, ends = section.getter("starts_at"), section.getter("ends_at")
            rows.sort(key=lambda row: starts(row.values) is not None or ends(row.values) is not None)
        elif name == "open":
            ends = section.getter("ends_at")
            rows.sort(key=lambda row: ends(row.values) is None)
        else:
            get = section.getter(name)
            rows.sort(key=lambda row: get(row.values) or missing)
    return rows


#: The fields that the file is ordered by, and of policies whether they have dates, of assignments whether they end.
_ORDERS = {
    "plans": ("slug",),
    "endpoints": ("name",),
    "policies": ("endpoint", "user", "subject", "plan", "counted_per", "starts_at", "dated"),
    "assignments": ("user", "plan", "starts_at", "open", "ends_at", "reason"),
}


def _own(name: str, value: Any) -> Any:
    """What names the object that a field refers to; the values of other fields as they are."""
    if value is None or name not in REFERENCES:
        return value
    return value.get_username() if name == "user" else getattr(value, REFERENCES[name])


def plain(name: str, value: Any) -> Any:
    """A value of the model's field as the file says it; of a reference, the name."""
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


def held(name: str, value: Any) -> Any:
    """A value of the file as the model's field holds it; references excepted."""
    if name == "routes":
        return "\n".join(value)
    if name == "methods":
        return " ".join(value)
    if isinstance(value, datetime) and not settings.USE_TZ:
        return timezone.make_naive(value, timezone.get_default_timezone())
    return value


def export(form: str = "yaml", *, assignments: bool = False) -> str:
    """What the database says, as the text of a file; ``form`` = yaml or json.

    The same content gives the same bytes. Fields at their defaults are left out.
    """
    return "".join(pieces(form, assignments=assignments))


def pieces(form: str = "yaml", *, assignments: bool = False) -> Iterator[str]:
    """The text of ``export`` in pieces, all of the database as of before the first."""
    sections = SECTIONS if assignments else SECTIONS[:-1]
    stored = load(sections)
    document = ((section.name, _entries(section, stored.pop(section.name))) for section in sections)
    return _PIECES[form](_versioned(document))


def _versioned(sections: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    yield "version", VERSION
    yield from sections


def _entries(section: Section, rows: list[Stored]) -> Iterator[Entry]:
    defaults = section.defaults()
    for row in rows:
        yield {name: value for name, value in row.entry.items() if name not in defaults or value != defaults[name]}
