"""Calls that wait for their turn: slots of one queue, shared by all processes."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from ..engine.decision import Decision, charges_of, take_all
from ..engine.limiter import Limiter
from ..engine.rates import MAX_UNITS
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

    The blocks keep the rate, not only the slots. A caller that wakes late, while others have just begun, books again
    with what is left of ``timeout``, and its first slot is used up. So in no period do more than limit + burst units
    begin. Callers that are always late still make progress, as only blocks that have begun send others back.

    ``cost`` is in units. ``limiter`` is the one to book with, by default that of the settings. The object may be used
    any number of times, also at once, and the block receives the ``Decision`` of ``Limiter.acquire``. Raises
    ``InvalidCost`` for a cost that never fits into the bucket, and ``StoreError`` when Redis gives no decision.
    """

    def __init__(self, bucket: Bucket, timeout: float = 30, *, cost: int = 1, limiter: Limiter | None = None) -> None:
        if bucket.rate.units(check_cost(cost)) > bucket.rate.capacity:
            raise InvalidCost(f"{cost} units never fit into {bucket.rate}: lower the cost or write a larger burst")
        self._bucket, self._timeout, self._cost, self._limiter = bucket, timeout, cost, limiter

    def __enter__(self) -> Decision:
        limiter, left = self._limiter or default_limiter(), self._timeout
        while True:
            booked = _booked(limiter.acquire(self._bucket, left, self._cost), left)
            try:
                time.sleep(booked.retry_after or 0)
            except BaseException:  # whatever a signal's handler raises
                with suppress(RateQuotaError):
                    for refund in take_all(charges_of(booked)):
                        limiter.decide(refund)
                raise
            start = limiter.check((self._starts(),), self._cost)
            if start.allowed:
                return booked
            left = _left(left, booked, start)

    def __exit__(self, *_error: object) -> None:
        """Leave the block; its errors pass."""

    async def __aenter__(self) -> Decision:
        limiter, left = self._limiter or default_limiter(), self._timeout
        while True:
            # A task of its own: when this one is cancelled, what was booked meanwhile must still become known.
            asked = asyncio.ensure_future(limiter.aacquire(self._bucket, left, self._cost))
            try:
                booked = _booked(await asyncio.shield(asked), left)
                await asyncio.sleep(booked.retry_after or 0)
            except asyncio.CancelledError:
                await shielded(_give_back(limiter, asked))
                raise
            start = await limiter.acheck((self._starts(),), self._cost)
            if start.allowed:
                return booked
            left = _left(left, booked, start)

    async def __aexit__(self, *_error: object) -> None:
        """Leave the block; its errors pass."""

    def _starts(self) -> Bucket:
        """Return the counter of the blocks that begin; callers less than an interval late always find room in it.

        To send back all others would stop a machine whose callers are all equally late, though they keep the rate.
        """
        rate = self._bucket.rate
        return replace(self._bucket, rate=replace(rate, burst=min(rate.capacity + 1, MAX_UNITS)))


def _booked(decision: Decision, timeout: float) -> Decision:
    if decision.allowed:
        return decision
    raise NoSlot(timeout, decision.retry_after or 0.0)


def _left(timeout: float, booked: Decision, start: Decision) -> float:
    """Return what is left of the timeout, by the clock of the slots."""
    return max(0.0, timeout - max(0, start.at_us - booked.at_us) / 10**6)


async def _give_back(limiter: Limiter, asked: asyncio.Future[Decision]) -> None:
    with suppress(RateQuotaError):
        for refund in take_all(charges_of(await asked)):
            await limiter.adecide(refund)
