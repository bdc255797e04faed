"""Counts over time and the busiest callers, from requests to the functions of the usage page."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
import time_machine
from asgiref.sync import async_to_sync

from django_ratequota import acheck_request, check_request
from django_ratequota.engine.keys import short
from django_ratequota.models import Endpoint, RatePolicy, UsageCount
from django_ratequota.monitoring.collector import _SLICE, collector
from django_ratequota.monitoring.packing import DAY, HOUR
from django_ratequota.monitoring.timeline import Counts, seen_callers, timeline, top_callers
from django_ratequota.runtime import default_limiter
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
    for span, minutes in (("hour", 1), ("day", 15), ("week", 60)):
        line = timeline(span)
        assert len(line.starts) == len(line.total)
        assert line.starts[1] - line.starts[0] == timedelta(minutes=minutes)
        assert total(line.total) == Counts(3, 3, 0)
        assert line.endpoints == {search.pk: Counts(2, 3, 0), 0: Counts(1, 0, 0)}
        # The wide policy admitted these requests; only the other one refused them.
        of_policies = [total(timeline(span, policy_id=policy.pk).total) for policy in (tight, wide)]
        assert of_policies == [Counts(2, 3, 0), Counts(3, 0, 0)]


def test_log_mode_counts_would_be_refusals(search: Endpoint) -> None:
    shadow = RatePolicy.objects.create(endpoint=search, rates="2/day", mode="log")
    closed = RatePolicy.objects.create(rates="blocked", mode="log")
    decisions = [check_request(request_from(address=f"203.0.113.{last}"), scope="search") for last in (7, 7, 7, 7, 8)]
    assert all(decision.allowed for decision in decisions)
    assert {decision.refusal_id for decision in decisions} == {""}
    collector.flush()
    line = timeline("hour")
    assert total(timeline("hour", policy_id=shadow.pk).total) == Counts(5, 0, 2)
    assert total(timeline("hour", policy_id=closed.pk).total) == Counts(5, 0, 5)
    assert total(line.total) == Counts(5, 0, 5)
    found = top_callers("hour", policy_id=shadow.pk)["would_refuse"]
    assert [(top.caller, top.counts) for top in found] == [("ip:203.0.113.7", Counts(0, 0, 2))]


def test_a_request_at_two_endpoints_counts_once_in_all(search: Endpoint) -> None:
    other = Endpoint.objects.create(name="reading", methods="GET", routes="*")
    request = request_from()
    request.resolver_match = type("Match", (), {"route": "a/", "view_name": "a", "namespaces": []})()
    check_request(request, scope="search")
    collector.flush()
    line = timeline("hour")
    assert total(line.total) == Counts(1, 0, 0)
    assert {key: counts.admitted for key, counts in line.endpoints.items()} == {search.pk: 1, other.pk: 1}


def test_the_busiest_callers_are_listed(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="3/day")
    for last, times in ((7, 5), (8, 2), (9, 3)):
        for _ in range(times):
            check_request(request_from(address=f"203.0.113.{last}"), scope="search")
        check_request(request_from(address=f"203.0.113.{last}"))
    collector.flush()
    used = top_callers("hour")["admitted"]
    assert [(top.caller[-1], top.counts.admitted) for top in used] == [("7", 4), ("9", 4), ("8", 3)]
    assert [top.counts for top in top_callers("day")["refused"]] == [Counts(4, 2, 0)]
    assert [top.counts for top in top_callers("week", endpoint_id=search.pk)["refused"]] == [Counts(3, 2, 0)]
    assert len(top_callers("hour", endpoint_id=0, most=2)["admitted"]) == 2
    assert top_callers("hour")["would_refuse"] == ()


def test_the_busiest_callers_are_not_evicted_by_many_others(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_CALLERS", 20)
    now = int(time.time())
    for round_ in range(20):
        collector.pending.extend([record(now, "user:busy")] * 5)
        collector.pending.extend(record(now, f"user:{round_}-{number}") for number in range(50))
        collector.flush()
    assert top_callers("hour", most=1)["admitted"][0].counts == Counts(100, 0, 0)
    for key in redis_client.scan_iter("rqtest:{statistics}:admitted:*"):
        assert redis_client.zcard(key) <= 40 + 2 * _SLICE


def test_counts_are_bounded_and_totals_stay_exact(monkeypatch: Any, redis_client: redis.Redis) -> None:
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_FIELDS", 50)
    now = int(time.time())
    collector.pending.append(record(now))
    collector.flush()
    collector.pending.extend(record(now, endpoint_ids=(number + 1,)) for number in range(500))
    collector.flush()
    line = timeline("hour")
    assert total(line.total) == Counts(501, 0, 0)
    assert 40 < len(line.endpoints) <= 50
    for key in redis_client.scan_iter("rqtest:{statistics}:minutes:*"):
        assert redis_client.hlen(key) <= 50


def test_the_chart_goes_on_where_a_key_is_full(monkeypatch: Any) -> None:
    """Regression: with 500 busy endpoints the day ended at ten o'clock, and the hour after forty minutes."""
    monkeypatch.setattr("django_ratequota.monitoring.collector.MAX_FIELDS", 50)
    monkeypatch.setattr("django_ratequota.monitoring.timeline.MAX_FIELDS", 50)
    noon = int(time.time()) // DAY * DAY + 12 * HOUR
    with time_machine.travel(noon + 1800, tick=False):
        collector.clear()
        collector.pending.append(record(noon))
        collector.flush()
        assert timeline("hour").complete
        for minute in range(1, 30):
            collector.pending.extend(record(noon + 60 * minute, endpoint_ids=(number + 1,)) for number in range(10))
            collector.flush()
        assert {total(timeline(span).total) for span in ("hour", "day", "week")} == {Counts(291, 0, 0)}
        line = timeline("hour")
        assert not line.complete, "the endpoints' counts are not whole"
        assert sum(counts.admitted for counts in line.endpoints.values()) < 290
        assert [slot.admitted for slot in line.total[-30:]] == [*([10] * 29), 0]
    with time_machine.travel(noon + HOUR + 60, tick=False):
        assert not timeline("hour").complete, "of two hours the first is not"


def test_of_each_hour_the_week_has_what_redis_or_the_database_counted_more_of() -> None:
    noon = int(time.time()) // DAY * DAY + 12 * HOUR

    def rolled_up(hours_ago: int, **counts: tuple[int, int, int]) -> None:
        starts_at = datetime.fromtimestamp(noon - hours_ago * HOUR, UTC)
        for place, numbers in counts.items():
            values = dict(zip(("admitted", "refused", "would_refuse"), numbers, strict=True))
            UsageCount.objects.create(starts_at=starts_at, place=place, **values)

    with time_machine.travel(noon + 1800, tick=False):
        collector.clear()
        for hours_ago, times, against in ((1, 5, ()), (2, 5, (7,)), (0, 1, ())):
            one = record(noon - hours_ago * HOUR, endpoint_ids=(4,), policy_ids=(7,), against=against)
            collector.pending.extend([one] * times)
        collector.flush()
        rolled_up(1, t=(4, 0, 0), e4=(4, 0, 0), p7=(4, 0, 0))  # late counts came after the rollup
        rolled_up(2, t=(6, 3, 1), e4=(6, 3, 1), p7=(6, 3, 1), p8=(1, 0, 0))  # Redis has lost its data since
        rolled_up(100, t=(20, 9, 2), e5=(20, 9, 2), p7=(20, 9, 2))
        rolled_up(200, t=(1000, 0, 0), e5=(1000, 0, 0))
        week = timeline("week")
        assert total(week.total) == Counts(5 + 6 + 20 + 1, 3 + 9, 1 + 2)
        assert week.endpoints == {4: Counts(12, 3, 1), 5: Counts(20, 9, 2)}
        assert total(timeline("week", endpoint_id=4).total) == Counts(12, 3, 1)
        assert total(timeline("week", policy_id=7).total) == Counts(32, 12, 3)
        assert timeline("week", policy_id=8).total[-3] == Counts(1, 0, 0)
        assert total(timeline("week", endpoint_id=99).total) == Counts()


def test_a_week_takes_two_queries_and_a_command_per_day(monkeypatch: Any, django_assert_num_queries: Any) -> None:
    starts_at = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=5)
    for place in ("t", "e1", "e2", "p1"):
        UsageCount.objects.create(starts_at=starts_at, place=place, admitted=1, refused=0, would_refuse=0)
    commands: list[Any] = []
    store = type(default_limiter().store)
    execute = store.execute
    monkeypatch.setattr(store, "execute", lambda self, command: (commands.append(command), execute(self, command))[1])
    with django_assert_num_queries(2):
        assert len(timeline("week").endpoints) == 2
    assert len(commands) in (7, 8)


def test_callers_are_seen_by_the_beginning_of_their_names() -> None:
    now = int(time.time())
    names = ["user:1", "user:" + "x" * 200, "ip:203.0.113.7"]
    for hours_ago, more in ((0, names), (1, ["user:2"]), (2, ["user:3"])):
        collector.pending.extend(record(now - hours_ago * HOUR, short(name)) for name in more)
    collector.flush()
    assert seen_callers("user:", 2) == ["user:1", "user:2"], "the latest first, up to that many"


def test_a_machine_whose_clock_is_ahead_is_no_error() -> None:
    noon = int(time.time()) // DAY * DAY + 12 * HOUR
    with time_machine.travel(noon, tick=False):
        collector.clear()
        collector.pending.extend([record(noon + 3 * HOUR), record(noon)])
        collector.flush()
        for span in ("hour", "day", "week"):
            assert total(timeline(span).total) == Counts(1, 0, 0)
