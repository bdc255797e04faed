"""Keeps counts in the database, by the hour and by the day, when Redis lets them go after 48 hours."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connections, transaction
from django.db.models import Sum
from django.utils import timezone

from ..conf import settings
from ..models import UsageCount
from ..recording.databases import policy_alias
from .collector import HOUR, KEPT_SECONDS, OUTCOMES
from .statistics import counted_quarters

#: Days for which hours, and days, are kept.
KEEP_HOURS, KEEP_DAYS = 35, 400
_BATCH = 500


@dataclass(frozen=True, slots=True)
class RolledUp:
    """How many rows were written, and how many were too old."""

    hours: int
    days: int
    deleted: int


def roll_up(keep_hours: int = KEEP_HOURS, keep_days: int = KEEP_DAYS) -> RolledUp:
    """Write the hours that have ended and the days they belong to, and delete what is older than so many days.

    Any number of times an hour, from any number of machines: what is written already is only ever raised, so that
    counts which Redis has lost since stay. At least once in 48 hours, or hours are missing. Raises ``StoreError``.
    """
    now = time.time()
    hours: dict[tuple[datetime, str], list[int]] = {}
    for (second, place, outcome), times in counted_quarters(now - KEPT_SECONDS, now).items():
        # The first hour may be there in part only: it was whole an hour ago.
        if second // HOUR * HOUR >= now - KEPT_SECONDS and second // HOUR < now // HOUR:
            starts_at = datetime.fromtimestamp(second // HOUR * HOUR, UTC)
            hours.setdefault((starts_at, place), [0, 0, 0])[outcome] += times
    with transaction.atomic(using=policy_alias(UsageCount)):
        written = _raise(UsageCount.Length.HOUR, hours)
        days = _raise(UsageCount.Length.DAY, _days({starts_at for starts_at, _ in hours}))
        deleted = 0
        for length, kept in ((UsageCount.Length.HOUR, keep_hours), (UsageCount.Length.DAY, keep_days)):
            too_old = timezone.now() - timedelta(days=kept)
            deleted += UsageCount.objects.filter(length=length, starts_at__lt=too_old).delete()[0]
    return RolledUp(written, days, deleted)


def _days(hours: Iterable[datetime]) -> dict[tuple[datetime, str], list[int]]:
    """The counts of the calendar days (TIME_ZONE) that the hours belong to, from the hours that are kept."""
    zone = settings.time_zone
    counts: dict[tuple[datetime, str], list[int]] = {}
    for day in sorted({hour.astimezone(zone).date() for hour in hours}):
        start, finish = (
            datetime(one.year, one.month, one.day, tzinfo=zone).astimezone(UTC)
            for one in (day, day + timedelta(days=1))
        )
        rows = UsageCount.objects.filter(
            length=UsageCount.Length.HOUR, starts_at__gte=start, starts_at__lt=finish
        ).order_by()
        for place, *sums in (
            rows.values("place")
            .annotate(*map(Sum, OUTCOMES))
            .values_list("place", *(f"{outcome}__sum" for outcome in OUTCOMES))
        ):
            counts[start, place] = sums
    return counts


def _raise(length: str, counts: Mapping[tuple[datetime, str], list[int]]) -> int:
    """Write these counts where they are higher than what is kept; returns how many rows changed."""
    if not counts:
        return 0
    kept = UsageCount.objects.filter(length=length, starts_at__in={starts_at for starts_at, _ in counts}).order_by()
    known = {
        (starts_at, place): values for starts_at, place, *values in kept.values_list("starts_at", "place", *OUTCOMES)
    }
    rows = []
    for (starts_at, place), values in counts.items():
        before = known.get((starts_at, place), [-1, -1, -1])
        after = [max(pair) for pair in zip(before, values, strict=True)]
        if after != before:
            rows.append(
                UsageCount(length=length, starts_at=starts_at, place=place, **dict(zip(OUTCOMES, after, strict=True)))
            )
    # MySQL and MariaDB take whichever unique key is there.
    target = connections[UsageCount.objects.db].features.supports_update_conflicts_with_target
    UsageCount.objects.bulk_create(
        rows,
        batch_size=_BATCH,
        update_conflicts=True,
        unique_fields=["length", "starts_at", "place"] if target else None,
        update_fields=list(OUTCOMES),
    )
    return len(rows)
