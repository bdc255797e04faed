"""On a Cluster: one atomic call a subject, as each may live on a server of its own.

What the caller has to itself comes first, what it shares with others after that. A refusal gives back what the calls
before it took; so does a store that fails in between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from ..exceptions import StoreError
from .charges import charges_of, take
from .types import Bucket, BucketStatus, Decision

#: (mode, buckets of one subject, cost, times in µs) -> the steps of one atomic call.
Ask = Callable[[str, tuple[Bucket, ...], int, tuple[int, ...]], Generator[Any, Any, Decision]]


def ask_each(
    ask: Ask, mode: str, buckets: tuple[Bucket, ...], cost: int, times: tuple[int, ...]
) -> Generator[Any, Any, Decision]:
    """Steps of a verb over buckets of any subjects; raises ``StoreError``.

    The statuses have the buckets' order. A refusal leaves out those whose server could not be asked after it.
    """
    at_us, *each = times  # the rest, if any, is one a bucket: its level, or its own cost
    subjects = sorted(dict.fromkeys(bucket.subject for bucket in buckets), key=_is_shared)
    decisions: list[Decision] = []
    for subject in subjects:
        own = tuple(bucket for bucket in buckets if bucket.subject == subject)
        own_each = (number for bucket, number in zip(buckets, each, strict=False) if bucket.subject == subject)
        # After a refusal, what the others would have said is asked without charging them.
        refused = not all(decision.allowed for decision in decisions)
        try:
            decision = yield from ask("peek" if refused else mode, own, cost, (at_us, *own_each))
        except StoreError:
            if refused:
                continue  # no server that is down turns a refusal into anything else
            if mode == "check":
                yield from _give_back(ask, decisions)
            raise
        if mode == "check" and not refused and not decision.allowed:
            decisions = yield from _give_back(ask, decisions)
        decisions.append(decision)
    statuses = {status.bucket.counter: status for decision in decisions for status in decision.statuses}
    allowed = all(decision.allowed for decision in decisions)
    # Each subject's server has a clock of its own.
    charges = [charge for decision in decisions for charge in charges_of(decision)]
    return Decision(
        allowed=allowed,
        statuses=tuple(statuses[bucket.counter] for bucket in buckets if bucket.counter in statuses),
        at_us=max((decision.at_us for decision in decisions), default=0),
        cost=max((decision.cost for decision in decisions), default=0) if allowed else 0,
        _charges=charges if allowed else None,
    )


def _give_back(ask: Ask, taken: list[Decision]) -> Generator[Any, Any, list[Decision]]:
    """The decisions that had charged, with what was free again after they gave it back."""
    given_back = []
    for decision in taken:
        now: dict[object, BucketStatus] = {}
        for refund in take(charges_of(decision), decision.cost):  # one call for each cost
            try:
                given = yield from ask("refund", *refund)
            except StoreError:
                continue  # its server fails now: the units stay taken until they come back by themselves
            now |= {status.bucket.counter: status for status in given.statuses}
        statuses = tuple(now.get(status.bucket.counter, status) for status in decision.statuses)
        given_back.append(replace(decision, statuses=statuses))
    return given_back


def _is_shared(subject: str) -> bool:
    return subject == "everyone" or subject.startswith("plan:")
