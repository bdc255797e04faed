"""Several checks of one request: by the middleware, a decorator, its view.

A later check charges a bucket only for the units by which its cost exceeds those that the request has paid there.
When it refuses, the units of the earlier checks are refunded: a refused request is charged nowhere. Each decision
settles the units of its own check. Independent checks (``again=True``, one item of a batch) take no part in this.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from ..engine.decision import Charges, Decision, charges_of, take_all
from ..engine.types import Bucket, BucketStatus
from ..monitoring.records import RequestCost
from ..policies.resolver import Resolution
from .settlement import StoreSettler
from .steps import Step

#: Attributes of Django's request: the decisions of earlier checks (most requests are checked once),
EARLIER = "ratequota_earlier"
#: the last independent decision (``again=True``),
APART = "ratequota_apart"
#: and what is recorded of the request so far: (caller, endpoint ids, cost, policy ids).
RECORDED = "ratequota_recorded"


class EarlierChecks:
    """The earlier checks of a request, all of which admitted it: what they charged and found."""

    def __init__(self, request: Any, decisions: list[Decision]) -> None:
        self._request, self._decisions = request, decisions
        self.last = decisions[-1]
        #: Whether these checks are recorded; else the next one's record stands for them, too.
        self.recorded = RECORDED in vars(request)
        #: The decision of a check that has nothing left to charge, and so nothing to refund.
        paid = max(charges_of(decision).units for decision in decisions)
        self.again = replace(self.last, cost=0, _charges=Charges(units=paid))
        #: The counters of this check's buckets: units charged by hand after it are charged there.
        self._own: frozenset[object] = frozenset()

    @classmethod
    def of(cls, request: Any) -> EarlierChecks | None:
        """Return None where the request was not checked, or was refused and so charged nowhere."""
        decisions = _decisions_of(request)
        return cls(request, decisions) if decisions else None

    def owed(self, buckets: tuple[Bucket, ...], cost: int) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
        """Return the buckets to check now, and the units to charge in each; no units = ``cost`` by its rate."""
        self._own = frozenset(bucket.counter for bucket in buckets)
        self.again = replace(self.again, _own=self._own)
        paid: dict[object, int] = {}
        for charge in [one for done in self._decisions for one in charges_of(done) if not one.settled]:
            paid[charge.bucket.counter] = paid.get(charge.bucket.counter, 0) + charge.units
        # Buckets in log mode that had no room are checked, too, though not charged.
        had_room = {status.bucket.counter: status.allowed for done in self._decisions for status in done.statuses}
        unpaid: list[Bucket] = []
        costs: list[int] = []
        for bucket in buckets:
            counter, whole = bucket.counter, bucket.rate.units(cost)
            units = whole - paid.get(counter, 0)
            if (counter in had_room or counter in paid) and (units <= 0 or not had_room.get(counter, True)):
                continue
            unpaid.append(bucket)
            # Above the capacity, check the whole cost: it can never be admitted, and no wait helps.
            costs.append(whole if whole > bucket.rate.capacity else units)
        return tuple(unpaid), () if all(units == cost for units in costs) else tuple(costs)

    def request_cost(self, caller: str, resolution: Resolution, units: int) -> int | RequestCost:
        """Return the cost to record of a later check: with it the record stands for the whole request.

        Just ``units`` where the earlier record is not of this caller: it counts for another one.
        """
        known = vars(self._request).get(RECORDED)
        at_us = self.last.at_us
        if known is None or not at_us or known[0] != caller:
            return units
        _caller, earlier_ids, cost, policy_ids = known
        each = dict.fromkeys((0, *earlier_ids), cost) if isinstance(cost, int) else dict(cost)
        each |= {endpoint: max(units, each.get(endpoint, 0)) for endpoint in (0, *resolution.endpoint_ids)}
        series = ("t", *(f"e{pk}" for pk in earlier_ids or (0,)), *(f"p{pk}" for pk in policy_ids))
        whole = RequestCost(units, tuple(each.items()), (at_us // 10**6, earlier_ids, cost), series)
        vars(self._request)[RECORDED] = (caller, *whole.attempt, tuple({*policy_ids, *resolution.policy_ids}))
        return whole

    def combine(self, decision: Decision) -> Generator[Step, Any, Decision]:
        """Return the decision with the statuses of these checks as well; a refusal refunds their charges.

        Counts of the store and of this process are not combined, because they settle in different places.
        """
        if self.last.degraded == decision.degraded:
            statuses = {status.bucket.counter: status for status in (*self.last.statuses, *decision.statuses)}
            charges = charges_of(decision)
            decision = replace(decision, statuses=tuple(statuses.values()), _charges=charges, _own=self._own)
        return decision if decision.allowed else (yield from self.give_back(decision))

    def narrow(self, buckets: tuple[Bucket, ...]) -> Generator[Step, Any, None]:
        """Keep what these checks charged and found in ``buckets``, and refund the rest."""
        counters = frozenset(bucket.counter for bucket in buckets)
        yield from self._refund_charges(counters)
        kept = tuple(status for status in self.last.statuses if status.bucket.counter in counters)
        self.last, self.again = replace(self.last, statuses=kept), replace(self.again, statuses=kept)

    def _refund_charges(self, kept: frozenset[object] = frozenset()) -> Generator[Step, Any, list[Decision]]:
        """Refund all charges but those in the ``kept`` counters; returns the buckets' state afterwards."""
        refunded: list[Decision] = []
        for decision in self._decisions:
            charges = charges_of(decision)
            for refund in take_all([one for one in charges if not (one.settled or one.bucket.counter in kept)]):
                settler = decision.settler
                if isinstance(settler, StoreSettler):
                    refunded.append((yield from settler.steps(refund)))
                elif settler:  # this process's own counters: nothing blocks
                    refunded.append(settler.decide(refund))
        return refunded

    def give_back(self, refused: Decision) -> Generator[Step, Any, Decision]:
        """Refund all charges of these checks; returns the refused decision with the buckets' state afterwards."""
        vars(self._request).pop(EARLIER, None)
        now: dict[object, BucketStatus] = {}
        for refunded in (yield from self._refund_charges()):
            if refunded.degraded == refused.degraded:
                now |= {status.bucket.counter: status for status in refunded.statuses}
        statuses = [
            status if (later := now.get(status.bucket.counter)) is None else _since_refund(status, later)
            for status in refused.statuses
        ]
        return replace(refused, statuses=tuple(statuses))


def set_apart(request: Any, decision: Decision) -> None:
    """Keep an independent decision, soon the request's last, apart: no other check deducts or refunds its units."""
    _decisions_of(request)  # keeps the last decision so far, which this one replaces
    vars(request)[APART] = decision


def _decisions_of(request: Any) -> list[Decision]:
    """Return the decisions of earlier checks, up to the last one; none where that refused."""
    last: Decision | None = getattr(request, "ratequota", None)
    decisions: list[Decision] = vars(request).get(EARLIER, [])
    if last is None or last is vars(request).get(APART):
        return decisions
    if not last.allowed:
        return []
    # By their charges: copies of a decision share these.
    if all(charges_of(last) is not charges_of(decision) for decision in decisions):
        decisions.append(last)
        vars(request)[EARLIER] = decisions
    return decisions


def _since_refund(refused: BucketStatus, later: BucketStatus) -> BucketStatus:
    """Return a refusal's bucket with its state after a refund; its wait stays, being for the refused cost."""
    if later.bucket.rate != refused.bucket.rate:
        return refused  # edited between the checks: the remaining units of two rates cannot be compared
    return replace(
        refused,
        remaining=later.remaining,
        reset_after_us=later.reset_after_us,
        next_after_us=later.next_after_us,
    )
