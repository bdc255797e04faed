"""The list of plans: its order, and the subscribers of each; a new slug is warned of."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from django_ratequota.models import Plan, PlanAssignment, PolicyChange
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
    assert subscribers(operator) == ["as PLAN_RESOLVER decides and logged-in users without an assignment"]


def test_positions_are_edited_in_the_list_and_recorded(operator: Client) -> None:
    for position, name in enumerate(("Free", "Enterprise", "Pro")):
        Plan.objects.create(name=name, slug=name.lower(), position=position * 10)
    page = operator.get(LIST)
    assert [plan.name for plan in page.context["cl"].result_list] == ["Free", "Enterprise", "Pro"]
    sent = fields_of(page) | {"form-2-position": "5", "change_reason": "Ticket 4711", "_save": "Save"}
    assert operator.post(LIST, sent).status_code == 302
    assert [plan.name for plan in Plan.objects.all()] == ["Free", "Pro", "Enterprise"]
    change = PolicyChange.objects.order_by("-pk")[0]
    assert (change.object_text, change.reason, change.before["position"], change.after["position"]) == (
        "Pro",
        "Ticket 4711",
        20,
        5,
    )
    refused = operator.post(LIST, sent | {"form-0-position": "-1"})
    assert "greater than or equal to 0" in text_of(refused)


def test_only_operators_who_may_change_plans_get_positions_to_edit() -> None:
    Plan.objects.create(name="Free", slug="free")
    assert "data-move" in text_of(client_of("view_plan", "change_plan").get(LIST))
    text = text_of(client_of("view_plan", name="viewer").get(LIST))
    assert 'name="form-0-position"' not in text
    assert '<td class="field-position">0</td>' in text


def test_plans_are_moved_only_where_all_of_them_are_shown_in_their_order(operator: Client) -> None:
    Plan.objects.create(name="Free", slug="free")
    for query in ("?q=free", "?o=1", "?default_for__exact="):
        page = text_of(operator.get(f"{LIST}{query}"))
        assert "data-move" not in page
        assert 'name="form-0-position"' in page


def test_a_new_plan_is_put_after_the_others(operator: Client) -> None:
    assert fields_of(operator.get(f"{LIST}add/"))["position"] == "0"
    Plan.objects.create(name="Free", slug="free", position=30)
    assert fields_of(operator.get(f"{LIST}add/"))["position"] == "40"


def test_a_rename_keeps_the_slug_and_a_new_slug_is_warned_of(operator: Client, settings: Any) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    path = f"{LIST}{plan.pk}/change/"
    sent = fields_of(operator.get(path))
    page = text_of(operator.post(path, sent | {"name": "Team"}, follow=True))
    assert "The slug was" not in page
    plan.refresh_from_db()
    assert (plan.name, plan.slug) == ("Team", "pro")
    page = text_of(operator.post(path, sent | {"slug": "team"}, follow=True))
    assert "The slug was pro and is team now. Change it where policy files name the plan." in page
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "builtins.repr"}
    page = text_of(operator.post(path, fields_of(operator.get(path)) | {"slug": "pro"}, follow=True))
    assert "Callers for whom PLAN_RESOLVER returns team are on the default plan until it returns pro." in page
