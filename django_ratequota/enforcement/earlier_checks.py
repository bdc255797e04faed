"""Several checks of one request: by the middleware, a decorator, its view.

A later check charges a bucket only for the units by which its cost exceeds those that the request has paid there. If
another limit of the same counter applies by then, because the user is known, it checks that limit as well. When it
refuses, the units of the earlier checks are refunded: a refused request is charged nowhere. Each decision settles the
units of its own check. Independent checks (``again=True``, one item of a batch) take no part in this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from ..engine.decision import Charges, Decision, LimitRequest, Settler, charges_of, take_all
from ..engine.slots import Slots
from ..engine.types import Bucket, BucketStatus
from ..monitoring.records import Recorded
from ..utils.sansio import Twins
from .settlement import StoreSettler
from .step_runner import Step, Uncancelled

#: The attribute of Django's request with its ``RequestChecks``.
CHECKS = "ratequota_checks"
#: Decisions that admitted a request, each with the statuses of those before.
Admitted = tuple[Decision, ...]


class RequestChecks:
    """What is known of a request's checks so far; several may be under way at once."""

    #: The decisions of its checks; none once one has refused.
    admitted: Admitted = ()
    #: What is recorded of them; None = nothing, so the next one's record stands for them, too.
    recorded: Recorded | None = None
    #: The slots that the checks have taken of concurrent buckets; None = of none.
    slots: Slots | None = None
    #: Whether the request has ended, so that what its checks have charged is final.
    ended = False
    #: Whether the middleware notices that; and whether there are durable charges.
    watched = durable = False
    #: The check before the view runs, until it is recorded, or another check builds on it.
    first: Any = None

    def add(self, decision: Decision) -> None:
        """Add the decision of the next check."""
        self.first = None
        self.admitted = (*self.admitted, decision) if decision.allowed else ()

    def end(self) -> None:
        """End the request: its charges are final, and its slots are released."""
        self.ended = True
        if self.slots is not None:
            self.slots.release()

    async def aend(self) -> None:
        """``end``, awaited; it goes on when the awaiting task is cancelled."""
        self.ended = True
        if self.slots is not None:
            await self.slots.arelease()

    def abandon(self) -> None:
        """``end`` where nothing may wait: the thread releases the slots."""
        self.ended = True
        if self.slots is not None:
            self.slots.abandon()


def owed(
    earlier: Admitted, buckets: Sequence[Bucket], cost: int, slots: Slots | None = None
) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
    """Return the buckets to check now, and the units to charge in each; their rates make units of the whole ``cost``.

    Buckets that were checked and paid are not among them, nor are concurrent ones of which ``slots`` has one. If a
    counter was paid under another limit, the bucket is checked for 0 units and refuses if its limit is exceeded.
    """
    held = {lease.bucket.counter for _keeper, lease in slots.held} if slots else ()
    paid = Counter[object]()
    for charge in [one for done in earlier for one in charges_of(done) if not one.settled]:
        paid[charge.bucket.counter] += charge.units
    checked = {status.bucket.counter: status for done in earlier for status in done.statuses}
    unpaid: list[Bucket] = []
    costs: list[int] = []
    for bucket in buckets:
        counter, whole = bucket.counter, bucket.rate.units(cost)
        units, before = max(0, whole - paid[counter]), checked.get(counter)
        # Log-only buckets that had no room are not charged, but that is known.
        is_known = before is not None and before.bucket == bucket and not (units and before.allowed)
        if is_known or counter in held:
            continue
        unpaid.append(bucket)
        # Above the capacity, check the whole cost: it can never be admitted, and no wait helps.
        costs.append(whole if whole > bucket.rate.capacity else units)
    return tuple(unpaid), tuple(costs)


def again(earlier: Admitted, buckets: Sequence[Bucket]) -> Decision:
    """Return the decision of a check that has nothing left to charge in its buckets, and so nothing to refund."""
    paid = max(charges_of(decision).units for decision in earlier)
    return replace(earlier[-1], cost=0, _charges=Charges(units=paid), _own=_counters(buckets))


def combine(earlier: Admitted, decision: Decision, buckets: Sequence[Bucket]) -> Generator[Step, Any, Decision]:
    """Return the decision about ``buckets`` with the earlier statuses as well; a refusal refunds the earlier charges.

    Counts of the store and of this process are not combined, because they settle in different places.
    """
    last = earlier[-1]
    if last.degraded == decision.degraded:
        statuses = {status.bucket.counter: status for status in (*last.statuses, *decision.statuses)}
        charges = charges_of(decision)
        decision = replace(decision, statuses=tuple(statuses.values()), _charges=charges, _own=_counters(buckets))
    if decision.allowed:
        return decision
    now: dict[object, BucketStatus] = {}
    for refunded in (yield from _refund(earlier)):
        if refunded.degraded == decision.degraded:
            now |= {status.bucket.counter: status for status in refunded.statuses}
    found = [_since_refund(status, now.get(status.bucket.counter, status)) for status in decision.statuses]
    return replace(decision, statuses=tuple(found))


def refund_others(earlier: Admitted, buckets: Sequence[Bucket]) -> Generator[Step, Any, Admitted]:
    """Refund what was charged outside of ``buckets``; returns the decisions with what they found there."""
    counters = _counters(buckets)
    yield from _refund(earlier, counters)
    kept = tuple(status for status in earlier[-1].statuses if status.bucket.counter in counters)
    return *earlier[:-1], replace(earlier[-1], statuses=kept)


def release_others(slots: Slots, buckets: Sequence[Bucket], *, elsewhere: bool) -> Generator[Step, Any, None]:
    """Release the slots taken under other limits of the buckets' counters; ``elsewhere``: of other counters, too."""
    limits = {bucket.counter: (bucket.rate, bucket.mode) for bucket in buckets}
    held = {lease.bucket.counter: (lease.bucket.rate, lease.bucket.mode) for _keeper, lease in slots.held}
    kept = frozenset(one for one in held if held[one] == limits.get(one, None if elsewhere else held[one]))
    if len(kept) < len(held):
        yield release(slots, kept)


def _refund(earlier: Admitted, kept: frozenset[object] = frozenset()) -> Generator[Step, Any, list[Decision]]:
    """Refund all charges but those in the ``kept`` counters; returns the buckets' state afterwards."""
    refunds = [
        (decision.settler, refund)
        for decision in earlier
        if decision.settler
        for refund in take_all([c for c in charges_of(decision) if not (c.settled or c.bucket.counter in kept)])
    ]
    return (yield Uncancelled(_each(refunds))) if refunds else []


def _each(refunds: list[tuple[Settler, LimitRequest]]) -> Generator[Step, Any, list[Decision]]:
    refunded: list[Decision] = []
    for settler, refund in refunds:
        if isinstance(settler, StoreSettler):
            refunded.append((yield from settler.steps(refund)))
        else:  # this process's own counters: nothing blocks
            refunded.append(settler.decide(refund))
    return refunded


def release(slots: Slots, kept: frozenset[object] = frozenset()) -> Twins:
    """Return the step that releases the slots of the request, but for those of the ``kept`` counters."""
    return Twins(slots.release, slots.arelease, (kept,))


def _counters(buckets: Sequence[Bucket]) -> frozenset[object]:
    return frozenset(bucket.counter for bucket in buckets)


def _since_refund(refused: BucketStatus, later: BucketStatus) -> BucketStatus:
    """Return a refusal's bucket with its state after a refund; its wait stays, being for the refused cost."""
    if later.bucket.rate != refused.bucket.rate:
        return refused  # checked under another limit before: the remaining units of two rates cannot be compared
    return replace(
        refused, remaining=later.remaining, reset_after_us=later.reset_after_us, next_after_us=later.next_after_us
    )
