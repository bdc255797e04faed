"""The decision about a resolution: by the store, or by each policy's ``on_error`` where it does not answer."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from ..conf import settings
from ..engine.decision import Decision, LimitRequest, charges_of
from ..engine.limiter import Limiter
from ..engine.protocol import MAX_BUCKETS
from ..engine.slots import Holder
from ..engine.types import Bucket
from ..exceptions import InvalidRate, StoreError, StoreLeftAlone
from ..monitoring import ledger
from ..monitoring.health import note_degraded
from ..monitoring.outages import outages
from ..monitoring.restoring import restore
from ..policies.facts import PolicyFacts
from ..policies.resolver import Resolution
from ..runtime import process
from ..utils.problems import note_problem
from .step_runner import Step


def decide(
    limiter: Limiter, resolution: Resolution, asked: LimitRequest, holder: Holder | None = None
) -> Generator[Step, Any, Decision]:
    """Check in the store, or decide by ``on_error`` where it does not answer. Raises ``NewerRevision``.

    ``holder`` takes the slots of an admitted request, and learns of which it is not known whether they are taken.
    """
    if holder:
        asked = asked._replace(slot=holder.slot)
    if len(asked.buckets) > MAX_BUCKETS:
        asked = _limit_number(asked)
    counts, blocked_by, unreadable = asked.mode != "peek", resolution.blocked_by, resolution.unreadable
    denied_by = tuple(name for name, policy in unreadable if action_of(policy) == "deny") if unreadable else ()
    # A blocked request consumes nothing, but asks the store too: so it sees the edit that lifts the block.
    sent = asked._replace(buckets=(), costs=()) if blocked_by or denied_by else asked
    try:
        durable = resolution.durable and bool(sent.buckets) and ledger.is_kept(limiter)
        if durable:
            sent = sent._replace(restore=restore)
        if holder and sent.settler:
            holder.asks(sent.settler, sent.buckets)
        decision = yield from limiter.steps(sent)
        if durable and counts and decision.allowed:
            if limiter.store.clustered:
                ledger.note_charges(decision)
            else:
                ledger.note_check(decision, sent)
    except StoreError as error:
        if holder and isinstance(error, StoreLeftAlone):
            holder.spared(sent.settler, sent.buckets)
        if counts:
            note_degraded(error.reason, error)
            if not blocked_by:
                actions = {each.policy_id: action_of(each) for each in asked.buckets if each.mode == "enforce"}
                outages.note(error.reason, actions)
        asked = asked._replace(mode="peek") if denied_by or blocked_by else asked
        decision = decide_without_store(asked, error.reason)
    if unreadable and counts:
        ids = ", ".join(str(policy.id) for _name, policy in unreadable)
        note_degraded("rates", InvalidRate("the rates of policy %(ids)s cannot be read", ids=ids))
    if denied_by:
        names = (*decision.denied_by, *denied_by)
        decision = replace(decision, allowed=False, denied_by=names, error=decision.error or "rates")
    if blocked_by:
        decision = replace(decision, allowed=False, blocked_by=blocked_by)
    if holder:
        holder.decided(decision)
        decision.holder = holder
    return decision


def decide_without_store(asked: LimitRequest, reason: str) -> Decision:
    """Return the decision by ``on_error``: refused if any policy denies, or has no room in its local counter.

    ``reason`` is why the store did not decide.
    """
    actions = [action_of(bucket) if bucket.mode == "enforce" else "allow" for bucket in asked.buckets]
    denied_by = [bucket.title for bucket, action in zip(asked.buckets, actions, strict=True) if action == "deny"]
    if reason == "database" and settings.on_error == "deny":
        denied_by = ["all"]
    places = [at for at, action in enumerate(actions) if action == "local"]
    local = process.local_limiter()
    mode = "peek" if denied_by else asked.mode
    decision = local.decide(asked.part(places)._replace(mode=mode, settler=local))
    return replace(
        decision,
        allowed=decision.allowed and not denied_by,
        at_us=0,
        _charges=charges_of(decision),  # by the clock of this process
        denied_by=tuple(denied_by),
        error=reason,
    )


def action_of(of: Bucket | PolicyFacts) -> str:
    """Return what happens while the store gives no decision: allow, deny or local."""
    return of.on_error or settings.on_error


def _limit_number(asked: LimitRequest) -> LimitRequest:
    """Return the request of the first ``MAX_BUCKETS`` buckets: enforced ones before those in log mode."""
    buckets = asked.buckets
    text = f"a request has {len(buckets)} limits, of which {MAX_BUCKETS} are checked: merge policies or endpoints"
    note_problem("buckets", text)
    return asked.part(sorted(range(len(buckets)), key=lambda at: buckets[at].mode != "enforce")[:MAX_BUCKETS])
