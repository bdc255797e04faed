"""Refusals and their ids, from the response to the lookup by operators."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from rest_framework.test import APIClient

from django_ratequota import check_request
from django_ratequota.engine.decision import Decision
from django_ratequota.engine.keys import statistics_key
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring import records
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.packing import HOUR
from django_ratequota.monitoring.pending_refusals import PendingRefusals
from django_ratequota.monitoring.refusals import caller_refusals, find_refusal, refusals, would_be_refusals
from django_ratequota.policies.limit_names import limit_name
from tests.monitoring.support import record
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]


def test_a_refusal_is_found_by_its_id(search: Endpoint) -> None:
    plan = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    tight = RatePolicy.objects.create(endpoint=search, plan=plan, rates="1/day")
    alice = User.objects.create(username="alice")
    before = int(time.time())
    decisions = [check_request(request_from(user=alice, address="203.0.113.7"), scope="search") for _ in range(4)]
    ids = {decision.refusal_id for decision in decisions[1:]}
    assert decisions[0].refusal_id == ""
    assert all(re.fullmatch("[a-z2-7]{10}", one) for one in ids)
    collector.flush()
    found = [one for one in map(find_refusal, ids) if one]
    assert sum(one.count for one in found) == 3
    refusal = found[0]
    assert before <= refusal.at.timestamp() <= time.time()
    assert (refusal.caller, refusal.ip, refusal.plan_id) == (f"user:{alice.pk}", "ip:203.0.113.7", plan.pk)
    assert (refusal.scope, refusal.method, refusal.cost, refusal.error) == ("search", "GET", 1, "")
    assert (refusal.violated, refusal.revision) == (("search/day",), decisions[1].revision)
    [bucket] = refusal.buckets
    assert (bucket.title, str(bucket.rate), bucket.policy_id) == ("search/day", "1/day", tight.pk)
    assert (bucket.subject, bucket.refused, bucket.limit, bucket.remaining) == (f"user:{alice.pk}", True, 1, 0)
    assert bucket.retry_after == bucket.reset_after == pytest.approx(86_400, abs=60)
    assert {one.id for one in refusals()} == ids
    assert find_refusal(f"  {refusal.id.upper()}\n") == refusal
    assert find_refusal(f"{refusal.id}:count") is None


def test_names_that_cannot_be_sent_hide_no_refusals(search: Endpoint) -> None:
    RatePolicy.objects.create(rates="blocked")
    text = "x\ud800é"
    check_request(request_from(address=text, method=text), scope=text)
    collector.flush()
    assert [(one.scope, one.method) for one in refusals()] == [("x?é", "x?é")]


@pytest.mark.parametrize(
    "written", ["", "nothing", "a" * 10, "a" * 10_000, "refused_at", "aaaaaaaaa\x00", "ａｂｃｄｅｆｇｈｉｊ"]
)
def test_an_unknown_id_is_not_found(written: str) -> None:
    assert find_refusal(written) is None


def test_different_callers_endpoints_and_reasons_have_different_ids(search: Endpoint) -> None:
    RatePolicy.objects.create(rates="blocked")
    requests = [(ip, scope) for ip in ("203.0.113.7", "203.0.113.8") for scope in ("search", None)]
    assert len({check_request(request_from(address=ip), scope=scope).refusal_id for ip, scope in requests}) == 4


def test_the_refusal_id_depends_on_the_secret_key(settings: Any) -> None:
    """Without it, all addresses could be tried to find the one with this digest."""
    ids = set()
    for key in ("one", "two"):
        settings.SECRET_KEY = key
        ids.add(records.digest("ip:203.0.113.7"))
    assert len(ids) == 2


def test_the_refusals_of_a_caller_are_searched_among_the_newest(search: Endpoint, monkeypatch: Any) -> None:
    RatePolicy.objects.create(rates="blocked")
    for last in range(20):
        check_request(request_from(address=f"203.0.113.{last}"))
    collector.flush()
    found = caller_refusals("ip:203.0.113.3")
    assert ([one.caller for one in found.refusals], found.since) == (["ip:203.0.113.3"], None)
    assert len(refusals(most=5)) == 5
    monkeypatch.setattr("django_ratequota.monitoring.refusals.SEARCHED", 20)
    limited = caller_refusals("ip:203.0.113.3")
    assert limited.refusals == found.refusals
    assert limited.since is not None
    assert limited.since <= found.refusals[0].at


@pytest.fixture
def refused() -> Callable[..., str]:
    """Record a refusal at a time, which the test flushes; returns its id."""
    RatePolicy.objects.create(rates="blocked")
    decision = check_request(request_from())
    collector.clear()
    return lambda at, caller="user:7": collector.refusals.add(record(at, caller), "", "", "GET", decision)


def test_the_refusals_of_a_caller_are_those_of_the_last_day(refused: Callable[..., str]) -> None:
    now, ids = int(time.time()), []
    for hours in (25, 23, 1):
        ids.append(refused(now - hours * HOUR))
        collector.flush()
    assert [one.id for one in caller_refusals("user:7").refusals] == [ids[2], ids[1]]


def test_refusals_of_one_minute_are_listed_newest_first(refused: Callable[..., str]) -> None:
    """Regression: within a minute they came in the order of their ids, which looked like no order at all."""
    minute = int(time.time()) // 60 * 60 - 120
    for second in range(30):
        refused(minute + second, f"user:{second}")
    collector.flush()
    assert [int(one.at.timestamp()) - minute for one in refusals()] == list(reversed(range(30)))


def test_refused_responses_carry_the_refusal_id() -> None:
    Endpoint.objects.create(name="search")
    RatePolicy.objects.create(rates="blocked")
    client = APIClient(headers={"accept": "application/json"})
    for path in ("/decorated/", "/search/"):
        response = client.get(path)
        assert response.status_code == 429, path
        collector.flush()
        assert find_refusal(response["X-RateLimit-Refusal"]) is not None


def test_refusals_expire_after_48_hours(redis_client: redis.Redis, refused: Callable[..., str]) -> None:
    ids = []
    for hours in (50, 47):
        ids.append(refused(int(time.time()) - hours * HOUR))
        collector.flush()
    assert [find_refusal(one) is not None for one in ids] == [False, True]
    redis_client.zadd(statistics_key("rqtest", "refused_at"), {ids[1]: time.time() - 50 * HOUR})
    check_request(request_from())
    collector.flush()
    assert find_refusal(ids[1]) is None


def test_would_be_refusals_are_kept_apart_and_without_an_id(search: Endpoint, redis_client: redis.Redis) -> None:
    trial = RatePolicy.objects.create(endpoint=search, rates="2/day", mode="log")
    other = RatePolicy.objects.create(rates="blocked", mode="log", counted_per="everyone")
    decisions = [check_request(request_from(address="203.0.113.7"), scope="search") for _ in range(5)]
    assert {(decision.allowed, decision.refusal_id) for decision in decisions} == {(True, "")}
    check_request(request_from(address="203.0.113.8"), scope="search")
    collector.flush()
    assert refusals() == ()
    assert redis_client.zcard(statistics_key("rqtest", "refused_at")) == 0
    found = would_be_refusals(trial.pk)
    assert sum(one.count for one in found) == 3
    assert {(one.caller, one.scope, one.violated) for one in found} == {("ip:203.0.113.7", "search", ())}
    assert all(set(one.against) == {trial.pk, other.pk} for one in found)
    assert sum(one.count for one in would_be_refusals(other.pk)) == 6
    assert len(would_be_refusals(other.pk, most=1)) == 1
    assert would_be_refusals(0) == ()


def test_a_refusal_names_the_enforced_limit_beside_one_on_trial() -> None:
    RatePolicy.objects.create(rates="2/hour")
    RatePolicy.objects.create(rates="1/hour", mode="log")
    while check_request(request_from()).allowed:
        pass
    collector.flush()
    [refusal] = refusals()
    assert refusal.limits == ["all endpoints: 2/hour"]
    names = [limit_name(bucket) for bucket in refusal.buckets]
    assert names == ["all endpoints: 2/hour", "all endpoints: 1/hour (log only)"]


def test_a_network_has_a_share_of_the_refusals_of_each_minute() -> None:
    pending, minute = PendingRefusals(most=9, most_of_share=4), int(time.time()) // 60 * 60

    def note(ip: str, later: int = 0) -> bool:
        noted = record(minute + later, ip=f"ip:{ip}", allowed=False, against=(1,))
        return bool(pending.add(noted, "", "", "GET", Decision(allowed=False)))

    assert [note(f"203.0.113.{last}") for last in (1, 2, 2, 3, 4, 5)] == [True] * 5 + [False]
    assert [(count, later) for _id, _at, count, _text, later in pending.take()] == [(1, 0), (2, 0), (1, 0), (1, 1)]
    assert (pending.take(), note("203.0.113.5")) == ([], False), "it has had its share of this minute"
    assert note("198.51.100.1", 60)
    assert [at for _id, at, *_ in pending.take()] == [minute + 60]
    assert note("203.0.113.5", 60)


def test_would_be_refusals_never_displace_refusals(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr(collector, "would_be", PendingRefusals(most=4, most_of_share=3))
    monkeypatch.setattr(collector, "refusals", PendingRefusals(most=2, most_of_share=2))
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_KEPT_WOULD_BE", 5)
    now = int(time.time()) // 60 * 60

    def note(last: int, policy: int, allowed: bool = True, ago: int = 0) -> str:
        noted = record(now - ago, f"ip:203.0.113.{last}", allowed=allowed, against=(policy,))
        pending = collector.would_be if allowed else collector.refusals
        return pending.add(noted, "", "", "GET", Decision(allowed=allowed))

    assert [bool(note(last, 1)) for last in range(4)] == [True, True, True, False]
    assert [bool(note(last, 2)) for last in range(2)] == [True, False]
    refused = [note(last, 3, allowed=False) for last in range(3)]
    assert [bool(one) for one in refused] == [True, True, False]
    collector.flush()
    for ago in (60, 120, 180):
        collector.clear()
        note(ago, 1, ago=ago)
        collector.flush()
    assert len(refusals()) == 2
    assert [len(would_be_refusals(policy)) for policy in (1, 2, 3)] == [4, 1, 0]
    assert redis_client.hlen(statistics_key("rqtest", "would_be")) == 10
    collector.clear()
    assert note(0, 1)
