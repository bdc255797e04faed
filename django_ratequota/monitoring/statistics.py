"""What was decided, for operators to look at: counts over time, the busiest callers, usage to replay, refusals.

Everything here reads what ``collecting`` has flushed to Redis (the last 48 hours) and what ``ratequota rollup`` has
kept in the database. Functions that ask Redis raise ``StoreError``.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from operator import attrgetter
from typing import Any, Literal

from ..engine.keys import statistics_key
from ..models import UsageCount
from ..runtime import default_limiter
from ..store.base import reading
from .collector import HOUR, KEPT_SECONDS, MINUTE, MINUTES, OUTCOMES, QUARTER, QUARTERS
from .records import bounded, sampled

Span = Literal["hour", "day", "week"]

#: Seconds of a slot, and how many there are.
_SPANS = {"hour": (MINUTE, 60), "day": (QUARTER, 96), "week": (HOUR, 168)}
_REFUSAL_ID = re.compile("[a-z2-7]{10}")
#: Refusals read by one command, and looked through for one caller's.
_AT_ONCE, _SEARCHED = 500, 2_000


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
class Top:
    """One of the busiest callers."""

    #: ``user:42``, ``ip:203.0.113.7``, ``tenant:acme``.
    caller: str
    counts: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Equal requests of one caller in one second."""

    #: Unix time, whole seconds.
    second: int
    caller: str
    #: The client's address as ``ip:...``; "" when unknown.
    ip: str
    plan_id: int | None
    #: The endpoints that the requests belonged to; empty = none.
    endpoint_ids: tuple[int, ...]
    #: Units each.
    cost: int
    admitted: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What callers asked for, to be replayed against another policy."""

    #: In the order of time; one for each (second, caller, ip, plan, endpoints, cost).
    attempts: tuple[Attempts, ...]
    #: The part of all callers whose attempts are kept; 1.0 = all of them. A caller is kept whole, or not at all.
    share: float
    #: Since when attempts were recorded (aware), at most as far back as asked for; None when there are none.
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedBucket:
    """How a bucket stood when it was part of a refusal."""

    #: ``search/min``, as in the headers.
    title: str
    #: Canonical rate text.
    rate: str
    policy_id: int | None
    #: Whom it counts.
    subject: str
    refused: bool
    limit: int
    remaining: int
    #: Seconds; None when waiting cannot help.
    retry_after: float | None
    #: Seconds.
    reset_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A caller's refusals at one endpoint by the same policies within one minute, described by the first of them."""

    #: What the responses carried: 10 letters and digits.
    id: str
    #: When the first of them was decided (aware).
    at: datetime
    #: How many there were.
    count: int
    caller: str
    #: The client's address as ``ip:...``; "" when unknown.
    ip: str
    #: The plan's id.
    plan_id: int | None
    #: The scope that the view named; "" for none.
    scope: str
    #: The resolved route with a leading slash; "" when unknown.
    route: str
    method: str
    cost: int
    #: Names of the policies that refused, as the client saw them.
    violated: tuple[str, ...]
    buckets: tuple[RefusedBucket, ...]
    revision: int
    #: Why ``on_error`` decided, Redis having given no decision; "" when it gave one.
    error: str = ""


@reading()
def timeline(span: Span) -> Timeline:
    """Requests over time: by the minute for the last hour, the quarter of an hour for a day, the hour for a week."""
    now = time.time()
    step, number = _SPANS[span]
    starts = [int(now // step - behind) * step for behind in reversed(range(number))]
    slots: dict[str, dict[int, list[int]]] = {}
    for (second, place, outcome), times in _counted(starts[0], now, MINUTES if span == "hour" else QUARTERS).items():
        slots.setdefault(place, {}).setdefault(second // step * step, [0, 0, 0])[outcome] += times
    if span == "week":
        _add_rolled_up(slots, starts[0])
    zero = [0, 0, 0]
    rows = {place: tuple(Counts(*own.get(start, zero)) for start in starts) for place, own in slots.items()}
    return Timeline(
        starts=tuple(datetime.fromtimestamp(start, UTC) for start in starts),
        step=timedelta(seconds=step),
        total=rows.get("t") or (Counts(),) * number,
        endpoints={int(place[1:]): counts for place, counts in rows.items() if place[0] == "e"},
        policies={int(place[1:]): counts for place, counts in rows.items() if place[0] == "p"},
    )


@reading()
def top_callers(
    span: Span, *, endpoint_id: int | None = None, policy_id: int | None = None, most: int = 20
) -> dict[str, tuple[Top, ...]]:
    """For each of ``OUTCOMES`` the callers with the highest counts, the highest first; of one endpoint or policy.

    By the hour, and at most the last 48 hours are known. Counts are exact unless callers come and go by the thousand.
    Of one policy only those are known that it refused, or would have; what it admitted is not counted by caller, so
    ``admitted`` is 0 there and means nothing.
    """
    place = "t"
    if policy_id is not None:
        place = f"p{policy_id}"
    elif endpoint_id is not None:
        place = f"e{endpoint_id}"
    prefix = f"{place}|".encode()
    counts: dict[str, list[int]] = {}
    for hour in _hours({"hour": 2, "day": 25, "week": 49}[span]):
        for which, outcome in enumerate(OUTCOMES):
            found = _ask("ZRANGE", f"{outcome}:{hour}", 0, -1, "WITHSCORES")
            for member, score in _pairs(found):
                if member.startswith(prefix):
                    own = counts.setdefault(member[len(prefix) :].decode(), [0, 0, 0])
                    own[which] += int(float(score))
    tops = [Top(caller=name, counts=Counts(*numbers)) for name, numbers in sorted(counts.items())]
    return {
        outcome: tuple(sorted((top for top in tops if getattr(top.counts, outcome)), key=order, reverse=True)[:most])
        for outcome, order in ((outcome, attrgetter(f"counts.{outcome}")) for outcome in OUTCOMES)
    }


@reading()
def usage(hours: int = 24) -> Usage:
    """What callers asked for in the last so many hours, 48 at most; up to the last ten seconds or so."""
    since = time.time() - hours * HOUR
    level = 0
    counted: dict[tuple[Any, ...], list[int]] = {}
    for hour in _hours(hours + 1):
        kept = dict(_pairs(_ask("HGETALL", f"level:{hour}")))
        level = max(level, int(kept.get(b"level", 0)))
        for chunk in _ask("LRANGE", f"usage:{hour}", 0, -1):
            for second, caller, ip, plan_id, endpoint_ids, cost, admitted, refused in json.loads(
                zlib.decompress(chunk)
            ):
                if second >= since:
                    own = counted.setdefault((second, caller, ip, plan_id, tuple(endpoint_ids), cost), [0, 0])
                    own[0] += admitted
                    own[1] += refused
    # Where one hour keeps fewer callers than another, only those that every hour keeps are whole.
    whole = {caller for caller in {attempt[1] for attempt in counted} if sampled(caller, level)}
    attempts = tuple(
        Attempts(
            second=second,
            caller=caller,
            ip=ip,
            plan_id=plan_id,
            endpoint_ids=endpoint_ids,
            cost=cost,
            admitted=admitted,
            refused=refused,
        )
        for (second, caller, ip, plan_id, endpoint_ids, cost), (admitted, refused) in sorted(
            counted.items(), key=lambda item: item[0][0]
        )
        if caller in whole
    )
    first = min((attempt[0] for attempt in counted), default=None)
    return Usage(
        attempts=attempts,
        share=0.5**level,
        since=None if first is None else datetime.fromtimestamp(first, UTC),
    )


@reading()
def find_refusal(refusal_id: str) -> Refusal | None:
    """The refusal with this id, in whatever case it is written; None when it is not kept (any more)."""
    refusal_id = refusal_id.strip().lower()
    return next(iter(_read_refusals([refusal_id])), None) if _REFUSAL_ID.fullmatch(refusal_id) else None


@reading()
def refusals(most: int = 50, caller: str = "") -> tuple[Refusal, ...]:
    """The newest refusals, newest first; with ``caller``, those of one caller among the 2,000 newest."""
    number = _SEARCHED if caller else most
    newest = [found.decode() for found in _ask("ZRANGE", "refused_at", 0, number - 1, "REV")]
    wanted = bounded(caller)
    read = (one for one in _read_refusals(newest) if not caller or one.caller == wanted)
    return tuple(islice(read, most))


def _read_refusals(ids: list[str]) -> Iterator[Refusal]:
    for at in range(0, len(ids), _AT_ONCE):
        some = ids[at : at + _AT_ONCE]
        asked = [field for refusal_id in some for field in (refusal_id, f"{refusal_id}:count")]
        found = _ask("HMGET", "refusals", *asked)
        times = iter(found)
        for refusal_id, described, count in zip(some, times, times, strict=True):
            if described is not None:
                yield _refusal(refusal_id, json.loads(described), int(count or 0))


def _refusal(refusal_id: str, read: dict[str, Any], count: int) -> Refusal:
    at = datetime.fromtimestamp(read.pop("at"), UTC)
    buckets = tuple(RefusedBucket(**bucket) for bucket in read.pop("buckets"))
    return Refusal(
        **{**read, "violated": tuple(read["violated"])}, id=refusal_id, at=at, count=count, buckets=buckets
    )


@reading()
def counted_quarters(since: float, until: float) -> dict[tuple[int, str, int], int]:
    """Counts by (Unix time of the quarter of an hour, place, number in ``OUTCOMES``), for ``rollup`` to keep.

    A place is ``t`` (all requests), ``e7`` (endpoint 7) or ``p7`` (policy 7).
    """
    return _counted(since, until, QUARTERS)


def _counted(since: float, until: float, kind: tuple[int, int]) -> dict[tuple[int, str, int], int]:
    slot, length = kind
    name = "minutes" if kind == MINUTES else "quarters"
    counts: dict[tuple[int, str, int], int] = {}
    for number in range(int(since // length), int(until // length) + 1):
        for field, times in _pairs(_ask("HGETALL", f"{name}:{number}")):
            at, place, outcome = field.decode().split(":")
            second = number * length + int(at) * slot
            if second >= since:
                counts[second, place, int(outcome)] = int(times)
    return counts


def _add_rolled_up(slots: dict[str, dict[int, list[int]]], since: int) -> None:
    """Hours that Redis does not hold any more, from the database."""
    rows = UsageCount.objects.filter(length=UsageCount.Length.HOUR, starts_at__gte=datetime.fromtimestamp(since, UTC))
    for starts_at, place, *counts in rows.values_list("starts_at", "place", *OUTCOMES).order_by():
        kept = slots.setdefault(place, {}).setdefault(int(starts_at.timestamp()), [0, 0, 0])
        kept[:] = map(max, kept, counts)


def _hours(number: int) -> range:
    """The last so many hours since the Unix epoch, as far as they are kept."""
    current = int(time.time() // HOUR)
    return range(current - min(number, KEPT_SECONDS // HOUR + 1) + 1, current + 1)


def _ask(command: str, name: str, *args: object) -> Any:
    limiter = default_limiter()
    return limiter.store.execute((command, statistics_key(limiter.prefix, name), *args))


def _pairs(flat: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """(field, value) of a reply, which is one flat list."""
    each = iter(flat)
    return zip(each, each, strict=True)
