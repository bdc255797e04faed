"""Subjects and counters that differ in case, accents or trailing blanks only, on every database."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client

from django_ratequota.engine.keys import beginning
from django_ratequota.models import (
    ListMember,
    Plan,
    PlanAssignment,
    PolicyChange,
    QuotaDay,
    QuotaWindow,
    RatePolicy,
    SubjectList,
)
from django_ratequota.operations import held_data
from django_ratequota.operations.overrides import blocks_in_force, propose_block
from tests.support.windows import counted, of_day

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

#: A blank at the end stays in what requests are counted by. What operators write loses it.
WRITTEN = ("tenant:acme", "tenant:ACME", "tenant:acmé", "tenant:acme😀", "tenant:acme🎉")
SUBJECTS = (*WRITTEN, "tenant:acme ")
OCTOBER = {"starts_at": datetime(2025, 10, 1, tzinfo=UTC), "ends_at": datetime(2025, 11, 1, tzinfo=UTC)}


def tenant(request: Any) -> str | None:
    return request.META.get("HTTP_X_TENANT")


@pytest.fixture(autouse=True)
def _tenants(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": f"{__name__}.tenant"}}


@pytest.fixture
def windows() -> list[QuotaWindow]:
    """A window of each, with one day; the first has used 1, the second 2."""
    made = [
        counted(subject=subject, counter=f"{beginning(subject)}0:month", **OCTOBER, used=number, limit=100)
        for number, subject in enumerate(SUBJECTS, 1)
    ]
    for window in made:
        of_day(window, window.first_day, window.used)
    return made


def test_counters_whose_names_differ_in_case_have_rows_of_their_own() -> None:
    for number, subject in enumerate(("user:anna", "user:Anna"), 1):
        of_day(counted(subject=subject, **OCTOBER, used=number, limit=100), OCTOBER["starts_at"].date(), number)
    for number, subject in enumerate(("user:anna", "user:Anna"), 1):
        window = QuotaWindow.objects.get(subject=subject)
        assert QuotaDay.objects.get(counter=window.counter).charged == window.used == number


@pytest.mark.usefixtures("windows")
def test_the_usage_history_is_of_the_exact_caller(client: Client, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["tenant"]}
    for number, subject in ((1, "acme"), (2, "ACME")):
        found = client.get("/quota/usage/history/", headers={"X-Tenant": subject}).json()["results"]
        assert [window["used"] for window in found] == [number]


def test_policies_assignments_and_members_are_found_by_exact_subjects() -> None:
    plan, bots = Plan.objects.create(name="Pro", slug="pro"), SubjectList.objects.create(name="Bots")
    for subject in WRITTEN:
        RatePolicy.objects.create(subject=subject, rates="1/s")
        PlanAssignment.objects.create(subject=subject, plan=plan)
        ListMember.objects.create(subject=subject, subject_list=bots)
    for model in (RatePolicy, PlanAssignment, ListMember):
        for subject in WRITTEN:
            assert model.objects.get(subject=subject).subject == subject


def test_a_block_is_of_the_exact_party() -> None:
    for subject in WRITTEN:
        block = propose_block(subject)
        block.save()
        assert blocks_in_force([subject]) == {subject: [block]}


def test_only_the_exact_subject_is_held_and_forgotten(windows: list[QuotaWindow]) -> None:
    for subject in WRITTEN:
        RatePolicy.objects.create(subject=subject, rates="1/s")
    for subject in SUBJECTS:
        kinds = Counter(kind for kind, _values in held_data.held(subject))
        written = subject in WRITTEN
        expected = {"RatePolicy": written, "PolicyChange": written, "QuotaWindow": 1, "QuotaDay": 1}
        assert kinds == Counter(expected), subject
    held_data.forget("tenant:acme")
    assert set(QuotaWindow.objects.filter(subject__in=SUBJECTS)) == set(windows[1:])
    assert set(RatePolicy.objects.values_list("subject", flat=True)) == set(WRITTEN[1:])
    assert PolicyChange.objects.filter(object_text__startswith="tenant:").count() == len(WRITTEN) - 1


def test_the_search_of_the_admin_ignores_case(operator: Client) -> None:
    RatePolicy.objects.create(subject="tenant:acme", rates="1/s")
    page = operator.get("/admin/django_ratequota/ratepolicy/", {"q": "ACME"})
    assert [row.subject for row in page.context["cl"].result_list] == ["tenant:acme"]
