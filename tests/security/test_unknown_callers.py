"""Identifiers and plan resolvers that raise: a client may be the cause, and must gain nothing by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from django_ratequota import check_request
from django_ratequota.admin.formatting import shown_subject
from django_ratequota.admin.names import explain_url
from django_ratequota.admin.usage.status import current_status
from django_ratequota.checks.database import check_plans
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring.health import health, report
from django_ratequota.operations.counters import is_shared
from django_ratequota.operations.explain import ExplainQuery
from django_ratequota.policies.requests.caller import FAILED, Caller, failed_kind
from tests.conftest import Check
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

TENANT = "tests.project.views.tenant"


class Broken:
    """An answer, or an error, that has no text."""

    def __str__(self) -> str:
        raise TypeError("no text")


class BrokenError(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def posted_name(request: Any) -> str | None:
    """As projects write it: right for every form, and for every client that means well."""
    name = json.loads(request.body)["username"]
    return name.strip().casefold()[:150] or None  # type: ignore[no-any-return]


@csrf_exempt
@ratequota(scope="login")
def log_in(request: Any) -> HttpResponse:
    return HttpResponse(str(json.loads(request.body)["username"]))


urlpatterns = [path("login/", log_in)]


@pytest.fixture
def per_tenant(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": TENANT, "other": TENANT}}


def test_a_number_for_a_name_is_no_way_around_the_limit_per_name(settings: Any, caplog: Any) -> None:
    """200 of 200 guesses passed, with a traceback in the log for each."""
    settings.ROOT_URLCONF = __name__
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"login_name": f"{__name__}.posted_name"}}
    endpoint = Endpoint.objects.create(name="login", methods="POST")
    RatePolicy.objects.create(endpoint=endpoint, counted_per="login_name", rates="20/hour sliding_window_log")

    def guess(name: Any) -> int:
        return Client().post("/login/", {"username": name}, content_type="application/json").status_code

    statuses = [guess(number) for number in range(4915, 5115)]
    assert statuses == [200] * 20 + [429] * 180
    assert guess("alice") == 200, "whoever has a name has a counter of his own"
    [record] = [one for one in caplog.records if "failed" in one.message]
    assert record.message == f"{__name__}.posted_name failed: AttributeError: 'int' object has no attribute 'strip'"
    assert record.exc_info is not None
    report()
    [shown] = current_status().problems
    assert shown == f"In the last minute, on {health().process}: {record.message}", "on_error had no part in it"


@pytest.mark.parametrize(
    "answer", [RuntimeError("down"), Broken(), BrokenError()], ids=lambda one: type(one).__name__
)
def test_an_identifier_that_raises(per_tenant: None, check: Check, answer: Any) -> None:
    RatePolicy.objects.create(counted_per="tenant", rates="5/hour")
    left = [check(request_from(address=f"203.0.113.{n}", tenant=answer)).binding.remaining for n in range(5)]  # type: ignore[union-attr]
    assert left == [4, 3, 2, 1, 0]
    assert not check(request_from(tenant=answer)).allowed


def test_a_function_for_an_answer_is_no_way_around(per_tenant: None, check: Check, caplog: Any) -> None:
    """An identifier that returns another one: the text of a function has its place in memory, a counter for each."""
    RatePolicy.objects.create(counted_per="tenant", rates="2/hour")
    made = [lambda request: "acme" for _ in range(4)]
    assert [check(request_from(tenant=one)).allowed for one in made] == [True, True, False, False]
    [record] = [one for one in caplog.records if "failed" in one.message]
    assert record.message == f"{TENANT} failed: TypeError: it returned a function, not a text"


def test_no_answer_and_no_subject_is_theirs(per_tenant: None) -> None:
    RatePolicy.objects.create(counted_per="tenant", rates="1/hour")
    assert check_request(request_from(tenant=RuntimeError())).allowed
    assert not check_request(request_from(tenant=RuntimeError())).allowed
    for value in ("unknown", ":", "tenant:", "~", " ", "\x00", "None"):
        assert check_request(request_from(tenant=value)).allowed, repr(value)
    for none in (None, ""):
        assert check_request(request_from(tenant=none)).statuses == ()
    caller = Caller(request_from(tenant=RuntimeError()))
    assert (caller.value("tenant"), caller.subject("tenant", None)) == (FAILED, "tenant:")
    assert caller.subject("other", None) == "other:", "each kind has its own"


def test_a_policy_for_a_subject_is_not_for_the_unknown(per_tenant: None) -> None:
    RatePolicy.objects.create(counted_per="tenant", rates="5/hour")
    RatePolicy.objects.create(counted_per="tenant", subject="tenant:acme", rates="1000/hour")
    # What no form accepts, and raw SQL may have written.
    RatePolicy.objects.create(counted_per="tenant", subject="tenant:", rates="unlimited")
    limits = [check_request(request_from(tenant=who)).statuses[0].limit for who in ("acme", RuntimeError())]
    assert limits == [1000, 5]


def test_as_the_caller_they_are_one(per_tenant: None, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["tenant", "user", "ip"]}
    RatePolicy.objects.create(rates="2/hour")
    requests = [request_from(User(pk=n), f"203.0.113.{n}", tenant=RuntimeError()) for n in range(1, 4)]
    assert [check_request(request).allowed for request in requests] == [True, True, False]
    assert check_request(request_from(User(pk=1), tenant=None)).allowed, "None passes the question on"


# --- Plans. ---


def test_a_plan_resolver_that_raises(settings: Any, caplog: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": TENANT}
    free = Plan.objects.create(name="Free", slug="free", default_for="anonymous")
    RatePolicy.objects.create(plan=free, rates="3/hour")
    RatePolicy.objects.create(counted_per="plan", rates="100/hour")
    decisions = [check_request(request_from(tenant=RuntimeError("down\nERROR forged"))) for _ in range(4)]
    assert [decision.allowed for decision in decisions] == [True] * 3 + [False]
    assert {status.bucket.subject for status in decisions[0].statuses} == {"ip:203.0.113.7", f"plan:{free.pk}"}
    assert [one.message for one in caplog.records] == [f"{TENANT} failed: RuntimeError: down\\nERROR forged"]


def test_slugs_that_clients_make_up_are_logged_once_a_minute(settings: Any, caplog: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": TENANT}
    RatePolicy.objects.create(rates="300/hour")
    for number in range(50):
        assert check_request(request_from(tenant=f"gold-{number}")).allowed
    [record] = caplog.records
    assert "PLAN_RESOLVER answered 'gold-0', but no plan has that slug" in record.message


def test_a_plan_resolver_without_a_default_plan_is_warned_of(settings: Any) -> None:
    plan = Plan.objects.create(name="Free", slug="free")
    RatePolicy.objects.create(rates="3/hour")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": TENANT}
    assert check_plans() == [], "no limit is a plan's"
    RatePolicy.objects.create(plan=plan, rates="3/hour")
    for callers, missing in (("", "anonymous and authenticated"), ("anonymous", "authenticated")):
        Plan.objects.filter(pk=plan.pk).update(default_for=callers)
        [message] = check_plans()
        assert message.msg.endswith(f"no plan is the default for {missing} clients.")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": ""}
    assert check_plans() == []


# --- What operators see. ---


def test_operators_see_who_unknown_callers_are(per_tenant: None) -> None:
    RatePolicy.objects.create(counted_per="tenant", rates="5/hour")
    assert check_request(request_from(tenant=RuntimeError())).allowed
    question = ExplainQuery(identifiers={"tenant": ""}, ip="203.0.113.7")
    caller = question.caller()
    assert caller.subject("tenant", None) == "tenant:"
    [status] = question.explain().decision.statuses
    assert (status.used, status.limit) == (1, 5)
    assert shown_subject("tenant:") == "tenant unknown (its function failed)"
    assert shown_subject("tenant:acme") == "tenant:acme"
    assert explain_url("admin", "tenant:") == ""
    assert question.params() == {"ip": "203.0.113.7", "method": "GET"}
    assert is_shared("tenant", "tenant:")
    assert [failed_kind(one) for one in ("everyone", "ip:unknown", "user:7", "tenant:a:")] == [""] * 4
