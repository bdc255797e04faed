"""Random walks through the engine, each answer compared with exact models (``models.py``): no step may differ.

The walks are the same in every run. ``--hypothesis-profile=explore`` walks twenty times as many, at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from math import ceil
from typing import Any

import pytest
import redis
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.calendar_windows import calendar_window
from django_ratequota.engine.keys import bucket_key, window_key
from django_ratequota.engine.rates import BURST_ALGORITHMS
from tests.conftest import NOON_US, Clock
from tests.support.properties import examples
from tests.support.reference_models import MODELS, CalendarWindow, Charged, Model, Outcome, Queue, judge, units_of

SECOND, DAY = 10**6, 86_400 * 10**6

#: What a counter is: one of the algorithms, a fixed window of the calendar, or a leaky bucket's queue.
KINDS = (*MODELS, "calendar", "queue")
#: Few counters a walk, so that each is asked often; a number picks one, counted around.
COUNTERS = st.integers(0, 2)
#: Beyond 2**53 µs-units doubles are not exact: a day's 15,000 units and as many in debt stay below.
LIMITS = st.integers(1, 12) | st.integers(13, 15_000)
DEBT = 20_000
PERIODS = st.sampled_from([0.001, 1, 1.234567, 7, 60, 900, 3600, 86_400])
COSTS = st.sampled_from([0, 1, 1, 1, 2, 3, "half", "room", "room", "room+1", "capacity", "capacity+1"])
#: What passes before a question: per cent of the first counter's period, and µs.
PAUSES = st.just((0, 0)) | st.tuples(st.integers(0, 230), st.integers(0, 10))
PICKS = st.lists(COUNTERS, min_size=1, max_size=3, unique=True)
LOGGED = st.just(frozenset[int]()) | st.frozensets(st.integers(0, 2), max_size=2)
Cost = int | str
Pause = tuple[int, int]
_subjects = itertools.count(1)


class Walk(RuleBasedStateMachine):
    """One limiter, one to three counters, and a clock that the walk moves."""

    client: redis.Redis
    clock: Clock
    limiter: Limiter
    #: Whether the clock goes back too; then nothing is refunded, as no formula predicts the entries left.
    rewinds = False

    @initialize(
        now=st.integers(NOON_US, NOON_US + DAY),
        kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True),
        limits=st.lists(LIMITS, min_size=3, max_size=3),
        periods=st.lists(PERIODS, min_size=3, max_size=3),
        calendar=st.sampled_from([86_400, 604_800, "month"]),
        counts=st.lists(st.sampled_from(["units", "units", "requests"]), min_size=3, max_size=3),
        anchor=st.integers(1, 31),
    )
    def begin(
        self,
        now: int,
        kinds: list[str],
        limits: list[int],
        periods: list[Any],
        calendar: Any,
        counts: list[Any],
        anchor: int,
    ) -> None:
        self.clock.now_us = now
        subject = f"user:{next(_subjects)}"
        self.kinds = kinds
        self.buckets: list[Bucket] = []
        self.models: list[Model] = []
        for kind, limit, period, what in zip(kinds, limits, periods, counts, strict=False):
            algorithm = {"calendar": "fixed_window", "queue": "leaky_bucket"}.get(kind, kind)
            rate = Rate(
                limit=limit, counts=what, period=calendar if kind == "calendar" else period, algorithm=algorithm
            )
            self.buckets.append(Bucket(subject, rate, scope=kind, queued=kind == "queue"))
            # A fixed window of a day is the calendar's.
            self.models.append(CalendarWindow() if rate.calendar else Queue() if kind == "queue" else MODELS[kind]())
        self.anchor_months(anchor)
        #: Instants worth standing at, of the latest answers.
        self.targets: list[int] = []
        self.room = 1
        #: Decisions that may be refunded, with the counters they charged.
        self.charged: list[tuple[Decision, list[int]]] = []

    def teardown(self) -> None:
        if hasattr(self, "buckets"):
            self.limiter.reset(self.buckets)

    @rule(picks=PICKS, cost=COSTS, logged=LOGGED, pause=PAUSES)
    def check(self, picks: list[int], cost: Cost, logged: frozenset[int], pause: Pause) -> None:
        self.ask("check", picks, cost, pause, logged=logged)

    @rule(pick=COUNTERS, cost=COSTS, pause=PAUSES)
    def check_one(self, pick: int, cost: Cost, pause: Pause) -> None:
        self.ask("check", [pick], cost, pause)

    @precondition(lambda self: self.targets)
    @rule(which=st.integers(0, 29), offset_us=st.sampled_from([-1, 0, 0, 1]), cost=COSTS)
    def check_at_target(self, which: int, offset_us: int, cost: Cost) -> None:
        target, pick = self.targets[which % len(self.targets)]
        self.clock.now_us = max(self.clock.now_us, target + offset_us)
        self.ask("check", [pick], cost)

    @rule(pick=COUNTERS, cost=COSTS, pause=PAUSES)
    def fill(self, pick: int, cost: Cost, pause: Pause) -> None:
        """Charge up to the limit or beyond; the next check is refused."""
        self.ask("charge", [pick], "capacity", pause)
        self.ask("check", [pick], cost)

    @rule(picks=PICKS, cost=COSTS, pause=PAUSES)
    def peek(self, picks: list[int], cost: Cost, pause: Pause) -> None:
        self.ask("peek", picks, cost, pause)

    @rule(picks=PICKS, cost=COSTS)
    def charge(self, picks: list[int], cost: Cost) -> None:
        self.ask("charge", picks, cost)

    @precondition(lambda self: not self.rewinds)
    @rule(picks=PICKS, cost=COSTS, pause=PAUSES, again=COSTS)
    def refund(self, picks: list[int], cost: Cost, pause: Pause, again: Cost) -> None:
        self.ask("refund", picks, cost, pause)
        self.ask("check", picks, again)

    @precondition(lambda self: self.charged and not self.rewinds)
    @rule(which=st.integers(0, 9), cost=COSTS, pause=PAUSES)
    def give_back(self, which: int, cost: Cost, pause: Pause) -> None:
        """A decision refunds what of its own charge is still counted, by the rate of its check."""
        decision, picks = self.charged.pop(which % len(self.charged))
        found = [(self.models[pick], status) for pick, status in zip(picks, decision.statuses, strict=True)]
        self.clock.now_us += pause[0] * decision.statuses[0].bucket.rate.period_us // 100 + pause[1]
        now = self.clock.now_us
        units = min(decision.cost, self.units(cost, decision.cost))
        refunded = decision.refund(units)
        refundable = [status.allowed and status.bucket.rate.counts == "units" for status in decision.statuses]
        if not units or not any(refundable):
            assert refunded is decision
            return
        expected = []
        anchor = self.buckets[0].anchor
        self.anchor_months(decision.statuses[0].bucket.anchor)  # as they were at the check
        claims = iter(refunded.statuses)
        for model, status in found:
            if status.allowed:
                rate, claim = status.bucket.rate, next(claims)
                if rate.counts == "requests":
                    expected.append(Outcome.of(status))  # as it was at the check
                    continue
                model.give_back(rate, now, units, Charged(decision.at_us, status.reset_after_us, decision.cost))
                if rate.calendar and status.reset_after_us <= now - decision.at_us:  # the window is over
                    remaining, reset, more = model.free(rate, decision.at_us), 0, None
                else:
                    remaining, reset, more = model.status(rate, now, claim=claim)
                expected.append(Outcome(True, remaining, 0, reset, more))
        assert [Outcome.of(status) for status in refunded.statuses] == expected
        charged = [(status.bucket, model) for (model, status), ok in zip(found, refundable, strict=True) if ok]
        self.outlive(
            [bucket for bucket, _ in charged], [model for _, model in charged], [True] * len(charged), decision.at_us
        )
        self.anchor_months(anchor)

    @precondition(lambda self: "queue" in self.kinds)
    @rule(cost=COSTS, patience_us=st.sampled_from([0, 1, 10**5, SECOND, 100 * SECOND]), pause=PAUSES)
    def acquire(self, cost: Cost, patience_us: int, pause: Pause) -> None:
        self.ask("acquire", [self.kinds.index("queue")], cost, pause, patience_us=patience_us)

    @precondition(lambda self: "queue" in self.kinds)
    @rule(period=PERIODS, cost=COSTS, pause=PAUSES)
    def edit_period(self, period: Any, cost: Cost, pause: Pause) -> None:
        """Of a queue, which goes on."""
        pick = self.kinds.index("queue")
        bucket = self.buckets[pick]
        self.buckets[pick] = replace(bucket, rate=replace(bucket.rate, period=period))
        self.ask("acquire", [pick], cost, pause, patience_us=100 * SECOND)

    @rule(pick=COUNTERS, limit=LIMITS, burst=st.none() | st.integers(1, 200), cost=COSTS)
    def edit(self, pick: int, limit: int, burst: int | None, cost: Cost) -> None:
        pick %= len(self.kinds)
        bucket = self.buckets[pick]
        burst = burst if bucket.rate.algorithm in BURST_ALGORITHMS else None
        rate = replace(bucket.rate, limit=limit, burst=burst)
        self.buckets[pick] = replace(bucket, rate=rate)
        self.ask("check", [pick], cost)

    @precondition(lambda self: "calendar" in self.kinds and not self.rewinds)
    @rule(anchor=st.integers(1, 31), cost=COSTS, pause=PAUSES)
    def move_months(self, anchor: int, cost: Cost, pause: Pause) -> None:
        self.anchor_months(anchor)
        self.ask("check", [self.kinds.index("calendar")], cost, pause)

    def anchor_months(self, anchor: int) -> None:
        self.buckets = [replace(bucket, anchor=anchor) for bucket in self.buckets]
        for model in self.models:
            if isinstance(model, CalendarWindow):
                model.anchor = anchor

    @rule(pick=COUNTERS)
    def reset(self, pick: int) -> None:
        pick %= len(self.kinds)
        self.limiter.reset([self.buckets[pick]])
        self.models[pick].reset(self.buckets[pick].rate, self.clock.now_us)

    @precondition(lambda self: self.rewinds)
    @rule(picks=PICKS, cost=COSTS, back=st.tuples(st.integers(0, 230), st.integers(0, 10) | st.just(DAY)))
    def rewind(self, picks: list[int], cost: Cost, back: Pause) -> None:
        self.ask("check", picks, cost, (-back[0], -back[1]))

    def ask(
        self,
        verb: str,
        picks: list[int],
        cost: Cost,
        pause: Pause = (0, 0),
        *,
        logged: frozenset[int] = frozenset(),
        patience_us: int = 0,
    ) -> None:
        """Let time pass, then compare the limiter's decision with the models'."""
        picks = list(dict.fromkeys(pick % len(self.kinds) for pick in picks))
        first = self.buckets[picks[0]].rate
        pause_us = pause[0] * first.period_us // 100 + pause[1]
        self.clock.now_us += pause_us
        now = self.clock.now_us
        cost = self.units(cost, first.capacity)
        models = [self.models[pick] for pick in picks]
        rates = [self.buckets[pick].rate for pick in picks]
        if verb == "charge" and any(m.used(r, now) > DEBT for m, r in zip(models, rates, strict=True)):
            cost = 1
        buckets = [
            replace(self.buckets[pick], mode="log" if position in logged else "enforce")
            for position, pick in enumerate(picks)
        ]
        if verb == "acquire":
            decision = self.limiter.acquire(buckets[0], patience_us / SECOND, cost)
        else:
            ask: Callable[..., Decision] = getattr(self.limiter, verb)
            decision = ask(buckets, cost)
        if decision.cost:
            self.charged = [*self.charged[-9:], (decision, picks)]
        claims = list(decision.statuses)
        allowed, expected = judge(
            verb, models, rates, now, cost, logged=logged, patience_us=patience_us, claims=claims
        )
        found = [Outcome.of(status) for status in claims]
        assert (decision.allowed, found) == (allowed, expected), [str(rate) for rate in rates]
        assert decision.at_us == now
        self.room = found[0].remaining
        self.note_targets(picks, found)
        charged = [bool(units_of(verb, rate, cost)) and allowed and verb != "peek" for rate in rates]
        self.outlive(buckets, models, [some and f.passed for some, f in zip(charged, found, strict=True)], now)

    def units(self, cost: Cost, capacity: int) -> int:
        named = {
            "half": (capacity + 1) // 2,
            "room": self.room,
            "room+1": self.room + 1,
            "capacity": capacity,
            "capacity+1": capacity + 1,
        }
        return named[cost] if isinstance(cost, str) else cost

    def note_targets(self, picks: list[int], found: list[Outcome]) -> None:
        now = self.clock.now_us
        for pick, outcome in zip(picks, found, strict=True):
            period_us = self.buckets[pick].rate.period_us
            named = [(now // period_us + 1) * period_us, now + outcome.reset_after_us]
            named += [now + outcome.retry_after_us] * 3 if outcome.retry_after_us else []
            named += [now + outcome.next_after_us] if outcome.next_after_us else []
            self.targets += [(target, pick) for target in named]
        self.targets = [entry for entry in self.targets[-30:] if entry[0] > now]

    def outlive(self, buckets: list[Bucket], models: list[Model], written: list[bool], at_us: int) -> None:
        """Check the TTLs of the written keys, then remove them: keys expire by real time, not by this clock."""
        pipeline = self.client.pipeline(transaction=False)
        for bucket in buckets:
            key, unit = bucket_key("rqtest", bucket), bucket.rate.calendar
            if unit:
                key = window_key(key, calendar_window(unit, at_us, UTC, bucket.anchor).first_day)
            pipeline.pttl(key).persist(key)
        ttls = pipeline.execute()[::2]
        for bucket, model, write, ttl in zip(buckets, models, written, ttls, strict=True):
            if not write or self.rewinds:
                continue
            # A refund leaves the state one of the rate that it was charged under.
            state_us = model.status(model.rate or bucket.rate, self.clock.now_us)[1]
            if bucket.rate.calendar:
                continue
            if not state_us:
                assert ttl == -2, "a count of nothing has no key"
                continue
            if bucket.rate.algorithm not in BURST_ALGORITHMS:
                state_us = max(state_us, 2 * bucket.rate.period_us)
            assert ttl <= ceil(state_us / 1000) + 1000, bucket
            assert ttl > 0, bucket


@pytest.mark.slow
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
        settings=settings(examples(80 if rewinds else 150), stateful_step_count=50),
    )
