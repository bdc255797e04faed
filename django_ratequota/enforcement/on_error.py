"""What decides while Redis does not: each policy's ``on_error``."""

from __future__ import annotations

from collections.abc import Sequence

from ..conf import settings
from ..engine.types import Bucket, Decision
from ..runtime import process


def decide_without_store(
    buckets: tuple[Bucket, ...],
    reason: str,
    cost: int,
    blocked_by: tuple[str, ...] = (),
    *,
    peek: bool = False,
    costs: Sequence[int] = (),
) -> Decision:
    """What ``on_error`` says; one policy that denies, or has no room locally, outweighs those that allow.

    ``costs`` are each bucket's own, in the order of the buckets; empty = ``cost`` in each.
    """
    enforced = [bucket for bucket in buckets if bucket.mode == "enforce"]
    says = [bucket.on_error or settings.on_error for bucket in enforced]
    denied_by = [bucket.title for bucket, word in zip(enforced, says, strict=True) if word == "deny"]
    if reason == "database" and settings.on_error == "deny":
        denied_by = ["all"]
    local = process.local_limiter()
    own = [bucket for bucket, word in zip(enforced, says, strict=True) if word == "local"]
    each = [units for bucket, units in zip(buckets, costs, strict=False) if bucket in own]
    statuses = local.check(own, cost, peek=bool(peek or denied_by or blocked_by), costs=each) if own else ()
    allowed = not denied_by and not blocked_by and all(status.allowed for status in statuses)
    units = cost if allowed and statuses and not peek else 0
    return Decision(
        allowed=allowed,
        statuses=statuses,
        blocked_by=blocked_by,
        denied_by=tuple(denied_by),
        error=reason,
        settler=local,
        cost=units,
        _charges=local.charges(statuses, units, each),
    )
