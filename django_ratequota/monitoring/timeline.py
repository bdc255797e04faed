"""Counts over time and the busiest callers: the last 48 hours from Redis, older hours from ``ratequota rollup``.

The functions raise ``StoreError``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Literal

from ..models import UsageCount
from ..store.base import reading
from .packing import HOUR, MINUTE, MINUTES, OUTCOMES, QUARTER, QUARTERS, kept_hours, pairs, read

Span = Literal["hour", "day", "week"]

#: Seconds of a slot, and how many there are.
_SPANS = {"hour": (MINUTE, 60), "day": (QUARTER, 96), "week": (HOUR, 168)}


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by outcome."""

    admitted: int = 0
    refused: int = 0
    #: Admitted, and refused had the policies in log mode been enforced.
    would_refuse: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Counts over time, in slots of equal length; every tuple of ``Counts`` has the length of ``starts``."""

    #: When each slot begins (aware), oldest first; the last one is still being counted.
    starts: tuple[datetime, ...]
    step: timedelta
    #: Of all requests.
    total: tuple[Counts, ...]
    #: By endpoint id; 0 = requests that belong to no endpoint.
    endpoints: dict[int, tuple[Counts, ...]]
    #: By policy id: requests that the policy applied to, and those that it refused.
    policies: dict[int, tuple[Counts, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopCaller:
    """One of the busiest callers."""

    #: ``user:42``, ``ip:203.0.113.7``, ``tenant:acme``.
    caller: str
    counts: Counts


@reading()
def timeline(span: Span) -> Timeline:
    """Return requests over time: an hour by the minute, a day by the quarter of an hour, a week by the hour."""
    now = time.time()
    step, number = _SPANS[span]
    starts = [int(now // step - behind) * step for behind in reversed(range(number))]
    kind = MINUTES if span == "hour" else QUARTERS
    slots: dict[str, dict[int, list[int]]] = {}
    for (second, series, outcome), times in slot_counts(starts[0], now, kind).items():
        slots.setdefault(series, {}).setdefault(second // step * step, [0, 0, 0])[outcome] += times
    if span == "week":
        _add_rolled_up(slots, starts[0])
    zero = [0, 0, 0]
    rows = {series: tuple(Counts(*own.get(start, zero)) for start in starts) for series, own in slots.items()}
    return Timeline(
        starts=tuple(datetime.fromtimestamp(start, UTC) for start in starts),
        step=timedelta(seconds=step),
        total=rows.get("t") or (Counts(),) * number,
        endpoints={int(series[1:]): counts for series, counts in rows.items() if series[0] == "e"},
        policies={int(series[1:]): counts for series, counts in rows.items() if series[0] == "p"},
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
    series = "t"
    if policy_id is not None:
        series = f"p{policy_id}"
    elif endpoint_id is not None:
        series = f"e{endpoint_id}"
    prefix = f"{series}|".encode()
    counts: dict[str, list[int]] = {}
    for hour in kept_hours({"hour": 2, "day": 25, "week": 49}[span]):
        for number, outcome in enumerate(OUTCOMES):
            for member, score in pairs(read("ZRANGE", f"{outcome}:{hour}", 0, -1, "WITHSCORES")):
                if member.startswith(prefix):
                    caller = member[len(prefix) :].decode()
                    counts.setdefault(caller, [0, 0, 0])[number] += int(float(score))
    tops = [TopCaller(caller=caller, counts=Counts(*numbers)) for caller, numbers in sorted(counts.items())]
    return {
        outcome: tuple(sorted((top for top in tops if getattr(top.counts, outcome)), key=order, reverse=True)[:most])
        for outcome, order in ((outcome, attrgetter(f"counts.{outcome}")) for outcome in OUTCOMES)
    }


@reading()
def slot_counts(since: float, until: float, kind: tuple[int, int]) -> dict[tuple[int, str, int], int]:
    """Return {(second, series, number in ``OUTCOMES``): requests} between two Unix times, by MINUTES or QUARTERS."""
    slot, length = kind
    name = "minutes" if kind == MINUTES else "quarters"
    counts: dict[tuple[int, str, int], int] = {}
    for number in range(int(since // length), int(until // length) + 1):
        for field, times in pairs(read("HGETALL", f"{name}:{number}")):
            position, series, outcome = field.decode().split(":")
            second = number * length + int(position) * slot
            if second >= since:
                counts[second, series, int(outcome)] = int(times)
    return counts


def _add_rolled_up(slots: dict[str, dict[int, list[int]]], since: int) -> None:
    """Add the hours that Redis does not hold any more, from the database."""
    rows = UsageCount.objects.filter(length=UsageCount.Length.HOUR, starts_at__gte=datetime.fromtimestamp(since, UTC))
    for starts_at, series, *counts in rows.values_list("starts_at", "place", *OUTCOMES).order_by():
        kept = slots.setdefault(series, {}).setdefault(int(starts_at.timestamp()), [0, 0, 0])
        kept[:] = map(max, kept, counts)
