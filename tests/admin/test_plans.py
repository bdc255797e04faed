"""Plans: the list with the subscribers of each, a new slug, and copies with every field of their policies."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.utils import timezone

from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.operations.copy_plan import scaled
from tests.support.operators import client_of, text_of
from tests.support.pages import form_of

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


def test_subscribers_from_code_are_named_beside_those_who_are_assigned(
    operator: Client, alice: User, settings: Any
) -> None:
    Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    PlanAssignment.objects.create(user=alice, plan=Plan.objects.create(name="Pro", slug="pro"))
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "builtins.repr"}
    code = "customers from PLAN_RESOLVER"
    assert subscribers(operator) == [f"0 and {code} and logged-in users without an assignment", f"1 and {code}"]


def test_a_new_plan_is_put_after_the_others(operator: Client) -> None:
    assert form_of(operator.get(f"{LIST}add/"))["position"] == "0"
    Plan.objects.create(name="Free", slug="free", position=30)
    assert form_of(operator.get(f"{LIST}add/"))["position"] == "40"


def test_a_rename_keeps_the_slug(operator: Client) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    path = f"{LIST}{plan.pk}/change/"
    sent = form_of(operator.get(path))
    operator.post(path, sent | {"name": "Team"})
    plan.refresh_from_db()
    assert (plan.name, plan.slug) == ("Team", "pro")


# --- Copying a plan. ---


FORM = {"name": "Pro", "slug": "pro", "description": "For some", "reason": "Ticket 4711", "factor": "1"}


@pytest.fixture
def free() -> Plan:
    """A plan with a policy that has every field set, and a plain one."""
    free = Plan.objects.create(name="Free", slug="free", description="For all", default_for="anonymous")
    now = timezone.now()
    RatePolicy.objects.create(plan=free, rates="1/s")
    RatePolicy.objects.create(
        plan=free,
        endpoint=Endpoint.objects.create(name="search"),
        counted_per="ip",
        rates="10/s, 1000/hour burst 50",
        algorithm="gcra",
        mode="log",
        on_error="deny",
        starts_at=now - timedelta(days=1),
        ends_at=now + timedelta(days=1),
        reason="A trial",
    )
    return free


def policies(plan: Plan) -> list[dict[str, Any]]:
    rows = list(RatePolicy.objects.filter(plan=plan).order_by("rates").values())
    for row in rows:
        del row["id"], row["plan_id"]
    return rows


def test_a_copy_has_every_field_of_the_policies(operator: Client, free: Plan, published: list[Any]) -> None:
    PlanAssignment.objects.create(user=User.objects.create(username="alice"), plan=free)
    RatePolicy.objects.create(subject="ip:::1", rates="71/s")
    page = operator.get(f"{LIST}{free.pk}/copy/").content.decode()
    assert 'value="Copy of Free"' in page
    assert "data-prepopulated-fields" in page
    assert "The copy is not a default" in page
    assert "2 policies are copied" in page
    before = policies(free)
    published.clear()
    last = PolicyChange.objects.latest("pk").pk
    done = operator.post(f"{LIST}{free.pk}/copy/", FORM)
    pro = Plan.objects.get(slug="pro")
    assert (done.status_code, done.headers["Location"]) == (302, f"{LIST}{pro.pk}/change/")
    assert (pro.name, pro.description, pro.default_for) == ("Pro", "For some", "")
    assert policies(pro) == policies(free) == before
    assert len(before) == 2
    assert not pro.assignments.exists()
    assert len(published) == 1
    changes = PolicyChange.objects.filter(pk__gt=last)
    assert {(c.model, c.action, c.actor.username, c.reason) for c in changes} == {
        ("plan", "create", "operator", "Ticket 4711"),
        ("ratepolicy", "create", "operator", "Ticket 4711"),
    }
    assert len(changes) == 3
    assert LogEntry.objects.get().get_change_message() == "Copied from Free with 2 policies."
    assert "Pro: Copied from Free with 2 policies." in operator.get(f"{LIST}{pro.pk}/change/").content.decode()


@pytest.mark.parametrize(
    ("rates", "factor", "expected"),
    [
        ("10/s, 1000/hour burst 50", "1.5", "15/s, 1500/hour burst 75"),
        ("60 requests/15min gcra, 100000/month", "1.5", "90 requests/15min gcra, 150000/month"),
        ("5/min", "1.1", "6/min"),  # 5.5
        ("1/s", "0.1", "1/s"),
        ("12345/day", "1.5", "18500/day"),
        ("999999999999/day", "2", "1000000000000/day"),
        ("unlimited", "2", "unlimited"),
        ("blocked", "0.5", "blocked"),
    ],
)
def test_limits_are_multiplied_and_rounded(rates: str, factor: str, expected: str) -> None:
    assert scaled(rates, Decimal(factor)) == expected


def test_a_copy_with_other_limits(operator: Client, free: Plan) -> None:
    path = f"{LIST}{free.pk}/copy/"
    assert operator.post(path, {**FORM, "factor": "1.5"}).status_code == 302
    assert set(Plan.objects.get(slug="pro").policies.values_list("rates", flat=True)) == {
        "2/s",
        "15/s, 1500/hour burst 75",
    }
    assert LogEntry.objects.get().get_change_message().endswith("All limits were multiplied by 1.5.")
    for wrong in ("0", "-1", "x", "1e9", "NaN"):
        assert "errorlist" in operator.post(path, {**FORM, "name": "Team", "factor": wrong}).content.decode()
    assert Plan.objects.count() == 2


def test_without_a_reason_the_history_names_the_plan(operator: Client, free: Plan) -> None:
    assert operator.post(f"{LIST}{free.pk}/copy/", {**FORM, "reason": ""}).status_code == 302
    assert {change.reason for change in PolicyChange.objects.all()[:3]} == {"copy of Free"}


def test_a_copy_stands_directly_after_its_plan(operator: Client, free: Plan) -> None:
    for name in ("Enterprise", "Visitors"):
        Plan.objects.create(name=name, slug=name.lower(), position=10)
    assert operator.post(f"{LIST}{free.pk}/copy/", FORM).status_code == 302
    assert [plan.name for plan in Plan.objects.all()] == ["Free", "Pro", "Enterprise", "Visitors"]


@pytest.mark.parametrize("missing", ["", "add_plan", "view_plan", "add_ratepolicy"])
def test_a_copy_needs_the_permissions_to_see_the_plan_and_to_add_both(free: Plan, missing: str) -> None:
    client = client_of(*{"add_plan", "view_plan", "add_ratepolicy"} - {missing})
    assert client.post(f"{LIST}{free.pk}/copy/", FORM).status_code == (403 if missing else 302)
    assert Plan.objects.filter(slug="pro").exists() is (not missing)


def test_an_invalid_policy_stops_the_copy(operator: Client, free: Plan) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = 'garbage' WHERE rates = '1/s'")
    page = operator.post(f"{LIST}{free.pk}/copy/", FORM)
    assert page.status_code == 200
    text = page.content.decode()
    assert "The plan was not copied, because plan Free × all endpoints: garbage is not valid." in text
    assert "expected a limit" in text
    assert (Plan.objects.count(), RatePolicy.objects.count()) == (1, 2)
    assert not LogEntry.objects.exists()


def test_the_factor_is_written_as_in_the_operators_language(operator: Client, free: Plan, settings: Any) -> None:
    settings.LANGUAGE_CODE = "de"
    assert operator.post(f"{LIST}{free.pk}/copy/", {**FORM, "factor": "1,5"}).status_code == 302
    assert Plan.objects.get(slug="pro").policies.filter(rates="2/s").exists()
