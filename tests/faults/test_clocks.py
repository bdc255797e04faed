"""A server's clock that steps mints no units, and locks nobody out for long."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS
from tests.conftest import Clock
from tests.support.properties import examples

SECOND = 10**6
#: The longest that a bucket which is full at a steady clock keeps a caller out, in periods. The counter of two
#: windows holds what was counted at the end of one against its caller until the end of the next.
FULL_FOR = {algorithm: 2 if algorithm == "sliding_window_counter" else 1 for algorithm in ALGORITHMS}


steps = st.sampled_from([-5 * SECOND, 5 * SECOND, 0])
moves = st.lists(st.tuples(steps, st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=25)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(150)
@given(limit=st.integers(1, 10), period=st.sampled_from([1, 10, 60]), moves=moves)
@example(limit=1, period=60, moves=[(0, 0, 1), (-5 * SECOND, 0, 1), (5 * SECOND, 0, 1)])
def test_a_server_whose_clock_steps(
    limiter: Limiter, clock: Clock, algorithm: str, limit: int, period: int, moves: list[tuple[int, int, int]]
) -> None:
    """Each move steps the clock, lets some twentieths of the period pass, and checks some units."""
    bucket = Bucket("user:1", Rate.parse(f"{limit}/{period}s {algorithm}"))
    limiter.reset([bucket])
    period_us, newest_us = period * SECOND, clock()
    admitted: list[tuple[int, int]] = []
    for step_us, twentieths, cost in moves:
        clock.advance(us=step_us + twentieths * period_us // 20)
        newest_us = max(newest_us, clock())
        decision = limiter.check([bucket], cost)
        (status,) = decision.statuses
        assert 0 <= status.remaining <= limit
        assert status.reset_after_us >= 0
        if decision.allowed:
            assert status.retry_after_us == 0
            admitted.append((max(clock(), admitted[-1][0] if admitted else 0), cost))
            assert most_at_once(algorithm, admitted, limit, period_us) <= limit
            continue
        assert (status.retry_after_us is None) == (cost > limit)
        if status.retry_after_us is not None:
            # As with a steady clock, and no more than the difference to the newest time stored.
            behind_us = newest_us - clock()
            event("refused behind its newest" if behind_us else "refused")
            assert 0 < status.retry_after_us <= FULL_FOR[algorithm] * period_us + behind_us
    if not decision.allowed and status.retry_after_us is not None:
        clock.advance(us=status.retry_after_us)
        assert limiter.check([bucket], cost).allowed, "it is admitted after retry_after"


def most_at_once(algorithm: str, admitted: list[tuple[int, int]], limit: int, period_us: int) -> Fraction:
    """The most units that the algorithm's limit is about: of one window, of any period, or above what was refilled.

    ``admitted`` are instants and units, in order, by a clock that stays where it is while the server's goes back.
    """
    sums = []
    for number, (start_us, _) in enumerate(admitted):
        rest, refilled = admitted[number:], Fraction(0)
        if algorithm == "sliding_window_log":
            rest = [(at_us, units) for at_us, units in rest if at_us < start_us + period_us]
        elif algorithm in ("fixed_window", "sliding_window_counter"):
            rest = [(at_us, units) for at_us, units in rest if at_us // period_us == start_us // period_us]
        else:
            refilled = Fraction((rest[-1][0] - start_us) * limit, period_us)
        sums.append(sum(units for _, units in rest) - refilled)
    return max(sums)
