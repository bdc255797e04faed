"""Read the limits of a caller at one endpoint or at all, or the tightest of several, without consuming units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..conf import settings
from ..engine.calendar_windows import calendar_window
from ..engine.protocol import MAX_BUCKETS
from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..policies.facts import EndpointFacts, to_datetime
from ..policies.limit_names import limit_name
from ..policies.matching import Where
from ..policies.precedence import outranks_plans
from ..policies.requests.caller import Caller, DescribedCaller, is_verified
from ..policies.resolve_for import Resolved, is_plan_open, own_of, own_or_shared, resolve_for
from ..policies.resolver import Resolution
from ..policies.snapshot import Snapshot
from ..runtime import default_limiter, process
from .counters import is_shared, peek
from .explain import newest_policies

#: Maximum number of limits returned, and of endpoints searched in alphabetical order, a user's own policies first.
MAX_LIMITS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """The limits that are enforced for a caller, without those of unverified subjects."""

    #: Enforced buckets with their status, those for all endpoints first; None while Redis does not answer.
    limits: tuple[tuple[Bucket, BucketStatus | None], ...]
    #: Names of policies whose rate is ``blocked``.
    blocked_by: tuple[str, ...]
    #: Whether limits are missing because of ``MAX_LIMITS``.
    truncated: bool
    #: Redis' time (µs) at which the limits stood so.
    at_us: int

    @property
    def available(self) -> bool:
        """Whether every limit has a status."""
        return all(status is not None for _, status in self.limits)


def caller_limits(caller: Caller, scope: str | None = None, *, ask: bool = True) -> CallerLimits:
    """Return the limits at one endpoint and those for all endpoints together; ``scope`` None = at every endpoint.

    Without ``ask`` Redis is not called, and limits have no status. With ``ENABLED = False`` there are no limits.
    Raises ``LookupError`` when no endpoint has that name, and ``django.db.Error`` when no policies were ever read.
    """
    limiter, policies = process.limiter(), process.policies
    snapshot = newest_policies() if ask else policies.current() or policies.reload(0)
    resolution, more = _resolve(caller, snapshot, scope, limiter.now_us)
    if getattr(limiter, "unlimited", False):
        return CallerLimits(limits=(), blocked_by=(), truncated=False, at_us=0)
    buckets = _shown(resolution.buckets)
    shown, statuses = buckets[:MAX_LIMITS], dict[Bucket, BucketStatus]()
    if ask:
        with suppress(StoreError):
            statuses = peek(shown)
    return CallerLimits(
        limits=tuple((bucket, statuses.get(bucket)) for bucket in shown),
        blocked_by=resolution.blocked_by,
        truncated=more or len(buckets) > len(shown),
        at_us=limiter.now_us,
    )


def describe_limit(bucket: Bucket, status: BucketStatus | None, at_us: int) -> dict[str, Any]:
    """Return what the caller sees of a limit at that time (µs); None for what is not known.

    Times are as model fields have them, waits are whole seconds.
    """
    rate, used = bucket.rate, status.used + status.debt if status else None
    # By the calendar, because the status of an unused counter says 0, and there is none while Redis is down.
    window = calendar_window(rate.calendar, at_us, settings.time_zone, bucket.anchor)[:2] if rate.calendar else None
    reset_us = at_us + status.reset_after_us if status else None
    period_us = window[1] - window[0] if window else 0 if rate.concurrent else rate.period_us
    wait_us = (status.retry_after_us or 0) if status else None
    return {
        **describe_window(bucket, at_us, used=used, window=window, reset_us=reset_us),
        "remaining": status and status.remaining,
        "retry_at": None if wait_us is None else to_datetime(at_us + wait_us),
        "retry_after": None if wait_us is None else _seconds(wait_us),
        "window": _seconds(period_us),
    }


def describe_window(
    bucket: Bucket, at_us: int, *, used: int | None, window: tuple[int, int] | None, reset_us: int | None = None
) -> dict[str, Any]:
    """Return what its caller sees of a limit, now or in the past; ``window`` = its calendar window's bounds (µs).

    ``reset_us`` is when all units are available again; for a calendar window that is its end.
    """
    starts_us, ends_us = window or (None, None)
    reset_us = ends_us or reset_us
    return {
        "title": limit_name(bucket),
        "name": bucket.title,
        "scope": bucket.scope or None,
        "period": bucket.rate.calendar or None,
        "rate": str(bucket.rate),
        "unit": "concurrent requests" if bucket.rate.concurrent else bucket.rate.counts,
        # The kind of the subject, not the subject: a key is a secret.
        "counted_per": bucket.subject.partition(":")[0],
        "limit": bucket.rate.capacity,
        "used": used,
        "starts_at": starts_us and to_datetime(starts_us),
        "ends_at": ends_us and to_datetime(ends_us),
        "reset": reset_us and to_datetime(reset_us),
        "resets_in": reset_us and _seconds(max(0, reset_us - at_us)),
    }


def _seconds(us: int) -> int:
    return -(-us // 10**6)


def _shown(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return the enforced buckets that the caller is shown: no counts that anybody may write or share."""
    kinds = [(bucket, bucket.subject.partition(":")[0]) for bucket in buckets if bucket.mode == "enforce"]
    # An anonymous caller's own limits are those of its address.
    own = ("ip", "caller")
    return tuple(bucket for bucket, kind in kinds if is_verified(kind) or (kind, bucket.counted_per) == own)


def _resolve(caller: Caller, snapshot: Snapshot, scope: str | None, at_us: int) -> tuple[Resolution, bool]:
    """Return what applies to the caller, and whether endpoints with limits were left out."""
    own, where, more = own_or_shared(caller), Where(scope), False
    if scope is None:
        endpoints, more = snapshot.overview.limiting(own.entry, MAX_LIMITS)
        snapshot, where = snapshot.overview.snapshot, Where(endpoints=endpoints)
    elif scope not in snapshot.names:
        raise LookupError(scope)
    return resolve_for(caller, where, snapshot, at_us, own)[1], more


def tightest(callers: Iterable[str], scope: str | None = None) -> dict[str, BucketStatus]:
    """Return caller -> its own enforced counter with the smallest share left; callers without one are left out.

    ``callers`` are subjects such as ``user:42``. Their limits at the endpoint ``scope`` and at all endpoints together
    are compared; without a scope also those at each endpoint, unless these are too many to ask for. Where only a
    request shows what plan its caller is on, the limits are compared that no plan changes. Raises ``StoreError`` and
    ``django.db.Error``.
    """
    limiter = default_limiter()
    if getattr(limiter, "unlimited", False):
        return {}
    overview = process.policies.reload(limiter.stored_revision()).overview
    # Without those that are counted together.
    names = [name for name in callers if name.partition(":")[2] and not is_shared("caller", name)]
    described = {name: DescribedCaller.named(name) for name in names}
    endpoints: tuple[EndpointFacts, ...] = ()
    if scope is not None and scope in overview.by_name:
        endpoints = (overview.by_name[scope],)
    elif scope is None and len(overview.limited) * len(described) <= MAX_BUCKETS:
        endpoints = overview.limited
    where, owns = Where(endpoints=endpoints), own_of(list(described.values()))
    buckets = {
        name: _own_buckets(resolve_for(caller, where, overview.snapshot, limiter.now_us, own))
        for (name, caller), own in zip(described.items(), owns, strict=True)
    }
    statuses = peek(dict.fromkeys(bucket for own in buckets.values() for bucket in own))
    found = {caller: [statuses[bucket] for bucket in own if bucket in statuses] for caller, own in buckets.items()}
    return {caller: min(own, key=_share_left) for caller, own in found.items() if own}


def _own_buckets(resolved: Resolved) -> list[Bucket]:
    """Return the enforced buckets that count only this caller and apply on every plan."""
    context, resolution = resolved
    groups = context.snapshot.groups
    is_open = is_plan_open(context.caller, resolution)
    found = []
    for policy, endpoint, buckets in resolution.applied:
        group = groups.get(endpoint.id if endpoint else None, {}).get(policy.counted_per)
        if not is_open or group is None or not group.enforces_plans() or outranks_plans(policy):
            found += [one for one in buckets if not is_shared(one.counted_per, one.subject)]
    return [bucket for bucket in found if bucket.mode == "enforce"]


def _share_left(status: BucketStatus) -> tuple[float, int]:
    return status.remaining / status.limit, status.remaining
