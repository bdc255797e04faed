"""What a process records and sends, and the bounds of what it and Redis hold."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User

from django_ratequota import Limiter, check_request
from django_ratequota.engine.keys import short
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Plan, RatePolicy
from django_ratequota.monitoring.attempts import recorded_attempts
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.packing import HOUR
from django_ratequota.monitoring.records import UNKNOWN_PLAN, DecisionRecord
from django_ratequota.monitoring.refusals import find_refusal, refusals
from django_ratequota.monitoring.timeline import Counts, timeline, top_callers
from django_ratequota.runtime import process
from tests.conftest import Clock
from tests.monitoring.support import record, total
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

#: A port without a listener.
CLOSED = "redis://127.0.0.1:1/0"


def test_without_statistics_nothing_is_recorded(settings: Any, redis_client: redis.Redis) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 0}
    RatePolicy.objects.create(rates="blocked")
    decision = check_request(request_from())
    assert (decision.allowed, decision.refusal_id) == (False, "")
    collector.flush()
    assert redis_client.keys("rqtest:{statistics}*") == []


def test_with_redis_down_a_flush_drops_the_records(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": CLOSED, "ON_ERROR": "deny"}
    RatePolicy.objects.create(rates="5/day")
    refused = check_request(request_from())
    assert (refused.allowed, refused.refusal_id) == (False, ""), "the refusal cannot be looked up"
    assert len(collector.pending) == 1
    with pytest.raises(StoreError):
        collector.flush()
    assert not collector.pending
    day = [lambda: timeline("day"), lambda: top_callers("day"), lambda: find_refusal("qk3c7m2xva")]
    for read in (*day, recorded_attempts, refusals):
        with pytest.raises(StoreError):
            read()


def test_a_decision_without_redis_is_counted_once_it_is_back(settings: Any) -> None:
    before = settings.RATEQUOTA
    settings.RATEQUOTA = {**before, "REDIS_URL": CLOSED}
    RatePolicy.objects.create(rates="5/day")
    check_request(request_from())
    settings.RATEQUOTA = before
    collector.flush()
    assert total(timeline("hour").total) == Counts(1, 0, 0)


def test_a_decision_is_counted_at_the_time_of_the_store(
    limiter: Limiter, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "limiter", lambda: limiter)
    RatePolicy.objects.create(rates="5/day")
    check_request(request_from())
    assert [fields[0] for fields in collector.pending] == [clock.now_us // 10**6]


def test_the_plan_of_a_user_that_no_policy_needs_is_unknown(settings: Any, alice: User) -> None:
    for caller, plan in (("ip", UNKNOWN_PLAN), ("user", None)):
        settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": [caller]}
        check_request(request_from(alice))
        assert DecisionRecord._make(collector.pending.pop()).plan_id == plan
    # Code may name it without reading the user.
    free = Plan.objects.create(name="Free", slug="free", default_for="anonymous")
    resolver = "tests.project.views.named_plan"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["ip"], "PLAN_RESOLVER": resolver}
    for slug, plan in (("free", free.pk), ("gone", UNKNOWN_PLAN), (None, UNKNOWN_PLAN)):
        check_request(request_from(alice, plan=slug))
        assert DecisionRecord._make(collector.pending.pop()).plan_id == plan


def test_a_process_that_ends_sends_attempts_that_waited_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector._CHUNK_SECONDS", 10**6)
    collector.pending.append(record(int(time.time())))
    collector.flush()
    assert recorded_attempts().attempts == ()
    collector.close()
    assert len(recorded_attempts().attempts) == 1


def test_every_key_expires(redis_client: redis.Redis) -> None:
    RatePolicy.objects.create(rates="1/day")
    for _ in range(3):
        check_request(request_from())
    collector.flush()
    keys = list(redis_client.scan_iter("rqtest:{statistics}*"))
    assert len(keys) == 8
    for key in keys:
        assert 0 < redis_client.ttl(key) <= 48 * HOUR, key


def test_a_process_holds_no_more_records_than_its_bound(monkeypatch: Any) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_PENDING", 10)
    for last in range(20):
        check_request(request_from(address=f"203.0.113.{last}"))
    assert len(collector.pending) == 10
    collector.flush()
    assert total(timeline("hour").total) == Counts(10, 0, 0)


@pytest.mark.parametrize(
    "name",
    ["tenant:" + "x" * 10_000, "tenant:<b>|:{}%\x00\n", "tenant:\ud800", "tenant:\u202egnol", "tenant:é😀", "|", ""],
)
def test_any_name_is_counted_and_read_back(name: str) -> None:
    collector.pending.append(record(int(time.time()), short(name)))
    collector.flush()
    [top] = top_callers("hour")["admitted"]
    assert top.caller == short(name)
    assert len(top.caller) < 300
    assert short(f"{name}x") != top.caller, "long names with a common prefix stay distinct"
    [attempt] = recorded_attempts().attempts
    assert attempt.caller == short(name)
