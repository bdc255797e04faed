"""A request that is checked more than once is one request in the records, and costs what it costs in the counters."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota import check_request
from django_ratequota.engine.keys import statistics_key
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.attempts import recorded_attempts
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.packing import HOUR, pack_attempts
from django_ratequota.monitoring.timeline import Counts, timeline
from django_ratequota.operations.impact import estimate
from tests.monitoring.support import total
from tests.project.views import request_from
from tests.support.properties import thorough_after

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

#: The checks of a request: (scope, cost).
CHECKS: dict[str, list[tuple[str | None, int]]] = {
    "dearer in the view": [(None, 1), ("search", 100)],
    "cheaper in the view": [("search", 9), (None, 2)],
    "same scope": [("search", 1), ("search", 7)],
    "two scopes": [("search", 3), ("reports", 2), (None, 8)],
    "once": [("search", 4)],
}


def ask(checks: list[tuple[str | None, int]], last: int = 7) -> bool:
    request = request_from(address=f"203.0.113.{last}")
    return all(check_request(request, scope=scope, cost=cost).allowed for scope, cost in checks)


@pytest.fixture
def endpoints() -> dict[str | None, Endpoint | None]:
    names = ("search", "reports")
    return {None: None, **{name: Endpoint.objects.create(name=name) for name in names}}


@pytest.mark.parametrize("checks", CHECKS.values(), ids=CHECKS)
@pytest.mark.parametrize("scope", [None, "search", "reports"])
@pytest.mark.parametrize(
    "rates", ["250/3650day fixed_window", "3 requests/3650day fixed_window", "20/3650day fixed_window"]
)
@pytest.mark.parametrize("others", thorough_after(1, [True, False]), ids=["with other policies", "alone"])
def test_the_estimate_equals_the_live_counters(
    endpoints: dict[Any, Any], checks: list[tuple[str | None, int]], scope: str | None, rates: str, others: bool
) -> None:
    """Counters refused 7 of 10 requests of two checks; the estimate refused 17 of 20."""
    if others:
        RatePolicy.objects.create(rates="1000000/day", counted_per="everyone")
        RatePolicy.objects.create(endpoint=endpoints["search"], rates="1000000 requests/day", counted_per="ip")
    for number in range(10):
        assert ask(checks, number % 2)
    collector.flush()
    policy = RatePolicy(endpoint=endpoints[scope], rates=rates)
    found = estimate(policy, seconds=60)
    policy.save()
    refused = sum(not ask(checks, number % 2) for number in range(10))
    applies = scope is None or scope in {name for name, _cost in checks}
    assert (found.requests, found.refused_requests) == (10 if applies else 0, refused)


def test_a_request_of_several_checks_is_counted_once(endpoints: dict[Any, Any]) -> None:
    policy = RatePolicy.objects.create(rates="1000/day")
    own = RatePolicy.objects.create(endpoint=endpoints["search"], rates="1000/day")
    for flushed in (False, True):
        request = request_from()
        for scope, cost in CHECKS["dearer in the view"]:
            check_request(request, scope=scope, cost=cost)
            if flushed:
                collector.flush()
    collector.flush()
    found = timeline("hour")
    assert total(found.total) == Counts(2, 0, 0)
    for pk in (policy.pk, own.pk):
        assert total(timeline("hour", policy_id=pk).total) == Counts(2, 0, 0)
    assert found.endpoints[endpoints["search"].pk] == Counts(2, 0, 0)
    assert sum(one.admitted for one in recorded_attempts().attempts) == 2
    assert {one.cost for one in recorded_attempts().attempts} == {100}


def test_a_check_without_a_charge_is_recorded_where_its_endpoint_is_new(endpoints: dict[Any, Any]) -> None:
    """The first check paid for all endpoints; nothing told that the request was one of search."""
    RatePolicy.objects.create(rates="1000/day")
    ask([(None, 1), ("search", 1), ("search", 1)])
    collector.flush()
    [attempts] = recorded_attempts().attempts
    assert (attempts.endpoint_ids, attempts.cost, attempts.admitted) == ((endpoints["search"].pk,), 1, 1)


def test_checks_of_two_callers_are_two_attempts(endpoints: dict[Any, Any]) -> None:
    """The user was not known at the first check, so it counted for the address."""
    RatePolicy.objects.create(rates="1000/day")
    request = request_from(address="203.0.113.7")
    check_request(request)
    request.user = User.objects.create(username="alice")
    check_request(request, scope="search", cost=5)
    collector.flush()
    assert sorted((one.caller[:4], one.cost) for one in recorded_attempts().attempts) == [("ip:2", 1), ("user", 5)]


def test_older_records_are_read_too(redis_client: Any) -> None:
    """A process of the previous release writes one number as the cost."""
    now = int(time.time())
    key = statistics_key("rqtest", f"usage:{now // HOUR}")
    older = [now, "user:1", "", None, [7], 3, 2, 1]
    newer = [now, "user:1", "", None, [7], [[0, 9], [7, 3]], 1, 0]
    redis_client.rpush(key, pack_attempts([older]), pack_attempts([newer, [now, "user:2", "", None, [], 1, -1, 0]]))
    first, second = recorded_attempts().attempts
    assert (first.cost, first.costs, first.admitted, first.refused) == (3, (), 2, 1)
    assert (second.at(7).cost, second.at(None).cost) == (3, 9)


def test_independent_checks_are_recorded_each(endpoints: dict[Any, Any]) -> None:
    request = request_from()
    check_request(request, cost=2)
    for _ in range(3):
        check_request(request, scope="search", again=True)
    check_request(request, cost=7)
    collector.flush()
    assert sorted((one.cost, one.admitted) for one in recorded_attempts().attempts) == [(1, 3), (7, 1)]
