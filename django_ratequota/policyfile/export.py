"""Read plans, endpoints, policies and assignments from the database in the order of a file, and write that file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from django.contrib.auth import get_user_model
from django.db import transaction

from .schema import REFERENCES, REFERRED, SECTIONS, VERSION, Entry, Interner, Section, Stored, file_value
from .writer import json_chunks, yaml_chunks

FORMATS = {"yaml": yaml_chunks, "json": json_chunks}


def export_chunks(form: str = "yaml", *, assignments: bool = False) -> Iterator[str]:
    """Yield the text of the file in chunks; ``form`` = yaml or json. The database is read before the first.

    The same content gives the same bytes. Fields at their defaults are left out.
    """
    sections = SECTIONS if assignments else SECTIONS[:-1]
    stored = load(sections)
    lists = ((section.name, _entries(section, stored.pop(section.name))) for section in sections)
    return FORMATS[form](chain([("version", VERSION)], lists))


def _entries(section: Section, rows: list[Stored]) -> Iterator[Entry]:
    defaults = section.defaults()
    for row in rows:
        yield {name: value for name, value in row.entry.items() if name not in defaults or value != defaults[name]}


def load(sections: tuple[Section, ...], using: str | None = None, lock: bool = False) -> dict[str, list[Stored]]:
    """Return the stored objects by section, in the order of the file; one query per section.

    Plans, endpoints and lists are always included. ``lock`` locks the rows until the transaction ends, by another
    query, where the database can.
    """
    wanted = {section.name: section for section in (*sections, *REFERRED)}
    rows = {
        # Referring rows first: what they refer to is then only missing if it was deleted meanwhile.
        section.name: _rows(section, using, lock)
        for section in reversed(SECTIONS)
        if section.name in wanted
    }
    referred = {section.singular: {pk: name for pk, name, *_ in rows[section.name]} for section in REFERRED}
    return {
        section.name: _ordered(section, list(_named_rows(section, rows[section.name], referred)))
        for section in SECTIONS
        if section.name in wanted
    }


def _rows(section: Section, using: str | None, lock: bool) -> list[Any]:
    """Return (primary key, values) of all rows; what they refer to as primary keys."""
    rows: Any = section.model._base_manager.using(using).order_by("pk")
    if lock and transaction.get_connection(using).features.has_select_for_update:
        list(rows.select_for_update().values_list("pk", flat=True))
    user = f"user__{get_user_model().USERNAME_FIELD}"
    names = (user if name == "user" else f"{name}_id" if name in REFERENCES else name for name in section.fields)
    intern = Interner().intern
    return [(pk, *map(intern, values)) for pk, *values in rows.values_list("pk", *names).iterator()]


def _named_rows(section: Section, rows: list[Any], referred: dict[str, dict[Any, str]]) -> Iterator[Stored]:
    """Replace primary keys of references by names; leave out rows that refer to one that was deleted meanwhile."""
    names_by_field = [referred.get(name) for name in section.fields]
    rows.reverse()
    while rows:  # popped, so that no row is in memory twice
        pk, *stored = rows.pop()
        values = [
            file_value(name, value) if names is None or value is None else names.get(value)
            for name, names, value in zip(section.fields, names_by_field, stored, strict=True)
        ]
        if not any(value is None and old is not None for value, old in zip(values, stored, strict=True)):
            yield Stored(section, tuple(values), pk)


def _ordered(section: Section, rows: list[Stored]) -> list[Stored]:
    """Sort the rows in the order of the file: by code points, because collations differ between servers.

    Equal rows keep the order of their ids, by which the last policy wins: an import creates them in that order.
    """
    for name in reversed(_ORDERS[section.name]):
        missing: Any = _MISSING.get(name, "")
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


#: What stands for an empty field in the order; "" for the others.
_MISSING = {
    **dict.fromkeys(("starts_at", "ends_at"), datetime.min.replace(tzinfo=UTC)),
    **dict.fromkeys(("position", "anchor"), 0),
}
#: What the file is ordered by: fields, whether a policy has dates, whether an assignment is open.
_ORDERS = {
    "plans": ("position", "slug"),
    "endpoints": ("name",),
    "subject_lists": ("name",),
    "members": ("subject_list", "user", "subject"),
    "policies": ("endpoint", "user", "subject", "subject_list", "plan", "counted_per", "starts_at", "dated"),
    "assignments": ("user", "subject", "plan", "starts_at", "open", "ends_at", "anchor", "reason"),
}
