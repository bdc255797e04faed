"""The usage endpoint: clients see how they stand, at no cost, whatever state they or Redis are in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.db import OperationalError
from django.test import Client
from django.urls import reverse
from rest_framework.test import APIRequestFactory

from django_ratequota.api import QuotaLimitSerializer, QuotaUsageSerializer, UsageView
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.operations import caller_limits
from django_ratequota.policies.cache import policies
from django_ratequota.policies.requests.caller import Caller
from tests.project.views import request_from
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def usage(client: Client, **query: Any) -> Any:
    response = client.get(reverse("ratequota:usage"), query)
    assert response.status_code == 200, response.content
    return response.json()


def names(found: Any) -> list[str]:
    return [limit["name"] for limit in found["limits"]]


def test_each_limit_has_its_current_state(client: Client, search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="4/min burst 8")
    RatePolicy.objects.create(rates="100/hour", algorithm="gcra", counted_per="everyone")
    for _ in range(3):
        assert client.get("/search/").status_code == 200
    response = client.get("/quota/usage/")
    assert response["Cache-Control"] == "no-store"
    found = response.json()
    assert (found["blocked_by"], found["available"], found["truncated"]) == ([], True, False)
    assert found["limits"][0].keys() == QuotaLimitSerializer().fields.keys()
    everyone = [
        "all endpoints: 100/hour for everyone together",
        "all/hour gcra per everyone",
        None,
        None,
        "100/hour gcra",
        "units",
        "everyone",
        100,
        3,
    ]
    own = ["search: 4/min burst 8", "search/min", "search", None, "4/min burst 8", "units", "ip", 8, 3]
    assert [list(limit.values()) for limit in found["limits"]] == [
        [*everyone, None, None, 108, 97, 0, 3600],
        [*own, None, None, 45, 5, 0, 60],
    ]
    assert found.keys() == QuotaUsageSerializer().fields.keys()


def test_a_calendar_limit_has_its_window_unused_and_in_debt(client: Client, alice: User) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    RatePolicy.objects.create(plan=pro, rates="10/month, 5 requests/day fixed_window")
    now = datetime.now(UTC)
    PlanAssignment.objects.create(user=alice, plan=pro, anchor=31, starts_at=now - timedelta(days=1))
    client.force_login(alice)
    month, day = usage(client)["limits"]
    assert [(limit["period"], limit["unit"], limit["used"]) for limit in (month, day)] == [
        *(("month", "units", 0), ("day", "requests", 0)),
    ]
    for limit in (month, day):
        begins, ends = (datetime.fromisoformat(limit[name]) for name in ("starts_at", "ends_at"))
        assert (ends - begins).total_seconds() == limit["window"]
        assert abs(ends - now - timedelta(seconds=limit["resets_in"])) < timedelta(seconds=30)
    assert (datetime.fromisoformat(month["ends_at"]) + timedelta(days=1)).day == 1, "the month's last day"
    check_from(alice, cost=4).charge(11)
    month = usage(client)["limits"][0]
    assert (month["used"], month["remaining"]) == (15, 0)


def test_what_is_counted_per_address_is_not_shown(client: Client, settings: Any, alice: User) -> None:
    names = {name: f"django_ratequota.identifiers.{name}" for name in ("login_pair", "network")}
    caller = ["login_pair", "user", "ip"]
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": names, "CALLER": caller}
    for per in ("ip", "network", "login_pair", "caller"):
        RatePolicy.objects.create(rates="10/min", counted_per=per)
    assert names_and_kinds(client) == [("all/min", "ip")], "an anonymous caller's own limit"
    client.force_login(alice)
    assert names_and_kinds(client) == [("all/min", "user")]
    body = '{"username": "victim"}'
    named = client.generic("GET", "/quota/usage/", body, content_type="application/json")
    assert named.json()["limits"] == [], "not even where CALLER names what anybody may write"


def names_and_kinds(client: Client) -> list[tuple[str, str]]:
    return [(limit["name"], limit["counted_per"]) for limit in usage(client)["limits"]]


def test_looking_costs_nothing_of_what_is_looked_at(client: Client, settings: Any, redis_client: redis.Redis) -> None:
    """Not by the project's default throttle, and not by the middleware that enforces every view."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    RatePolicy.objects.create(rates="2/hour")
    assert [client.get("/plain/").status_code for _ in range(3)] == [200, 200, 429]
    before = {key: redis_client.dump(key) for key in redis_client.keys("rqtest:{[iu]*")}
    assert len(before) == 1
    found = [usage(client)["limits"][0] for _ in range(3)]
    assert {limit["remaining"] for limit in found} == {0}
    assert all(1790 < limit["retry_after"] <= 1800 for limit in found)
    assert {key: redis_client.dump(key) for key in before} == before


def test_scope_selects_one_endpoint(client: Client, search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="4/min")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="exports"), rates="1/day")
    RatePolicy.objects.create(rates="100/hour")
    assert names(usage(client)) == ["all/hour", "exports/day", "search/min"]
    assert names(usage(client, scope="search")) == ["all/hour", "search/min"]
    response = client.get("/quota/usage/", {"scope": "serach"})
    assert (response.status_code, response.json()) == (400, {"scope": ["There is no endpoint with this name."]})


def test_callers_see_what_they_are_held_to_and_nothing_else(client: Client, search: Endpoint, alice: User) -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    PlanAssignment.objects.create(user=alice, plan=pro)
    Plan.objects.create(name="Free", slug="free", default_for="anonymous")
    RatePolicy.objects.create(endpoint=search, plan=pro, rates="50/min")
    RatePolicy.objects.create(plan=Plan.objects.get(slug="free"), rates="5/min")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="mine"), user=alice, rates="7/min")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="logged"), rates="7/min", mode="log")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="off"), rates="7/min", mode="off")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="free"), rates="unlimited")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="closed"), rates="blocked")
    found = usage(client)
    assert (names(found), found["blocked_by"]) == (["all/min"], ["closed/blocked"])
    client.force_login(alice)
    assert names(usage(client)) == ["mine/min", "search/min"]


def test_limits_are_known_while_redis_is_down_and_counts_are_not(client: Client, settings: Any) -> None:
    RatePolicy.objects.create(rates="9/month, 5/min", on_error="deny")
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "STATISTICS_SECONDS": 0}
    found = usage(client)
    assert found["available"] is False
    month, minute = found["limits"]
    assert [(one["rate"], one["limit"]) for one in (month, minute)] == [("9/month", 9), ("5/min", 5)]
    assert {limit[name] for limit in (month, minute) for name in ("used", "remaining", "retry_after")} == {None}
    assert (minute["resets_in"], minute["window"]) == (None, 60)
    assert 0 < month["resets_in"] <= month["window"] <= 31 * 86_400


def unreachable(*args: Any) -> Any:
    raise OperationalError("gone")


def test_policies_that_were_never_read_are_a_503(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "reload", unreachable)
    response = client.get("/quota/usage/")
    assert (response.status_code, response["Retry-After"]) == (503, "1")


def test_what_requests_remember_is_not_pushed_out(client: Client) -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="9/hour")
    client.get("/search/")
    memo = policies.current().memo  # type: ignore[union-attr]
    before = [dict(kept) for kept in (memo.policies, memo.resolutions, memo.endpoints)]
    assert caller_limits.caller_limits(Caller(request_from())).limits
    assert policies.current().memo is memo  # type: ignore[union-attr]
    assert [memo.policies, memo.resolutions, memo.endpoints] == before


def test_a_project_may_route_it_under_another_scope_or_under_none() -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="looks"), rates="1/hour")
    for view, statuses in (
        (UsageView.as_view(throttle_scope="looks"), [200, 429]),
        (UsageView.as_view(throttle_classes=[]), [200, 200]),
    ):
        assert [view(APIRequestFactory().get("/")).status_code for _ in range(2)] == statuses
