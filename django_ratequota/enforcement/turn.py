"""Calls that wait for their turn: slots of one queue, shared by all processes."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from ..engine.decision import Decision, charges_of, take_all
from ..engine.limiter import Limiter
from ..engine.types import Bucket, check_cost
from ..exceptions import InvalidCost, NoSlot, RateQuotaError
from ..runtime import default_limiter
from ..utils.shielding import shielded


class turn:
    """Wait for the next free slot of a ``leaky_bucket`` used as a queue, then run the block.

        with turn(slots): ...
        async with turn(slots): ...

    Books a slot only if it begins within ``timeout`` (seconds), and sleeps until then. Raises ``NoSlot``, which is a
    ``TimeoutError``, at once where the next slot is later; nothing is booked. A task that is cancelled or interrupted
    while it waits gives its slot back, unless another one has been booked behind it. A block that fails does not, as
    the call may have been made.

    ``cost`` is in units. ``limiter`` is the one to book with, by default that of the settings. The object may be used
    any number of times, also at once, and the block receives the ``Decision`` of ``Limiter.acquire``. Raises
    ``InvalidCost`` for a cost that never fits into the bucket, and ``StoreError`` when Redis gives no decision.
    """

    def __init__(self, bucket: Bucket, timeout: float = 30, *, cost: int = 1, limiter: Limiter | None = None) -> None:
        if bucket.rate.units(check_cost(cost)) > bucket.rate.capacity:
            raise InvalidCost(f"{cost} units never fit into {bucket.rate}: lower the cost or write a larger burst")
        self._bucket, self._timeout, self._cost, self._limiter = bucket, timeout, cost, limiter

    def __enter__(self) -> Decision:
        limiter = self._limiter or default_limiter()
        decision = self._booked(limiter.acquire(self._bucket, self._timeout, self._cost))
        try:
            time.sleep(decision.retry_after or 0)
        except BaseException:  # whatever a signal's handler raises
            with suppress(RateQuotaError):
                for refund in take_all(charges_of(decision)):
                    limiter.decide(refund)
            raise
        return decision

    def __exit__(self, *_error: object) -> None:
        """Leave the block; its errors pass."""

    async def __aenter__(self) -> Decision:
        limiter = self._limiter or default_limiter()
        # A task of its own: when this one is cancelled, what was booked meanwhile must still become known.
        asked = asyncio.ensure_future(limiter.aacquire(self._bucket, self._timeout, self._cost))
        try:
            decision = self._booked(await asyncio.shield(asked))
            await asyncio.sleep(decision.retry_after or 0)
        except asyncio.CancelledError:
            await shielded(_give_back(limiter, asked))
            raise
        return decision

    async def __aexit__(self, *_error: object) -> None:
        """Leave the block; its errors pass."""

    def _booked(self, decision: Decision) -> Decision:
        if decision.allowed:
            return decision
        raise NoSlot(self._timeout, decision.retry_after or 0.0)


async def _give_back(limiter: Limiter, asked: asyncio.Future[Decision]) -> None:
    with suppress(RateQuotaError):
        for refund in take_all(charges_of(await asked)):
            await limiter.adecide(refund)
