"""Read the objects of the models from the database in the order of a file, and write that file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from django.db import transaction

from .document import json_chunks, yaml_chunks
from .schema import POLICIES, SECTIONS, VERSION, Item, Items, Section, Values, file_value, is_log_only, name_lookup

FORMATS = {"yaml": yaml_chunks, "json": json_chunks}


def export_chunks(form: str = "yaml", *, assignments: bool = False) -> Iterator[str]:
    """Yield the text of the file in chunks; ``form`` = yaml or json. The database is read before the first.

    The same content gives the same bytes. Fields at their defaults are left out.
    """
    document: dict[str, Any] = {"version": VERSION}
    for section, rows in load(SECTIONS if assignments else SECTIONS[:-1]).items():
        document[section.name] = [section.without_defaults(row.values) for row in rows]
    return FORMATS[form](document)


def load(sections: Collection[Section], using: str | None = None, lock: bool = False) -> Items:
    """Return the stored objects of sections in the order of the file; one query per section.

    ``lock`` locks the rows until the transaction ends, by another query, where the database can.
    """
    return {
        section: sorted(_rows(section, using, lock), key=lambda row: _place(section, row.values))
        for section in SECTIONS
        if section in sections
    }


def _rows(section: Section, using: str | None, lock: bool) -> list[Item]:
    rows: Any = section.model._base_manager.using(using).order_by("pk")
    if lock and transaction.get_connection(using).features.has_select_for_update:
        list(rows.select_for_update().values_list("pk", flat=True))
    lookups = [name_lookup(name) if name in section.references else name for name in section.fields]
    return [
        Item(
            section=section,
            pk=pk,
            values=dict(zip(section.fields, map(file_value, section.fields, values), strict=True)),
        )
        for pk, *values in rows.values_list("pk", *lookups).iterator()
    ]


def _place(section: Section, values: Values) -> list[tuple[bool, Any]]:
    """Return an object's place in the file. Text is compared by code points, because collations differ.

    Policies and assignments that are equals in precedence share a place, so they keep the order of their keys, by
    which the last one wins. An import creates them in that order.
    """
    if "dated" in section.order:
        dated = values["ends_at"] is not None or (section is POLICIES and values["starts_at"] is not None)
        listed = values.get("subject_list") is not None
        values = {**values, "dated": dated, "listed": listed, "log_only": is_log_only(values)}
    return [(values[name] is not None, values[name]) for name in section.order or section.identity]
