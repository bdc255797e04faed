"""This process's own counters: the share that they admit, whom they remember, and that they stay few.

That each algorithm is exact is compared in ``test_memory``; here a unit counts as often as processes divide a limit.
"""

from __future__ import annotations

from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, Rate
from django_ratequota.engine.decision import Decision, LimitRequest
from django_ratequota.engine.memory import LocalLimiter
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS
from tests.conftest import Clock
from tests.support.properties import examples
from tests.support.threads import on_threads

HISTORY = st.lists(st.tuples(st.integers(0, 150), st.integers(0, 12)), min_size=1, max_size=12)


def bucket(rate: str, subject: str = "user:1", scope: str = "") -> Bucket:
    return Bucket(subject, Rate.parse(rate), scope=scope)


def limiter_of(share: int, clock: Clock, size: int = 10_000) -> LocalLimiter:
    return LocalLimiter(share, UTC, clock, size)


def check(limiter: LocalLimiter, *buckets: Bucket, cost: int = 1) -> Decision:
    return limiter.decide(LimitRequest(mode="check", buckets=buckets, cost=cost, settler=limiter))


def ask(limiter: LocalLimiter, *buckets: Bucket, cost: int = 1) -> bool:
    return check(limiter, *buckets, cost=cost).allowed


def peek(limiter: LocalLimiter, asked: Bucket, cost: int = 1) -> Decision:
    return limiter.decide(LimitRequest(mode="peek", buckets=(asked,), cost=cost))


def admitted(limiter: LocalLimiter, asked: Bucket, times: int = 100) -> int:
    return [ask(limiter, asked) for _ in range(times)].count(True)


# --- Shares. ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_process_admits_its_share(algorithm: str) -> None:
    # With fewer units than processes, one in a period as many times longer.
    table = [(100, 4, 25, 250), (10, 4, 2, 25), (4, 4, 1, 10), (1, 4, 1, 2), (3, 4, 1, 7), (7, 1, 7, 70)]
    for limit, share, first, in_ten_periods in table:
        clock = Clock()
        limiter, asked = limiter_of(share, clock), bucket(f"{limit}/min {algorithm}")
        total = admitted(limiter, asked)
        assert total == first
        for _ in range(600):
            clock.advance(1)
            total += admitted(limiter, asked, 3)
        # Of a limit of one, a sliding window that counts the one before admits every other.
        least = in_ten_periods * (0.95 if algorithm in BURST_ALGORITHMS else 0.45)
        assert least - 1 <= total <= in_ten_periods + first + 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(history=HISTORY, share=st.integers(2, 8), part=st.integers(1, 40))
@examples(100)
def test_a_unit_of_a_share_is_as_many_of_the_limit(
    algorithm: str, history: list[tuple[int, int]], share: int, part: int
) -> None:
    clock = Clock()
    own, whole = limiter_of(share, clock), limiter_of(1, clock)
    asked = bucket(f"{part * share}/min {algorithm}")
    for pause, units in history:
        clock.advance(pause)
        found, expected = check(own, asked, cost=min(units, part)), check(whole, asked, cost=min(units, part) * share)
        assert (found.allowed, found.retry_after, found.reset_after, found.remaining) == (
            expected.allowed,
            expected.retry_after,
            expected.reset_after,
            (expected.remaining or 0) // share,
        )


@pytest.mark.parametrize("algorithm", sorted(BURST_ALGORITHMS))
def test_a_burst_is_shared_too(clock: Clock, algorithm: str) -> None:
    limiter, asked = limiter_of(4, clock), bucket(f"60/min burst 20 {algorithm}")
    assert admitted(limiter, asked) == 5
    clock.advance(4)
    assert admitted(limiter, asked) == 1
    clock.advance(3600)
    assert admitted(limiter, asked) == 5


def test_a_month_is_the_calendars_unless_the_share_is_below_one_unit(clock: Clock) -> None:
    limiter, month = limiter_of(4, clock), bucket("100/month")
    assert admitted(limiter, month) == 25
    clock.advance((peek(limiter, month).reset_after or 0) - 1)
    assert admitted(limiter, month) == 0
    clock.advance(1)
    assert admitted(limiter, month) == 25
    assert check(limiter, bucket("1/month", "user:2")).reset_after == 4 * 31 * 86_400


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(history=HISTORY, limit=st.integers(1, 40), share=st.integers(1, 8), cost=st.integers(1, 12))
@examples(150)
def test_waits_are_exact(algorithm: str, history: list[tuple[int, int]], limit: int, share: int, cost: int) -> None:
    """Refused until retry_after, admitted at it; and no unit comes back before next_after."""
    asked = bucket(f"{limit}/min {algorithm}")

    def after(wait_us: int) -> Decision:
        clock = Clock()
        limiter = limiter_of(share, clock)
        for pause, units in history:
            clock.advance(pause)
            check(limiter, asked, cost=units)
        clock.advance(us=wait_us)
        return peek(limiter, asked, cost)

    [status] = after(0).statuses
    if cost > limit:
        assert (status.allowed, status.retry_after_us) == (False, None)
    elif status.retry_after_us:
        assert [after(status.retry_after_us - 1).allowed, after(status.retry_after_us).allowed] == [False, True]
    if status.next_after_us is None:
        # Nothing is used, or less than the part of a unit that the share has beyond whole ones.
        assert status.remaining == max(1, limit // share)
    else:
        left = [after(status.next_after_us + us).statuses[0].remaining for us in (-1, 0)]
        assert left[0] <= status.remaining < left[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_cost_above_the_share_passes_with_an_empty_counter(clock: Clock, algorithm: str) -> None:
    """Else a process would always refuse a cost that the limit allows."""
    limiter, asked = limiter_of(4, clock), bucket(f"20/min {algorithm}")
    assert ask(limiter, asked)
    refused = check(limiter, asked, cost=12)
    assert not refused.allowed
    clock.advance(refused.retry_after or 0)
    assert ask(limiter, asked, cost=12)
    assert check(limiter, asked).remaining == 0
    assert not ask(limiter, asked)


def test_buckets_with_counters_of_their_own(clock: Clock) -> None:
    limiter = limiter_of(1, clock)
    buckets = [
        bucket("2/min"),
        bucket("2/min", subject="user:2"),
        bucket("2/min", scope="search"),
        bucket("2/min gcra"),
        bucket("2/hour"),
        Bucket("user:1", Rate.parse("2/min"), counted_per="ip"),
    ]
    assert [admitted(limiter, one) for one in buckets] == [2] * 6
    # Another limit is no other counter.
    assert admitted(limiter, bucket("3/min")) == 1


# --- The bound on counters, and eviction. ---


def test_peek_neither_evicts_a_counter_nor_makes_one(clock: Clock) -> None:
    """Where another policy denies, buckets are only peeked at."""
    limiter, refused = limiter_of(1, clock, 2), bucket("2/min")
    assert admitted(limiter, refused) == 2
    for number in range(9):
        assert peek(limiter, bucket("2/min", subject=f"user:x{number}")).allowed
    assert not ask(limiter, refused)
    assert len(limiter) == 1


def test_the_longest_unused_goes_first(clock: Clock) -> None:
    limiter = limiter_of(1, clock, 3)
    for name in ("a", "b", "c", "a", "d"):
        assert ask(limiter, bucket("2/min", subject=f"user:{name}"))
    left = {name: peek(limiter, bucket("2/min", subject=f"user:{name}")).remaining for name in "abcd"}
    assert left == {"a": 0, "b": 2, "c": 1, "d": 1}
    assert len(limiter) == 3


# --- Threads. ---


def test_threads_are_admitted_the_share_exactly(clock: Clock) -> None:
    for algorithm in ALGORITHMS:
        limiter = limiter_of(4, clock)
        buckets = [bucket(f"1000/hour {algorithm}"), bucket("100000/hour", subject="everyone")]
        asked = on_threads(16, lambda: [ask(limiter, *buckets) for _ in range(40)].count(True))  # noqa: B023
        assert sum(asked) == 250
        assert peek(limiter, buckets[1]).remaining == 25_000 - 250
