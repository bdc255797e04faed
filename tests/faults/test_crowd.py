"""Callers who give up at any moment, in several event loops: nobody gets another's decision."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

import pytest
import redis

from django_ratequota import Bucket, Decision, Limiter, Rate
from tests.faults import poll
from tests.support import server

LOOPS = 3
#: In each loop ten callers ask on and on, beside eight at a time of whom 334 are cancelled.
STEADY, TIMES, DOOMED, AT_ONCE = 10, 50, 334, 8
#: Every caller has a counter and a cost of its own: what is left tells whose it is, and how often it asked.
LIMIT, COST = 10**12, 10**6
ENDLESS = f"{LIMIT}/3650day fixed_window"
SECONDS = 60.0


def asked(caller: int, decision: Decision) -> int:
    """How often the caller has asked, by the decision; fails when the decision is another's."""
    assert decision.allowed
    assert not decision.error
    (status,) = decision.statuses
    times, rest = divmod(LIMIT - status.remaining, COST + caller)
    assert rest == 0, f"caller {caller} got another's decision: {status}"
    return times


@dataclass
class Crowd:
    """Callers by the numbers ``first`` and on, in one event loop."""

    ask: Callable[[int, int], Awaitable[Decision]]
    first: int
    #: Those whose task was to be cancelled: True where it was before it had its decision.
    doomed: dict[int, bool] = field(default_factory=dict)
    #: Seconds within which a call is cancelled: about as long as one takes, on however busy a machine.
    span: float = 0.003

    @property
    def steady(self) -> range:
        return range(self.first, self.first + STEADY)

    async def run(self, at_most: int) -> None:
        rng = Random(self.first)
        await asyncio.gather(*map(self._ask_on, self.steady), *(self._doom(rng) for _ in range(AT_ONCE)))
        # While the loop still runs.
        poll(lambda: connected() <= at_most, 20, f"{at_most} connections, however many calls were cancelled")

    async def _ask_on(self, caller: int) -> None:
        for times in range(1, TIMES + 1):
            assert asked(caller, await self.ask(caller, COST + caller)) == times

    async def _doom(self, rng: Random) -> None:
        while sum(self.doomed.values()) < DOOMED:
            caller = self.steady.stop + len(self.doomed)
            self.doomed[caller] = False
            task = asyncio.ensure_future(self.ask(caller, COST + caller))
            late = rng.randrange(2)
            if late:
                asyncio.get_running_loop().call_later(rng.random() * self.span, task.cancel)
            else:
                for _ in range(rng.randrange(8)):
                    await asyncio.sleep(0)  # one turn of the loop: it is cancelled at a step of its way
                task.cancel()
            try:
                assert asked(caller, await task) == 1
            except asyncio.CancelledError:
                self.doomed[caller] = True
            if late:
                self.span *= 1.05 if self.doomed[caller] else 0.95


def connected() -> int:
    """The number of the server's connections, without those that count them."""
    with redis.Redis.from_url(server.url(), client_name="counting") as client:
        return sum(entry["name"] != "counting" for entry in client.client_list())


@pytest.fixture
def limiter() -> Iterator[Limiter]:
    """Without a deadline, and with connections of its own."""
    with redis.Redis.from_url(server.url()) as client:
        limiter = Limiter(client=client, prefix="rqtest", timeout=SECONDS)
    yield limiter
    limiter.store.close()
    gc.collect()  # whatever a loop left behind warns now, and warnings are errors


@pytest.mark.usefixtures("redis_client")
def test_a_thousand_cancelled_calls_in_three_loops(limiter: Limiter) -> None:
    """A connection released with an unread reply delivers it to the next caller; one not released is lost."""
    rate, outsider = Rate.parse(ENDLESS), LOOPS * 10_000

    def ask(caller: int, cost: int) -> Awaitable[Decision]:
        return limiter.acheck([Bucket(f"user:{caller}", rate)], cost)

    def ask_plainly(caller: int, cost: int) -> Decision:
        return limiter.check([Bucket(f"user:{caller}", rate)], cost)

    assert asked(outsider, ask_plainly(outsider, COST + outsider)) == 1
    crowds = [Crowd(ask, 1 + loop * 10_000) for loop in range(LOOPS)]
    before = connected()
    most = before + LOOPS * (STEADY + AT_ONCE)
    barrier = threading.Barrier(LOOPS + 1)

    def start(crowd: Crowd) -> None:
        barrier.wait(timeout=SECONDS)
        asyncio.run(crowd.run(most))

    with ThreadPoolExecutor(LOOPS) as threads:
        running = threads.map(start, crowds)
        barrier.wait(timeout=SECONDS)
        for times in range(2, 102):
            assert asked(outsider, ask_plainly(outsider, COST + outsider)) == times
        list(running)
    poll(lambda: connected() <= before, 20, "a loop that is done leaves no connection")

    cancelled = counted = 0
    for crowd in crowds:
        for caller in crowd.steady:
            assert asked(caller, ask_plainly(caller, COST + caller)) == TIMES + 1
        for caller, was_cancelled in crowd.doomed.items():
            times = asked(caller, ask_plainly(caller, COST + caller)) - 1
            assert times in ((0, 1) if was_cancelled else (1,))
            cancelled += was_cancelled
            counted += times if was_cancelled else 0
    assert cancelled >= 1000
    assert counted > 10, "some were cancelled after the server had counted them, and before they knew"
