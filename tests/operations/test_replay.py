"""The replay: the decisions of the real limiter on each attempt, in slices of any size, without using a key."""

from __future__ import annotations

import itertools
from struct import pack
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS
from django_ratequota.engine.scripts import REPLAY
from django_ratequota.exceptions import StoreError
from django_ratequota.operations.replay import Attempt, replay, replay_each
from django_ratequota.store.commands import ScriptCall
from tests.conftest import NOON_US, Clock
from tests.support.properties import examples

SECOND, DAY = 10**6, 86_400 * 10**6
#: Clocks go forward at 2026-03-29 01:00 UTC and back at 2026-10-25 01:00 UTC there.
BERLIN = ZoneInfo("Europe/Berlin")
_subjects = itertools.count(1)


@pytest.fixture
def limiter(redis_client: redis.Redis, clock: Clock) -> Any:
    limiter = Limiter(client=redis_client, clock=clock, prefix="rqtest", timeout=5, time_zone=BERLIN)
    yield limiter
    limiter.store.close()


@st.composite
def rates(draw: Any) -> list[Rate]:
    kinds = st.sampled_from([*ALGORITHMS, "calendar"])
    found = {}
    for kind in draw(st.lists(kinds, min_size=1, max_size=3)):
        calendar = kind == "calendar"
        periods = ["month", 604_800, 86_400] if calendar else [0.001, 1, 1.5, 7, 60, 86_399]
        rate = Rate(
            limit=draw(st.integers(1, 9) | st.integers(10, 10**12)),
            period=draw(st.sampled_from(periods)),
            algorithm="fixed_window" if calendar else kind,
            burst=draw(st.none() | st.integers(1, 20)) if kind in BURST_ALGORITHMS else None,
        )
        found[rate.algorithm, rate.period] = rate
    return list(found.values())


STARTS = st.sampled_from([NOON_US, 1_774_738_800 * SECOND, 1_792_879_200 * SECOND, 1_767_221_999 * SECOND])
PAUSES = st.sampled_from([0, 0, 1, 999, 1000, SECOND, SECOND + 1, 7 * SECOND, 60 * SECOND, DAY]) | st.integers(0, DAY)
COSTS = st.sampled_from([0, 1, 1, 1, 2, 5]) | st.integers(0, 10**12)
WALKS = st.lists(st.tuples(PAUSES, COSTS), min_size=1, max_size=40)


def attempts_of(start: int, walk: list[tuple[int, int]]) -> list[Attempt]:
    times = itertools.accumulate((pause for pause, _ in walk), initial=start)
    return [(at, cost) for at, (_, cost) in zip(times, walk, strict=False)]


def decided_by_limiter(limiter: Limiter, clock: Clock, rates: list[Rate], attempts: list[Attempt]) -> list[bool]:
    """Return the decisions of the limiter: one call per attempt, with real keys."""
    buckets = [Bucket(f"user:{next(_subjects)}", rate) for rate in rates]
    outcomes = []
    for clock.now_us, cost in attempts:
        outcomes.append(limiter.check(buckets, cost).allowed)
    limiter.reset(buckets)
    return outcomes


@examples(60)
@given(rates=rates(), walks=st.lists(st.tuples(STARTS, WALKS), max_size=4), slice_size=st.integers(1, 200))
def test_each_subject_has_its_own_counters(
    limiter: Limiter, clock: Clock, rates: list[Rate], walks: list[tuple[int, list[tuple[int, int]]]], slice_size: int
) -> None:
    sequences = [attempts_of(start, walk) for start, walk in walks]
    found = list(replay_each(rates, [*sequences, []], limiter=limiter, slice_size=slice_size))
    assert found == [*(decided_by_limiter(limiter, clock, rates, attempts) for attempts in sequences), []]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_replay_and_limiter_agree_on_hundreds_of_attempts(limiter: Limiter, clock: Clock, algorithm: str) -> None:
    """Enough attempts that lists are trimmed and passed to the next slice, and that slices both admit and refuse."""
    # Of minutes: the counters' keys end by the server's clock, which the injected one does not move.
    rates = [Rate.parse(f"30/min {algorithm}"), Rate.parse("200/hour sliding_window_log")]
    rates = rates[:1] if algorithm == "sliding_window_log" else rates
    attempts = [(NOON_US + number * 1_200_660, 1) for number in range(600)]
    found = replay(rates, attempts, limiter=limiter, slice_size=7)
    assert found == decided_by_limiter(limiter, clock, rates, attempts)
    assert 0 < sum(found) < len(found)


def test_a_replay_without_rates_or_attempts(limiter: Limiter) -> None:
    assert replay([], [(NOON_US, 5)], limiter=limiter) == [True]
    assert replay([Rate.parse("1/s")], [], limiter=limiter) == []
    assert list(replay_each([Rate.parse("1/s")], [], limiter=limiter)) == []


def test_a_replay_reads_and_writes_no_key(redis_client: redis.Redis, limiter: Limiter) -> None:
    rates = [Rate.parse(f"2/min {algorithm}") for algorithm in ALGORITHMS]
    before, keys = redis_client.info("commandstats"), redis_client.dbsize()
    assert replay(rates, [(NOON_US, 1)] * 5, limiter=limiter) == [True] * 2 + [False] * 3
    after = redis_client.info("commandstats")
    commands = {name for name in after if after[name]["calls"] != before.get(name, {"calls": 0})["calls"]}
    connecting = {"cmdstat_ping"}
    assert commands - connecting - {"cmdstat_eval", "cmdstat_dbsize"} == {"cmdstat_info", "cmdstat_evalsha"}
    assert redis_client.dbsize() == keys


@pytest.mark.parametrize(
    "attempts", [[(2, 1), (1, 1)], [(0, 1)], [(-1, 1)], [(2**53, 1)], [(1, -1)], [(1, 10**12 + 1)]], ids=str
)
def test_attempts_out_of_order_or_range_are_refused(limiter: Limiter, attempts: list[Attempt]) -> None:
    with pytest.raises(ValueError, match=r"order of time|a cost must"):
        replay([Rate.parse("1/s")], attempts, limiter=limiter)


GOOD: tuple[object, ...] = (pack(">dd", NOON_US, 1), "token_bucket", 5, SECOND, 5, b"", b"", 0)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"123", "attempts must be pairs"),
        (0, pack(">dd", -1, 1), "a time must be a whole number from 0"),
        (0, pack(">dd", float("nan"), 1), "a time must be a whole number"),
        (0, pack(">dd", NOON_US, 0.5), "a cost must be a whole number"),
        (0, pack(">dd", NOON_US, float("inf")), "a cost must be a whole number"),
        (1, "bucket", "unknown algorithm bucket"),
        (2, 0, "a limit must be a whole number from 1"),
        (3, "nan", "a period must be a whole number"),
        (4, "", "a burst must be a whole number"),
        (6, b"1", "windows must be pairs"),
        (6, pack(">dd", 1, 2), f"no calendar window contains {NOON_US}"),
    ],
)
def test_invalid_arguments_are_refused(limiter: Limiter, position: int, value: object, message: str) -> None:
    args = list(GOOD)
    args[position] = value
    with pytest.raises(StoreError, match=message):
        limiter.store.execute(ScriptCall(REPLAY, (), args))
    assert limiter.store.execute(ScriptCall(REPLAY, (), GOOD))[0] == b"1"


@pytest.mark.parametrize("count", [0, 2, 7, 9])
def test_a_wrong_number_of_arguments_is_refused(limiter: Limiter, count: int) -> None:
    with pytest.raises(StoreError, match="seven arguments per rate"):
        limiter.store.execute(ScriptCall(REPLAY, (), (GOOD * 2)[:count]))


def test_a_replay_needs_redis(settings: Any) -> None:
    """It said only that each worker counts on its own."""
    settings.RATEQUOTA = {"REDIS_URL": "memory://"}
    with pytest.raises(StoreError, match=r"needs Redis, but RATEQUOTA\['REDIS_URL'\] is memory://") as caught:
        replay([Rate.parse("2/s")], [(1_000_000, 1)])
    assert caught.value.reason == "memory"
