"""Copies counts from Redis, which keeps them for 48 hours, to the database: by the hour and by the day."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import Sum
from django.utils import timezone

from ..changes.databases import reading_and_writing
from ..conf import settings
from ..models import QuotaWindow, UsageCount
from ..runtime import default_limiter
from .packing import HOUR, KEPT_SECONDS, OUTCOMES, QUARTERS
from .timeline import slot_counts

#: Days for which hours, and days, are kept.
KEEP_HOURS, KEEP_DAYS = 35, 400
_BATCH = 500


@dataclass(frozen=True, slots=True)
class RolledUp:
    """How many rows were written, and how many were deleted as too old."""

    hours: int
    days: int
    deleted: int


def roll_up(keep_hours: int = KEEP_HOURS, keep_days: int = KEEP_DAYS) -> RolledUp:
    """Write the hours that have ended and the days they belong to; delete older rows (limits in days).

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
        written = _write(UsageCount.Length.HOUR, hours)
        days = _write(UsageCount.Length.DAY, _days({starts_at for starts_at, _ in hours}))
        deleted = 0
        for length, kept in ((UsageCount.Length.HOUR, keep_hours), (UsageCount.Length.DAY, keep_days)):
            too_old = timezone.now() - timedelta(days=kept)
            deleted += UsageCount.objects.filter(length=length, starts_at__lt=too_old).delete()[0]
    deleted += forget_windows()
    return RolledUp(written, days, deleted)


def forget_windows() -> int:
    """Delete the quota windows that ended more than KEEP_QUOTA_MONTHS ago; returns how many."""
    if not settings.keep_quota_months:
        return 0
    too_old = timezone.now() - timedelta(days=31 * settings.keep_quota_months)
    # Without loading them: nothing refers to these rows, and there may be millions.
    rows: Any = QuotaWindow.objects.filter(ends_at__lt=too_old)
    return int(rows._raw_delete(rows.db))


def _days(hours: Iterable[datetime]) -> dict[tuple[datetime, str], list[int]]:
    """Return the counts of the calendar days (TIME_ZONE) that the hours belong to, from the hours in the database."""
    zone = settings.time_zone
    counts: dict[tuple[datetime, str], list[int]] = {}
    for day in sorted({hour.astimezone(zone).date() for hour in hours}):
        start, finish = (
            datetime(date.year, date.month, date.day, tzinfo=zone).astimezone(UTC)
            for date in (day, day + timedelta(days=1))
        )
        rows = UsageCount.objects.filter(length=UsageCount.Length.HOUR, starts_at__gte=start, starts_at__lt=finish)
        sums = rows.order_by().values("place").annotate(*map(Sum, OUTCOMES))
        for series, *numbers in sums.values_list("place", *(f"{outcome}__sum" for outcome in OUTCOMES)):
            counts[start, series] = numbers
    return counts


def _write(length: str, counts: Mapping[tuple[datetime, str], list[int]]) -> int:
    """Write the counts that are higher than those in the database; returns how many rows changed."""
    if not counts:
        return 0
    kept = UsageCount.objects.filter(length=length, starts_at__in={starts_at for starts_at, _ in counts}).order_by()
    known = {
        (starts_at, series): values
        for starts_at, series, *values in kept.values_list("starts_at", "place", *OUTCOMES)
    }
    rows = []
    for (starts_at, series), values in counts.items():
        before = known.get((starts_at, series), [-1, -1, -1])
        after = [max(pair) for pair in zip(before, values, strict=True)]
        if after != before:
            rows.append(
                UsageCount(
                    length=length, starts_at=starts_at, place=series, **dict(zip(OUTCOMES, after, strict=True))
                )
            )
    # MySQL and MariaDB take no target: any unique key counts.
    target = connections[UsageCount.objects.db].features.supports_update_conflicts_with_target
    UsageCount.objects.bulk_create(
        rows,
        batch_size=_BATCH,
        update_conflicts=True,
        unique_fields=["length", "starts_at", "place"] if target else None,
        update_fields=list(OUTCOMES),
    )
    return len(rows)
