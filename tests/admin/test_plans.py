"""The list of plans, with the subscribers of each; a new slug is warned of."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from django_ratequota.models import Plan, PlanAssignment
from tests.admin.test_sizes import fields_of
from tests.support.operators import client_of, text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

LIST = "/admin/django_ratequota/plan/"


def subscribers(client: Client) -> list[str]:
    cells = re.findall(r'<td class="field-subscribers[^"]*">(.*?)</td>', text_of(client.get(LIST)))
    return [re.sub("<[^>]*>", "", cell) for cell in cells]


def test_subscribers_are_counted_and_default_callers_named(operator: Client) -> None:
    free = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    pro = Plan.objects.create(name="Pro", slug="pro")
    now = timezone.now()
    users = [User.objects.create(username=f"u{number}") for number in range(3)]
    for user in users:
        PlanAssignment.objects.create(user=user, plan=pro)
    PlanAssignment.objects.create(user=users[0], plan=free, ends_at=now + timedelta(days=1))
    PlanAssignment.objects.create(user=users[1], plan=free, starts_at=now + timedelta(days=1))
    day = timedelta(days=1)
    PlanAssignment.objects.create(user=users[2], plan=free, starts_at=now - 2 * day, ends_at=now - day)
    assert subscribers(operator) == ["1 and logged-in users without an assignment", "3"]
    link = re.search(r'<a href="([^"]*planassignment[^"]*)">3</a>', text_of(operator.get(LIST)))
    assert link is not None
    assert operator.get(link[1].replace("&amp;", "&")).context["cl"].result_count == 3
    viewer = client_of("view_plan", name="viewer")
    assert subscribers(viewer)[1] == "3"
    assert "planassignment" not in text_of(viewer.get(LIST))


def test_subscribers_are_not_counted_where_code_decides_the_plan(operator: Client, settings: Any) -> None:
    Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "builtins.repr"}
    assert subscribers(operator) == ["decided by PLAN_RESOLVER and logged-in users without an assignment"]


def test_a_new_plan_is_put_after_the_others(operator: Client) -> None:
    assert fields_of(operator.get(f"{LIST}add/"))["position"] == "0"
    Plan.objects.create(name="Free", slug="free", position=30)
    assert fields_of(operator.get(f"{LIST}add/"))["position"] == "40"


def test_a_rename_keeps_the_slug(operator: Client) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    path = f"{LIST}{plan.pk}/change/"
    sent = fields_of(operator.get(path))
    operator.post(path, sent | {"name": "Team"})
    plan.refresh_from_db()
    assert (plan.name, plan.slug) == ("Team", "pro")
