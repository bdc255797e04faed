"""The search of policies and assignments: related objects are looked up first, and what is found is as before."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin import ModelAdmin
from django.contrib.auth.models import User
from django.db.models import QuerySet
from django.test import Client

from django_ratequota.admin import base, search
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from tests.support.properties import thorough_after

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota"
TERMS = ("ali", "ALI", "ali pro", "alice@", "tenant:", "4711 tenant", "nothing", '"two words"', "%", "p", "a\x00li")


@pytest.fixture
def policies() -> None:
    alice = User.objects.create(username="alice", email="alice@example.com")
    malika = User.objects.create(username="malika")
    pro, free = (Plan.objects.create(name=name, slug=name.lower()) for name in ("Pro", "Free"))
    profile = Endpoint.objects.create(name="profile")
    RatePolicy.objects.create(plan=pro, endpoint=profile, rates="1/s")
    RatePolicy.objects.create(user=alice, endpoint=profile, rates="1/s")
    RatePolicy.objects.create(user=malika, rates="1/s", reason="Two words")
    RatePolicy.objects.create(subject="tenant:alive", rates="1/s", reason="Ticket 4711")
    PlanAssignment.objects.create(user=alice, plan=pro)
    PlanAssignment.objects.create(user=malika, plan=free, reason="Two words")


@pytest.mark.parametrize("most", thorough_after(1, [500, 0]))
@pytest.mark.parametrize("model", ["ratepolicy", "planassignment"])
def test_the_search_finds_what_djangos_finds(
    operator: Client, policies: None, monkeypatch: pytest.MonkeyPatch, model: str, most: int
) -> None:
    def found(term: str) -> set[Any]:
        page = operator.get(f"{BASE}/{model}/", {"q": term}, follow=True)
        return set(page.context["cl"].queryset.values_list("pk", flat=True))

    monkeypatch.setattr(search, "MOST_NAMED", most)
    ours = [found(term) for term in TERMS]
    monkeypatch.setattr(search.SearchesRelated, "get_search_results", ModelAdmin.get_search_results)
    theirs = [found(term) for term in TERMS]
    assert ours == theirs
    assert len(ours[0]) > 0


def test_filters_of_a_long_list_are_not_counted(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    Plan.objects.create(name="Pro", slug="pro")
    QuerySet(RatePolicy).bulk_create(RatePolicy(subject=f"tenant:{n}", rates="1/s") for n in range(3))
    counted = "(3)"
    assert counted in operator.get(f"{BASE}/ratepolicy/").content.decode()
    monkeypatch.setattr(base, "_MOST_COUNTED", 2)
    page = operator.get(f"{BASE}/ratepolicy/")
    assert counted not in page.content.decode()
    assert page.context["cl"].result_count == 3


@pytest.mark.parametrize(
    "model", ["ratepolicy", "planassignment", "listmember", "policychange", "plan", "endpoint", "subjectlist"]
)
def test_a_search_for_1_000_words(operator: Client, model: str) -> None:
    page = operator.get(f"{BASE}/{model}/", {"q": "a " * 1000})
    assert [str(message) for message in page.context["messages"]] == ["Search for at most 20 words."]
    assert not page.context["cl"].result_list
    page = operator.get(f"{BASE}/{model}/", {"q": "a " * 20})
    assert not page.context["messages"]


def test_the_search_of_an_autocomplete_has_at_most_20_words(operator: Client) -> None:
    Plan.objects.create(name="Pro", slug="pro")
    field = {"app_label": "django_ratequota", "model_name": "ratepolicy", "field_name": "plan"}
    found = [operator.get("/admin/autocomplete/", {**field, "term": "p " * n}).json()["results"] for n in (20, 21)]
    assert [len(results) for results in found] == [1, 0]


@pytest.mark.parametrize(
    ("model", "relation"),
    [
        *(("ratepolicy", one) for one in ("user", "subject_list__members__user", "plan__assignments__user")),
        *(("planassignment", one) for one in ("user", "created_by", "plan__policies__user")),
        *(
            ("listmember", "user"),
            ("policychange", "actor"),
            ("plan", "policies__user"),
            ("endpoint", "policies__user"),
        ),
    ],
)
def test_a_filter_that_reads_passwords(operator: Client, model: str, relation: str) -> None:
    """Letter by letter, as the list has rows or none."""
    for field in ("password__startswith", "password", "is_superuser"):
        assert operator.get(f"{BASE}/{model}/", {f"{relation}__{field}": "1"}).status_code == 400
