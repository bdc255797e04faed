"""Counting in this process (``memory://``): the limiter's verbs decide what they decide in Redis."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from asgiref.sync import async_to_sync
from django.test import override_settings
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.exceptions import InvalidBucket, StoreError
from tests.conftest import Clock
from tests.engine.test_against_reference import Walk
from tests.support.properties import examples
from tests.support.reference_models import Model


@pytest.fixture
def in_memory() -> Iterator[None]:
    """A project without Redis and without caches."""
    with override_settings(RATEQUOTA={"REDIS_URL": "memory://"}, CACHES={}):
        yield


class MemoryWalk(Walk):
    """The random walk of the engine's own test."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1)  # each walk begins at a time of its own, and no limiter's time goes back
        self.limiter = Limiter(clock=self.clock)

    def outlive(self, buckets: list[Bucket], models: list[Model], written: list[bool], at_us: int) -> None:
        """Nothing to check: there are no keys."""


@pytest.mark.slow
@pytest.mark.usefixtures("in_memory")
def test_every_step_of_a_random_walk_equals_the_exact_models() -> None:
    # Shrinking a walk takes minutes.
    some = settings(examples(150), stateful_step_count=50, phases=[Phase.generate])
    run_state_machine_as_test(MemoryWalk, settings=some)


# --- Verbs. ---

MINUTE = Bucket("user:1", Rate.parse("10/min"))
QUEUE = Bucket("user:1", Rate.parse("1/s burst 1 leaky_bucket"))
Run = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def run(request: Any) -> Run:
    """Calls a verb of a limiter or a decision, or its async twin."""

    def call(of: Any, verb: str, *args: Any, **options: Any) -> Any:
        if request.param == "sync":
            return getattr(of, verb)(*args, **options)
        return async_to_sync(getattr(of, f"a{verb}"))(*args, **options)

    return call


@pytest.mark.usefixtures("in_memory")
class TestVerbs:
    def test_each_verb_changes_the_counter_as_it_does_in_redis(self, run: Run) -> None:
        limiter = Limiter(clock=Clock())
        checked = run(limiter, "check", [MINUTE], 3)
        assert (checked.allowed, checked.remaining, checked.limit, checked.degraded) == (True, 7, 10, False)
        assert run(limiter, "peek", [MINUTE]).remaining == 7
        assert run(limiter, "charge", [MINUTE], 9).statuses[0].remaining == 0
        assert not run(limiter, "check", [MINUTE]).allowed
        assert run(limiter, "refund", [MINUTE], 5).statuses[0].remaining == 3
        assert run(checked, "settle", 1).statuses[0].remaining == 5
        assert run(limiter, "reset", [MINUTE]) == 1
        assert run(limiter, "reset", [MINUTE]) == 0
        assert run(limiter, "peek", [MINUTE]).remaining == 10

    def test_two_buckets_of_one_counter_are_refused(self) -> None:
        with pytest.raises(InvalidBucket, match="two buckets share"):
            Limiter().check([MINUTE, MINUTE])

    def test_limiters_of_one_prefix_share_counters(self, run: Run) -> None:
        Limiter().reset([MINUTE])
        assert [run(Limiter(), "check", [MINUTE]).remaining for _ in range(3)] == [9, 8, 7]
        assert run(Limiter(prefix="other"), "peek", [MINUTE]).remaining == 10
        assert run(Limiter(clock=Clock()), "peek", [MINUTE]).remaining == 10

    def test_calendar_windows_end_by_the_limiters_time_zone(self) -> None:
        clock = Clock(1_763_702_400_000_000)  # 2025-11-21 05:20 UTC
        limiter = Limiter(clock=clock, time_zone=ZoneInfo("Asia/Tokyo"))
        assert limiter.check([Bucket("user:1", Rate.parse("5/day fixed_window"))]).reset_after == (9 * 60 + 40) * 60
        assert limiter.check([Bucket("user:1", Rate.parse("5/month"))]).statuses[0].window_us == 30 * 86_400 * 10**6

    def test_redis_is_needed_for_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it connected"))
        assert Limiter().check([MINUTE]).statuses
        with pytest.raises(StoreError, match="memory://, so each worker counts on its own") as caught:
            Limiter().store.execute(("PING",))
        assert caught.value.reason == "memory"


def test_a_disabled_project_admits_everything_and_counts_nothing(run: Run) -> None:
    with override_settings(RATEQUOTA={"ENABLED": False}, CACHES={}):
        limiter = Limiter()
        for _ in range(3):
            decision = run(limiter, "check", [MINUTE, QUEUE], 20)
            assert (decision.allowed, decision.degraded) == (True, False)
            assert [status.remaining for status in decision.statuses] == [10, 1]
        run(decision, "charge", 5)
        run(decision, "refund", 5)
        assert run(limiter, "peek", [MINUTE]).remaining == 10
        assert [run(limiter, "acquire", QUEUE, timeout=0).retry_after for _ in range(2)] == [0, 0]
        assert run(limiter, "reset", [MINUTE]) == 0


def test_a_limiter_with_a_client_counts_in_redis_although_disabled(redis_client: redis.Redis) -> None:
    with override_settings(RATEQUOTA={"ENABLED": False}, CACHES={}):
        limiter = Limiter(client=redis_client, prefix="rqtest", timeout=5)
        assert [limiter.check([MINUTE]).remaining for _ in range(2)] == [9, 8]
        limiter.store.close()


# --- Rates and clocks that change. ---


@pytest.mark.parametrize("algorithm", ["token_bucket", "leaky_bucket", "gcra"])
def test_a_refund_by_a_faster_rate_leaves_the_slower_ones_usage(
    either: Limiter, clock: Clock, algorithm: str
) -> None:
    """By the faster rate everything had drained, so its refund emptied the counter."""
    slow, fast = (Bucket("user:1", Rate.parse(f"{limit}/day {algorithm}")) for limit in (10, 1000))
    either.check([slow], 10)
    clock.advance(86_400 / 40)
    either.refund([fast], 1)
    assert either.peek([slow]).remaining == 1


@pytest.mark.usefixtures("in_memory")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_clock_that_was_ahead_stops_no_other_counter(algorithm: str) -> None:
    clock = Clock()
    limiter = Limiter(clock=clock)
    rate = Rate.parse(f"2/s {algorithm}")
    limiter.check([Bucket("user:1", rate)])
    clock.advance(86_400)
    limiter.check([Bucket("user:2", rate)])
    clock.advance(-86_400)
    other = Bucket("user:3", rate)
    assert [limiter.check([other]).allowed for _ in range(3)] == [True, True, False]
    clock.advance(2.5)
    assert limiter.check([other]).allowed
    assert limiter.check([Bucket("user:2", rate)]).allowed
    assert not limiter.check([Bucket("user:2", rate)]).allowed
