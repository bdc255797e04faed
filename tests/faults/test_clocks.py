"""A server's clock that steps mints no units, and locks nobody out for long."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
import redis
from hypothesis import event, example, given
from hypothesis import strategies as st

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.keys import bucket_key
from django_ratequota.engine.memory import FAR_US
from django_ratequota.engine.rates import ALGORITHMS
from tests.conftest import Clock
from tests.support.properties import examples

SECOND, DAY = 10**6, 86_400
#: The longest that a bucket which is full at a steady clock keeps a caller out, in periods. The counter of two
#: windows holds what was counted at the end of one against its caller until the end of the next.
FULL_FOR = {algorithm: 2 if algorithm == "sliding_window_counter" else 1 for algorithm in ALGORITHMS}


steps = st.sampled_from([-5 * SECOND, 5 * SECOND, 0])
moves = st.lists(st.tuples(steps, st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=25)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@examples(150)
@given(limit=st.integers(1, 10), period=st.sampled_from([1, 10, 60]), moves=moves)
@example(limit=1, period=60, moves=[(0, 0, 1), (-5 * SECOND, 0, 1), (5 * SECOND, 0, 1)])
def test_a_clock_that_steps(
    limiter: Limiter, clock: Clock, algorithm: str, limit: int, period: int, moves: list[tuple[int, int, int]]
) -> None:
    """Each move steps the clock, lets some twentieths of the period pass, and checks some units."""
    bucket = Bucket("user:1", Rate.parse(f"{limit}/{period}s {algorithm}"))
    limiter.reset([bucket])
    period_us, newest_us = period * SECOND, clock()
    admitted: list[tuple[int, int]] = []
    for step_us, twentieths, cost in moves:
        if newest_us - clock() - step_us > FAR_US:
            step_us = 0
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


@pytest.mark.parametrize("period", [1, 60, 3600])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestAClockThatWasADayAhead:
    """Counters charged meanwhile kept the time of the wrong clock, so they refused for the whole day."""

    def test_a_full_counter_refuses_no_longer_than_at_a_steady_clock(
        self, either: Limiter, clock: Clock, algorithm: str, period: int
    ) -> None:
        bucket = Bucket("user:1", Rate.parse(f"10/{period}s {algorithm}"))
        clock.advance(DAY + 0.3 * period)
        assert either.check([bucket], 10).allowed
        clock.advance(-DAY)
        for _ in range(3):  # a refused request stores the time, a peek shows the same
            peeked, refused = either.peek([bucket]), either.check([bucket])
            assert [d.statuses[0] for d in (peeked, refused)] == [refused.statuses[0]] * 2
            assert not refused.allowed
            clock.advance(us=1)
        assert refused.retry_after is not None
        assert 0 < refused.retry_after <= FULL_FOR[algorithm] * period
        clock.advance(refused.retry_after, us=-2)
        assert not either.check([bucket]).allowed
        clock.advance(us=1)
        assert either.check([bucket]).allowed

    def test_what_was_used_stays_used(self, either: Limiter, clock: Clock, algorithm: str, period: int) -> None:
        bucket, full = Bucket("user:1", Rate.parse(f"10/{period}s {algorithm}")), Bucket("user:2", Rate.parse("1/h"))
        clock.advance(DAY)
        charged = either.check([bucket], 6)
        either.check([full])
        clock.advance(-DAY)
        assert not either.check([bucket, full]).allowed
        assert either.peek([bucket]).remaining == 4
        assert either.check([bucket], 3).remaining == 1
        assert charged.refund(6).statuses[0].remaining <= 7
        either.charge([bucket], either.peek([bucket]).remaining or 0)
        assert not either.check([bucket]).allowed

    def test_the_key_lives_no_longer_than_its_state(
        self, limiter: Limiter, clock: Clock, redis_client: redis.Redis, algorithm: str, period: int
    ) -> None:
        bucket = Bucket("user:1", Rate.parse(f"10/{period}s {algorithm}"))
        clock.now_us = time.time_ns() // 1000 + DAY * SECOND
        limiter.check([bucket], 6)
        key = bucket_key("rqtest", bucket)
        redis_client.expire(key, DAY)  # as the server's clock goes back, its keys' TTLs grow
        assert Limiter(client=redis_client, prefix="rqtest", timeout=5).check([bucket]).remaining == 3
        assert 0 < redis_client.ttl(key) <= 2 * period + 1


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
