"""Where only the order of creation says which policy or plan wins, a copy of the database has the same winners."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota.models import ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from django_ratequota.policyfile import apply_file
from tests.policyfile.examples import JANUARY, delete_all_rows, export
from tests.support.requests import check_from

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
        limits += [status.limit for status in check_from(user).statuses]
    return limits


LATER = {"ends_at": JANUARY + timedelta(days=9999)}


@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("of", [{}, {"starts_at": JANUARY}, LATER, "assignments", "one audience"], ids=str)
def test_of_equals_the_newest_wins(alice: User, names: str, of: Any) -> None:
    for number, name in enumerate(names, start=1):
        if of == "one audience":
            RatePolicy.objects.create(rates=f"{number}/min", starts_at=JANUARY)
        elif of == "assignments":
            plan = Plan.objects.create(name=name, slug=name)
            RatePolicy.objects.create(plan=plan, rates=f"{number}/min")
            PlanAssignment.objects.create(user=alice, plan=plan, starts_at=JANUARY)
        else:
            listed = SubjectList.objects.create(name=name)
            ListMember.objects.create(subject_list=listed, subject="ip:203.0.113.7")
            RatePolicy.objects.create(subject_list=listed, rates=f"{number}/min", **of)
    assert limits_of(alice) == [2, 2]
