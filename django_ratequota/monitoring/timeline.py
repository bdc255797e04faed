"""Counts over time and the busiest callers: the last 48 hours from Redis, older hours from ``ratequota rollup``.

The functions raise ``StoreError``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import Literal

from django.db.models import Sum

from ..models import UsageCount
from ..store.base import reading
from .collector import MAX_FIELDS
from .packing import HOUR, MINUTE, MINUTES, OUTCOMES, QUARTER, QUARTERS, Slots, kept_hours, read_pairs

Span = Literal["hour", "day", "week"]

#: Seconds of a slot, and the hours before the one that runs now: whole hours, as callers are counted by the hour.
_SPANS = {"hour": (MINUTE, 1), "day": (QUARTER, 24), "week": (HOUR, 167)}
#: Unix time, series, number in ``OUTCOMES``, requests.
_Count = tuple[int, str, int, int]
#: Requests that were admitted, and are counted there too.
_WOULD_REFUSE = OUTCOMES.index("would_refuse")


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by outcome."""

    admitted: int = 0
    refused: int = 0
    #: Admitted, and refused had the policies in log mode been enforced.
    would_refuse: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Counts over time, in slots of equal length, and their sums by endpoint."""

    #: When each slot begins (aware), oldest first; the last one is still being counted.
    starts: tuple[datetime, ...]
    #: Of all requests, or of the endpoint or policy asked for; one per slot.
    total: tuple[Counts, ...]
    #: By endpoint id; 0 = requests that belong to no endpoint.
    endpoints: dict[int, Counts]
    #: False where more endpoints and policies were active than Redis counts apart: their sums lack requests.
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TopCaller:
    """One of the busiest callers."""

    #: ``user:42``, ``ip:203.0.113.7``, ``tenant:acme``.
    caller: str
    counts: Counts


@reading()
def timeline(span: Span, *, endpoint_id: int | None = None, policy_id: int | None = None) -> Timeline:
    """Return requests over time: an hour by the minute, a day by the quarter of an hour, a week by the hour.

    Each begins with a whole hour, so that ``top_callers`` counts the same requests, but of a week two days only.
    ``total`` is of all requests, or of one endpoint or policy. Of the others only sums are made, because a week of
    10,000 policies by the hour would take seconds.
    """
    now = time.time()
    step, hours = _SPANS[span]
    starts = range(int(now // HOUR - hours) * HOUR, int(now) + 1, step)
    chosen = _series(endpoint_id, policy_id)
    counted, complete = slot_counts(starts[0], now, MINUTES if span == "hour" else QUARTERS)
    sums: dict[str, list[int]] = {}
    slots = {start: [0, 0, 0] for start in starts}
    for second, series, outcome, times in _with_rolled_up(counted, starts, chosen) if span == "week" else counted:
        sums.setdefault(series, [0, 0, 0])[outcome] += times
        if series == chosen:
            slots[second // step * step][outcome] += times
    return Timeline(
        starts=tuple(datetime.fromtimestamp(start, UTC) for start in starts),
        total=tuple(Counts(*counts) for counts in slots.values()),
        endpoints={int(series[1:]): Counts(*counts) for series, counts in sums.items() if series[0] == "e"},
        complete=complete,
    )


@reading()
def top_callers(
    span: Span, *, endpoint_id: int | None = None, policy_id: int | None = None, most: int = 20
) -> dict[str, tuple[TopCaller, ...]]:
    """Return, for each of ``OUTCOMES``, the callers with the highest counts, the highest first.

    Counts are of all requests, or of one endpoint or policy; by the hour, for the last 48 hours at most. They are
    exact unless callers come and go by the thousand. With ``policy_id``, only refusals and would-be refusals by the
    policy are counted by caller: ``admitted`` is 0, which means unknown.
    """
    prefix = f"{_series(endpoint_id, policy_id)}|"
    counts: dict[str, list[int]] = {}
    for hour in kept_hours(_SPANS[span][1] + 1):
        members = read_pairs("zset", *(f"{outcome}:{hour}" for outcome in OUTCOMES), prefix=prefix)
        for outcome, scored in enumerate(members):
            for member, score in scored:
                counts.setdefault(member[len(prefix) :], [0, 0, 0])[outcome] += int(float(score))
    tops = [TopCaller(caller=caller, counts=Counts(*numbers)) for caller, numbers in sorted(counts.items())]
    highest = {}
    for name in OUTCOMES:
        count = attrgetter(f"counts.{name}")
        highest[name] = tuple(sorted(filter(count, tops), key=count, reverse=True)[:most])
    return highest


@reading()
def seen_callers(prefix: str, most: int) -> list[str]:
    """Return callers of the last 48 hours whose names begin with ``prefix``, until there are ``most``: latest first.

    Of each hour the busiest callers are known. Those of long names are left out, which statistics keep as digests.
    """
    found: dict[str, None] = {}
    for hour in reversed(kept_hours()):
        if len(found) >= most:
            break
        for members in read_pairs("zset", f"admitted:{hour}", f"refused:{hour}", prefix=f"t|{prefix}"):
            found |= dict.fromkeys(member.removeprefix("t|") for member, _score in members)
    return list(found)


@reading()
def slot_counts(since: float, until: float, slots: Slots) -> tuple[list[_Count], bool]:
    """Return the counts between two Unix times, by MINUTES or QUARTERS.

    Then whether that is all: Redis holds at most ``MAX_FIELDS`` counts of an hour's minutes or a day's quarters.
    """
    counts: list[_Count] = []
    complete = True
    for start in range(int(since // slots.span) * slots.span, int(until) + 1, slots.span):
        [fields] = read_pairs("hash", slots.key(start))
        complete = complete and len(fields) < MAX_FIELDS
        for field, times in fields:
            position, series, outcome = field.split(":")
            second = start + int(position) * slots.slot
            if since <= second <= until:  # another machine's clock may be ahead
                counts.append((second, series, int(outcome), min(int(times), 2**53)))
    return counts, complete


def _series(endpoint_id: int | None, policy_id: int | None) -> str:
    if policy_id is not None:
        return f"p{policy_id}"
    return "t" if endpoint_id is None else f"e{endpoint_id}"


def _with_rolled_up(counted: list[_Count], starts: Sequence[int], chosen: str) -> list[_Count]:
    """Return the counts with those of the hours of which the database holds more requests than Redis counted.

    Redis has forgotten these hours, or has lost its data since they were rolled up. Of other series than the chosen
    one only the sum is read, as of the first of them, because a week may have 100,000 rows.
    """
    kept = dict.fromkeys(starts, 0)
    for second, series, outcome, times in counted:
        if series == "t" and outcome != _WOULD_REFUSE:
            kept[second // HOUR * HOUR] += times
    times_of = [datetime.fromtimestamp(start, UTC) for start in starts]
    rows = UsageCount.objects.filter(starts_at__in=times_of, place__in={"t", chosen}).order_by()
    older: list[datetime] = []
    own: list[_Count] = []
    for starts_at, series, *counts in rows.values_list("starts_at", "place", *OUTCOMES):
        start = int(starts_at.timestamp())
        if series == "t" and counts[0] + counts[1] > kept[start]:
            older.append(starts_at)
        if series == chosen:
            own += [(start, series, outcome, times) for outcome, times in enumerate(counts)]
    sums = UsageCount.objects.filter(starts_at__in=older).exclude(place=chosen).order_by().values_list("place")
    replaced = {int(starts_at.timestamp()) for starts_at in older}
    others = [
        (min(replaced), series, outcome, times)
        for series, *counts in sums.annotate(*map(Sum, OUTCOMES))
        for outcome, times in enumerate(counts)
    ]
    kept_counts = [count for count in counted if count[0] // HOUR * HOUR not in replaced]
    return [*kept_counts, *(count for count in own if count[0] in replaced), *others]
