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

from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from tests.admin.test_history import cells
from tests.admin.test_revert import confirm, revert_url
from tests.support.operators import client_of, text_of

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


@pytest.mark.parametrize("anchor", ["0", "32"])
def test_months_begin_on_a_day_that_a_month_may_have(operator: Client, pro: Plan, anchor: str) -> None:
    page = text_of(operator.post(f"{LIST}add/", form(pro, subject="tenant:acme", anchor=anchor)))
    assert "than or equal to" in page
    assert not PlanAssignment.objects.exists()


def test_the_creation_is_shown_once_there_is_one(operator: Client, pro: Plan) -> None:
    assert "field-created" not in text_of(operator.get(f"{LIST}add/"))
    assign(pro, "tenant:acme")
    page = text_of(operator.get(f"{LIST}{PlanAssignment.objects.get().pk}/change/"))
    assert "field-created_by" in page
    assert "field-created_at" in page


def test_the_list_is_searched(operator: Client, pro: Plan, alice: User) -> None:
    assign(pro, alice, "tenant:beta", "tenant:acme")

    def listed(query: str) -> list[str]:
        return cells(operator.get(f"{LIST}?{query}"), "who")

    assert listed("q=tenant:acme") == ["tenant:acme"]
    assert listed("q=ali") == ["alice"]


# --- The plan's page, and its deletion. ---


def test_a_plans_page_leads_to_its_subscribers_and_to_a_new_one(operator: Client, pro: Plan, alice: User) -> None:
    now = timezone.now()
    assign(pro, alice, "tenant:acme", "tenant:beta")
    assign(pro, "tenant:gone", starts_at=now - timedelta(days=2), ends_at=now - timedelta(days=1))
    page = text_of(operator.get(f"{BASE}/plan/{pro.pk}/change/"))
    subscribers, new = (
        html.unescape(re.findall(f'<a href="([^"]*)">{text}</a>', page)[0])
        for text in ("Customers", "Assign this plan")
    )
    assert operator.get(subscribers).context["cl"].result_count == 3
    assert f'<option value="{pro.pk}" selected>Pro</option>' in text_of(operator.get(new))
    assert re.search(r">3</a>", text_of(operator.get(f"{BASE}/plan/")))


@pytest.mark.parametrize(
    ("permissions", "links"),
    [
        ((), set()),
        (("view_planassignment",), {"Customers"}),
        (("add_planassignment",), {"Assign this plan"}),
        (("change_planassignment", "add_planassignment"), {"Customers", "Assign this plan"}),
    ],
)
def test_links_need_the_permissions_of_the_pages(pro: Plan, permissions: tuple[str, ...], links: set[str]) -> None:
    page = text_of(client_of("view_plan", *permissions, name="support").get(f"{BASE}/plan/{pro.pk}/change/"))
    assert {text for text in ("Customers", "Assign this plan") if f">{text}</a>" in page} == links


def test_a_plans_page_offers_no_assignments_where_code_decides_the_plan(
    operator: Client, pro: Plan, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "builtins.repr"}
    page = text_of(operator.get(f"{BASE}/plan/{pro.pk}/change/"))
    assert ">Customers</a>" not in page
    assert ">Assign this plan</a>" not in page


def test_a_plans_deletion_counts_its_subscribers_and_undoing_it_brings_them_back(
    operator: Client, pro: Plan, alice: User
) -> None:
    assign(pro, alice, "tenant:acme", anchor=31)
    before = list(PlanAssignment.objects.order_by("pk").values())
    page = text_of(operator.get(f"{BASE}/plan/{pro.pk}/delete/"))
    assert "plan assignments: 2" in page.lower()
    operator.post(f"{BASE}/plan/{pro.pk}/delete/", {"post": "yes"})
    assert not PlanAssignment.objects.exists()
    done = confirm(operator, revert_url("save"), reason="Too early")
    assert done.status_code == 302
    after = list(PlanAssignment.objects.order_by("pk").values())
    assert after == before


# --- The history. ---


def test_the_history_of_a_subject_is_one_search_away(operator: Client, pro: Plan, free: Plan) -> None:
    search = Endpoint.objects.create(name="search")
    for subject in ("tenant:acme", "tenant:globex"):
        assign(free, subject)
        PlanAssignment.objects.filter(subject=subject).update(plan=pro, anchor=15)
        RatePolicy.objects.create(subject=subject, endpoint=search, rates="10/s")
        PlanAssignment.objects.filter(subject=subject).delete()
        found = operator.get(f"{BASE}/policychange/", {"q": subject})
        assert [text.split()[:2] for text in cells(found, "saved")] == [
            ["plan", "assignment"],
            ["rate", "policy"],
            ["plan", "assignment"],
            ["plan", "assignment"],
        ]
    summary = " ".join(cells(operator.get(f"{BASE}/policychange/?q=tenant:acme"), "what_changed"))
    assert "plan: Free → Pro" in summary
    assert "months begin on day: empty → 15" in summary
