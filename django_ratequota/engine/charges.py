"""The units that a decision charged, so that a refund gives back these and no others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .rates import BURST_ALGORITHMS

if TYPE_CHECKING:
    from .decision import Decision
    from .types import Bucket, BucketStatus

#: Modes that charge or refund units by hand.
BY_HAND = frozenset({"charge", "refund"})


@dataclass(slots=True)
class Charge:
    """Units that were charged to one bucket at once, minus the refunded ones."""

    bucket: Bucket
    #: Units not refunded yet.
    units: int
    #: When it was charged (µs), by the store's clock; by this process's for a ``LocalLimiter``.
    at_us: int
    #: µs from then until the bucket would have been full again. The oldest units drain first, so these drain last.
    level_us: int
    #: Processes that divide the limit, each with its own counter; 1 = the store counts for all.
    share: int
    #: Charged by ``Decision.charge`` after the check: for work that was done, so no later refusal refunds it.
    settled: bool = False

    def take(self, units: int) -> None:
        """Subtract refunded units; the rest drains that much earlier."""
        self.units -= units
        rate = self.bucket.rate
        if rate.algorithm in BURST_ALGORITHMS:
            self.level_us = max(0, self.level_us - units * self.share * rate.period_us // rate.limit)


class Charges(list[Charge]):
    """What one decision charged and did not give back, the newest last."""

    def __init__(self, charges: Iterable[Charge] = (), *, units: int = 0) -> None:
        """``units`` are the request's: those of its checks, plus and minus those charged and refunded by hand."""
        super().__init__(charges)
        self.units = units
        #: The decision of the last charge or refund by hand; None = none yet.
        self.latest: Decision | None = None


class Refund(NamedTuple):
    """The arguments of one refund."""

    buckets: tuple[Bucket, ...]
    units: int
    #: When they were charged (µs), then each bucket's ``level_us``.
    charged: tuple[int, ...]


class Settler(Protocol):
    """The limiter that made a decision; it charges and refunds the buckets afterwards.

    ``charged`` names the units of a refund: when they were charged (µs), then for each bucket how long after that
    it would have been full again (µs). Empty = the newest units.
    """

    def charge(self, buckets: tuple[Bucket, ...], *, cost: int) -> Decision: ...
    def refund(self, buckets: tuple[Bucket, ...], *, cost: int, charged: tuple[int, ...]) -> Decision: ...
    async def acharge(self, buckets: tuple[Bucket, ...], *, cost: int) -> Decision: ...
    async def arefund(self, buckets: tuple[Bucket, ...], *, cost: int, charged: tuple[int, ...]) -> Decision: ...


def own_costs(mode: str, buckets: tuple[Bucket, ...], cost: int) -> tuple[int, ...]:
    """Return each bucket's own cost where some count requests; else none, as all have the same."""
    if all(bucket.rate.counts == "units" for bucket in buckets):
        return ()
    request = 0 if mode in BY_HAND else 1
    return tuple(request if bucket.rate.counts == "requests" else cost for bucket in buckets)


def charge_each(
    statuses: Sequence[BucketStatus], units: int, at_us: int, share: int = 1, costs: Sequence[int] = ()
) -> Charges:
    """Return the charges of an admitted request of ``units``: the buckets that had room, without those of 0 units.

    ``costs`` are the units of each bucket, in the order of the statuses; empty = by its rate.
    """
    each = costs or [status.bucket.rate.units(units) for status in statuses]
    charges = (
        Charge(status.bucket, cost, at_us, status.reset_after_us, share)
        for status, cost in zip(statuses, each, strict=False)
        if cost and status.allowed
    )
    return Charges(charges, units=units)


def charges_of(decision: Decision) -> Charges:
    """Return what the decision charged, the newest last; always the same list."""
    charges = decision._charges
    if charges is None:
        # A peek, and a decision without the store, has a cost of 0. A check of 0 units lists its charges itself.
        charges = charge_each(decision.statuses, decision.cost, decision.at_us) if decision.cost else Charges()
        object.__setattr__(decision, "_charges", charges)
    return charges


def take(charges: Sequence[Charge], units: int) -> list[Refund]:
    """Take ``units`` from each bucket's charges, the newest first; one refund for what was charged together."""
    left: dict[object, int] = {}
    together: dict[tuple[int, int, int], list[tuple[Bucket, int]]] = {}
    for charge in reversed(charges):
        wanted = left.get(charge.bucket.counter, units)
        taken = min(wanted, charge.units)
        if taken:
            together.setdefault((charge.at_us, taken, wanted), []).append((charge.bucket, charge.level_us))
            charge.take(taken)
            left[charge.bucket.counter] = wanted - taken
    return [
        Refund(tuple(bucket for bucket, _ in of), taken, (at_us, *(level_us for _, level_us in of)))
        for (at_us, taken, _), of in together.items()
    ]


def take_all(charges: Sequence[Charge]) -> list[Refund]:
    """Take all units that are left; a bucket may have been charged more than once."""
    return take(charges, sum(charge.units for charge in charges))
