"""An edited rate: what was used stays counted, and nobody waits longer than either rate takes from empty to full."""

from __future__ import annotations

from datetime import UTC
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.decision import LimitRequest
from django_ratequota.engine.memory import LocalLimiter
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS
from tests.conftest import Clock
from tests.support.properties import examples

SECOND, HOUR = 10**6, 3600 * 10**6
METERS = sorted(BURST_ALGORITHMS)
EXAMPLES = examples(60)


def bucket(rate: str, **more: Any) -> Bucket:
    return Bucket("user:1", Rate.parse(rate), **more)


def empty_to_full_us(rate: Rate, share: int = 1) -> int:
    """How long the bucket takes from empty to full, rounded up."""
    if rate.algorithm in BURST_ALGORITHMS or rate.limit < share:
        capacity = max(Fraction(rate.capacity, share), 1)
        return -(-capacity * share * rate.period_us // rate.limit)
    return rate.period_us * (2 if rate.algorithm == "sliding_window_counter" else 1)


EDITS = st.lists(
    st.tuples(
        st.integers(1, 12) | st.integers(13, 20_000),
        st.none() | st.integers(1, 500),
        st.sampled_from(["check", "peek", "charge", "log"]),
        st.sampled_from(["1", "half", "all"]),
        st.sampled_from([0, 0, 1, 3, 20, 55, 100, 130]),
    ),
    min_size=2,
    max_size=7,
)


def rates_of(algorithm: str, period: float, edits: list[Any]) -> list[Rate]:
    meter = algorithm in BURST_ALGORITHMS
    return [
        Rate(limit=limit, period=period, burst=burst if meter else None, algorithm=algorithm)
        for limit, burst, *_ in edits
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_in_the_process_a_look_leaves_the_counter_as_it_is(algorithm: str) -> None:
    """A look from the next window on moved the windows there."""
    clock = Clock()
    local = LocalLimiter(1, UTC, clock)
    asked = (Bucket("user:1", Rate.parse(f"4/min {algorithm}")),)
    local.decide(LimitRequest(mode="check", buckets=asked, cost=4))

    def look() -> Any:
        return local.decide(LimitRequest(mode="peek", buckets=asked)).statuses

    before = look()
    clock.advance(61)
    assert look() != before
    clock.advance(-61)
    assert look() == before


@pytest.mark.parametrize("share", [0, 1, 4], ids=["Redis", "process", "share"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
# On a server keys expire by its own clock: one of a rate per second was gone before a busy machine asked again.
@given(edits=EDITS, period=st.sampled_from([7, 60, 3600]))
@EXAMPLES
def test_no_sequence_of_edits_makes_anybody_wait_longer(
    limiter: Limiter, clock: Clock, algorithm: str, share: int, edits: list[Any], period: float
) -> None:
    """No charge makes a debt here, so each wait is for usage, within one rate's own time."""
    asked_of = LocalLimiter(share, UTC, clock) if share else limiter
    share, longest_us = share or 1, 0
    limiter.reset([bucket(f"1/{period}s {algorithm}")])

    def ask(verb: Any, rate: Rate, cost: int, mode: Any = "enforce") -> Decision:
        buckets = (Bucket("user:1", rate, mode=mode),)
        return asked_of.decide(LimitRequest(mode=verb, buckets=buckets, cost=cost))

    for rate, (_limit, _burst, verb, part, pause) in zip(rates_of(algorithm, period, edits), edits, strict=True):
        longest_us = max(longest_us, empty_to_full_us(rate, share))
        room = max(1, rate.capacity // share)
        for cost in (1, (room + 1) // 2, room):
            wait = ask("peek", rate, cost).retry_after_us
            assert wait is not None
            assert wait <= longest_us, rate
            if wait:
                clock.advance(us=wait - 1)
                assert not ask("peek", rate, cost).allowed
                clock.advance(us=1)
                assert ask("peek", rate, cost).allowed
                clock.advance(us=-wait)
        units = {"1": 1, "half": (room + 1) // 2, "all": room}[part]
        if verb == "charge":
            units = min(units, ask("peek", rate, 1).statuses[0].remaining)
        ask("check" if verb == "log" else verb, rate, units, "log" if verb == "log" else "enforce")
        clock.advance(us=pause * rate.period_us // 100)
