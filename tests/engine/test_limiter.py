"""The verbs of the engine: several buckets at once, settling, queueing, async twins, bad input."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from enum import IntEnum
from typing import Any

import pytest
import redis
import redis.asyncio

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.exceptions import InvalidBucket
from tests.conftest import NOON_US, Clock
from tests.faults import poll
from tests.project.views import Units

VERBS = ("check", "peek", "charge", "refund")


class Two(IntEnum):
    TWO = 2


class Index:
    """A whole number of another library, such as NumPy."""

    def __index__(self) -> int:
        return 2


TWOS = (Units.TWO, Two.TWO, Index())


def bucket(rate: str, subject: str = "user:1", **more: Any) -> Bucket:
    return Bucket(subject, Rate.parse(rate), **more)


MINUTE = bucket("10/min")


# --- Decisions over several buckets. ---


def test_refused_requests_that_use_up_other_limits(limiter: Limiter) -> None:
    buckets = [
        bucket("100/min"),
        bucket("2/min gcra", scope="search"),
        bucket("1000/day fixed_window", "everyone"),
    ]
    decisions = [limiter.check(buckets) for _ in range(3)]
    assert [decision.allowed for decision in decisions] == [True, True, False]
    assert [status.remaining for status in decisions[1].statuses] == [98, 0, 998]
    assert [status.remaining for status in decisions[2].statuses] == [98, 0, 998]
    assert [status.allowed for status in decisions[2].statuses] == [True, False, True]
    assert [status.bucket for status in decisions[2].statuses] == buckets
    assert decisions[2].refusing == (decisions[2].statuses[1],)
    assert decisions[2].retry_after == decisions[2].statuses[1].retry_after == 30


def test_a_bucket_in_log_mode_is_checked_and_counted_but_never_refuses(limiter: Limiter) -> None:
    logged, enforced = bucket("2/min", scope="a", mode="log"), bucket("4/min", scope="b")
    decisions = [limiter.check([logged, enforced]) for _ in range(5)]
    assert [decision.allowed for decision in decisions] == [True, True, True, True, False]
    assert [decision.statuses[0].allowed for decision in decisions] == [True, True, False, False, False]
    assert [decision.statuses[0].remaining for decision in decisions] == [1, 0, 0, 0, 0]
    assert decisions[2].retry_after_us == 0
    assert decisions[2].statuses[0].retry_after == 30
    assert [status.bucket.scope for status in decisions[4].refusing] == ["b"]
    assert decisions[4].binding == decisions[4].statuses[1]


def test_no_bucket_is_admitted(limiter: Limiter) -> None:
    decision = limiter.check([])
    assert (decision.allowed, decision.statuses, decision.retry_after_us, decision.binding) == (True, (), 0, None)
    assert decision.charge(5) is decision


def test_five_hundred_buckets_are_one_decision(limiter: Limiter) -> None:
    buckets = [bucket("10/min", f"user:{number}") for number in range(500)]
    assert {status.remaining for status in limiter.check(buckets).statuses} == {9}
    with pytest.raises(InvalidBucket, match="at most 500 buckets, not 501"):
        limiter.check([*buckets, bucket("10/min", "user:500")])


def test_the_longest_wait_decides_and_never_is_the_longest(limiter: Limiter) -> None:
    buckets = [bucket("1/min", scope="a"), bucket("1/hour", scope="b"), bucket("1/s", scope="c")]
    limiter.check(buckets)
    refused = limiter.check(buckets)
    never = limiter.check([*buckets, bucket("1/day", scope="d")], 2)
    assert refused.retry_after == 3600
    assert refused.binding == refused.statuses[1]
    assert never.retry_after is None
    assert never.binding is not None
    assert never.binding.retry_after_us is None


def test_the_binding_bucket_of_an_admitted_request_has_the_smallest_share_left(limiter: Limiter) -> None:
    wide = bucket("1000/min", scope="b")
    limiter.charge([wide], 600)
    decision = limiter.check([bucket("10/min", scope="a"), wide, bucket("1/min", scope="c", mode="log")])
    assert [status.remaining for status in decision.statuses] == [9, 399, 0]
    assert decision.binding == decision.statuses[1]


def test_of_two_limits_in_debt_the_first_is_the_tightest(limiter: Limiter) -> None:
    """However deep the debts are: bucket algorithms do not tell theirs."""
    buckets = [Bucket("user:1", Rate.parse(f"{rate} fixed_window")) for rate in ("1000/day", "10/min")]
    done = limiter.check(buckets).charge(1000)
    assert [status.debt for status in done.statuses] == [1, 991]
    assert (done.binding, done.limit) == (done.statuses[0], 1000)


def test_a_misspelled_attribute_of_a_decision_is_named_as_python_does(limiter: Limiter) -> None:
    with pytest.raises(AttributeError, match="'Decision' object has no attribute 'alowed'"):
        limiter.check([]).alowed  # type: ignore[attr-defined]  # noqa: B018


def test_a_decision_tells_how_the_tightest_bucket_stands(limiter: Limiter) -> None:
    wide, tight = bucket("100/hour", scope="a"), bucket("20/min", scope="b")
    decision = limiter.check([wide, tight, bucket("1/hour", scope="c", mode="log")], 5)
    assert (decision.limit, decision.remaining, decision.reset_after) == (20, 15, 15.0)
    refused = limiter.check([wide, tight], 16)
    assert (refused.limit, refused.remaining, refused.reset_after) == (20, 15, 15.0)
    nothing = limiter.check([])
    assert (nothing.limit, nothing.remaining, nothing.reset_after) == (None, None, None)


def test_the_decision_s_own_time_is_the_store_s(limiter: Limiter, clock: Clock, redis_client: redis.Redis) -> None:
    clock.advance(us=7)
    assert limiter.check([MINUTE]).at_us == limiter.now_us == NOON_US + 7
    real = Limiter(client=redis_client, prefix="rqtest", timeout=5)
    seconds, micros = redis_client.time()
    at_us = real.check([MINUTE]).at_us
    real.store.close()
    assert at_us >= seconds * 10**6 + micros
    assert real.now_us >= at_us


# --- Charge, refund, reset. ---


def test_reset_deletes_counters_and_returns_their_number(limiter: Limiter) -> None:
    buckets = [bucket(f"10/min {algorithm}") for algorithm in ALGORITHMS]
    limiter.check(buckets[:4], 10)
    assert limiter.reset(buckets) == 4
    assert limiter.reset(buckets) == 0
    assert limiter.reset([]) == 0
    assert limiter.check(buckets, 10).allowed


# --- acquire: the leaky bucket as a queue. ---

QUEUE = bucket("10/s burst 1 leaky_bucket")


def test_any_number_of_leaky_buckets_is_reset(either: Limiter) -> None:
    buckets = [replace(QUEUE, subject=f"partner:{number}") for number in range(260)]
    either.acquire(buckets[0], timeout=1)
    assert either.reset(buckets) == 1


def test_acquire_beyond_its_timeout_is_refused_at_once_and_books_nothing(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock
) -> None:
    for _ in range(4):
        limiter.acquire(QUEUE, timeout=1)
    [key] = redis_client.keys("rqtest:*")
    before = redis_client.dump(key), redis_client.pexpiretime(key)
    refused = limiter.acquire(QUEUE, timeout=0.399999)
    assert (refused.allowed, refused.retry_after) == (False, 0.4)
    assert (redis_client.dump(key), redis_client.pexpiretime(key)) == before
    booked = limiter.acquire(QUEUE, timeout=0.4)
    assert (booked.allowed, booked.retry_after) == (True, 0.4)
    clock.advance(0.5)
    assert limiter.acquire(QUEUE, timeout=0).retry_after == 0


@pytest.mark.parametrize("rate", ["1/s", "60/min burst 3", "2/hour"])
def test_reset_forgets_a_queue_whatever_rate_it_was_booked_under(limiter: Limiter, rate: str) -> None:
    for _ in range(3):
        limiter.acquire(QUEUE, timeout=1)
    both = [bucket(f"{rate} leaky_bucket"), bucket("7/day leaky_bucket")]
    assert limiter.reset(both) == 1
    assert limiter.acquire(QUEUE, timeout=1).retry_after == 0
    assert limiter.reset([limiter.acquire(QUEUE, timeout=1).statuses[0].bucket]) == 1


def test_a_queue_is_a_counter_of_its_own(redis_client: redis.Redis, limiter: Limiter) -> None:
    limiter.acquire(QUEUE, timeout=1)
    assert limiter.check([QUEUE]).allowed
    assert sorted(redis_client.keys("rqtest:*")) == [b"rqtest:{user:1}:0:lb1", b"rqtest:{user:1}:0:queue"]
    assert limiter.reset([QUEUE]) == 2


def test_only_a_leaky_bucket_queues(limiter: Limiter) -> None:
    with pytest.raises(InvalidBucket, match="acquire needs a leaky_bucket"):
        limiter.acquire(bucket("10/s gcra"), timeout=1)


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), float("inf"), 10**300])
def test_a_timeout_that_is_no_time(limiter: Limiter, timeout: float) -> None:
    with pytest.raises(InvalidBucket, match="timeout must be seconds, 0 or more"):
        limiter.acquire(QUEUE, timeout=timeout)


# --- Async twins. ---


@pytest.fixture
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """``asyncio.run``; then collect garbage inside the test, as warnings are errors."""
    yield asyncio.run
    gc.collect()


def test_async_acquire_settle_and_reset(limiter: Limiter, run: Callable[..., Any]) -> None:
    async def story() -> list[Any]:
        waits = [(await limiter.aacquire(QUEUE, timeout=1)).retry_after for _ in range(3)]
        refused = await limiter.aacquire(QUEUE, timeout=0.1)
        decision = await limiter.acheck([MINUTE])
        charged = await decision.acharge(4)
        refunded = await decision.arefund(2)
        forgotten = await limiter.areset([MINUTE, QUEUE, bucket("5/s")])
        return [waits, refused.allowed, charged.statuses[0].remaining, refunded.statuses[0].remaining, forgotten]

    assert run(story()) == [[0, 0.1, 0.2], False, 5, 7, 2]


def test_loops_use_the_same_connections_and_are_forgotten(
    redis_client: redis.Redis, limiter: Limiter, run: Callable[..., Any]
) -> None:
    """Under WSGI every async call runs in a loop of its own; each stayed in memory with its client and its pool."""
    loops: list[weakref.ref[Any]] = []

    async def ask() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(*(limiter.acheck([MINUTE]) for _ in range(3)))

    run(ask())
    gc.collect()
    before = len(redis_client.client_list())
    for _ in range(10):
        run(ask())
    gc.collect()
    # Fewer where the server had not noticed yet that an earlier test has hung up.
    poll(lambda: len(redis_client.client_list()) <= before, 20, "as many connections as before")
    assert [loop() for loop in loops] == [None] * 11


def test_a_cancelled_call_leaves_the_next_its_own_answer(limiter: Limiter, run: Callable[..., Any]) -> None:
    """A connection released with an unread reply would deliver that reply to its next caller."""

    async def story() -> list[int]:
        await limiter.acheck([MINUTE])
        for _ in range(20):
            task = asyncio.create_task(limiter.acheck([bucket("100/min", "user:2")]))
            await asyncio.sleep(0)  # a turn of the loop: the task has begun
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return [(await limiter.apeek([MINUTE])).statuses[0].limit for _ in range(3)]

    assert run(story()) == [10, 10, 10]


def test_an_async_client_can_be_passed_as_client(redis_client: redis.Redis, clock: Clock) -> None:
    kwargs = redis_client.connection_pool.connection_kwargs
    client = redis.asyncio.Redis(host=kwargs["host"], port=kwargs["port"], db=kwargs.get("db", 0))
    limiter = Limiter(client=client, clock=clock, prefix="rqtest", timeout=5)
    assert limiter.check([MINUTE]).allowed
    assert asyncio.run(limiter.acheck([MINUTE])).statuses[0].remaining == 8
    limiter.store.close()


# --- Bad input. ---


@pytest.mark.parametrize("two", TWOS, ids=lambda two: type(two).__name__)
@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "refund"])
def test_a_cost_is_anything_that_is_a_whole_number(limiter: Limiter, two: Any, verb: str) -> None:
    """An IntegerChoices was sent as its repr: every decision was an error, and plain ints after it as well."""
    # The same command is asked again, by a plain number.
    left = [getattr(limiter, verb)([MINUTE], cost).statuses[0].remaining for cost in (two, 2)]
    assert left == ([10, 10] if verb == "peek" else [8, 6])
    assert limiter.refund([MINUTE], two).statuses[0].remaining == min(10, left[1] + 2)


@pytest.mark.parametrize("two", TWOS, ids=lambda two: type(two).__name__)
def test_so_are_the_numbers_of_a_rate(limiter: Limiter, two: Any) -> None:
    rate = Rate(limit=two, period=60, burst=two)
    assert (type(rate.limit), type(rate.burst), str(rate)) == (int, int, "2/min burst 2")
    subject = Bucket("user:1", rate)
    assert [limiter.check([subject]).allowed for _ in range(3)] == [True, True, False]
    assert not limiter.check([Bucket("user:1", Rate.parse("2/min burst 2"))]).allowed


@pytest.mark.parametrize("now", [0, -1, 1.5, None, "soon", float("nan"), 2**53, 10**5000], ids=lambda n: type(n))
def test_a_clock_that_is_none(redis_client: redis.Redis, now: Any) -> None:
    limiter = Limiter(client=redis_client, clock=lambda: now, prefix="rqtest")
    with pytest.raises(InvalidBucket, match="the clock must return whole µs since the Unix epoch"):
        limiter.check([MINUTE])
    assert redis_client.keys("rqtest:*") == []


@pytest.mark.parametrize("now", [1, 2**52])
def test_the_ends_of_time(redis_client: redis.Redis, now: int) -> None:
    limiter = Limiter(client=redis_client, clock=lambda: now, prefix="rqtest", timeout=5)
    buckets = [bucket(f"10/min {algorithm}") for algorithm in ALGORITHMS]
    for _ in range(2):
        decision = limiter.check(buckets, 5)
    refused = limiter.check(buckets, 5)
    limiter.store.close()
    assert decision.allowed
    assert {status.remaining for status in decision.statuses} == {0}
    assert {status.allowed for status in refused.statuses} == {False}
    assert all(status.retry_after_us for status in refused.statuses)


@pytest.mark.parametrize(
    "twin",
    [
        MINUTE,
        bucket("20/min"),
        bucket("10/min burst 5"),
        bucket("10/min", mode="log"),
        bucket("10/60s", counted_per="caller"),
    ],
    ids=str,
)
def test_two_buckets_of_one_counter_are_refused(limiter: Limiter, twin: Bucket) -> None:
    for ask in (limiter.check, limiter.peek, limiter.charge, limiter.refund, limiter.reset):
        with pytest.raises(InvalidBucket, match="so one counter; keep one"):
            ask([MINUTE, twin])


# --- Names. ---


def test_title() -> None:
    for asked, title in (
        (bucket("10/min"), "all/min"),
        (bucket("10/15min", scope="search"), "search/15min"),
        (bucket("10/min gcra", scope="search"), "search/min gcra"),
        (bucket("10/min", scope="search", counted_per="caller"), "search/min"),
        (bucket("10/min", scope="search", counted_per="ip"), "search/min per ip"),
        (bucket("10/min", name="burst"), "burst"),
    ):
        assert asked.title == title
