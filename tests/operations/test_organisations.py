"""Boost, boost all, block, give back and reset for an organisation; its people's refusals in Explain."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota import check_request
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.monitoring import refusals
from django_ratequota.monitoring.collector import collector
from tests.admin.test_explain import explain
from tests.operations.test_boost_all import boost_all, fields
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "recording")]

ACME = {"identifier_tenant": "acme"}


@pytest.fixture
def people(api_keys: None) -> list[User]:
    """Return two people of acme; everyone has 2 an hour, and each tenant 3 at search."""
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(rates="2/hour")
    RatePolicy.objects.create(endpoint=search, counted_per="tenant", rates="3/hour")
    return [User.objects.create(username=name) for name in ("alice", "bob")]


def ask(user: User | None, key: str = "acme", **headers: str) -> bool:
    return check_request(request_from(user, headers={"X-Api-Key": key, **headers}), scope="search").allowed


def refuse(people: list[User]) -> None:
    """Refuse alice by her own limit, and bob by that of acme."""
    alice, bob = people
    assert [ask(alice), ask(alice), ask(alice), ask(bob), ask(bob)] == [True, True, False, True, False]
    collector.flush()


def rows_of(text: str) -> list[list[str]]:
    """Return the table of places that refused, cell by cell."""
    [table] = re.findall(r"Refusals in the last 24 hours.*?<tbody>(.*?)</tbody>", text)
    cells = [re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row) for row in re.findall(r"<tr.*?</tr>", table)]
    return [[re.sub(r"<[^>]+>", "", cell).strip() for cell in row] for row in cells]


def test_explain_begins_with_the_refusals_of_an_organisations_people(operator: Client, people: list[User]) -> None:
    refuse(people)
    text = explain(operator, **ACME)
    assert "Refusals in the last 24 hours: tenant:acme" in text
    [[place, times, by, callers, _last]] = rows_of(text)
    assert (place, times) == ("GET search", "2")
    assert {*by.split(", ")} == {"all endpoints: 2/hour", "search: 3/hour per tenant"}
    assert {*callers.split(", ")} == {"user alice", "user bob"}
    assert f"?user={people[0].pk}" in text
    assert "Customers" not in explain(operator, user=people[0].pk).partition("Limits that apply now")[0]
    assert "No refusals of this customer" in explain(operator, identifier_tenant="other")


def test_all_that_refused_an_organisation_is_boosted(operator: Client, people: list[User]) -> None:
    """Its people's own limits, too: one boost that holds for each of them."""
    refuse(people)
    url = boost_all(operator, **ACME)
    rows = fields(unescape(operator.get(url).content.decode()))
    assert sorted(rows.values()) == ["4/hour", "6/hour"]
    assert operator.post(url, {**rows, "until": "hours", "reason": "R"}).status_code == 302
    boosted = RatePolicy.objects.filter(ends_at__isnull=False)
    assert {(one.subject, one.counted_per, one.rates) for one in boosted} == {
        ("tenant:acme", "caller", "4/hour"),
        ("tenant:acme", "tenant", "6/hour"),
    }
    assert all(ask(user) for user in people)


def test_boosting_all_is_offered_only_where_something_can_be_boosted(operator: Client, people: list[User]) -> None:
    """Regression: the links led to a page that said that nothing could be boosted."""
    RatePolicy.objects.all().delete()
    RatePolicy.objects.create(counted_per="everyone", rates="1/hour")
    assert [ask(people[0]), ask(people[0])] == [True, False]
    collector.flush()
    assert len(refusals.caller_refusals(f"user:{people[0].pk}").refusals) == 1
    assert not boost_all(operator, user=people[0].pk)
    RatePolicy.objects.create(rates="1/hour")
    assert not ask(people[0])
    RatePolicy.objects.filter(counted_per="everyone").delete()
    assert [ask(people[0]), ask(people[0])] == [True, False]
    collector.flush()
    assert boost_all(operator, user=people[0].pk)
    assert not boost_all(client_of("view_ratepolicy", name="viewer"), user=people[0].pk)


@pytest.fixture
def pro(people: list[User]) -> Plan:
    """Put acme on the plan Pro, from the 15th to the 15th; its people are on no plan of their own."""
    pro = Plan.objects.create(name="Pro", slug="pro")
    RatePolicy.objects.all().delete()
    RatePolicy.objects.create(plan=pro, counted_per="tenant", rates="3/month")
    RatePolicy.objects.create(plan=pro, rates="2/hour")
    PlanAssignment.objects.create(subject="tenant:acme", plan=pro, anchor=15)
    return pro


def test_explain_says_whose_plan_it_is_and_when_its_months_begin(operator: Client, pro: Plan) -> None:
    text = explain(operator, **ACME)
    assert "Pro</a> (assigned to tenant:acme)" in text
    assert "months begin on day 15" in text
    assert "plan Pro, <a" in text
    shown = run("explain", "--identifier", "tenant=acme")
    assert "plan         Pro (assigned to tenant:acme)" in shown
    assert "all endpoints: 3/month per tenant of tenant:acme: 3 of 3 left" in shown
    assert "(months begin on day 15)" in shown
    assert "all endpoints: 2/hour of tenant:acme: each of its clients has one" in shown
    assert "tenant:acme" not in run("explain", "--identifier", "tenant=other")


def test_a_refusal_is_explained_by_the_organisations_plan(operator: Client, people: list[User], pro: Plan) -> None:
    """Regression: without a counter per tenant, a refusal did not name the tenant that its plan came from."""
    RatePolicy.objects.filter(counted_per="tenant").delete()
    assert [ask(people[0]) for _ in range(3)] == [True, True, False]
    collector.flush()
    [refusal] = refusals.caller_refusals("tenant:acme").refusals
    assert (refusal.caller, refusal.assigned_to) == (f"user:{people[0].pk}", "tenant:acme")
    text = explain(operator, id=refusal.id)
    assert "Pro</a> (assigned to tenant:acme)" in text
    assert "would be refused by all endpoints: 2/hour" in text
    assert boost_all(operator, id=refusal.id)


def test_a_refusal_is_explained_by_the_plan_that_code_named_or_left_to_assignments(
    operator: Client, people: list[User], pro: Plan, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "tests.project.views.plan_of_some"}
    RatePolicy.objects.create(plan=Plan.objects.create(name="Service", slug="service"), rates="1/month")
    alice, bob = people
    assert [ask(alice), ask(alice), ask(alice)] == [True, True, False]
    assert [ask(bob, **{"X-Service": "service"}) for _ in range(2)] == [True, False]
    collector.flush()
    sources = {"alice": "Pro{} (assigned to tenant:acme)", "bob": "Service{} (from PLAN_RESOLVER)"}
    for user in people:
        [refusal] = refusals.caller_refusals(f"user:{user.pk}").refusals
        assert sources[user.username].format("</a>") in explain(operator, id=refusal.id)
        shown = run("explain", "--id", refusal.id)
        assert sources[user.username].format("") in shown
    assert "1/month of" in shown
    assert "0 of 1 left" in shown
    assert "(months begin on day 15)" in shown, "that of acme, which the refusal names"
