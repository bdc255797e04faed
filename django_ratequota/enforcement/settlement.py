"""What a request was charged, after it was decided: settled by hand, charged once by several checks, given back.

A request may be checked more than once: by the middleware, a decorator, its view. Each decision settles the units of
its own check. A later check charges a bucket only what its cost exceeds the units that the request paid there. When
it refuses, the units of the earlier checks go back: a refused request is charged nowhere. A check that stands by
itself, one item of a batch, is left out of all that.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from ..engine.charges import Charge, Refund, charges_of, take_all
from ..engine.limiter import Limiter
from ..engine.types import Bucket, BucketStatus, Decision
from ..exceptions import StoreError
from ..monitoring.health import note_degraded
from ..utils.sansio import adrive, drive
from .steps import Step, StepRunner, limiter_or_error

#: The decisions of earlier checks hang on the request (Django's, not DRF's) under this name; most are checked once.
EARLIER = "ratequota_earlier"
#: The last decision that stands by itself (``again=True``), where there is one.
APART = "ratequota_apart"
#: What the middleware charged before the view ran.
HELD = "ratequota_held"


class StoreSettler:
    """Charges and refunds after the decision; a store that fails then is logged and fails no request."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    def charge(self, buckets: tuple[Bucket, ...], *, cost: int) -> Decision:
        return drive(self.steps("charge", buckets, cost), _doer().do)

    def refund(self, buckets: tuple[Bucket, ...], *, cost: int, charged: tuple[int, ...]) -> Decision:
        return drive(self.steps("refund", buckets, cost, charged), _doer().do)

    async def acharge(self, buckets: tuple[Bucket, ...], *, cost: int) -> Decision:
        return await adrive(self.steps("charge", buckets, cost), _doer().ado)

    async def arefund(self, buckets: tuple[Bucket, ...], *, cost: int, charged: tuple[int, ...]) -> Decision:
        return await adrive(self.steps("refund", buckets, cost, charged), _doer().ado)

    def steps(
        self, mode: str, buckets: tuple[Bucket, ...], cost: int, charged: tuple[int, ...] = (0,)
    ) -> Generator[Step, Any, Decision]:
        """The steps of either verb, for ``enforcement`` to drive among its own."""
        try:
            return (yield from self._limiter.steps(mode, buckets, cost, times=charged, settler=self))
        except StoreError as error:
            note_degraded(error.reason, error)
            return Decision(allowed=True, error=error.reason)


def _doer() -> StepRunner:
    # By the settings in force now, in this process: it may have been forked since the decision.
    return StepRunner(limiter_or_error())


class Earlier:
    """What the earlier checks of a request, all of which admitted it, charged and found."""

    def __init__(self, request: Any, decisions: list[Decision]) -> None:
        self._request, self._decisions = request, decisions
        #: The decision of a check that has nothing more to charge, and so nothing to give back.
        self.again = replace(decisions[-1], cost=0, _charges=[])
        #: The counters of this check's buckets: what is charged by hand after it is charged there.
        self._own: frozenset[object] = frozenset()

    @classmethod
    def of(cls, request: Any) -> Earlier | None:
        """None where the request was not checked, or was refused and so charged nowhere."""
        held: Held | None = vars(request).pop(HELD, None)
        if held is not None:
            return held
        decisions = _earlier(request)
        return cls(request, decisions) if decisions else None

    def owed(self, buckets: tuple[Bucket, ...], cost: int) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
        """The buckets to ask now, and the units to charge each of them; the units empty = ``cost`` in each."""
        self._own = frozenset(bucket.counter for bucket in buckets)
        self.again = replace(self.again, _own=self._own)
        paid: dict[object, int] = {}
        for charge in self._charges():
            paid[charge.bucket.counter] = paid.get(charge.bucket.counter, 0) + charge.units
        # Buckets in log mode that had no room have been judged, and are not charged.
        seen = {status.bucket.counter: status.allowed for one in self._decisions for status in one.statuses}
        asked: list[Bucket] = []
        costs: list[int] = []
        for bucket in buckets:
            counter = bucket.counter
            units = cost - paid.get(counter, 0)
            if (counter in seen or counter in paid) and (units <= 0 or not seen.get(counter, True)):
                continue
            asked.append(bucket)
            # What can never be admitted is to be refused as that: no wait for the rest of it helps.
            costs.append(cost if cost > bucket.rate.capacity else units)
        return tuple(asked), () if all(units == cost for units in costs) else tuple(costs)

    def together(self, decision: Decision) -> Decision:
        """The decision, with the buckets of the earlier checks that it did not ask.

        What was counted in another place says nothing here, and is not to be settled here.
        """
        last = self._decisions[-1]
        if last.degraded != decision.degraded:
            return decision
        statuses = {status.bucket.counter: status for status in (*last.statuses, *decision.statuses)}
        return replace(decision, statuses=tuple(statuses.values()), _charges=charges_of(decision), _own=self._own)

    def free(self) -> Generator[Step, Any, list[Decision]]:
        """Give back all that these checks charged; returns how the buckets stand then."""
        given: list[Decision] = []
        for decision in self._decisions:
            charges = [charge for charge in charges_of(decision) if not charge.settled]
            for refund in take_all(charges):
                given += [(yield from _refund(decision, refund))]
        vars(self._request).pop(EARLIER, None)
        return given

    def give_back(self, refused: Decision) -> Generator[Step, Any, Decision]:
        """``free``; returns the refused decision as things stand then."""
        now: dict[object, BucketStatus] = {}
        for given in (yield from self.free()):
            if given.degraded == refused.degraded:
                now |= {status.bucket.counter: status for status in given.statuses}
        statuses = [
            status if (later := now.get(status.bucket.counter)) is None else _since_refund(status, later)
            for status in refused.statuses
        ]
        return replace(refused, statuses=tuple(statuses))

    def _charges(self) -> list[Charge]:
        return [charge for one in self._decisions for charge in charges_of(one) if not charge.settled]


class Held(Earlier):
    """What a request was charged before its view ran. The view's own check takes it over as its own charge."""

    def __init__(self, request: Any, decision: Decision, seen: Any) -> None:
        """``seen`` is what ``decision`` was made of: to note it, where the view makes no decision of its own."""
        charged = {charge.bucket.counter for charge in charges_of(decision)}
        statuses = tuple(status for status in decision.statuses if status.bucket.counter in charged)
        super().__init__(request, [replace(decision, statuses=statuses)])
        self.again = self._decisions[0]
        self.decision, self.seen = decision, seen

    def fits(self, buckets: tuple[Bucket, ...], cost: int) -> bool:
        """Whether a check of ``buckets`` charges all that was charged, and no less."""
        rates = {bucket.counter: bucket.rate for bucket in buckets}
        charges = self._charges()
        return bool(charges) and all(
            rates.get(one.bucket.counter) == one.bucket.rate and one.units <= cost for one in charges
        )

    def hand_over(self, decision: Decision, buckets: tuple[Bucket, ...]) -> Generator[Step, Any, Decision]:
        """Return the decision of the view's check as if that had asked all ``buckets``; refused, it charged none."""
        held = self._decisions[0]
        if decision.degraded == held.degraded:
            charges, new = charges_of(held), charges_of(decision)
            found = {status.bucket.counter: status for status in (*held.statuses, *decision.statuses)}
            statuses = [
                # Other policies may have the same rate: the view's check knows which apply.
                status if status.bucket is bucket else replace(status, bucket=bucket)
                for bucket in buckets
                if (status := found.get(bucket.counter)) is not None
            ]
            # Where nothing was left to ask, both are the same list.
            charges = charges if new is charges else [*charges, *new]
            decision = replace(decision, statuses=tuple(statuses), _charges=charges)
        return decision if decision.allowed else (yield from self.give_back(decision))


def drop_held(request: Any) -> Generator[Step, Any, None]:
    """Give back what was charged before the view: a check that stands by itself does not take it over."""
    held: Held | None = vars(request).pop(HELD, None)
    if held is not None:
        yield from held.free()


def set_apart(request: Any, decision: Decision) -> None:
    """Make a decision that stands by itself the request's last: no other check deducts or gives back its units."""
    _earlier(request)  # keeps the last decision so far, which it takes the place of
    vars(request)[APART] = request.ratequota = decision


def _earlier(request: Any) -> list[Decision]:
    """The decisions of earlier checks, up to the last one."""
    last: Decision | None = getattr(request, "ratequota", None)
    decisions: list[Decision] = vars(request).get(EARLIER, [])
    if last is None or last is vars(request).get(APART):
        return [] if last is None else decisions
    if not last.allowed:
        return []
    if all(last is not decision for decision in decisions):
        decisions.append(last)
        vars(request)[EARLIER] = decisions
    return decisions


def _since_refund(refused: BucketStatus, later: BucketStatus) -> BucketStatus:
    """A bucket of a refusal as it stands after a refund; its wait is for what was asked then."""
    if later.bucket.rate != refused.bucket.rate:
        return refused  # edited between the checks: what is left of the one rate says nothing of the other
    return replace(
        refused,
        remaining=later.remaining,
        reset_after_us=later.reset_after_us,
        next_after_us=later.next_after_us,
    )


def _refund(decision: Decision, refund: Refund) -> Generator[Step, Any, Decision]:
    settler = decision.settler
    if isinstance(settler, StoreSettler):
        return (yield from settler.steps("refund", *refund))
    if settler is None:
        return decision
    # This process's own counters: there is nothing to wait for.
    return settler.refund(refund.buckets, cost=refund.units, charged=refund.charged)
