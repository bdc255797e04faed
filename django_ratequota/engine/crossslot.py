"""Decisions on a Cluster: one atomic call per subject, as each subject may live on a server of its own.

The subjects of this caller alone come first, shared ones (everyone, plan) last. When one of them refuses, or its
store fails, the units that the calls before it charged are given back. Each refund is tried, whatever became of the
others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from ..exceptions import StoreError, StoreLeftAlone
from .decision import Charges, Decision, LimitRequest, Slot, Steps, charges_of, take_all
from .slots import releasing
from .types import BucketStatus

#: Returns the steps of one atomic call over the buckets of one subject.
AtomicCall = Callable[[LimitRequest], Steps]


def decide_per_subject(call: AtomicCall, request: LimitRequest) -> Steps:
    """Return the steps of a verb over buckets of any subjects; raises ``StoreError``.

    The statuses have the buckets' order. A refusal leaves out buckets whose server failed after it.
    """
    decisions: list[Decision] = []
    failure: StoreError | None = None
    subjects = sorted(dict.fromkeys(bucket.subject for bucket in request.buckets), key=_is_shared)
    for subject in subjects:
        places = [at for at, bucket in enumerate(request.buckets) if bucket.subject == subject]
        own = request.part(places)._replace(revision=None)  # which is compared apart
        # After a refusal, the other subjects are read, not charged.
        refused = not all(decision.allowed for decision in decisions)
        try:
            decision = yield from call(own._replace(mode="peek") if refused else own)
        except StoreError as error:
            if refused:
                continue  # a server that is down does not undo a refusal
            if request.mode == "check":
                yield from _give_back(call, decisions, request.slot)
            elif request.mode == "refund":
                failure = error
                continue
            if decisions and isinstance(error, StoreLeftAlone):
                raise StoreError(error.reason, str(error)) from error  # to other servers, something was sent
            raise
        if request.mode == "check" and not refused and not decision.allowed:
            decisions = yield from _give_back(call, decisions, request.slot)
        decisions.append(decision)
    if failure:
        raise failure
    statuses = {status.bucket.counter: status for decision in decisions for status in decision.statuses}
    allowed = all(decision.allowed for decision in decisions)
    # Each subject's server has a clock of its own.
    units = max((decision.cost for decision in decisions), default=0) if allowed else 0
    charges = Charges((charge for decision in decisions for charge in charges_of(decision)), units=units)
    return Decision(
        allowed=allowed,
        statuses=tuple(statuses[bucket.counter] for bucket in request.buckets if bucket.counter in statuses),
        at_us=max((decision.at_us for decision in decisions), default=0),
        revision=request.revision or 0,
        settler=request.settler,
        cost=units,
        _charges=charges if allowed else None,
    )


def _give_back(call: AtomicCall, charged: list[Decision], slot: Slot | None) -> Generator[Any, Any, list[Decision]]:
    """Refund the decisions, release their slots, and return them with their buckets' statuses after that."""
    refunded = []
    for decision in charged:
        now: dict[object, BucketStatus] = {}
        # One call for each cost, and one for the slots.
        for refund in take_all(charges_of(decision)) + releasing(decision, slot):
            try:
                after = yield from call(refund)
            except StoreError:
                continue  # its server fails now: the units stay charged until they drain or expire
            now |= {status.bucket.counter: status for status in after.statuses}
        statuses = tuple(now.get(status.bucket.counter, status) for status in decision.statuses)
        refunded.append(replace(decision, statuses=statuses))
    return refunded


def _is_shared(subject: str) -> bool:
    return subject == "everyone" or subject.startswith("plan:")
