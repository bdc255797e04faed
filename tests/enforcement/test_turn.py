"""``turn``: calls of all processes wait for their slots, begin at the rate, and give slots back that are not used."""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Decision, Limiter, Rate, turn
from django_ratequota.exceptions import InvalidBucket, InvalidCost, NoSlot, RateQuotaError, StoreError
from tests.conftest import Clock
from tests.support.threads import on_threads

SECOND = 10**6
Enter = Callable[[turn], Decision]


def slots(rate: str = "20/s burst 1") -> Bucket:
    return Bucket("partner:maps", Rate.parse(f"{rate} leaky_bucket"), scope="geocode")


@pytest.fixture
def real_limiter(redis_client: redis.Redis) -> Iterator[Limiter]:
    """A limiter by the server's clock."""
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=5)
    yield limiter
    limiter.store.close()


@pytest.fixture(params=["sync", "async"])
def enter(request: Any) -> Iterator[Enter]:
    """Enters the block and leaves it."""

    def plainly(its: turn) -> Decision:
        with its as decision:
            return decision

    async def awaiting(its: turn) -> Decision:
        async with its as decision:
            return decision

    yield plainly if request.param == "sync" else lambda its: asyncio.run(awaiting(its))
    gc.collect()


def next_slot(limiter: Limiter, bucket: Bucket) -> float | None:
    """Seconds until a slot that is booked now; then it is given back."""
    decision = limiter.acquire(bucket, timeout=3600)
    decision.refund(1)
    return decision.retry_after


# --- Waiting. ---


def test_it_enters_at_its_slot(real_limiter: Limiter, enter: Enter) -> None:
    begun = time.monotonic()
    decisions = [enter(turn(slots(), limiter=real_limiter)) for _ in range(4)]
    entered = time.monotonic()
    booked_us = [decision.at_us + (decision.retry_after_us or 0) for decision in decisions]
    assert all(later - one >= 50_000 for one, later in itertools.pairwise(booked_us))
    # The first slot was booked after ``begun``, and nobody enters before his slot.
    assert entered - begun >= (booked_us[-1] - booked_us[0]) / SECOND


def test_one_object_serves_many_threads_at_once(real_limiter: Limiter) -> None:
    its = turn(slots("200/s burst 1"), limiter=real_limiter)

    def work() -> float:
        with its:
            return time.monotonic()

    begun = time.monotonic()
    entered = sorted(on_threads(16, work))
    assert all(at - begun >= 0.005 * number for number, at in enumerate(entered))


def test_a_burst_enters_at_once(limiter: Limiter, enter: Enter) -> None:
    its = turn(slots("2/hour burst 3"), limiter=limiter)
    assert [enter(its).retry_after for _ in range(3)] == [0, 0, 0]
    with pytest.raises(NoSlot):
        enter(its)


@pytest.mark.parametrize("url", ["redis", "memory://"])
def test_the_limiter_of_the_settings_books_by_default(
    redis_client: redis.Redis, enter: Enter, url: str, settings: Any
) -> None:
    if url == "memory://":
        settings.RATEQUOTA, settings.CACHES = {"REDIS_URL": url}, {}
    bucket = Bucket(f"partner:{url}", Rate.parse("2/hour burst 1 leaky_bucket"))
    Limiter().reset([bucket])
    enter(turn(bucket))
    with pytest.raises(NoSlot):
        enter(turn(bucket))
    assert len(redis_client.keys("rqtest:*")) == (2 if url == "redis" else 0)  # slots, and calls that began


# --- Waking late. ---

LATE_US = 410_000
#: When callers wake that sleep until an instant, both in µs from the first call on, and seconds that 100 calls take.
MACHINES: dict[str, tuple[Callable[[int], int], float]] = {
    "late by less than an interval": (lambda at: at + random.Random(at).randrange(50_000), 5),
    "always late": (lambda at: at + LATE_US, 5.5),
    "frozen every two seconds": (lambda at: at + max(0, LATE_US - at % (2 * SECOND)), 6.5),
    "late at random": (lambda at: at + random.Random(at).randrange(LATE_US), 8),
}


def most_in_a_second(times: list[int]) -> int:
    return max(sum(begin <= at < begin + SECOND for at in times) for begin in times)


@pytest.mark.parametrize("burst", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_starts_keep_the_rate_when_callers_wake_late(
    limiter: Limiter, clock: Clock, monkeypatch: pytest.MonkeyPatch, machine: str, burst: int
) -> None:
    """On a machine that froze for 410 ms, 32 calls began within a second of 20/s."""
    its, begun, order, loop_turn = turn(slots(f"20/s burst {burst}"), limiter=limiter), clock.now_us, 0, asyncio.sleep
    wakes_at, enough = MACHINES[machine]
    asleep, starts = list[tuple[int, int, asyncio.Event]](), list[int]()

    async def sleep(seconds: float) -> None:
        nonlocal order
        if not seconds:
            return await loop_turn(0)
        order, woken = order + 1, asyncio.Event()
        wakes = begun + wakes_at(clock.now_us - begun + round(seconds * SECOND))
        heapq.heappush(asleep, (wakes, order, woken))
        await woken.wait()

    async def call() -> None:
        async with its:
            starts.append(clock.now_us)

    async def run() -> None:
        calls = [asyncio.create_task(call()) for _ in range(100)]
        while (ended := sum(one.done() for one in calls)) < len(calls):
            if len(asleep) + ended < len(calls):
                await loop_turn(0)  # somebody asks Redis
            else:
                clock.now_us, _, woken = heapq.heappop(asleep)
                woken.set()
        await asyncio.gather(*calls)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(run())
    gc.collect()
    assert most_in_a_second(starts) <= 20 + burst
    assert starts[-1] - begun <= enough * SECOND


def test_threads_that_wake_late_together_start_one_after_the_other(
    limiter: Limiter, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    its, asleep, starts = turn(slots(), limiter=limiter), 0, list[int]()

    def sleep(seconds: float) -> None:
        nonlocal asleep
        asleep += 1
        if asleep < 30:
            call()  # the next one books and sleeps, too
        elif asleep == 30:
            clock.advance(1.5 + LATE_US / SECOND)
        else:
            clock.advance(seconds)

    def call() -> None:
        with its:
            starts.append(clock.now_us)

    monkeypatch.setattr(time, "sleep", sleep)
    call()
    call()
    assert len(starts) == 31
    assert most_in_a_second(starts) <= 21


def test_a_late_caller_books_again_within_what_is_left_of_its_timeout(
    limiter: Limiter, clock: Clock, monkeypatch: pytest.MonkeyPatch, enter: Enter
) -> None:
    bucket = slots("12/min burst 1")
    limiter.acquire(bucket, timeout=0)

    def sleep(seconds: float) -> None:
        clock.advance(seconds)
        if seconds == 5:
            limiter.charge([bucket], 2)  # others that woke late

    async def asleep(seconds: float) -> None:
        sleep(seconds)

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", sleep)
        patched.setattr(asyncio, "sleep", asleep)
        with pytest.raises(NoSlot, match=r"no slot within 4.5 s; the next one is in 5.0 s"):
            enter(turn(bucket, 9.5, limiter=limiter))
    assert next_slot(limiter, bucket) == 5, "nothing more is booked"


# --- No slot. ---


def test_without_a_slot_in_time_nothing_is_booked(limiter: Limiter, clock: Clock, enter: Enter) -> None:
    bucket = slots("12/min burst 1")
    its = turn(bucket, 4.999, limiter=limiter)
    enter(its)
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"no slot within 4.999 s; the next one is in 5.0 s") as refused:
            enter(its)
        assert isinstance(refused.value, NoSlot)
        assert isinstance(refused.value, RateQuotaError)
        assert refused.value.retry_after == 5
    clock.advance(5)
    enter(its)


def test_mistakes_and_failures_are_raised_as_they_are(limiter: Limiter, enter: Enter) -> None:
    with pytest.raises(InvalidCost, match="3 units never fit into 20/s burst 2 leaky_bucket"):
        turn(slots("20/s burst 2"), cost=3)
    with pytest.raises(InvalidBucket, match="acquire needs a leaky_bucket"):
        enter(turn(Bucket("partner:maps", Rate.parse("20/s")), limiter=limiter))
    with pytest.raises(InvalidBucket, match="timeout must be"):
        enter(turn(slots(), -1, limiter=limiter))
    with redis.Redis(port=1) as nobody:
        absent = Limiter(client=nobody, prefix="rqtest")
        with pytest.raises(StoreError):
            enter(turn(slots(), limiter=absent))
        absent.store.close()


# --- Giving back. ---


def test_a_block_that_fails_keeps_its_slot(limiter: Limiter, clock: Clock) -> None:
    bucket = slots("12/min burst 1")

    def fail() -> None:
        with turn(bucket, limiter=limiter):
            raise LookupError

    async def afail() -> None:
        async with turn(bucket, limiter=limiter):
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert next_slot(limiter, bucket) == 5
    clock.advance(5)
    with pytest.raises(LookupError):
        asyncio.run(afail())
    assert next_slot(limiter, bucket) == 5
    gc.collect()


@pytest.mark.parametrize("counts", ["", " requests"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
def test_an_interrupted_thread_gives_its_slot_back(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], counts: str
) -> None:
    bucket = slots(f"12{counts}/min burst 1")
    limiter.acquire(bucket, timeout=0)

    def interrupted(seconds: float) -> None:
        assert seconds == 5
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", interrupted)
        with pytest.raises(error), turn(bucket, limiter=limiter):
            pytest.fail("it entered")
    assert next_slot(limiter, bucket) == 5


def test_a_thread_that_is_interrupted_while_redis_fails_is_interrupted(
    limiter: Limiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter.acquire(slots("12/min burst 1"), timeout=0)

    def interrupted(_seconds: float) -> None:
        monkeypatch.setattr(limiter, "decide", failing)
        raise KeyboardInterrupt

    def failing(_request: Any) -> Decision:
        raise StoreError("timeout", "no reply")

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt), turn(slots("12/min burst 1"), limiter=limiter):
        pytest.fail("it entered")


class Watched:
    """A limiter that says when it has booked, and waits for ``go`` before it asks."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self.asked, self.go, self.booked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.fails = False

    async def aacquire(self, *args: Any) -> Decision:
        self.asked.set()
        await self.go.wait()
        if self.fails:
            raise StoreError("timeout", "no reply")
        decision = await self._limiter.aacquire(*args)
        self.booked.set()
        return decision

    async def adecide(self, *args: Any) -> Decision:
        await asyncio.sleep(0)  # a turn of the loop, as a call to Redis takes
        return await self._limiter.adecide(*args)


def cancelled(
    limiter: Limiter, bucket: Bucket, story: Callable[[Watched, asyncio.Task[None]], Awaitable[None]]
) -> None:
    """Let a task wait for the slot after the first one, and a story cancel it."""
    limiter.acquire(bucket, timeout=0)

    async def wait(watched: Any) -> None:
        async with turn(bucket, limiter=watched):
            pytest.fail("it entered")

    async def run() -> None:
        watched = Watched(limiter)
        task = asyncio.create_task(wait(watched))
        async with asyncio.timeout(20):
            await story(watched, task)
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    gc.collect()


def test_a_task_that_is_cancelled_gives_its_slot_back(limiter: Limiter) -> None:
    bucket = slots("12/min burst 1")

    async def story(watched: Watched, task: asyncio.Task[None]) -> None:
        watched.go.set()
        await watched.booked.wait()
        assert next_slot(limiter, bucket) == 10
        task.cancel()

    cancelled(limiter, bucket, story)
    assert next_slot(limiter, bucket) == 5


def test_a_task_that_is_cancelled_while_it_books_gives_its_slot_back(limiter: Limiter) -> None:
    bucket = slots("12/min burst 1")

    async def story(watched: Watched, task: asyncio.Task[None]) -> None:
        await watched.asked.wait()
        task.cancel()
        await asyncio.sleep(0)  # a turn of the loop: it gives back
        task.cancel()  # again, while it gives back: that goes on by itself
        watched.go.set()
        await watched.booked.wait()
        with pytest.raises(asyncio.CancelledError):
            await task
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others)

    cancelled(limiter, bucket, story)
    assert next_slot(limiter, bucket) == 5


def test_a_task_that_is_cancelled_while_redis_fails_is_cancelled(limiter: Limiter) -> None:
    async def story(watched: Watched, task: asyncio.Task[None]) -> None:
        await watched.asked.wait()
        task.cancel()
        watched.fails = True
        watched.go.set()

    cancelled(limiter, slots("12/min burst 1"), story)
