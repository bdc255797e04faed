"""Decisions on a Cluster: one atomic call per subject, as each subject may live on a server of its own.

The subjects of this caller alone come first, shared ones (everyone, plan) last. When one of them refuses, or its
store fails, the units that the calls before it charged are given back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from ..exceptions import StoreError
from .charges import Charges, charges_of, take_all
from .decision import Decision
from .types import Bucket, BucketStatus

#: (mode, buckets of one subject, cost, times in µs) -> the steps of one atomic call.
AtomicCall = Callable[[str, tuple[Bucket, ...], int, tuple[int, ...]], Generator[Any, Any, Decision]]


def decide_per_subject(
    call: AtomicCall, mode: str, buckets: tuple[Bucket, ...], cost: int, times: tuple[int, ...]
) -> Generator[Any, Any, Decision]:
    """Return the steps of a verb over buckets of any subjects; raises ``StoreError``.

    The statuses have the buckets' order. A refusal leaves out buckets whose server failed after it.
    """
    at_us, *each = times  # the rest, if any, is one or two per bucket: its level or own cost, and its seed
    subjects = sorted(dict.fromkeys(bucket.subject for bucket in buckets), key=_is_shared)
    decisions: list[Decision] = []
    for subject in subjects:
        own = tuple(bucket for bucket in buckets if bucket.subject == subject)
        own_each = [n for at, n in enumerate(each) if buckets[at % len(buckets)].subject == subject]
        # After a refusal, the other subjects are read, not charged.
        refused = not all(decision.allowed for decision in decisions)
        try:
            decision = yield from call("peek" if refused else mode, own, cost, (at_us, *own_each))
        except StoreError:
            if refused:
                continue  # a server that is down does not undo a refusal
            if mode == "check":
                yield from _give_back(call, decisions)
            raise
        if mode == "check" and not refused and not decision.allowed:
            decisions = yield from _give_back(call, decisions)
        decisions.append(decision)
    statuses = {status.bucket.counter: status for decision in decisions for status in decision.statuses}
    allowed = all(decision.allowed for decision in decisions)
    # Each subject's server has a clock of its own.
    units = max((decision.cost for decision in decisions), default=0) if allowed else 0
    charges = Charges((charge for decision in decisions for charge in charges_of(decision)), units=units)
    return Decision(
        allowed=allowed,
        statuses=tuple(statuses[bucket.counter] for bucket in buckets if bucket.counter in statuses),
        at_us=max((decision.at_us for decision in decisions), default=0),
        cost=units,
        _charges=charges if allowed else None,
    )


def _give_back(call: AtomicCall, charged: list[Decision]) -> Generator[Any, Any, list[Decision]]:
    """Refund the decisions and return them with their buckets' statuses after that."""
    refunded = []
    for decision in charged:
        now: dict[object, BucketStatus] = {}
        for refund in take_all(charges_of(decision)):  # one call for each cost
            try:
                after = yield from call("refund", *refund)
            except StoreError:
                continue  # its server fails now: the units stay charged until they drain or expire
            now |= {status.bucket.counter: status for status in after.statuses}
        statuses = tuple(now.get(status.bucket.counter, status) for status in decision.statuses)
        refunded.append(replace(decision, statuses=statuses))
    return refunded


def _is_shared(subject: str) -> bool:
    return subject == "everyone" or subject.startswith("plan:")
