"""A log-only policy beside an enforced one: it is judged and counted, and changes nothing for the caller."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from django_ratequota import check_caller
from django_ratequota.models import Plan, RatePolicy

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.mark.parametrize(
    ("kind", "would_refuse"), [("the same customers, dated", 20), ("one of them", 20), ("everyone", 0)]
)
def test_a_log_only_policy_takes_no_enforced_one_s_place(alice: User, kind: str, would_refuse: int) -> None:
    """It disarmed the limit that it was to tighten: 45 of 45 were admitted."""
    plan = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    audience: dict[str, Any] = {
        "the same customers, dated": {"plan": plan, "starts_at": timezone.now() - timedelta(hours=1)},
        "one of them": {"user": alice},
        "everyone": {},  # a weaker one than the plan's, so that it would not apply enforced either
    }[kind]
    enforced = RatePolicy.objects.create(plan=plan, rates="30/hour")
    tried = RatePolicy.objects.create(rates="10/hour", mode="log", **audience)
    admitted = [decision for decision in (check_caller(user=alice) for _ in range(45)) if decision.allowed]
    assert len(admitted) == 30
    full = [{each.bucket.policy_id for each in decision.statuses if not each.allowed} for decision in admitted]
    assert full.count({tried.pk}) == would_refuse
    tried.delete()
    RatePolicy.objects.filter(pk=enforced.pk).update(rates="31/hour")
    assert [check_caller(user=alice).allowed for _ in range(2)] == [True, False], "it has counted apart"


def test_what_is_on_trial_is_not_in_the_bills(alice: User) -> None:
    RatePolicy.objects.create(rates="30/month")
    RatePolicy.objects.create(rates="10/month", mode="log", user=alice)
    found = [(status.limit, status.bucket.durable) for status in check_caller(user=alice).statuses]
    assert found == [(30, True), (10, False)]
