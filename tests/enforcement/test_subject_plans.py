"""Organisations and API keys on plans, from the request to the decision."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.urls import path

from django_ratequota import check_request
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from tests.project.urls import urlpatterns as project_urls
from tests.project.views import request_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies"),
    pytest.mark.urls("tests.enforcement.test_subject_plans"),
]
KEY = {"X-Api-Key": "k_7"}


@ratequota(scope="search")
def counting(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"users": User.objects.count()})


urlpatterns = [*project_urls, path("counting/", counting)]


@pytest.fixture(autouse=True)
def identifiers(settings: Any) -> None:
    names = {"tenant": "tests.enforcement.test_subject_plans.tenant", "api_key": "tests.project.views.api_key"}
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": names}


def tenant(request: Any) -> str | None:
    """The tenant of a user, by a query, as projects have it."""
    user = request.user
    return user.last_name or None if user.is_authenticated else None


@pytest.fixture
def pro() -> Plan:
    return Plan.objects.create(name="Pro", slug="pro")


def staff(*names: str, tenant: str = "acme") -> list[User]:
    return [User.objects.create(username=name, last_name=tenant) for name in names]


def test_months_begin_on_the_tenants_day_where_no_policy_is_for_plans(pro: Plan, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["tenant", "ip"]}
    RatePolicy.objects.create(rates="100/month")
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=search, plan=pro, rates="50/min")
    assignment = PlanAssignment.objects.create(subject="tenant:acme", plan=pro, anchor=15)
    (alice,) = staff("alice")

    def days() -> list[int]:
        decisions = (check_request(request_from(alice), scope) for scope in ("search", None))
        return [status.bucket.anchor for one in decisions for status in one.statuses if status.bucket.rate.calendar]

    assert days() == [15, 15]
    assignment.anchor = 20
    assignment.save()
    assert days() == [20, 20]


def test_a_plan_that_cannot_be_read_does_not_abort_the_transaction_of_the_view(
    pro: Plan, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    """ATOMIC_REQUESTS: on PostgreSQL a failed query aborts the transaction that is open."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="5/hour")
    PlanAssignment.objects.create(subject="api_key:k_7", plan=pro)
    assert Client().get("/counting/", headers=KEY).status_code == 200
    with connections["default"].cursor() as cursor:
        cursor.execute("ALTER TABLE django_ratequota_planassignment RENAME COLUMN anchor TO other")
    try:
        response = Client().get("/counting/", headers={"X-Api-Key": "unread"})
        assert (response.status_code, response["X-RateLimit-Remaining"]) == (200, "3")
    finally:
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER TABLE django_ratequota_planassignment RENAME COLUMN other TO anchor")


def test_before_the_view_authenticates_no_plan_of_a_subject_counts(pro: Plan, settings: Any) -> None:
    """COUNT_UNCHECKED: where a plan has a higher limit per ip, nobody is refused before the plan is known."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": True}
    RatePolicy.objects.create(counted_per="ip", rates="1/hour")
    RatePolicy.objects.create(plan=pro, counted_per="ip", rates="3/hour")
    PlanAssignment.objects.create(subject="api_key:k_7", plan=pro)
    assert [Client().get("/search/", headers=KEY).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert Client().get("/search/").status_code == 429
