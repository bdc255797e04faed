"""Counts over time and the busiest callers, from requests to the functions of the usage page."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync

from django_ratequota import acheck_request, check_request
from django_ratequota.models import Endpoint, RatePolicy, UsageCount
from django_ratequota.monitoring.collector import _SLICE, collector
from django_ratequota.monitoring.timeline import Counts, timeline, top_callers
from tests.monitoring.support import record, total
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]


@pytest.mark.parametrize("check", [check_request, async_to_sync(acheck_request)], ids=["sync", "async"])
def test_requests_are_counted_by_endpoint_and_policy(check: Callable[..., Any], search: Endpoint) -> None:
    tight = RatePolicy.objects.create(endpoint=search, rates="2/day")
    wide = RatePolicy.objects.create(rates="100/day")
    for _ in range(5):
        check(request_from(address="203.0.113.7"), scope="search")
    check(request_from(address="203.0.113.8"))
    collector.flush()
    for span in ("hour", "day", "week"):
        line = timeline(span)
        assert len(line.starts) == len(line.total) > 1
        assert line.starts[1] - line.starts[0] == line.step
        assert total(line.total) == Counts(3, 3, 0)
        assert {key: total(counts) for key, counts in line.endpoints.items()} == {
            search.pk: Counts(2, 3, 0),
            0: Counts(1, 0, 0),
        }
        # The wide policy admitted these requests; only the other one refused them.
        assert {key: total(counts) for key, counts in line.policies.items()} == {
            tight.pk: Counts(2, 3, 0),
            wide.pk: Counts(3, 0, 0),
        }


def test_log_mode_counts_would_be_refusals(search: Endpoint) -> None:
    shadow = RatePolicy.objects.create(endpoint=search, rates="2/day", mode="log")
    closed = RatePolicy.objects.create(rates="blocked", mode="log")
    decisions = [check_request(request_from(address=f"203.0.113.{last}"), scope="search") for last in (7, 7, 7, 7, 8)]
    assert all(decision.allowed for decision in decisions)
    assert {decision.refusal_id for decision in decisions} == {""}
    collector.flush()
    line = timeline("hour")
    assert total(line.policies[shadow.pk]) == Counts(5, 0, 2)
    assert total(line.policies[closed.pk]) == Counts(5, 0, 5)
    assert total(line.total) == Counts(5, 0, 5)
    found = top_callers("hour", policy_id=shadow.pk)["would_refuse"]
    assert [(top.caller, top.counts) for top in found] == [("ip:203.0.113.7", Counts(0, 0, 2))]


def test_blocked_requests_count_as_refused_by_the_policy(search: Endpoint) -> None:
    block = RatePolicy.objects.create(endpoint=search, rates="blocked")
    assert check_request(request_from(), scope="search").refusal_id
    collector.flush()
    assert total(timeline("hour").policies[block.pk]) == Counts(0, 1, 0)


def test_a_request_at_two_endpoints_counts_once_in_all(search: Endpoint) -> None:
    other = Endpoint.objects.create(name="reading", methods="GET", routes="*")
    request = request_from()
    request.resolver_match = type("Match", (), {"route": "a/", "view_name": "a", "namespaces": []})()
    check_request(request, scope="search")
    collector.flush()
    line = timeline("hour")
    assert total(line.total) == Counts(1, 0, 0)
    assert {key: total(counts).admitted for key, counts in line.endpoints.items()} == {search.pk: 1, other.pk: 1}


def test_the_busiest_callers_are_listed(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="3/day")
    for last, times in ((7, 5), (8, 2), (9, 3)):
        for _ in range(times):
            check_request(request_from(address=f"203.0.113.{last}"), scope="search")
        check_request(request_from(address=f"203.0.113.{last}"))
    collector.flush()
    used = top_callers("hour")["admitted"]
    assert [(top.caller, top.counts.admitted) for top in used] == [
        ("ip:203.0.113.7", 4),
        ("ip:203.0.113.9", 4),
        ("ip:203.0.113.8", 3),
    ]
    assert [top.counts for top in top_callers("day")["refused"]] == [Counts(4, 2, 0)]
    assert [top.counts for top in top_callers("week", endpoint_id=search.pk)["refused"]] == [Counts(3, 2, 0)]
    assert len(top_callers("hour", endpoint_id=0, most=2)["admitted"]) == 2
    assert top_callers("hour")["would_refuse"] == ()


def test_the_busiest_callers_are_not_evicted_by_many_others(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_CALLERS", 20)
    now = int(time.time())
    for round_ in range(20):
        collector._pending.extend([record(now, "user:busy")] * 5)
        collector._pending.extend(record(now, f"user:{round_}-{number}") for number in range(50))
        collector.flush()
    assert top_callers("hour", most=1)["admitted"][0].counts == Counts(100, 0, 0)
    for key in redis_client.scan_iter("rqtest:{statistics}:admitted:*"):
        assert redis_client.zcard(key) <= 40 + 2 * _SLICE


def test_counts_are_bounded_and_totals_stay_exact(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_FIELDS", 50)
    now = int(time.time())
    collector._pending.append(record(now))
    collector.flush()
    collector._pending.extend(record(now, policy_ids=(number,)) for number in range(500))
    collector.flush()
    line = timeline("hour")
    assert total(line.total) == Counts(501, 0, 0)
    assert 40 < len(line.policies) <= 50
    for key in redis_client.scan_iter("rqtest:{statistics}:minutes:*"):
        assert redis_client.hlen(key) <= 50


def test_the_week_includes_rolled_up_hours_from_the_database(search: Endpoint) -> None:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    UsageCount.objects.create(
        length="hour", starts_at=now - timedelta(days=5), place="t", admitted=7, refused=2, would_refuse=1
    )
    UsageCount.objects.create(
        length="day", starts_at=now - timedelta(days=5), place="t", admitted=70, refused=0, would_refuse=0
    )
    check_request(request_from(), scope="search")
    collector.flush()
    assert total(timeline("week").total) == Counts(8, 2, 1)
    assert total(timeline("day").total) == Counts(1, 0, 0)
