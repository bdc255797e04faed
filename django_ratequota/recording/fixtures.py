"""Records what fixtures load (``loaddata``), though a fixture may bring a history with ids of its own."""

from __future__ import annotations

from typing import Any

from django.core.management.color import no_style
from django.db import IntegrityError, transaction
from django.db.models import F, Max

from .publication import loaded_ids, publish_on_commit

_BATCH = 500


def record_loaded(change: Any, using: str) -> None:
    """Write one row of the history beside a fixture, and publish it on commit."""
    behind = _reset_sequence(type(change), using)
    with transaction.atomic(using=using, savepoint=False):
        try:
            with transaction.atomic(using=using, savepoint=bool(behind)):
                change.save(using=using, force_insert=True)
        except IntegrityError:
            if not behind:
                raise
            # The fixture's rows have taken the ids that the sequence hands out.
            _execute(behind, using)
            change.save(using=using, force_insert=True)
        publish_on_commit(using)
        loaded_ids(using).add(change.pk)


def move_aside(model: Any, pk: Any, using: str) -> None:
    """Move the rows written beside a fixture, if one of them has the id that the fixture brings.

    They move above all ids, so that other processes read them as new. Each move doubles the ids, so few are needed.
    """
    ids = loaded_ids(using)
    if pk not in ids:
        return
    rows = model._base_manager.using(using)
    top = rows.aggregate(top=Max("pk"))["top"]
    mine = sorted(ids)
    for begin in range(0, len(mine), _BATCH):
        rows.filter(pk__in=mine[begin : begin + _BATCH]).update(id=F("id") + top)
    ids.clear()
    ids.update(one + top for one in mine)
    _execute(_reset_sequence(model, using), using)


def _reset_sequence(model: Any, using: str) -> list[str]:
    """SQL that lets new ids begin above all rows; none where the database does that by itself."""
    return list(transaction.get_connection(using).ops.sequence_reset_sql(no_style(), [model]))


def _execute(statements: list[str], using: str) -> None:
    with transaction.get_connection(using).cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
