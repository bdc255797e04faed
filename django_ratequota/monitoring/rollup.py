"""Copies counts by the hour from Redis, which keeps them for 48 hours, to the database."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import Exists, Model, OuterRef, Q
from django.utils import timezone

from ..changes.databases import reading_and_writing
from ..conf import settings
from ..models import LedgerWriter, Outage, QuotaDay, QuotaWindow, UsageCount
from ..runtime import default_limiter
from .packing import HOUR, KEPT_SECONDS, OUTCOMES, QUARTERS
from .timeline import slot_counts

#: Days for which hours and outages are kept.
KEEP_DAYS = 35
#: Days after which a process that has added nothing to the ledger is forgotten.
_WRITER_DAYS = 35
_BATCH = 500
#: Rows of the ledger above which ``status`` warns.
MANY_ROWS = 10**6


@dataclass(frozen=True, slots=True)
class RolledUp:
    """How many rows were written, and how many were deleted as too old."""

    written: int
    deleted: int


def roll_up(keep_days: int = KEEP_DAYS) -> RolledUp:
    """Write the hours that have ended; delete rows that are older than ``keep_days``.

    Call it at least once in 48 hours, or hours are missing; more often, and from several machines, does no harm:
    rows are only ever raised, so that counts which Redis has lost since stay. Without Redis (``memory://``,
    ``ENABLED = False``) there are no hours to write. Raises ``StoreError``.
    """
    now = time.time()
    hours: dict[tuple[datetime, str], list[int]] = {}
    slots = [] if default_limiter().store.absent else slot_counts(now - KEPT_SECONDS, now, QUARTERS)[0]
    for second, series, outcome, times in slots:
        # The first hour may be incomplete by now; an earlier rollup wrote all of it.
        if second // HOUR * HOUR >= now - KEPT_SECONDS and second // HOUR < now // HOUR:
            starts_at = datetime.fromtimestamp(second // HOUR * HOUR, UTC)
            hours.setdefault((starts_at, series), [0, 0, 0])[outcome] += times
    with reading_and_writing(UsageCount):
        written = _write(hours)
        too_old = timezone.now() - timedelta(days=keep_days)
        deleted = _delete(UsageCount, Q(starts_at__lt=too_old)) + _delete(Outage, Q(ended_at__lt=too_old))
    return RolledUp(written, deleted + forget_windows())


def forget_windows() -> int:
    """Delete the ledger's old rows, by KEEP_QUOTA_MONTHS and KEEP_QUOTA_DAYS; returns how many.

    Days stay until their month has ended, and under several policies or rates as long as the month.
    """
    now, months, days = timezone.now(), settings.keep_quota_months, settings.keep_quota_days
    deleted = _delete(LedgerWriter, Q(written_at__lt=now - timedelta(days=_WRITER_DAYS), held=""))
    if months:
        # All periods, named for the index that begins with them.
        ended = Q(period__in=QuotaWindow.Period.values, ends_at__lt=now - timedelta(days=31 * months))
        deleted += _delete(QuotaWindow, ended)
    if days:
        today = timezone.localdate(now, settings.time_zone)
        # Invoices tell a month's plans by its days.
        window = QuotaWindow.objects.filter(counter=OuterRef("counter"), first_day=OuterRef("first_day"))
        needed = Exists(window.filter(Q(mixed=True) | Q(ends_at__gte=now)))
        deleted += _delete(QuotaDay, Q(~needed, day__lt=today - timedelta(days=days)))
    return deleted


def _delete(model: type[Model], old: Q) -> int:
    # Without loading them: nothing refers to these rows, and there may be millions.
    rows: Any = model._default_manager.filter(old)
    return int(rows._raw_delete(rows.db))


def _write(counts: Mapping[tuple[datetime, str], list[int]]) -> int:
    """Write the counts that are higher than those in the database; returns how many rows changed."""
    kept = UsageCount.objects.filter(starts_at__in={starts_at for starts_at, _ in counts}).order_by()
    read = kept.values_list("starts_at", "place", *OUTCOMES)
    known = {(starts_at, series): values for starts_at, series, *values in read}
    rows = []
    for (starts_at, series), values in counts.items():
        before = known.get((starts_at, series), [-1, -1, -1])
        after = [max(pair) for pair in zip(before, values, strict=True)]
        if after != before:
            rows.append(UsageCount(starts_at=starts_at, place=series, **dict(zip(OUTCOMES, after, strict=True))))
    # MySQL and MariaDB take no target: any unique key counts.
    target = connections[UsageCount.objects.db].features.supports_update_conflicts_with_target
    UsageCount.objects.bulk_create(
        rows,
        batch_size=_BATCH,
        update_conflicts=True,
        unique_fields=["starts_at", "place"] if target else None,
        update_fields=list(OUTCOMES),
    )
    return len(rows)
