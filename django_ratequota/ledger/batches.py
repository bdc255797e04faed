"""Adds sums to the rows, each batch of a writer exactly once, and the units of its open checks with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from typing import Any
from uuid import UUID

from django.db import DatabaseError, DataError, IntegrityError, transaction

from ..changes.databases import committing, policy_alias, read_from
from ..engine.calendar_windows import CalendarWindow
from ..engine.keys import short
from ..engine.protocol import Raised
from ..engine.rates import Rate
from ..engine.types import Bucket
from ..policies.facts import to_us
from ..utils.escaping import one_line
from ..utils.log import logger
from ..utils.problems import remember
from . import rows, writers
from .notices import Notices, claim
from .rows import Part, Row, Sums, Window, due, model_of, rows_of, total_of

#: What a database raises for values that it refuses: out of range, too long, or against a constraint.
_REFUSALS = (DataError, IntegrityError)
#: Those that MariaDB's drivers raise as ``OperationalError``: a malformed value, a division by 0, and a character
#: that the table's encoding lacks.
_REFUSAL_NUMBERS = {1292, 1365, 1366}
#: The windows whose rows the database refuses, and why.
Refused = dict[Window, DatabaseError]


def add(sums: Sums, writer: UUID, batch: int, levels: Mapping[Window, int], notices: Notices) -> tuple[Raised, int]:
    """Add the sums to the rows unless the writer's batch of this number is in them; returns what Redis is raised to.

    ``levels`` are the units of the writer's open checks in those of the windows where they have changed. ``notices``
    gets what the rows make known; if the batch is in them, its first try has done so.

    Rows that the database refuses must not keep the others waiting: they are logged, and their units are returned,
    too. Raises ``django.db.Error``; then nothing is known, and the same batch is to be added again.
    """
    refused: Refused = {}
    with committing(model_of("QuotaWindow")):
        # First, as a transaction on SQLite has to begin with a write.
        if writers.claim(writer, batch):
            for window, units in writers.change(writer, levels).items() if levels else ():
                sums[window][0].held = units
            found = _add_each(dict(sorted(sums.items())), refused)
            errors = list(refused.values())
            if len(errors) == len(sums) > 1 and all(isinstance(error, IntegrityError) for error in errors):
                raise errors[0]  # all of them: another version of this app has migrated the table
            claim(sums, found, notices)
        else:
            found = rows_of(sums)
    return due(found, sums), _log(sums, refused) if refused else 0


def _add_each(sums: Sums, refused: Refused) -> dict[Window, Row]:
    """Add the sums but for those that the database refuses, which it finds by halving."""
    try:
        with transaction.atomic(using=policy_alias(model_of("QuotaWindow"))):
            return rows.add_once(sums)
    except DatabaseError as error:
        if not isinstance(error, _REFUSALS) and _REFUSAL_NUMBERS.isdisjoint(error.args[:1]):
            raise
        refusal = error
    items = list(sums.items())
    if half := len(items) // 2:
        return _add_each(dict(items[:half]), refused) | _add_each(dict(items[half:]), refused)
    [(window, parts)] = items
    subject = parts[0].bucket.subject
    if subject.isascii():
        refused[window] = refusal
        return {}
    # Perhaps it has a character that the table's encoding lacks, as all lack NUL: then its digest is written.
    parts = [replace(part, bucket=replace(part.bucket, subject=short(f"{subject}\0"))) for part in parts]
    return _add_each({window: parts}, refused)


def _log(sums: Sums, refused: Refused) -> int:
    """Log which units are in no row and are not tried again; returns how many they are."""
    lost = [(*window, *total_of(sums[window])) for window in refused]
    why = str(next(iter(refused.values()))).partition("\n")[0]  # further lines have the values
    listed = "; ".join("{} of {}: {} charged, {} refunded".format(*one) for one in lost)
    text = one_line(f"the database refuses rows of the ledger ({why}), these units are not recorded: {listed}")
    remember("ledger", text)
    logger.error("%s", text)  # not once a minute, as nothing else has these units
    return sum(charged + refunded for _counter, _first_day, charged, refunded in lost)


def drop_silent(today: date) -> Iterator[Raised]:
    """Refund what writers that have been silent for ten minutes held; yields what Redis is to be raised to.

    They were killed, so nobody has got anything for these units: they are charged and refunded at once. A writer that
    lives after all begins with no open units. Raises ``django.db.Error``.
    """
    for writer in read_from(policy_alias(model_of("LedgerWriter")), writers.silent):
        sums = Sums()
        with committing(model_of("QuotaWindow")):
            levels = writers.take(writer)
            found = model_of("QuotaWindow").objects.filter(counter__in={counter for counter, _day in levels})
            for row in found:
                if units := levels.get((row.counter, row.first_day)):
                    sums[row.counter, row.first_day] = [part_of(row, today, units)]
            totals = due(rows.add_once(sums), sums)
        if levels:
            logger.warning("a worker was killed: refunded the open requests of the ledger's writer %s", writer)
        yield totals


def part_of(row: Any, day: date, given_back: int) -> Part:
    """Return held units of a window that are charged and refunded, limited as its row says that it was last."""
    bucket = Bucket(
        row.subject, Rate.parse(row.rate), endpoint_id=row.endpoint_id, policy_id=row.policy_id, durable=True
    )
    bounds = CalendarWindow(to_us(row.starts_at), to_us(row.ends_at), row.first_day)
    return Part(bucket, bounds, day, given_back, given_back, -given_back)
