"""The decision about a resolution: by the store, or by each policy's ``on_error`` while it is unavailable."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from ..conf import settings
from ..engine.decision import Decision, LimitRequest, Steps, charges_of
from ..engine.limiter import Limiter
from ..engine.protocol import MAX_BUCKETS
from ..engine.types import Bucket
from ..exceptions import InvalidRate, StoreError
from ..ledger import book
from ..ledger.restoring import restore
from ..monitoring.health import note_degraded
from ..monitoring.outages import outages
from ..monitoring.workers import is_kept
from ..policies.facts import PolicyFacts
from ..policies.resolver import Resolution
from ..runtime import process
from ..utils.problems import note_problem
from .step_runner import Step


def enforce(
    limiter: Limiter, resolution: Resolution, request: LimitRequest, checks: Any = None
) -> Generator[Step, Any, Decision]:
    """Check the buckets in the store, or by ``on_error`` while it is unavailable. Raises ``NewerRevision``.

    ``checks`` are those of the request; durable counts hold what this one charges until they have ended.
    """
    if len(request.buckets) > MAX_BUCKETS:
        request = _limit_number(request)
    denied_by = tuple(name for name, policy in resolution.unreadable if action_of(policy) == "deny")
    sent = request
    if resolution.blocked_by or denied_by:
        # It consumes nothing, but asks the store too: so it sees the change that lifts the block.
        request, sent = request._replace(mode="peek"), request._replace(buckets=(), costs=())
    durable = resolution.durable and bool(sent.buckets) and is_kept(limiter)
    try:
        decision = yield from limiter.ask(sent._replace(restore=restore) if durable else sent)
        if durable and sent.mode != "peek":
            book.note_check(decision, sent, checks)
    except StoreError as error:
        if sent.mode != "peek":
            note_degraded(error.reason, error)
            enforced = [] if resolution.blocked_by else [each for each in request.buckets if each.mode == "enforce"]
            outages.note(error.reason, {bucket.policy_id: action_of(bucket) for bucket in enforced})
        decision = yield from without_store(request, error.reason)
        decision.slots = request.slots  # those whose reply was lost
    if resolution.unreadable or resolution.blocked_by:
        return _verdict(decision, resolution, denied_by, counts=sent.mode != "peek")
    return decision


def _verdict(decision: Decision, resolution: Resolution, denied_by: tuple[str, ...], *, counts: bool) -> Decision:
    """Apply the winners that have no counter: those that block, and those whose rates cannot be read."""
    if resolution.unreadable and counts:
        ids = ", ".join(str(policy.id) for _name, policy in resolution.unreadable)
        note_degraded("rates", InvalidRate("the rates of policy %(ids)s cannot be read", ids=ids))
    if denied_by:
        names = (*decision.denied_by, *denied_by)
        decision = replace(decision, allowed=False, denied_by=names, error=decision.error or "rates")
    if resolution.blocked_by:
        decision = replace(decision, allowed=False, blocked_by=resolution.blocked_by)
    return decision


def without_store(request: LimitRequest, reason: str) -> Steps:
    """Return the steps of the decision by ``on_error``; ``reason`` is the reason why the store did not check.

    It is refused if any policy denies, or has no room in its local counter.
    """
    actions = [action_of(bucket) if bucket.mode == "enforce" else "allow" for bucket in request.buckets]
    denied_by = [bucket.title for bucket, action in zip(request.buckets, actions, strict=True) if action == "deny"]
    if reason == "database" and settings.on_error == "deny":
        denied_by = ["all"]
    places = [at for at, action in enumerate(actions) if action == "local"]
    local = process.local_limiter()
    mode = "peek" if denied_by else request.mode
    decision = yield from local.ask(request.part(places)._replace(mode=mode, settler=local))
    allowed, charges = decision.allowed and not denied_by, charges_of(decision)  # by the clock of this process
    return replace(decision, allowed=allowed, at_us=0, denied_by=tuple(denied_by), error=reason, _charges=charges)


def action_of(of: Bucket | PolicyFacts) -> str:
    """Return what happens while the store gives no decision: allow, deny or local."""
    return of.on_error or settings.on_error


def _limit_number(request: LimitRequest) -> LimitRequest:
    """Return the request of the first ``MAX_BUCKETS`` buckets: enforced ones before those in log mode."""
    buckets = request.buckets
    text = f"a request has {len(buckets)} limits, of which {MAX_BUCKETS} are checked: merge policies or endpoints"
    note_problem("buckets", text)
    return request.part(sorted(range(len(buckets)), key=lambda at: buckets[at].mode != "enforce")[:MAX_BUCKETS])
