"""The writers of the ledger: the last batch of each worker, and the units of its open checks by window."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import date, timedelta
from typing import Any
from uuid import UUID

from django.db.models import F
from django.db.models.functions import Now

from ..changes.databases import committing
from .rows import Window, model_of


class _UtcNow(Now):
    """The database's clock in UTC, whatever the time zone of a session."""

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)


#: Units by window.
Levels = dict[Window, int]
#: How often a writer with open checks writes at least (s), and when one that is silent is dropped.
RENEWED_SECONDS = 60.0
SILENT = timedelta(minutes=10)


def claim(writer: UUID, batch: int) -> bool:
    """Note that the writer's batch is in the ledger; returns whether it was not."""
    if _writers().filter(pk=writer, batches__lt=batch).update(batches=batch, written_at=_UtcNow()):
        return True
    # It is, or the database has no such writer: it is new, or the rollup has forgotten it while it was idle.
    return bool(_writers().get_or_create(pk=writer, defaults={"batches": batch, "written_at": _UtcNow()})[1])


def levels_of(writer: UUID) -> Levels:
    """Return the units of the writer's open checks, as the rows have them; none once it was dropped."""
    return _read(_writers().filter(pk=writer).values_list("held", flat=True).first() or "")


def change(writer: UUID, levels: Mapping[Window, int]) -> Levels:
    """Replace the levels of these windows; returns by how much each has changed. The writer's row must be locked."""
    before = levels_of(writer)
    _writers().filter(pk=writer).update(held=_text({**before, **levels}))
    return {window: units - before.get(window, 0) for window, units in levels.items()}


def renew(writer: UUID) -> bool:
    """Note that the writer lives; returns False where its levels are gone, as it was dropped."""
    with committing(model_of("LedgerWriter")):
        return bool(_writers().filter(pk=writer).exclude(held="").update(written_at=_UtcNow()))


def silent() -> list[UUID]:
    """Return the writers with open checks that have been silent."""
    return list(_silent().values_list("pk", flat=True))


def take(writer: UUID) -> Levels:
    """Take the levels from a writer that is silent, in the caller's transaction; none where another worker has."""
    # First, as a transaction on SQLite has to begin with a write.
    if not _silent().filter(pk=writer).update(batches=F("batches")):
        return {}
    levels = levels_of(writer)
    _writers().filter(pk=writer).update(held="")
    return levels


def forget(counters: Collection[str]) -> None:
    """Take the levels of these counters from all writers, as the caller's transaction deletes the rows."""
    for writer in _writers().exclude(held="").select_for_update().order_by("pk"):
        levels = {window: units for window, units in _read(writer.held).items() if window[0] not in counters}
        _writers().filter(pk=writer.pk).update(held=_text(levels))


def _writers() -> Any:
    return model_of("LedgerWriter").objects


def _silent() -> Any:
    return _writers().filter(written_at__lt=_UtcNow() - SILENT).exclude(held="")


def _text(levels: Mapping[Window, int]) -> str:
    named = {f"{counter} {first_day}": units for (counter, first_day), units in levels.items() if units}
    return json.dumps(named) if named else ""


def _read(text: str) -> Levels:
    named = json.loads(text) if text else {}
    split = ((name.rpartition(" "), units) for name, units in named.items())
    return {(counter, date.fromisoformat(day)): units for (counter, _space, day), units in split}
