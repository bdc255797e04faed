"""Random walks through the engine, each answer compared with exact models (``models.py``): no step may differ.

The walks are the same in every run. ``RATEQUOTA_TEST_EXPLORE=20`` walks twenty times as many, at random.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.keys import bucket_key
from django_ratequota.rates import BURST_ALGORITHMS

from .conftest import NOON_US, Clock
from .models import MODELS, Model, Outcome, judge

EXPLORE = int(os.environ.get("RATEQUOTA_TEST_EXPLORE", "0"))
SECOND, DAY = 10**6, 86_400 * 10**6

#: One counter per algorithm, and one in the calendar's windows.
KINDS = (*MODELS, "calendar")
COUNTERS = st.integers(0, len(KINDS) - 1)
#: Beyond 2**53 µs-units doubles are not exact: a day's 20,000 units and a walk's debts stay below.
LIMITS = st.integers(1, 12) | st.integers(13, 20_000)
PERIODS = st.sampled_from([0.001, 1, 1.234567, 7, 60, 900, 3600, 86_400])
COSTS = st.sampled_from([0, 1, 1, 1, 2, 3, "half", "room", "room", "room+1", "capacity", "capacity+1"])
#: What passes before a question: µs, or "target±µs", an instant that an earlier answer named or a window's edge.
PAUSES = st.just(0) | st.integers(1, 10) | st.integers(11, 2 * SECOND) | st.integers(2 * SECOND, 40 * DAY)
PICKS = st.lists(COUNTERS, min_size=1, max_size=3, unique=True)
LOGGED = st.just(frozenset[int]()) | st.frozensets(st.integers(0, 2), max_size=2)
_subjects = itertools.count(1)


class Walk(RuleBasedStateMachine):
    """One limiter, seven counters, and a clock that the walk moves."""

    client: redis.Redis
    clock: Clock
    limiter: Limiter
    #: Whether the clock goes back too; then nothing is refunded, as no formula says which entries that leaves.
    rewinds = False

    @initialize(
        now=st.integers(NOON_US, NOON_US + DAY),
        limits=st.lists(LIMITS, min_size=len(KINDS), max_size=len(KINDS)),
        periods=st.lists(PERIODS, min_size=len(KINDS), max_size=len(KINDS)),
        calendar=st.sampled_from([86_400, 604_800, "month"]),
    )
    def begin(self, now: int, limits: list[int], periods: list[Any], calendar: Any) -> None:
        self.clock.now_us = now
        subject = f"user:{next(_subjects)}"
        self.buckets: list[Bucket] = []
        self.models: list[Model] = []
        for kind, limit, period in zip(KINDS, limits, (*periods[:-1], calendar), strict=True):
            algorithm = kind if kind in MODELS else "fixed_window"
            rate = Rate(limit=limit, period=period, algorithm=algorithm)
            self.buckets.append(Bucket(subject, rate, scope=kind))
            self.models.append(MODELS[algorithm]())
        #: Instants worth standing at, of the latest answers.
        self.targets: list[int] = []
        self.room = 1

    def teardown(self) -> None:
        if hasattr(self, "buckets"):
            self.limiter.reset(self.buckets)

    @rule(picks=PICKS, cost=COSTS, logged=LOGGED, pause=PAUSES)
    def check(self, picks: list[int], cost: int | str, logged: frozenset[int], pause: int) -> None:
        self.clock.now_us += pause
        self.ask("check", picks, self.units(cost, picks[0]), logged)

    @rule(pick=COUNTERS, cost=COSTS)
    def check_one(self, pick: int, cost: int | str) -> None:
        self.ask("check", [pick], self.units(cost, pick))

    @precondition(lambda self: self.targets)
    @rule(which=st.integers(0, 29), offset_us=st.sampled_from([-1, 0, 0, 1]), cost=COSTS)
    def check_at_target(self, which: int, offset_us: int, cost: int | str) -> None:
        target, pick = self.targets[which % len(self.targets)]
        self.clock.now_us = max(self.clock.now_us, target + offset_us)
        self.ask("check", [pick], self.units(cost, pick))

    @rule(pick=COUNTERS, cost=COSTS, pause=PAUSES)
    def fill(self, pick: int, cost: int | str, pause: int) -> None:
        """Charge to the brim or beyond, then see the next one refused."""
        self.clock.now_us += pause
        self.ask("charge", [pick], self.buckets[pick].rate.capacity)
        self.ask("check", [pick], self.units(cost, pick))

    @rule(picks=PICKS, cost=COSTS, pause=PAUSES)
    def peek(self, picks: list[int], cost: int | str, pause: int) -> None:
        self.clock.now_us += pause
        self.ask("peek", picks, self.units(cost, picks[0]))

    @rule(picks=PICKS, cost=COSTS)
    def charge(self, picks: list[int], cost: int | str) -> None:
        self.ask("charge", picks, min(1000, self.units(cost, picks[0])))

    @precondition(lambda self: not self.rewinds)
    @rule(picks=PICKS, cost=COSTS, pause=PAUSES)
    def refund(self, picks: list[int], cost: int | str, pause: int) -> None:
        self.clock.now_us += pause
        self.ask("refund", picks, self.units(cost, picks[0]))

    @rule(cost=COSTS, patience_us=st.sampled_from([0, 1, 10**5, SECOND, 100 * SECOND]), pause=PAUSES)
    def acquire(self, cost: int | str, patience_us: int, pause: int) -> None:
        self.clock.now_us += pause
        pick = KINDS.index("leaky_bucket")
        self.ask("acquire", [pick], self.units(cost, pick), patience_us=patience_us)

    @rule(pick=COUNTERS, limit=LIMITS, burst=st.none() | st.integers(1, 200), cost=COSTS)
    def edit(self, pick: int, limit: int, burst: int | None, cost: int | str) -> None:
        bucket = self.buckets[pick]
        burst = burst if bucket.rate.algorithm in BURST_ALGORITHMS else None
        rate = Rate(limit=limit, period=bucket.rate.period, burst=burst, algorithm=bucket.rate.algorithm)
        self.buckets[pick] = replace(bucket, rate=rate)
        self.ask("check", [pick], self.units(cost, pick))

    @rule(pick=COUNTERS)
    def reset(self, pick: int) -> None:
        self.limiter.reset([self.buckets[pick]])
        self.models[pick].clear()

    @precondition(lambda self: self.rewinds)
    @rule(span_us=st.integers(1, 10) | st.integers(11, 10 * SECOND) | st.integers(10**6, 40 * DAY), picks=PICKS)
    def rewind(self, span_us: int, picks: list[int]) -> None:
        self.clock.now_us -= span_us
        self.ask("check", picks, 1)

    def units(self, cost: int | str, pick: int) -> int:
        capacity = self.buckets[pick].rate.capacity
        named = {
            "half": (capacity + 1) // 2,
            "room": self.room,
            "room+1": self.room + 1,
            "capacity": capacity,
            "capacity+1": capacity + 1,
        }
        return named[cost] if isinstance(cost, str) else cost

    def ask(
        self,
        verb: str,
        picks: list[int],
        cost: int,
        logged: frozenset[int] = frozenset(),
        *,
        patience_us: int = 0,
    ) -> None:
        """Ask the engine and the models, and compare."""
        now = self.clock.now_us
        buckets = [
            replace(self.buckets[pick], mode="log" if position in logged else "enforce")
            for position, pick in enumerate(picks)
        ]
        if verb == "acquire":
            decision = self.limiter.acquire(buckets[0], patience_us / SECOND, cost)
        else:
            ask: Callable[..., Decision] = getattr(self.limiter, verb)
            decision = ask(buckets, cost)
        models = [self.models[pick] for pick in picks]
        rates = [bucket.rate for bucket in buckets]
        claims = list(decision.statuses)
        allowed, expected = judge(
            verb, models, rates, now, cost, logged=logged, patience_us=patience_us, claims=claims
        )
        found = [Outcome.of(status) for status in claims]
        assert (decision.allowed, found) == (allowed, expected), [str(rate) for rate in rates]
        assert decision.at_us == now
        self.room = found[0].remaining
        self.note_targets(picks, found)
        self.outlive(buckets, [f if allowed and f.passed and verb != "peek" else None for f in found])

    def note_targets(self, picks: list[int], found: list[Outcome]) -> None:
        now = self.clock.now_us
        for pick, outcome in zip(picks, found, strict=True):
            period_us = self.buckets[pick].rate.period_us
            named = [(now // period_us + 1) * period_us, now + outcome.reset_after_us]
            named += [now + outcome.retry_after_us] * 3 if outcome.retry_after_us else []
            self.targets += [(target, pick) for target in named]
        self.targets = [entry for entry in self.targets[-30:] if entry[0] > now]

    def outlive(self, buckets: list[Bucket], written: list[Outcome | None]) -> None:
        """Check the TTLs of what was written, then take them off: keys expire by the real time, not by this clock."""
        pipeline = self.client.pipeline(transaction=False)
        for bucket in buckets:
            key = bucket_key("rqtest", bucket)
            pipeline.pttl(key).persist(key)
        ttls = pipeline.execute()[::2]
        for bucket, outcome, ttl in zip(buckets, written, ttls, strict=True):
            if outcome is None or self.rewinds:
                continue
            state_us = outcome.reset_after_us
            if bucket.rate.algorithm not in BURST_ALGORITHMS:
                state_us = max(state_us, 2 * bucket.rate.period_us)
            assert ttl <= ceil(state_us / 1000) + 1000, bucket
            assert ttl > 0 or outcome.reset_after_us == 0, bucket


@pytest.mark.parametrize("rewinds", [False, True], ids=["forward", "rewinding"])
def test_every_step_of_a_random_walk_equals_the_exact_models(
    redis_client: redis.Redis, clock: Clock, limiter: Limiter, rewinds: bool
) -> None:
    class FixtureWalk(Walk):
        pass

    FixtureWalk.client, FixtureWalk.clock, FixtureWalk.limiter = redis_client, clock, limiter
    FixtureWalk.rewinds = rewinds
    run_state_machine_as_test(
        FixtureWalk,
        settings=settings(
            max_examples=(80 if rewinds else 150) * max(1, EXPLORE),
            stateful_step_count=50,
            derandomize=not EXPLORE,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
