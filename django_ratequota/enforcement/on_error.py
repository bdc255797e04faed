"""Decisions while Redis or the database fails: each policy's ``on_error``."""

from __future__ import annotations

from collections.abc import Sequence

from ..conf import settings
from ..engine.charges import Charges
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
    costs: Sequence[int] = (),
) -> Decision:
    """Return the decision by ``on_error``: refused if any policy denies, or has no room in its local counter.

    ``reason`` is why the store did not decide. ``costs`` are the units of each bucket; empty = ``cost`` by its rate.
    """
    enforced = [bucket for bucket in buckets if bucket.mode == "enforce"]
    actions = [bucket.on_error or settings.on_error for bucket in enforced]
    denied_by = [bucket.title for bucket, action in zip(enforced, actions, strict=True) if action == "deny"]
    if reason == "database" and settings.on_error == "deny":
        denied_by = ["all"]
    local = process.local_limiter()
    counted = [bucket for bucket, action in zip(enforced, actions, strict=True) if action == "local"]
    local_costs = [units for bucket, units in zip(buckets, costs, strict=False) if bucket in counted]
    statuses = (
        local.check(counted, cost, peek=bool(peek or denied_by or blocked_by), costs=local_costs) if counted else ()
    )
    allowed = not denied_by and not blocked_by and all(status.allowed for status in statuses)
    charged = bool(allowed and statuses and not peek)
    units = cost if charged else 0
    return Decision(
        allowed=allowed,
        statuses=statuses,
        blocked_by=blocked_by,
        denied_by=tuple(denied_by),
        error=reason,
        settler=local,
        cost=units,
        _charges=local.charges(statuses, units, local_costs) if charged else Charges(),
    )
