"""The six algorithms on a real server: tables to read, and properties that hold for all of them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from fractions import Fraction
from math import floor
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.decision import LimitRequest
from django_ratequota.engine.keys import bucket_key
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS
from tests.conftest import NOON_US, Clock
from tests.support.properties import examples, thorough_after

SECOND = 10**6
METERS = sorted(BURST_ALGORITHMS)
#: A property's examples, the same in every run, on fixtures that hold no state of their own.
EXAMPLES = examples(40)


def bucket(rate: str, subject: str = "user:1", **more: Any) -> Bucket:
    return Bucket(subject, Rate.parse(rate), **more)


def ask_all(
    client: redis.Redis, limiter: Limiter, clock: Clock, asks: Iterable[tuple[int, Bucket]]
) -> list[Decision]:
    """``check`` many times at chosen instants, in one pipeline: same commands, a tenth of the time.

    In a transaction, because keys expire by the server's clock, which stands still in one.
    """
    limiter.peek([])  # the script is loaded
    running, pipeline = [], client.pipeline(transaction=True)
    for clock.now_us, asked in asks:
        steps = limiter.ask(LimitRequest(mode="check", buckets=(asked,)))
        pipeline.execute_command(*next(steps))
        running.append(steps)
    decisions = []
    for steps, reply in zip(running, pipeline.execute(), strict=True):
        with pytest.raises(StopIteration) as stop:
            steps.send(reply)
        decisions.append(stop.value.value)
    return decisions


def everything(client: redis.Redis) -> dict[bytes, tuple[bytes, int]]:
    """Each key with its content and the instant at which it expires."""
    return {key: (client.dump(key), client.pexpiretime(key)) for key in client.keys("rqtest:*")}


# --- Tables: (seconds, cost) -> admitted, remaining, retry after, reset after (seconds; None = never). ---

YES, NO = True, False
FIXED_WINDOW = [
    #    now  cost  admitted  remaining  retry  reset
    (0.000000, 1, YES, 3, 0, 10),
    (1.000000, 3, YES, 0, 0, 9),
    (2.000000, 1, NO, 0, 8, 8),
    (9.999999, 1, NO, 0, 0.000001, 0.000001),
    (10.00000, 4, YES, 0, 0, 10),  # the next window
    (15.00000, 5, NO, 0, None, 5),  # more than the limit
    (27.50000, 2, YES, 2, 0, 2.5),
    (27.50000, 0, YES, 2, 0, 2.5),  # a free request
]
SLIDING_WINDOW_LOG = [
    (0.000000, 1, YES, 3, 0, 10),
    (3.000000, 3, YES, 0, 0, 10),
    (4.000000, 1, NO, 0, 6, 9),  # until the request of second 0 is ten seconds old
    (4.000000, 2, NO, 0, 9, 9),  # until that of second 3 is
    (9.999999, 1, NO, 0, 0.000001, 3.000001),
    (10.00000, 1, YES, 0, 0, 10),
    (13.00000, 2, YES, 1, 0, 10),
    (13.00000, 5, NO, 1, None, 10),
    (23.00000, 4, YES, 0, 0, 10),
]
SLIDING_WINDOW_COUNTER = [
    (0.000000, 4, YES, 0, 0, 20),
    (5.000000, 1, NO, 0, 7.5, 15),  # at 12.5 three quarters of the first window's four are in sight
    (12.49999, 1, NO, 0, 0.00001, 7.50001),
    (12.50000, 1, YES, 0, 0, 17.5),
    (15.00000, 1, YES, 0, 0, 15),
    (15.00000, 2, NO, 0, 5, 15),
    (20.00000, 2, YES, 0, 0, 20),
    (40.00000, 5, NO, 4, None, 0),  # two windows later nothing is left
]
#: 6/min burst 3: one unit every ten seconds.
METER = [
    (0.000000, 2, YES, 1, 0, 20),
    (0.000000, 2, NO, 1, 10, 20),
    (5.000000, 1, YES, 0, 0, 25),
    (5.000000, 1, NO, 0, 5, 25),
    (9.999999, 1, NO, 0, 0.000001, 20.000001),
    (10.00000, 1, YES, 0, 0, 30),
    (70.00000, 3, YES, 0, 0, 30),
    (70.00000, 4, NO, 0, None, 30),  # more than the burst
    (75.00000, 1, NO, 0, 5, 25),
    (80.00000, 1, YES, 0, 0, 30),
]
Row = tuple[float, int, bool, int, float | None, float]


@pytest.mark.parametrize(
    ("rate", "table"),
    [
        ("4/10s fixed_window", FIXED_WINDOW),
        ("4/10s sliding_window_log", SLIDING_WINDOW_LOG),
        ("4/10s sliding_window_counter", SLIDING_WINDOW_COUNTER),
        ("6/min burst 3 token_bucket", METER),
        ("6/min burst 3 leaky_bucket", METER),
        ("6/min burst 3 gcra", METER),
    ],
    ids=ALGORITHMS,
)
def test_table(limiter: Limiter, clock: Clock, rate: str, table: list[Row]) -> None:
    for seconds, cost, *expected in table:
        clock.now_us = NOON_US + round(seconds * SECOND)
        [status] = limiter.check([bucket(rate)], cost).statuses
        found = [status.allowed, status.remaining, status.retry_after, status.reset_after]
        assert found == expected, f"at {seconds} s, cost {cost}"


# --- What is written, and what is not. ---


@pytest.fixture
def one_of_each(limiter: Limiter) -> list[Bucket]:
    """A half-used bucket of each algorithm."""
    buckets = [bucket(f"10/hour {algorithm}", scope="room") for algorithm in ALGORITHMS]
    limiter.check(buckets, 5)
    return buckets


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_refused_request_changes_nothing_in_any_bucket(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock, one_of_each: list[Bucket], algorithm: str
) -> None:
    """A client that retries while blocked must not prolong its block, nor use up its other limits."""
    full = bucket(f"2/hour {algorithm}", scope="full")
    limiter.check([full], 2)
    before = everything(redis_client)
    assert len(before) == len(ALGORITHMS) + 1
    clock.advance(us=1)
    for asked in ([full], [full, *one_of_each], [*one_of_each, full]):
        assert not limiter.check(asked).allowed
    assert not limiter.check(one_of_each, 6).allowed
    assert not limiter.check(one_of_each, 11).allowed
    assert everything(redis_client) == before


def test_peek_changes_nothing_even_when_windows_have_passed(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock, one_of_each: list[Bucket]
) -> None:
    """A peek that rotated the windows it read lost a window's count."""
    before = everything(redis_client)
    for advance in (0, 1, 3600, 7200, 10**6):
        clock.advance(advance)
        for cost in (0, 1, 6, 11):
            limiter.peek(one_of_each, cost)
    assert everything(redis_client) == before


def test_refused_requests_do_not_trim_the_log(redis_client: redis.Redis, limiter: Limiter, clock: Clock) -> None:
    asked = [bucket("3/min sliding_window_log")]
    for _ in range(3):
        limiter.check(asked)
        clock.advance(20)
    clock.advance(1)  # the first one has expired
    before = everything(redis_client)
    assert not limiter.check(asked, 2).allowed
    assert everything(redis_client) == before


@pytest.mark.parametrize("meter", METERS)
def test_a_bucket_that_refills_within_milliseconds_is_not_lost(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock, meter: str
) -> None:
    """A TTL rounded down to 0 deleted the key: 1000/s burst 400 admitted 3000 of 3000."""
    asked = bucket(f"1000/s burst 400 {meter}")
    decisions = ask_all(redis_client, limiter, clock, [(NOON_US, asked)] * 1000)
    assert [decision.allowed for decision in decisions] == [True] * 400 + [False] * 600


# --- High rates. ---


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", thorough_after(1, ALGORITHMS))
def test_ten_thousand_a_second_saturated_for_seconds(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock, algorithm: str
) -> None:
    """Doubles near 1.7e15 µs have a step of 0.25 µs: emission intervals rounded to it lost 2 % of the limit."""
    limit, step_us = 9_973, 83  # a prime, so that no interval is whole; 12,048 are asked for in a second
    burst = 10 if algorithm in BURST_ALGORITHMS else None
    rate = Rate(limit=limit, period=1, burst=burst, algorithm=algorithm)
    times = range(NOON_US, NOON_US + (1 if burst else 2) * SECOND, step_us)
    decisions = ask_all(redis_client, limiter, clock, [(at, Bucket("user:1", rate)) for at in times])
    admitted = [at for at, decision in zip(times, decisions, strict=True) if decision.allowed]
    if burst:
        total = 0
        for asked, (at, decision) in enumerate(zip(times, decisions, strict=True), 1):
            total += decision.allowed
            assert total == min(asked, burst + floor(Fraction((at - NOON_US) * limit, SECOND)))
    else:
        first = sum(at < NOON_US + SECOND for at in admitted)
        assert first == limit
        assert limit * 0.999 <= len(admitted) - first <= limit
    if algorithm == "sliding_window_log":
        seen: deque[int] = deque()
        for at in admitted:
            seen.append(at)
            while seen[0] <= at - SECOND:
                seen.popleft()
            assert len(seen) <= limit


@pytest.mark.parametrize("algorithm", [*METERS, "sliding_window_counter"])
@pytest.mark.parametrize(
    "rate", thorough_after(1, ["999_983/week", "1_000_000/week", "10_000_000/day", "123_456_789/30day"])
)
def test_beyond_the_exact_domain_no_wait_is_wrong_by_more_than_a_microsecond(
    limiter: Limiter, clock: Clock, algorithm: str, rate: str
) -> None:
    chance = random.Random(f"{algorithm} {rate}")
    asked = bucket(f"{rate} {algorithm}")
    limit, period_us = asked.rate.limit, asked.rate.period_us
    limiter.check([asked], limit)
    admitted, late = limit, 0
    for _ in range(150):
        cost = chance.choice([1, 1, 2, 1000, limit // 10])
        decision = limiter.check([asked], cost)
        if not decision.allowed:
            assert decision.retry_after_us
            clock.advance(us=decision.retry_after_us - 1)
            assert not limiter.check([asked], cost).allowed
            clock.advance(us=1)
            decision = limiter.check([asked], cost)
        if not decision.allowed:
            assert decision.retry_after_us == 1
            late += 1
            clock.advance(us=1)
            decision = limiter.check([asked], cost)
        assert decision.allowed
        admitted += cost
        if algorithm in BURST_ALGORITHMS:
            assert admitted <= limit + Fraction(limit * (clock.now_us + 1 - NOON_US), period_us)
    assert late < 30


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_largest_numbers_are_counted(limiter: Limiter, clock: Clock, algorithm: str) -> None:
    rate = Rate(limit=10**12, period=3653 * 86_400, algorithm=algorithm)
    asked = [Bucket("user:1", rate)]
    assert limiter.check(asked, 10**12).allowed
    refused = limiter.check(asked, 10**12)
    assert not refused.allowed
    assert refused.retry_after_us
    assert 0 < refused.retry_after_us <= 2 * rate.period_us
    for _ in range(3):  # debts beyond every bound stay numbers
        [status] = limiter.charge(asked, 10**12).statuses
        assert (status.remaining, status.retry_after_us) == (0, 0)
        assert 0 < status.reset_after_us < 2**53


@pytest.mark.parametrize("meter", METERS)
def test_a_debt_of_ages_stays_a_number(redis_client: redis.Redis, limiter: Limiter, meter: str) -> None:
    asked = bucket(f"1/3653day {meter}")
    [owing] = limiter.charge([asked], 10**12).statuses
    [refused] = limiter.check([asked]).statuses
    assert (owing.remaining, owing.reset_after_us) == (0, 2**53 - 1)
    assert (refused.allowed, refused.retry_after_us, refused.reset_after_us) == (False, 2**53 - 1, 2**53 - 1)
    # The key need not outlive ten years.
    assert 0 < redis_client.pttl(bucket_key("rqtest", asked)) <= 3653 * 86_400 * 1000


# --- The log's memory. ---


def test_the_log_takes_sixteen_bytes_a_request(redis_client: redis.Redis, limiter: Limiter, clock: Clock) -> None:
    """A sorted set took 95."""
    asked = bucket("1000/min sliding_window_log")
    decisions = ask_all(redis_client, limiter, clock, [(NOON_US + 977 * i, asked) for i in range(1200)])
    assert sum(decision.allowed for decision in decisions) == 1000
    memory = redis_client.memory_usage(bucket_key("rqtest", asked), samples=0)
    assert memory <= 16 * 1000


def test_one_request_of_any_cost_is_one_entry_of_the_log(
    redis_client: redis.Redis, limiter: Limiter, clock: Clock
) -> None:
    asked = bucket("10/min sliding_window_log")
    limiter.check([asked], 10)
    limiter.charge([asked], 10**9)
    assert redis_client.llen(bucket_key("rqtest", asked)) == 2 * 2
    assert limiter.refund([asked], 10**9).statuses[0].remaining == 0
    clock.advance(60)
    assert limiter.check([asked], 10).allowed


def test_the_log_drops_expired_entries(redis_client: redis.Redis, limiter: Limiter, clock: Clock) -> None:
    asked = bucket("10/min sliding_window_log")
    for _ in range(500):
        clock.advance(6)
        assert limiter.check([asked]).allowed
    assert redis_client.llen(bucket_key("rqtest", asked)) <= 2 * 11


@pytest.mark.parametrize("behind", [999, 1000])
def test_a_refund_passes_a_thousand_requests_at_most(either: Limiter, clock: Clock, behind: int) -> None:
    """It rewrote all requests behind its own: with 10**6 of them the server did nothing else for 2 s."""
    asked = bucket("100_000/min sliding_window_log")
    charged = either.check([asked], 5)
    for _ in range(behind):
        clock.advance(us=1)
        either.charge([asked])
    given_back = 5 if behind < 1000 else 0
    assert charged.refund(5).statuses[0].remaining == 100_000 - behind - 5 + given_back
    clock.advance(60, us=-behind)  # the request charged expires, then the others do
    assert either.peek([asked]).remaining == 100_000 - behind
    clock.advance(us=behind)
    assert either.peek([asked]).remaining == 100_000
