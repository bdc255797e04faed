"""This process's own counters: the share that they admit, whom they remember, and that they stay few."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, Rate
from django_ratequota.engine.local import LocalLimiter
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS
from django_ratequota.engine.types import BucketStatus
from django_ratequota.exceptions import InvalidCost
from tests.project.views import Units
from tests.support.properties import examples, scaled
from tests.support.threads import on_threads

WINDOWS = sorted(set(ALGORITHMS) - BURST_ALGORITHMS)
BUCKETS = sorted(BURST_ALGORITHMS)


class Seconds:
    """A clock in seconds, moved by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


def bucket(rate: str, subject: str = "user:1", scope: str = "") -> Bucket:
    return Bucket(subject, Rate.parse(rate), scope=scope)


def ask(limiter: LocalLimiter, *buckets: Bucket, cost: int = 1) -> bool:
    return all(status.allowed for status in limiter.check(buckets, cost))


def admitted(limiter: LocalLimiter, asked: Bucket, times: int = 100) -> int:
    return [ask(limiter, asked) for _ in range(times)].count(True)


def peek(limiter: LocalLimiter, asked: Bucket, cost: int = 1) -> BucketStatus:
    [status] = limiter.check([asked], cost, peek=True)
    return status


# --- Limits. ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("limit", "share", "first", "in_ten_periods"),
    # With fewer units than processes, one in a period as many times longer.
    [(100, 4, 25, 250), (10, 4, 2, 25), (4, 4, 1, 10), (1, 4, 1, 2), (3, 4, 1, 7), (7, 1, 7, 70)],
)
def test_each_process_admits_its_share(
    seconds: Seconds, algorithm: str, limit: int, share: int, first: int, in_ten_periods: int
) -> None:
    limiter = LocalLimiter(share, clock=seconds)
    asked = bucket(f"{limit}/min {algorithm}")
    assert admitted(limiter, asked) == first
    total = first
    for _ in range(600):
        seconds.now += 1
        total += admitted(limiter, asked, 3)
    # Of a limit of one, a sliding window that counts the one before admits every other.
    least = in_ten_periods * (0.45 if algorithm in WINDOWS else 0.95)
    assert least - 1 <= total <= in_ten_periods + first + 1


@pytest.mark.parametrize("algorithm", BUCKETS)
def test_a_burst_is_shared_too(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(4, clock=seconds)
    asked = bucket(f"60/min burst 20 {algorithm}")
    assert admitted(limiter, asked) == 5
    seconds.now += 4
    assert admitted(limiter, asked) == 1
    seconds.now += 3600
    assert admitted(limiter, asked) == 5


def test_a_month_is_thirty_one_days(seconds: Seconds) -> None:
    limiter = LocalLimiter(4, clock=seconds)
    asked = bucket("100/month")
    assert admitted(limiter, asked) == 25
    seconds.now += 31 * 86_400 - 1
    assert admitted(limiter, asked) == 0
    seconds.now += 31 * 86_400
    assert admitted(limiter, asked) == 24


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    history=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 12)), min_size=1, max_size=8),
    limit=st.integers(1, 40),
    share=st.integers(1, 8),
)
@examples(150)
def test_no_unit_comes_back_before_next_after_and_one_does_at_it(
    algorithm: str, history: list[tuple[int, int]], limit: int, share: int
) -> None:
    clock = Seconds()
    limiter = LocalLimiter(share, clock=clock)
    asked = bucket(f"{limit}/min {algorithm}")
    for pause, units in history:
        clock.now += pause
        limiter.check([asked], units)
    status = peek(limiter, asked)
    if status.next_after is None:
        # Nothing is used, or less than the part of a unit that the share has beyond whole ones.
        assert status.remaining == max(1, limit // share)
        return
    now = clock.now
    clock.now = now + status.next_after - 3e-6
    assert peek(limiter, asked).remaining <= status.remaining
    clock.now = now + status.next_after + 3e-6
    assert peek(limiter, asked).remaining > status.remaining


WALK = st.lists(
    st.tuples(
        # Some of the gaps lead right to where something ends.
        st.sampled_from([0.0, 0.25, 1.0, 30.0, 59.5, 60.0, 120.0, 240.0])
        | st.integers(0, 75_000).map(lambda n: n / 256),
        st.integers(1, 3),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=60,
)


@pytest.mark.parametrize("algorithm", WINDOWS)
@given(walk=WALK, limit=st.integers(1, 40), share=st.integers(1, 8))
@examples(150)
def test_no_window_holds_more_than_the_share(
    algorithm: str, walk: list[tuple[float, int, int]], limit: int, share: int
) -> None:
    clock = Seconds()
    limiter = LocalLimiter(share, clock=clock)
    asked = bucket(f"{limit}/min {algorithm}")
    units, period = (limit / share, 60) if limit >= share else (1, 60 * share / limit)
    windows: dict[int, int] = {}
    begin = clock.now
    for gap, cost, times in walk:
        clock.now += gap
        for _ in range(times):
            if cost <= units and ask(limiter, asked, cost=cost):
                if not windows:
                    begin = clock.now
                number = int((clock.now - begin) // period)
                windows[number] = windows.get(number, 0) + cost
    assert all(counted <= units for counted in windows.values())


@pytest.mark.parametrize("algorithm", BUCKETS)
@given(walk=WALK, limit=st.integers(1, 40), burst=st.integers(1, 40), share=st.integers(1, 8))
@examples(150)
def test_no_interval_holds_more_than_the_share_of_burst_and_rate(
    algorithm: str, walk: list[tuple[float, int, int]], limit: int, burst: int, share: int
) -> None:
    clock = Seconds()
    limiter = LocalLimiter(share, clock=clock)
    asked = bucket(f"{limit}/min burst {burst} {algorithm}")
    room = max(burst / share, 1)
    taken: list[tuple[float, int]] = []
    for gap, cost, times in walk:
        clock.now += gap
        if cost <= room:
            taken += [(clock.now, cost) for _ in range(times) if ask(limiter, asked, cost=cost)]
    for at, (begin, _) in enumerate(taken):
        units = 0
        for now, cost in taken[at:]:
            units += cost
            assert units <= room + (now - begin) * limit / share / 60 + 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    walk=WALK,
    limit=st.integers(1, 40),
    share=st.integers(1, 8),
    begin=st.floats(0, 1e7),
    period=st.sampled_from(["s", "7s", "min", "hour", "week"]),
)
@examples(150)
def test_refused_until_retry_after_and_admitted_at_it(
    algorithm: str, walk: list[tuple[float, int, int]], limit: int, share: int, begin: float, period: str
) -> None:
    clock = Seconds(begin)
    limiter = LocalLimiter(share, clock=clock)
    asked = bucket(f"{limit}/{period} {algorithm}")
    for gap, cost, times in walk:
        clock.now += gap
        for _ in range(times):
            [status] = limiter.check([asked], cost)
            if cost > limit:
                assert (status.allowed, status.retry_after) == (False, None)
                continue
            assert status.retry_after is not None
            assert (status.retry_after == 0) == status.allowed
            if status.allowed:
                continue
            now = clock.now
            clock.now = now + status.retry_after * 0.99
            assert not peek(limiter, asked, cost).allowed
            clock.now = now + status.retry_after
            assert peek(limiter, asked, cost).allowed
            clock.now = now


# --- Costs. ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_than_the_capacity_never_passes(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket(f"10/min {algorithm}")
    [status] = limiter.check([asked], 11)
    assert (status.allowed, status.retry_after_us, status.remaining) == (False, None, 10)
    assert ask(limiter, asked, cost=10)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_cost_above_the_share_passes_with_an_empty_counter(seconds: Seconds, algorithm: str) -> None:
    """Else a process would always refuse a cost that the limit allows."""
    limiter = LocalLimiter(4, clock=seconds)
    asked = bucket(f"20/min {algorithm}")
    assert ask(limiter, asked)
    [status] = limiter.check([asked], 12)
    assert not status.allowed
    assert status.retry_after is not None
    seconds.now += status.retry_after
    assert ask(limiter, asked, cost=12)
    [status] = limiter.check([asked], 1)
    assert not status.allowed
    assert status.remaining == 0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_cost_of_zero_is_checked_and_charges_nothing(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket(f"2/min {algorithm}")
    assert all(ask(limiter, asked, cost=0) for _ in range(9))
    assert admitted(limiter, asked, 9) == 2


# --- All or nothing. ---


def test_one_bucket_without_room_leaves_the_others_uncharged(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    wide, narrow = bucket("10/min"), bucket("2/hour fixed_window")
    assert [ask(limiter, wide, narrow) for _ in range(5)] == [True, True, False, False, False]
    statuses = limiter.check([wide, narrow], 1)
    assert [(s.bucket, s.allowed, s.remaining) for s in statuses] == [(wide, True, 8), (narrow, False, 0)]
    assert [s.retry_after == 0 for s in statuses] == [True, False]
    assert admitted(limiter, wide) == 8


def test_buckets_with_counters_of_their_own(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, clock=seconds)
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


def test_no_bucket_at_all_is_admitted(seconds: Seconds) -> None:
    assert LocalLimiter(1, clock=seconds).check([], 1) == ()


# --- Peeking, charging, refunding. ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_peek_returns_what_check_would_and_changes_nothing(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket(f"2/min {algorithm}")
    assert peek(limiter, asked).allowed
    assert len(limiter) == 0
    assert ask(limiter, asked)
    for _ in range(5):
        assert (peek(limiter, asked).allowed, peek(limiter, asked, 2).allowed) == (True, False)
        assert peek(limiter, asked).remaining == 1
    assert admitted(limiter, asked) == 1
    assert not peek(limiter, asked).allowed


def test_peek_neither_evicts_a_counter_nor_makes_one_evictable(seconds: Seconds) -> None:
    """Where another policy denies, buckets are only peeked at; a flood of peeks must free no client."""
    limiter = LocalLimiter(1, size=2, clock=seconds)
    refused, used = bucket("2/min"), bucket("2/min", subject="user:2")
    assert admitted(limiter, refused) == 2
    assert ask(limiter, used)
    assert peek(limiter, refused, 0).allowed
    for number in range(9):
        assert peek(limiter, bucket("2/min", subject=f"user:x{number}")).allowed
    assert admitted(limiter, used) == 1
    for number in range(9):
        ask(limiter, bucket("2/min", subject=f"user:x{number}"))
    assert not ask(limiter, refused)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_charge_never_refuses_and_may_leave_a_debt(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket(f"10/min {algorithm}")
    decision = limiter.charge((asked,), cost=4)
    assert (decision.allowed, decision.degraded, decision.statuses[0].remaining) == (True, True, 6)
    assert decision.charge(16).statuses[0].remaining == 0
    assert not ask(limiter, asked)
    assert decision.refund(11).statuses[0].remaining == 1
    assert admitted(limiter, asked) == 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_refund_gives_back_no_more_than_was_used(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket(f"10/min {algorithm}")
    assert ask(limiter, asked, cost=3)
    assert limiter.refund((asked,), cost=100).statuses[0].remaining == 10
    assert limiter.refund((bucket("10/min", subject="user:2"),), cost=1).statuses[0].remaining == 10
    assert admitted(limiter, asked) == 10


def test_settling_awaited_is_the_same(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket("10/min")

    async def settle() -> list[int]:
        decision = await limiter.acharge((asked,), cost=5)
        steps = [decision, await decision.acharge(2), await decision.arefund(4)]
        steps.append(await limiter.arefund((asked,), cost=1))
        return [step.statuses[0].remaining for step in steps]

    assert asyncio.run(settle()) == [5, 3, 7, 8]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_left_comes_back(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket(f"10/min {algorithm}")
    assert (peek(limiter, asked).remaining, peek(limiter, asked).reset_after) == (10, 0.0)
    assert ask(limiter, asked, cost=8)
    status = peek(limiter, asked)
    assert status.remaining == 2
    assert status.window_us == 60 * 10**6
    seconds.now += status.reset_after - 0.001
    assert peek(limiter, asked).reset_after == pytest.approx(0.001, abs=1e-5)
    seconds.now += 0.001
    assert (peek(limiter, asked).remaining, peek(limiter, asked).reset_after) == (10, 0.0)


def test_the_window_before_counts_less_and_less(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket("10/min sliding_window_counter")
    assert ask(limiter, asked, cost=8)
    seen = []
    for _ in range(5):
        seconds.now += 30
        seen.append(peek(limiter, asked).remaining)
    assert seen == [2, 2, 6, 10, 10]


# --- The bound on counters, and eviction. ---


@pytest.mark.slow
def test_the_number_of_counters_is_bounded(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    for number in range(scaled(100_000)):
        assert ask(limiter, bucket("1/min", subject=f"user:{number}"))
        # Every twentieth asks once too often, and is remembered as refused.
        if number % 20 == 0:
            assert not ask(limiter, bucket("1/min", subject=f"user:{number}"))
    assert len(limiter) <= 10_001


def test_a_refused_client_is_not_freed_by_a_flood_of_newcomers(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, size=100, clock=seconds)
    refused = bucket("3/min")
    assert admitted(limiter, refused) == 3
    for number in range(1000):
        assert ask(limiter, bucket("3/min", subject=f"user:x{number}"))
    assert not ask(limiter, refused)
    assert len(limiter) <= 100


def test_a_cost_that_never_fits_does_not_end_a_refusal(seconds: Seconds) -> None:
    """It was stored as passing, so a flood of new callers evicted it."""
    limiter = LocalLimiter(1, size=100, clock=seconds)
    refused = bucket("3/min")
    assert admitted(limiter, refused) == 3
    assert not ask(limiter, refused, cost=4)
    for number in range(1000):
        assert ask(limiter, bucket("3/min", subject=f"user:x{number}"))
    assert not ask(limiter, refused)


def test_a_cost_that_never_fits_adds_no_counter(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    for number in range(100):
        assert not ask(limiter, bucket("1/min", subject=f"user:{number}"), cost=2)
    assert len(limiter) == 0


@pytest.mark.parametrize("algorithm", ["fixed_window", "token_bucket"])
def test_a_client_whose_refusal_ended_makes_room(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(1, size=10, clock=seconds)
    for number in range(10):
        assert admitted(limiter, bucket(f"2/min {algorithm}", subject=f"user:{number}")) == 2
    seconds.now += 90 if algorithm == "fixed_window" else 30
    # Each newcomer finds a place of its own: were it shared, two requests would use it up.
    for number in range(30):
        assert ask(limiter, bucket(f"2/min {algorithm}", subject=f"user:x{number}"))
    assert len(limiter) <= 10


def test_an_ended_refusal_is_found_behind_others(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, size=21, clock=seconds)
    for number in range(20):
        assert admitted(limiter, bucket("1/hour", subject=f"user:{number}")) == 1
    assert admitted(limiter, bucket("1/min", subject="user:20")) == 1
    seconds.now += 60
    # The first newcomer looks at some, and shares; the second looks at those behind, and has a place of its own.
    assert [ask(limiter, bucket("1/min", subject=f"user:x{number}")) for number in range(2)] == [True, True]


def test_the_longest_unused_goes_first(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, size=3, clock=seconds)
    for name in ("a", "b", "c", "a", "d"):
        assert ask(limiter, bucket("2/min", subject=f"user:{name}"))
    left = {name: peek(limiter, bucket("2/min", subject=f"user:{name}")).remaining for name in "abcd"}
    assert left == {"a": 0, "b": 2, "c": 1, "d": 1}
    assert len(limiter) == 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_once_all_refuse_the_newcomers_of_a_policy_share_a_counter(seconds: Seconds, algorithm: str) -> None:
    """A new caller evicted the shared counter, so each of them had its own after all."""
    limiter = LocalLimiter(1, size=3, clock=seconds)
    for number in range(3):
        assert admitted(limiter, bucket(f"2/min {algorithm}", subject=f"user:{number}")) == 2

    def newcomers(scope: str) -> int:
        asked = [bucket(f"2/min {algorithm}", subject=f"user:x{number}", scope=scope) for number in range(50)]
        return [ask(limiter, one) for one in asked].count(True)

    assert newcomers("") == 2
    assert newcomers("search") == 2
    assert newcomers("search") == 0
    assert not any(ask(limiter, bucket(f"2/min {algorithm}", subject=f"user:{number}")) for number in range(3))
    assert len(limiter) == 3 + 2
    seconds.now += 150
    assert newcomers("") == 50
    assert len(limiter) <= 3 + 2


# --- Threads and forks. ---


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_threads_are_admitted_the_share_exactly(seconds: Seconds, algorithm: str) -> None:
    limiter = LocalLimiter(4, clock=seconds)
    buckets = [bucket(f"1000/hour {algorithm}"), bucket("100000/hour", subject="everyone")]
    assert sum(on_threads(64, lambda: [ask(limiter, *buckets) for _ in range(10)].count(True))) == 250
    assert peek(limiter, buckets[1]).remaining == 25_000 - 250


def test_no_charge_of_a_thread_is_lost(seconds: Seconds) -> None:
    limiter = LocalLimiter(1, clock=seconds)
    asked = bucket("100000/hour")

    def charge() -> None:
        for _ in range(100):
            limiter.charge((asked,), cost=3)
            limiter.refund((asked,), cost=1)

    on_threads(32, charge)
    assert peek(limiter, asked).remaining == 100_000 - 32 * 100 * 2


def test_settling_takes_enums() -> None:
    local, asked = LocalLimiter(1), Bucket("user:1", Rate.parse("10/hour"))
    assert local.charge((asked,), cost=Units.THREE).statuses[0].remaining == 7


@pytest.mark.parametrize("cost", [-5, 1.5, float("nan"), True, None, 2**60])
@pytest.mark.parametrize("verb", ["charge", "refund"])
def test_charge_and_refund_raise_for_invalid_costs(verb: str, cost: Any) -> None:
    local = LocalLimiter(4)
    with pytest.raises(InvalidCost):
        getattr(local, verb)((Bucket("user:1", Rate.parse("100/hour")),), cost=cost)
    assert len(local) == 0
