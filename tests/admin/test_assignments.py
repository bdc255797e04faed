"""Plan assignments of users and of subjects in the admin: forms, list, plan's page, history and permissions."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from django_ratequota.models import Plan, PlanAssignment, PolicyChange
from tests.admin.test_history import cells
from tests.support.operators import client_of, text_of
from tests.support.pages import form_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "tenants")]

BASE = "/admin/django_ratequota"
LIST = f"{BASE}/planassignment/"


@pytest.fixture
def pro() -> Plan:
    return Plan.objects.create(name="Pro", slug="pro")


def form(plan: Plan, **fields: Any) -> dict[str, Any]:
    return {"plan": plan.pk, "starts_at_0": "2026-01-01", "starts_at_1": "00:00", **fields}


def assign(plan: Plan, *owners: Any, **fields: Any) -> None:
    """Put users and subjects on the plan."""
    for owner in owners:
        who = {"subject": owner} if isinstance(owner, str) else {"user": owner}
        PlanAssignment.objects.create(plan=plan, **who, **fields)


def test_a_subject_is_put_on_a_plan_with_the_day_on_which_its_months_begin(operator: Client, pro: Plan) -> None:
    reply = operator.post(f"{LIST}add/", form(pro, subject="tenant:acme", anchor="15", reason="Contract 7"))
    assert reply.status_code == 302, reply.content.decode()
    row = PlanAssignment.objects.get()
    assert (row.user, row.subject, row.anchor, row.created_by) == (None, "tenant:acme", 15, User.objects.get())
    page = operator.get(LIST)
    assert cells(page, "who") == ["tenant:acme"]
    assert cells(page, "anchor") == ["15"]
    change = PolicyChange.objects.get(model="planassignment")
    assert (change.object_text, change.reason, change.touched_user) == ("tenant:acme: Pro", "Contract 7", "")
    url = f"{LIST}{row.pk}/change/"
    other = client_of(superuser=True, name="other")
    assert other.post(url, {**form_of(other.get(url)), "reason": "Contract 8"}).status_code == 302
    row.refresh_from_db()
    assert (row.reason, row.created_by.username) == ("Contract 8", "operator")


@pytest.mark.parametrize("anchor", ["0", "32"])
def test_months_begin_on_a_day_that_a_month_may_have(operator: Client, pro: Plan, anchor: str) -> None:
    page = text_of(operator.post(f"{LIST}add/", form(pro, subject="tenant:acme", anchor=anchor)))
    assert "than or equal to" in page
    assert not PlanAssignment.objects.exists()


# --- The plan's page, and its deletion. ---


def test_a_plans_page_leads_to_its_subscribers_and_to_a_new_one(
    operator: Client, pro: Plan, alice: User, settings: Any
) -> None:
    now = timezone.now()
    assign(pro, alice, "tenant:acme", "tenant:beta")
    assign(pro, "tenant:gone", starts_at=now - timedelta(days=2), ends_at=now - timedelta(days=1))
    # Beside a resolver, too: it may have no opinion on a customer.
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "builtins.repr"}
    page = text_of(operator.get(f"{BASE}/plan/{pro.pk}/change/"))
    subscribers, new = (
        html.unescape(re.findall(f'<a href="([^"]*)">{text}</a>', page)[0])
        for text in ("Customers", "Assign this plan")
    )
    assert operator.get(subscribers).context["cl"].result_count == 3
    assert f'<option value="{pro.pk}" selected>Pro</option>' in text_of(operator.get(new))
    assert re.search(r">3</a>", text_of(operator.get(f"{BASE}/plan/")))


# --- The history. ---
