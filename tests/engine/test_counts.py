"""Rates that count requests, beside rates that count units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.crossslot import EachSubject
from django_ratequota.engine.decision import LimitRequest, charges_of
from django_ratequota.engine.protocol import ScriptBackend
from django_ratequota.exceptions import OutOfTime, StoreError, StoreLeftAlone
from django_ratequota.replay import replay
from django_ratequota.store.base import Call
from django_ratequota.store.cluster import SHARE
from django_ratequota.utils.sansio import drive
from tests.conftest import Clock
from tests.support.threads import on_threads

TOKENS = Bucket("user:1", Rate.parse("1000/day"))
CALLS = Bucket("user:1", Rate.parse("10 requests/min"))
BOTH = [TOKENS, CALLS]


def each_subject(limiter: Limiter, ask: Callable[[LimitRequest], Any]) -> EachSubject:
    """Return the link of a Cluster, whose servers are asked by ``ask``."""

    class Servers(ScriptBackend):
        def ask(self, request: LimitRequest) -> Any:
            return ask(request)

    return EachSubject(Servers(limiter.store, "rqtest", UTC, None), list)


def remaining(decision: Decision) -> list[int]:
    return [status.remaining for status in decision.statuses]


def test_a_decision_over_requests_only_has_no_units_to_settle(limiter: Limiter) -> None:
    decision = limiter.check([CALLS], 5)
    assert decision.charge(5) is decision.refund(5) is decision.settle(100) is decision
    assert remaining(limiter.peek([CALLS])) == [9]


# --- settle ---


@pytest.fixture(params=["sync", "async"])
def settle(request: Any) -> Any:
    def run(decision: Decision, actual: int) -> Decision:
        return decision.settle(actual) if request.param == "sync" else async_to_sync(decision.asettle)(actual)

    return run


@pytest.mark.parametrize("actual", [0, 1, 20, 349, 2000])
@pytest.mark.parametrize("cost", [0, 1, 20])
def test_settling_leaves_the_actual_units_and_one_request(
    limiter: Limiter, settle: Any, cost: int, actual: int
) -> None:
    decision = limiter.check(BOTH, cost)
    settle(decision, actual)
    assert limiter.peek([TOKENS]).statuses[0].used == min(actual, 1000)
    again = settle(decision, actual)
    assert again is decision if actual == cost else remaining(again) == remaining(limiter.peek(BOTH))
    assert limiter.peek([CALLS]).remaining == 9
    settle(decision, 5)
    assert limiter.peek([TOKENS]).statuses[0].used == 5


@pytest.mark.parametrize("actual", [30, 50, 70])
def test_the_same_settlement_again_returns_the_same_state(limiter: Limiter, settle: Any, actual: int) -> None:
    decision = limiter.check(BOTH, 50)
    first = settle(decision, actual)
    assert remaining(first) == remaining(settle(decision, actual)) == remaining(settle(first, actual))
    assert settle(decision, actual).remaining == 1000 - actual
    assert remaining(first)[0] == 1000 - actual


def test_a_settlement_upwards_returns_the_limits_on_requests_as_well(limiter: Limiter, settle: Any) -> None:
    for _ in range(9):
        limiter.check([CALLS], 1)
    decision = limiter.check(BOTH, 100)
    assert decision.binding == decision.statuses[1]
    assert remaining(settle(decision, 150)) == [850, 0]
    assert remaining(settle(decision, 50)) == [950, 0]
    refused = limiter.check(BOTH, 1)
    assert (refused.limit, refused.remaining) == (10, 0)
    assert remaining(decision.charge(10)) == [940, 0]


def test_what_remains_is_of_a_limit_that_is_enforced(limiter: Limiter) -> None:
    decision = limiter.check([TOKENS, Bucket("user:1", Rate.parse("5/min"), mode="log")], 3)
    assert (decision.limit, decision.remaining) == (1000, 997)


def test_two_threads_settle_the_difference_once(limiter: Limiter) -> None:
    for number in range(200):
        tokens = replace(TOKENS, subject=f"user:{number}")
        decision = limiter.check([tokens], 10)
        on_threads(2, lambda: decision.settle(30))  # noqa: B023 - called before the next round
        assert remaining(limiter.peek([tokens])) == [970]


def test_settling_a_peek_charges_what_it_took(limiter: Limiter, settle: Any) -> None:
    settle(limiter.peek(BOTH, 100), 7)
    assert remaining(limiter.peek(BOTH)) == [993, 10]


# --- Elsewhere. ---


def test_a_cluster_counts_requests_once_and_gives_them_back(limiter: Limiter, clock: Clock) -> None:
    shared = replace(CALLS, subject="everyone")

    def check(cost: int, everyone: Bucket) -> Decision:
        buckets = (*BOTH, everyone)
        backend = ScriptBackend(limiter.store, "rqtest", UTC, clock)
        steps = EachSubject(backend, list).ask(LimitRequest(mode="check", buckets=buckets, cost=cost))
        return drive(steps, Call(limiter.store).do)

    assert remaining(check(0, shared)) == [1000, 9, 9]
    assert remaining(check(30, shared)) == [970, 8, 8]
    refused = check(30, replace(shared, rate=Rate.parse("20/day")))
    assert not refused.allowed
    assert remaining(refused)[:2] == [970, 8]


@pytest.mark.parametrize("hanging", [["everyone"], ["user:1", "everyone"], ["user:2", "everyone"]])
def test_a_hung_server_leaves_time_to_refund_on_the_others(limiter: Limiter, hanging: list[str]) -> None:
    """On a Cluster the units stayed charged: the hung server had taken all of the decision's time."""
    buckets = tuple(replace(TOKENS, subject=subject) for subject in ("user:1", "user:2", "everyone"))
    backend, left = ScriptBackend(limiter.store, "rqtest", UTC, None), [1.0]

    def ask(part: LimitRequest) -> Any:
        if left[0] < 0.001:
            raise OutOfTime(1.0)
        if part.buckets[0].subject in hanging and (part.mode == "refund" or part.buckets[0].subject == "everyone"):
            left[0] -= left[0] * SHARE
            raise StoreError("timeout", "no reply")
        left[0] -= 0.001
        return backend.ask(part)

    with pytest.raises(StoreError, match="no reply"):
        drive(each_subject(limiter, ask).ask(LimitRequest(mode="check", buckets=buckets)), limiter.store.execute)
    refunded = [bucket.subject not in hanging for bucket in buckets[:2]]
    assert remaining(limiter.peek(buckets[:2])) == [1000 if free else 999 for free in refunded]


@pytest.mark.parametrize(("left_alone", "error"), [("user:1", StoreLeftAlone), ("everyone", StoreError)])
def test_a_cluster_is_left_alone_when_none_of_its_servers_was_asked(
    limiter: Limiter, left_alone: str, error: type[StoreError]
) -> None:
    backend = ScriptBackend(limiter.store, "rqtest", UTC, None)

    def ask(part: LimitRequest) -> Any:
        if part.buckets[0].subject == left_alone:
            raise StoreLeftAlone("timeout", "not used")
        return backend.ask(part)

    buckets = (TOKENS, replace(TOKENS, subject="everyone"))
    with pytest.raises(StoreError) as raised:
        drive(each_subject(limiter, ask).ask(LimitRequest(mode="check", buckets=buckets)), limiter.store.execute)
    assert (raised.type, raised.value.reason) == (error, "timeout")


def test_each_refund_by_hand_is_tried_although_another_fails(limiter: Limiter, clock: Clock) -> None:
    class Hanging:
        def __init__(self, subject: str) -> None:
            self.subject = subject

        def ask(self, part: LimitRequest) -> Any:
            if part.mode == "refund" and part.buckets[0].subject == self.subject:
                raise StoreError("timeout", "no reply")
            return backend.ask(part)

        def decide(self, request: LimitRequest) -> Decision:
            return drive(each_subject(limiter, self.ask).ask(request), limiter.store.execute)

    backend = ScriptBackend(limiter.store, "rqtest", UTC, clock)
    buckets = (TOKENS, replace(TOKENS, subject="everyone"))
    for apart in (0, 1):  # with clocks apart, each server's refund is a call of its own
        for subject, left in (("user:1", [995, 1000]), ("everyone", [1000, 995])):
            limiter.reset(buckets)
            servers: Any = Hanging(subject)
            decision = servers.decide(LimitRequest(mode="check", buckets=buckets, cost=5, settler=servers))
            for charge in charges_of(decision)[:apart]:
                charge.at_us += 1
            with pytest.raises(StoreError, match="no reply"):
                decision.refund(5)
            assert remaining(limiter.peek(buckets)) == left


def test_a_replay_counts_requests_once() -> None:
    attempts = [(1_000_000 + number, cost) for number, cost in enumerate((0, 349, 5, 1))]
    assert replay([Rate.parse("3 requests/min"), Rate.parse("1000/day")], attempts) == [True, True, True, False]
    assert replay([Rate.parse("3 requests/min sliding_window_log")], attempts) == [True, True, True, False]


def test_keys_of_requests_are_never_those_of_units(redis_client: redis.Redis, limiter: Limiter) -> None:
    limiter.check(BOTH, 3)
    keys = sorted(key.decode() for key in redis_client.scan_iter("rqtest:*"))
    assert keys == ["rqtest:{user:1}:0:tb60r", "rqtest:{user:1}:0:tb86400"]
