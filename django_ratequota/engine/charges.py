"""The units that a decision charged, so that a refund gives back these and no others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .rates import BURST_ALGORITHMS

if TYPE_CHECKING:
    from .types import Bucket, BucketStatus, Decision


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


def charge_each(
    statuses: Iterable[BucketStatus], units: int, at_us: int, share: int = 1, costs: Sequence[int] = ()
) -> list[Charge]:
    """Return the charges of the buckets that had room, without those of 0 units.

    ``costs`` are the units of each bucket, in the order of the statuses; empty = ``units`` in each.
    """
    return [
        Charge(status.bucket, cost, at_us, status.reset_after_us, share)
        for status, cost in zip(statuses, costs or repeat(units), strict=False)
        if units and cost and status.allowed
    ]


def charges_of(decision: Decision) -> list[Charge]:
    """Return what the decision charged, the newest last; always the same list."""
    charges = decision._charges
    if charges is None:
        charges = charge_each(decision.statuses, decision.cost, decision.at_us) if decision.allowed else []
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
