"""What a file holds: which sections, which fields of which models, in which order; and writing it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.db import models, transaction
from django.utils import timezone

from ..models import Endpoint, Plan, PlanAssignment, RatePolicy
from .text import write_json, write_yaml

VERSION = 1
#: Fields that the database holds as text and the file as lists.
LISTS = ("routes", "methods")
#: Fields that name another object, and what names it.
REFERENCES = {"endpoint": "name", "plan": "slug", "user": "USERNAME_FIELD"}
FORMATS = {"yaml": write_yaml, "json": write_json}
_BEGINNING = datetime.min.replace(tzinfo=UTC)

#: An object as the file says it, all fields, defaults too: text, numbers, tuples of text, moments in UTC, None.
Entry = dict[str, Any]


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
        return {name: _plain(name, getattr(instance, name)) for name in self.fields}

    def who(self, entry: Entry) -> tuple[Any, ...]:
        """The values of ``identity``."""
        return tuple(entry[name] for name in self.identity)


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


@dataclass(slots=True)
class Stored:
    """An object of the database, and what a file would say of it."""

    instance: Any
    entry: Entry


def load(sections: tuple[Section, ...], using: str | None = None, lock: bool = False) -> dict[str, list[Stored]]:
    """What the database holds, by section in the order of the file; one query a section.

    Plans and endpoints are always among it. ``lock`` keeps others from changing them until the transaction ends,
    where the database can.
    """
    wanted = {section.name: section for section in (*sections, PLANS, ENDPOINTS)}
    rows = {
        # Those that refer to others first: what they refer to can then only be missing if it is being deleted.
        section.name: _rows(section.model, using, lock)
        for section in reversed(SECTIONS)
        if section.name in wanted
    }
    referred = {
        "plan": {row.pk: row for row in rows["plans"]},
        "endpoint": {row.pk: row for row in rows["endpoints"]},
    }
    return {
        section.name: sorted(
            (Stored(row, section.entry(row)) for row in rows[section.name] if _whole(section, row, referred)),
            key=_ORDERS[section.name],
        )
        for section in SECTIONS
        if section.name in wanted
    }


def _rows(model: type[models.Model], using: str | None, lock: bool) -> list[Any]:
    rows = model._base_manager.using(using).order_by("pk")
    if any(field.name == "user" for field in model._meta.concrete_fields):
        rows = rows.select_related("user")
    connection = transaction.get_connection(using)
    if lock and connection.features.has_select_for_update:
        rows = rows.select_for_update(of=("self",) if connection.features.has_select_for_update_of else ())
    return list(rows)


def _whole(section: Section, row: Any, referred: dict[str, dict[Any, Any]]) -> bool:
    """Gives the row the objects it refers to, those that were read; False if one was deleted meanwhile."""
    for name in referred.keys() & set(section.fields):
        key = getattr(row, f"{name}_id")
        if key is not None and key not in referred[name]:
            return False
        setattr(row, name, referred[name].get(key))
    return True


def _policy_order(stored: Stored) -> tuple[Any, ...]:
    entry = stored.entry
    names = tuple(entry[name] or "" for name in ("endpoint", "user", "subject", "plan", "counted_per"))
    dated = entry["starts_at"] is not None or entry["ends_at"] is not None
    # Policies that are equal so far win by their ids: an import creates them in this order again.
    return (*names, entry["starts_at"] or _BEGINNING, dated, stored.instance.pk)


def _assignment_order(stored: Stored) -> tuple[Any, ...]:
    entry = stored.entry
    ends = (entry["ends_at"] is None, entry["ends_at"] or _BEGINNING)
    return (entry["user"], entry["plan"], entry["starts_at"], *ends, entry["reason"])


# By code points, not by the database's collation, of which every server has another.
_ORDERS = {
    "plans": lambda stored: stored.entry["slug"],
    "endpoints": lambda stored: stored.entry["name"],
    "policies": _policy_order,
    "assignments": _assignment_order,
}


def _plain(name: str, value: Any) -> Any:
    if name == "routes":
        return tuple(line.strip() for line in value.splitlines() if line.strip())
    if name == "methods":
        return tuple(value.replace(",", " ").split())
    if value is None:
        return None
    if name == "user":
        return str(value.get_username())
    if name in REFERENCES:
        return getattr(value, REFERENCES[name])
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
    sections = SECTIONS if assignments else SECTIONS[:-1]
    stored = load(sections)
    document: dict[str, Any] = {"version": VERSION}
    for section in sections:
        defaults = section.defaults()
        document[section.name] = [
            {name: value for name, value in one.entry.items() if name not in defaults or value != defaults[name]}
            for one in stored[section.name]
        ]
    return FORMATS[form](document)
