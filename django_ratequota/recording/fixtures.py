"""Records what fixtures load (``loaddata``), even if a fixture brings PolicyChange rows with ids of its own."""

from __future__ import annotations

from typing import Any

from django.core.management.color import no_style
from django.db import IntegrityError, transaction
from django.db.models import F, Max

from .publication import loaded_ids, publish_on_commit

_BATCH = 500


def record_loaded(change: Any, using: str) -> None:
    """Write a PolicyChange while a fixture is loaded, and publish it on commit."""
    reset = _reset_sequence(type(change), using)
    with transaction.atomic(using=using, savepoint=False):
        try:
            with transaction.atomic(using=using, savepoint=bool(reset)):
                change.save(using=using, force_insert=True)
        except IntegrityError:
            if not reset:
                raise
            # The fixture's rows have taken the next ids of the sequence.
            _execute(reset, using)
            change.save(using=using, force_insert=True)
        publish_on_commit(using)
        loaded_ids(using).add(change.pk)


def move_aside(model: Any, pk: Any, using: str) -> None:
    """Give the rows that ``record_loaded`` wrote new ids if one of them has the id ``pk`` that the fixture brings.

    The new ids are above all others, so that other processes read the rows as new. Each time the ids double, so this
    happens a few times at most.
    """
    ids = loaded_ids(using)
    if pk not in ids:
        return
    rows = model._base_manager.using(using)
    top = rows.aggregate(top=Max("pk"))["top"]
    recorded = sorted(ids)
    for begin in range(0, len(recorded), _BATCH):
        rows.filter(pk__in=recorded[begin : begin + _BATCH]).update(id=F("id") + top)
    ids.clear()
    ids.update(recorded_id + top for recorded_id in recorded)
    _execute(_reset_sequence(model, using), using)


def _reset_sequence(model: Any, using: str) -> list[str]:
    """Return SQL that sets the next id above all rows; none if the database does that by itself."""
    return list(transaction.get_connection(using).ops.sequence_reset_sql(no_style(), [model]))


def _execute(statements: list[str], using: str) -> None:
    with transaction.get_connection(using).cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
