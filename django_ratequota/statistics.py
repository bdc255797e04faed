"""What was decided, for operators to look at: counts over time, the busiest callers, usage to replay, refusals.

Everything here reads what ``collecting`` has flushed to Redis (the last 48 hours) and what ``ratequota rollup`` has
kept in the database. Functions that ask Redis raise ``StoreError``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

Span = Literal["hour", "day", "week"]


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


def timeline(span: Span) -> Timeline:
    """Requests over time: by the minute for the last hour, the quarter of an hour for a day, the hour for a week."""
    raise NotImplementedError


def top_callers(
    span: Span,
    by: Literal["admitted", "refused", "would_refuse"],
    *,
    endpoint_id: int | None = None,
    policy_id: int | None = None,
    most: int = 20,
) -> tuple[Top, ...]:
    """The callers with the highest counts, the highest first; of one endpoint, or of one policy.

    At most the last 48 hours are known. Counts of the busiest are exact unless callers come and go by the thousand.
    """
    raise NotImplementedError


def usage(hours: int = 24) -> Usage:
    """What callers asked for in the last so many hours."""
    raise NotImplementedError


def find_refusal(refusal_id: str) -> Refusal | None:
    """The refusal with this id, in whatever case it is written; None when it is not kept (any more)."""
    raise NotImplementedError


def refusals(most: int = 50, caller: str = "") -> tuple[Refusal, ...]:
    """The newest refusals, newest first; of one caller."""
    raise NotImplementedError
