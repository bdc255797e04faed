"""How a caller stands: each limit that applies, wherever it applies; nothing is consumed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from django.db import Error as DatabaseError

from .enforcement import newest
from .exceptions import StoreError
from .facts import NOBODY, EndpointFacts, Snapshot, UserEntry
from .identity import Caller
from .limiter import default_limiter
from .resolver import Asked, resolve_anew
from .snapshot import policies
from .types import Bucket, BucketStatus
from .usage import peek

#: Limits that are looked at; those beyond it, of the endpoints last in the alphabet, are left out.
MAX_LIMITS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The limits that a caller is held to."""

    #: Enforced buckets, those for all endpoints first, and how each stands; None while the store does not say.
    limits: tuple[tuple[Bucket, BucketStatus | None], ...]
    #: Names of the policies that say ``blocked``.
    blocked_by: tuple[str, ...]
    #: Whether there are more than ``MAX_LIMITS``.
    truncated: bool

    @property
    def available(self) -> bool:
        """Whether the store told how every limit stands."""
        return all(status is not None for _, status in self.limits)


def standing(caller: Caller, scope: str | None = None) -> Standing:
    """How the caller stands at one endpoint and under the limits for all; None = at every endpoint.

    Raises ``LookupError`` when no endpoint has that name, and ``django.db.Error`` when no policies were ever read.
    """
    snapshot, entry = _policies(caller)
    asked = Asked(
        caller=caller,
        entry=entry,
        endpoints=_endpoints(snapshot, entry, scope),
        scope=scope,
        # Requests see few endpoints each; what is worked out of all at once must not push theirs out of memory.
        snapshot=replace(snapshot),
        now_us=_now_us(),
    )
    resolution = resolve_anew(asked)
    buckets = [bucket for bucket in resolution.buckets if bucket.mode == "enforce"]
    shown = buckets[:MAX_LIMITS]
    try:
        statuses = peek(shown)
    except StoreError:
        statuses = {}
    return Standing(
        limits=tuple((bucket, statuses.get(bucket)) for bucket in shown),
        blocked_by=resolution.blocked_by,
        truncated=len(buckets) > len(shown),
    )


def _policies(caller: Caller) -> tuple[Snapshot, UserEntry]:
    """The newest policies; the last known ones, which judge requests as well, while the database is down."""
    try:
        return newest(caller)
    except DatabaseError:
        snapshot, user_id = policies.current(), caller.user_id
        if snapshot is None:
            raise
        return snapshot, (None if user_id is None else policies.user(user_id)) or NOBODY


def _endpoints(snapshot: Snapshot, entry: UserEntry, scope: str | None) -> tuple[EndpointFacts, ...]:
    """The endpoint of that name; without one, those that some policy may limit this caller at, by name."""
    if scope is not None:
        found = tuple(endpoint for endpoint in snapshot.endpoints.values() if endpoint.name == scope)
        if not found:
            raise LookupError(scope)
        return found
    limited = snapshot.groups.keys() | {policy.endpoint_id for policy in entry.policies}
    endpoints = (endpoint for endpoint in snapshot.endpoints.values() if endpoint.id in limited)
    return tuple(sorted(endpoints, key=lambda endpoint: endpoint.name))


def _now_us() -> int:
    try:
        return default_limiter().now_us
    except StoreError:
        return time.time_ns() // 1000
