"""Read the objects of the models from the database in the order of a file, and write that file."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any

from django.db import transaction

from .document import FORMATS
from .schema import SECTIONS, VERSION, Item, Items, Section, file_value, name_lookup


def export_chunks(form: str = "yaml", *, assignments: bool = False) -> Iterator[str]:
    """Yield the text of the file in chunks; ``form`` = yaml or json. The database is read before the first.

    The same content gives the same bytes. Fields at their defaults are left out.
    """
    document: dict[str, Any] = {"version": VERSION}
    for section, rows in load(SECTIONS if assignments else SECTIONS[:-1]).items():
        document[section.name] = [row.without_defaults() for row in rows]
    return FORMATS[form](document)


def load(sections: Collection[Section], using: str | None = None, lock: bool = False) -> Items:
    """Return the stored objects of sections in the order of the file; one query per section.

    ``lock`` locks the rows until the transaction ends, by another query, where the database can.
    """
    found: Items = {}
    for section in filter(sections.__contains__, SECTIONS):
        rows: Any = section.model._base_manager.using(using).order_by("pk")
        if lock and transaction.get_connection(using).features.has_select_for_update:
            list(rows.select_for_update().values_list("pk", flat=True))
        lookups = [name_lookup(name) if name in section.references else name for name in section.fields]
        items = []
        for pk, *row in rows.values_list("pk", *lookups).iterator():
            values = {name: file_value(name, value) for name, value in zip(section.fields, row, strict=True)}
            items.append(Item(section, values, pk))
        found[section] = sorted(items, key=attrgetter("order"))
    return found
