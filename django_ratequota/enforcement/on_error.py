"""Decisions while Redis or the database fails: each policy's ``on_error``."""

from __future__ import annotations

from dataclasses import replace

from ..conf import settings
from ..engine.backend import LimitRequest, Mode
from ..engine.decision import Decision
from ..engine.types import Bucket
from ..runtime import process


def decide_without_store(
    buckets: tuple[Bucket, ...],
    reason: str,
    cost: int,
    blocked_by: tuple[str, ...] = (),
    *,
    peek: bool = False,
    costs: tuple[int, ...] = (),
) -> Decision:
    """Return the decision by ``on_error``: refused if any policy denies, or has no room in its local counter.

    ``reason`` is why the store did not decide. ``costs`` are the units of each bucket; empty = ``cost`` by its rate.
    """
    denied_by = [bucket.title for bucket in buckets if bucket.mode == "enforce" and _action(bucket) == "deny"]
    if reason == "database" and settings.on_error == "deny":
        denied_by = ["all"]
    places = [at for at, bucket in enumerate(buckets) if bucket.mode == "enforce" and _action(bucket) == "local"]
    mode: Mode = "check" if places and not (peek or denied_by or blocked_by) else "peek"
    local = process.local_limiter()
    decision = local.decide(
        LimitRequest(
            mode=mode,
            buckets=tuple(buckets[at] for at in places),
            cost=cost,
            costs=tuple(costs[at] for at in places if costs),
            settler=local,
        )
    )
    return replace(
        decision,
        allowed=decision.allowed and not denied_by and not blocked_by,
        at_us=0,
        blocked_by=blocked_by,
        denied_by=tuple(denied_by),
        error=reason,
    )


def _action(bucket: Bucket) -> str:
    return bucket.on_error or settings.on_error
