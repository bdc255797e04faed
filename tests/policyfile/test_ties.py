"""Where only the order of creation says which policy or plan wins, a copy of the database has the same winners."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import RequestFactory

from django_ratequota import check_request
from django_ratequota.models import ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from django_ratequota.policyfile import apply_file
from tests.policyfile.examples import JANUARY, delete_all_rows, export

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def limits_of(user: User) -> list[int]:
    """Return the limits of the policies that win, here and in a copy of this database."""
    limits = []
    for copy in (False, True):
        if copy:
            text = export(assignments=True)
            delete_all_rows()
            apply_file(text)
            assert export(assignments=True) == text
        request = RequestFactory().get("/", REMOTE_ADDR="203.0.113.9")
        request.user = user
        limits += [status.limit for status in check_request(request).statuses]
    return limits


@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("dates", [{}, {"starts_at": JANUARY}, {"ends_at": JANUARY + timedelta(days=9999)}])
def test_of_two_lists_the_one_with_the_newer_policy_wins(alice: User, names: str, dates: dict[str, Any]) -> None:
    for number, name in enumerate(names, start=1):
        listed = SubjectList.objects.create(name=name)
        ListMember.objects.create(subject_list=listed, subject="ip:203.0.113.9")
        RatePolicy.objects.create(subject_list=listed, rates=f"{number}/min", **dates)
    assert limits_of(alice) == [2, 2]


@pytest.mark.parametrize("slugs", ["ab", "ba"])
def test_of_two_assignments_the_newer_one_wins(alice: User, slugs: str) -> None:
    for number, slug in enumerate(slugs, start=1):
        plan = Plan.objects.create(name=slug, slug=slug)
        RatePolicy.objects.create(plan=plan, rates=f"{number}/min")
        PlanAssignment.objects.create(user=alice, plan=plan, starts_at=JANUARY)
    assert limits_of(alice) == [2, 2]


def test_of_policies_of_one_audience_the_newest_wins(alice: User) -> None:
    for rates in ("3/min", "1/min", "2/min"):
        RatePolicy.objects.create(rates=rates, starts_at=JANUARY)
    assert limits_of(alice) == [2, 2]
