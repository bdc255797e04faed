"""Random walks through the engine, each answer compared with exact models (``models.py``): no step may differ.

The walks are the same in every run. ``RATEQUOTA_TEST_EXPLORE=20`` walks twenty times as many, at random.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from django_ratequota import Bucket, Limiter, Rate

from .conftest import NOON_US, Clock
from .models import MODELS, Model, Outcome, judge

EXPLORE = int(os.environ.get("RATEQUOTA_TEST_EXPLORE", "0"))
SECOND, DAY = 10**6, 86_400 * 10**6

#: Two counters per algorithm, and the calendar's windows.
NAMES = (*MODELS, *MODELS, "day", "month")
BURSTS = ("token_bucket", "leaky_bucket", "gcra")
#: 2**53 µs-units bound the exact domain: a day's 20,000 units and what a walk may add in debts stay below.
LIMITS = st.integers(1, 12) | st.integers(13, 20_000)
PERIODS = st.sampled_from([0.001, 1, 1.234567, 7, 60, 900, 3600, 86_400])
SPANS = (
    st.integers(1, 10)
    | st.integers(11, 10**6)
    | st.sampled_from([SECOND, 60 * SECOND, 3600 * SECOND, DAY, 31 * DAY])
    | st.integers(10**6, 2 * DAY)
)
COUNTERS = st.integers(0, len(NAMES) - 1)
_subjects = itertools.count(1)


class Walk(RuleBasedStateMachine):
    """One limiter, fourteen counters, and a clock that the walk moves."""

    client: redis.Redis
    clock: Clock
    limiter: Limiter
    #: Whether the clock goes back too; then nothing is refunded, as no formula says which entries that leaves.
    rewinds = False

    @initialize(
        now=st.integers(NOON_US, NOON_US + DAY),
        limits=st.lists(LIMITS, min_size=len(NAMES), max_size=len(NAMES)),
        periods=st.lists(PERIODS, min_size=len(NAMES), max_size=len(NAMES)),
    )
    def begin(self, now: int, limits: list[int], periods: list[float]) -> None:
        self.clock.now_us = now
        subject = f"user:{next(_subjects)}"
        self.buckets: list[Bucket] = []
        self.models: list[Model] = []
        for position, (name, limit, seconds) in enumerate(zip(NAMES, limits, periods, strict=True)):
            period = {"day": 86_400, "month": "month"}.get(name, seconds)
            algorithm = name if name in MODELS else "fixed_window"
            rate = Rate(limit=limit, period=period, algorithm=algorithm)
            self.buckets.append(Bucket(subject, rate, scope=f"s{position}"))
            self.models.append(MODELS[algorithm]())
        self.targets: list[int] = []
        self.room = 1

    def teardown(self) -> None:
        if hasattr(self, "buckets"):
            self.limiter.reset(self.buckets)

    @rule(
        verb=st.sampled_from(["check", "check", "check", "check", "peek", "charge", "refund"]),
        picks=st.lists(COUNTERS, min_size=1, max_size=3, unique=True),
        logged=st.frozensets(st.integers(0, 2), max_size=2),
        cost=st.integers(0, 3) | st.sampled_from(["room", "room+1", "capacity", "capacity+1"]),
    )
    def ask(self, verb: str, picks: list[int], logged: frozenset[int], cost: int | str) -> None:
        if self.rewinds and verb == "refund":
            verb = "check"
        capacity = self.buckets[picks[0]].rate.capacity
        known = {"room": self.room, "room+1": self.room + 1, "capacity": capacity, "capacity+1": capacity + 1}
        units = known[cost] if isinstance(cost, str) else cost
        if verb == "charge":
            units = min(units, 1000)
        buckets = [
            replace(self.buckets[pick], mode="log" if position in logged else "enforce")
            for position, pick in enumerate(picks)
        ]
        decision = getattr(self.limiter, verb)(buckets, units)
        self.compare(verb, picks, units, decision, logged=logged)

    @rule(pick=COUNTERS, cost=st.integers(0, 3), patience_us=st.sampled_from([0, 1, 10**5, SECOND, 100 * SECOND]))
    def acquire(self, pick: int, cost: int, patience_us: int) -> None:
        pick = NAMES.index("leaky_bucket") + (len(MODELS) if pick % 2 else 0)
        decision = self.limiter.acquire(self.buckets[pick], patience_us / SECOND, cost)
        self.compare("acquire", [pick], cost, decision, patience_us=patience_us)

    def compare(self, verb: str, picks: list[int], cost: int, decision, **how) -> None:
        rates = [self.buckets[pick].rate for pick in picks]
        now = self.clock.now_us
        allowed, expected = judge(
            verb, [self.models[pick] for pick in picks], rates, now, cost, claims=decision.statuses, **how
        )
        found = [Outcome.of(status) for status in decision.statuses]
        assert (decision.allowed, found) == (allowed, expected), [str(rate) for rate in rates]
        self.room = found[0].remaining
        for pick, outcome in zip(picks, found, strict=True):
            period_us = self.buckets[pick].rate.period_us
            self.targets += [now + outcome.reset_after_us, (now // period_us + 1) * period_us]
            if outcome.retry_after_us:
                self.targets += [now + outcome.retry_after_us] * 3
        self.targets = [target for target in self.targets[-24:] if target > now]
        self.outlive(picks, found)

    def outlive(self, picks: list[int], found: list[Outcome]) -> None:
        """Check the TTLs, then take them off: keys expire by the real time, which this walk does not follow."""
        keys = [key for pick in picks for key in self.client.keys(f"rqtest:{{{self.buckets[pick].subject}}}:s{pick}:*")]
        if keys:
            pipeline = self.client.pipeline(transaction=False)
            for key in keys:
                pipeline.persist(key)
            pipeline.execute()

    @rule(span_us=SPANS)
    def wait(self, span_us: int) -> None:
        self.clock.now_us += span_us

    @precondition(lambda self: self.targets)
    @rule(which=st.integers(0, 23), offset_us=st.sampled_from([-1, 0, 0, 1]))
    def wait_until(self, which: int, offset_us: int) -> None:
        target = self.targets[which % len(self.targets)] + offset_us
        self.clock.now_us = max(self.clock.now_us, target)

    @precondition(lambda self: self.rewinds)
    @rule(span_us=st.integers(1, 10) | st.integers(11, 10 * SECOND) | st.integers(10**6, 2 * DAY))
    def rewind(self, span_us: int) -> None:
        self.clock.now_us -= span_us

    @rule(pick=COUNTERS, limit=LIMITS, burst=st.none() | st.integers(1, 200))
    def edit(self, pick: int, limit: int, burst: int | None) -> None:
        bucket = self.buckets[pick]
        burst = burst if bucket.rate.algorithm in BURSTS else None
        rate = Rate(limit=limit, period=bucket.rate.period, burst=burst, algorithm=bucket.rate.algorithm)
        self.buckets[pick] = replace(bucket, rate=rate)

    @rule(pick=COUNTERS)
    def reset(self, pick: int) -> None:
        self.limiter.reset([self.buckets[pick]])
        self.models[pick].clear()


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
            max_examples=(60 if rewinds else 120) * max(1, EXPLORE),
            stateful_step_count=50,
            derandomize=not EXPLORE,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
