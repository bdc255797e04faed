"""Refusals of the last 48 hours, for operators to look up; ``pending_refusals`` records them.

The readers raise ``StoreError``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from ..conf import settings
from ..engine.keys import short
from ..engine.rates import Rate
from ..policies.limit_names import limit_names
from ..store.base import reading
from ..utils.addresses import is_within, named_network
from .packing import DAY, made, read

_REFUSAL_ID = re.compile("[a-z2-7]{10}")
#: Refusals read by one command, and looked through for those of one caller.
_BATCH, SEARCHED = 500, 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedBucket:
    """The state of a bucket that was part of a refusal."""

    #: ``search/min``, as in the headers.
    title: str
    rate: Rate
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
    #: The endpoint's name; "" = all endpoints together.
    scope: str = ""
    counted_per: str = ""
    mode: str = "enforce"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A caller's refusals at one endpoint by the same policies within one minute, described by the first of them."""

    #: As in the responses: 10 letters and digits.
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
    #: The endpoints that the request belonged to; empty = none.
    endpoint_ids: tuple[int, ...] = ()
    revision: int
    #: Why ``on_error`` decided instead of Redis; "" when Redis decided.
    error: str = ""
    #: Ids of the policies that refused it or, in log mode, would have.
    against: tuple[int | None, ...] = ()
    #: The subject whose assignment gave the plan unless code named one, such as ``tenant:acme``; "" = nobody.
    assigned_to: str = ""
    #: Whether PLAN_RESOLVER or ``plan=`` of ``check_caller`` named the plan.
    plan_named: bool = False

    @property
    def limits(self) -> list[str]:
        """The limits of ``violated``, as people call them."""
        return limit_names(self.violated, self.buckets)

    @property
    def place(self) -> str:
        """The method, and the scope or else the route."""
        return f"{self.method} {self.scope or self.route}"

    @property
    def subjects(self) -> list[str]:
        """Whom it counts for besides the caller: refusing buckets first, then the others, then ``assigned_to``."""
        buckets = sorted(self.buckets, key=lambda bucket: not bucket.refused)
        return [*(bucket.subject for bucket in buckets), self.assigned_to]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerRefusals:
    """The refusals of one caller (or subject) in the last day, among the ``SEARCHED`` newest of all callers."""

    #: Newest first.
    refusals: tuple[Refusal, ...] = ()
    #: Time of the oldest refusal that was searched (aware); None = the whole day was searched.
    since: datetime | None = None


@reading()
def find_refusal(refusal_id: str) -> Refusal | None:
    """Return the refusal with this id, in upper or lower case; None when it is not kept (any more)."""
    refusal_id = refusal_id.strip().lower()
    return next(read_refusals([refusal_id]), None) if _REFUSAL_ID.fullmatch(refusal_id) else None


@reading()
def refusals(most: int = 50) -> tuple[Refusal, ...]:
    """Return the newest refusals, newest first."""
    newest = read("ZRANGE", "refused_at", 0, most - 1, "REV")
    return tuple(read_refusals([refusal_id.decode() for refusal_id in newest]))


@reading()
def caller_refusals(caller: str) -> CallerRefusals:
    """Return the refusals of a caller, such as ``user:42``, in the last day.

    Of an identifier's subject, such as ``tenant:acme``, also those of other callers that were counted for it; of a
    network, such as ``ip:203.0.113.0/24``, those of its addresses.
    """
    day = ("+inf", time.time() - DAY, "BYSCORE", "REV", "LIMIT", 0, SEARCHED, "WITHSCORES")
    flat = iter(read("ZRANGE", "refused_at", *day))
    found = [(refusal_id.decode(), float(at)) for refusal_id, at in zip(flat, flat, strict=True)]
    name, network = short(caller), named_network(caller)
    shared = caller.partition(":")[0] in settings.identifiers
    return CallerRefusals(
        refusals=tuple(
            one
            for one in read_refusals([pk for pk, _at in found])
            if one.caller == name
            or (shared and name in one.subjects)
            or (network is not None and is_within(named_network(one.ip), network))
        ),
        since=datetime.fromtimestamp(found[-1][1], UTC) if len(found) == SEARCHED else None,
    )


@reading()
def would_be_refusals(policy_id: int, most: int = 20) -> tuple[Refusal, ...]:
    """Return the newest admitted requests that a policy in log mode would have refused, newest first.

    Of all policies the newest 2,000 are kept, and of one policy ten per minute and process.
    """
    newest = [refusal_id.decode() for refusal_id in read("ZRANGE", "would_be_at", 0, -1, "REV")]
    found = (refusal for refusal in read_refusals(newest, "would_be") if policy_id in refusal.against)
    return tuple(islice(found, most))


def read_refusals(ids: list[str], key: str = "refusals") -> Iterator[Refusal]:
    """Yield those of the refusals that are kept under the key, ``refusals`` or ``would_be``."""
    for start in range(0, len(ids), _BATCH):
        batch = ids[start : start + _BATCH]
        fields = [field for refusal_id in batch for field in (refusal_id, f"{refusal_id}:count")]
        values = iter(read("HMGET", key, *fields))
        for refusal_id, described, count in zip(batch, values, values, strict=True):
            if described is not None:
                yield _refusal(refusal_id, json.loads(described), int(count or 0))


def _refusal(refusal_id: str, described: dict[str, Any], count: int) -> Refusal:
    described |= {name: tuple(described.get(name, ())) for name in ("violated", "against", "endpoint_ids")}
    buckets = [bucket | {"rate": Rate.parse(bucket["rate"])} for bucket in described["buckets"]]
    described["buckets"] = tuple(made(RefusedBucket, bucket) for bucket in buckets)
    described["at"] = datetime.fromtimestamp(described["at"], UTC)
    return made(Refusal, {**described, "id": refusal_id, "count": count})
