"""The limiter of ``on_error = local``: counters of this process, each at its limit / LOCAL_SHARE.

They serve until Redis is back: they start empty and know nothing of other processes. All window algorithms count in
sliding windows and all bucket algorithms in leaky buckets, by the process's monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .charges import Charges, charge_each, own_costs
from .counters import Counters
from .decision import Decision
from .types import Bucket, BucketStatus, check_cost

#: Most counters. When all of them are refusing, new callers share one counter per policy, outside this bound.
SIZE = 10_000


class LocalLimiter(Counters):
    """Decides by this process's share of each limit."""

    def __init__(self, share: int, size: int = SIZE, clock: Callable[[], float] = time.monotonic) -> None:
        """``share`` is the number of processes that divide a limit; ``clock`` returns seconds."""
        super().__init__(share, size, clock)

    def check(
        self, buckets: Sequence[Bucket], cost: int, *, peek: bool = False, costs: Sequence[int] = ()
    ) -> tuple[BucketStatus, ...]:
        """Return each bucket's status, in their order; charge all of them if all have room, and ``peek`` is False.

        Buckets in log mode refuse nothing, and are charged if they have room.

        ``costs`` are each bucket's own, in the order of the buckets; empty = ``cost`` by its rate. A share below one
        unit admits one unit in a period that is longer by that factor. A request that costs more than the share
        passes when its counter is empty.
        """
        each = costs or [bucket.rate.units(cost) for bucket in buckets]
        return self._apply("peek" if peek else "check", buckets, each)[1]

    def charges(self, statuses: Sequence[BucketStatus], cost: int, costs: Sequence[int] = ()) -> Charges:
        """Return what ``check`` has just charged to an admitted request, for refunds."""
        return charge_each(statuses, cost, round(self._clock() * 10**6), self._share, costs)

    def charge(self, buckets: tuple[Bucket, ...], *, cost: int) -> Decision:
        """Charge every bucket that counts units, and refuse none; degraded decisions settle with it."""
        each = self._units("charge", buckets, cost)
        now, statuses = self._apply("charge", buckets, each)
        charges = charge_each(statuses, cost, round(now * 10**6), self._share, each)
        return Decision(allowed=True, statuses=statuses, error="local", settler=self, cost=cost, _charges=charges)

    def refund(self, buckets: tuple[Bucket, ...], *, cost: int, charged: tuple[int, ...] = ()) -> Decision:
        """Give units back, never more than are still counted of the charge.

        Without ``charged``, the newest units; requests stay counted.
        """
        each = [check_cost(cost)] * len(buckets) if charged else self._units("refund", buckets, cost)
        _now, statuses = self._apply("refund", buckets, each, charged)
        return Decision(allowed=True, statuses=statuses, error="local", settler=self)

    async def acharge(self, buckets: tuple[Bucket, ...], *, cost: int) -> Decision:
        """``charge``, for async callers; it does not wait."""
        return self.charge(buckets, cost=cost)

    async def arefund(self, buckets: tuple[Bucket, ...], *, cost: int, charged: tuple[int, ...] = ()) -> Decision:
        """``refund``, for async callers; it does not wait."""
        return self.refund(buckets, cost=cost, charged=charged)

    @staticmethod
    def _units(mode: str, buckets: tuple[Bucket, ...], cost: int) -> Sequence[int]:
        cost = check_cost(cost)
        return own_costs(mode, buckets, cost) or (cost,) * len(buckets)
