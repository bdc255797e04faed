"""The decision about a resolution: by the store, or by each policy's ``on_error`` where it does not answer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from ..conf import settings
from ..engine.decision import Decision, LimitRequest, Mode
from ..engine.limiter import Limiter
from ..engine.protocol import MAX_BUCKETS
from ..engine.types import Bucket
from ..exceptions import InvalidRate, StoreError
from ..monitoring import ledger, restoring
from ..monitoring.health import note_degraded
from ..policies.resolver import Resolution
from ..runtime import process
from ..utils.problems import note_problem
from .settlement import StoreSettler
from .steps import Step


def decide(
    limiter: Limiter | StoreError,
    resolution: Resolution,
    mode: Mode,
    cost: int,
    buckets: tuple[Bucket, ...],
    revision: int | None,
    costs: tuple[int, ...] = (),
) -> Generator[Step, Any, Decision]:
    """Check in the store, or decide by ``on_error`` where it does not answer. Raises ``NewerRevision``.

    ``costs`` are the units of each bucket; empty = ``cost`` by its rate.
    """
    if len(buckets) > MAX_BUCKETS:
        buckets, costs = _limit_number(buckets, costs)
    denied_by = _denied_by(resolution) if resolution.unreadable else ()
    # A blocked request consumes nothing, but asks the store too: so it sees the edit that lifts the block.
    checked = () if resolution.blocked_by or denied_by else buckets
    try:
        if isinstance(limiter, StoreError):
            raise limiter
        durable = resolution.durable and bool(checked) and not limiter.store.absent and ledger.is_kept()
        request = LimitRequest(
            mode=mode,
            buckets=checked,
            cost=cost,
            costs=costs if checked else (),
            revision=revision,
            settler=StoreSettler(limiter),
        )
        decision = yield from (restoring.ask if durable else Limiter.steps)(limiter, request)
        if durable and decision.allowed and mode != "peek":
            ledger.note_charges(decision)
    except StoreError as error:
        if mode != "peek":
            note_degraded(error.reason, error)
        peek = mode == "peek" or bool(denied_by)
        blocked = resolution.blocked_by
        decision = decide_without_store(buckets, error.reason, cost, blocked, peek=peek, costs=costs)
    if resolution.unreadable:
        if mode != "peek":
            ids = ", ".join(str(policy.id) for _name, policy in resolution.unreadable)
            note_degraded("rates", InvalidRate("the rates of policy %(ids)s cannot be read", ids=ids))
        if denied_by:
            names = (*decision.denied_by, *denied_by)
            decision = replace(decision, allowed=False, denied_by=names, error=decision.error or "rates")
    if resolution.blocked_by:
        return replace(decision, allowed=False, blocked_by=resolution.blocked_by)
    return decision


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


def _denied_by(resolution: Resolution) -> tuple[str, ...]:
    """Return the names of the policies that refuse because their rates cannot be read."""
    on_error = settings.on_error
    return tuple(name for name, policy in resolution.unreadable if (policy.on_error or on_error) == "deny")


def _limit_number(buckets: tuple[Bucket, ...], costs: tuple[int, ...]) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
    """Return the first ``MAX_BUCKETS`` buckets and their costs: enforced ones before those in log mode."""
    text = f"a request has {len(buckets)} limits, of which {MAX_BUCKETS} are checked: merge policies or endpoints"
    note_problem("buckets", text)
    order = sorted(range(len(buckets)), key=lambda at: buckets[at].mode != "enforce")[:MAX_BUCKETS]
    return tuple(buckets[at] for at in order), tuple(costs[at] for at in order if costs)
