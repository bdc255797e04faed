"""The history's why: asked for with each save in the admin, and never that of an earlier change."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from tests.admin.test_admin import BASE, list_form, plan_form, row_of
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

OLD = "Migration week, ticket 4711"
WHY = "Ticket 4712"
FIELD = 'name="change_reason"'


@pytest.fixture
def operator() -> Client:
    return client_of(superuser=True)


@pytest.fixture
def free() -> Plan:
    return Plan.objects.create(name="Free", slug="free")


@pytest.fixture
def policy(free: Plan) -> RatePolicy:
    return RatePolicy.objects.create(plan=free, rates="1/s", reason=OLD)


def policy_form(policy: RatePolicy, **fields: str) -> dict[str, str]:
    """What a browser sends for a policy's page."""
    form = {"plan": str(policy.plan_id), "counted_per": "caller", "algorithm": "token_bucket", "mode": "enforce"}
    return {**form, "rates": policy.rates, "reason": policy.reason, "change_reason": "", **fields}


def last() -> PolicyChange:
    change = PolicyChange.objects.first()
    assert change is not None
    return change


@pytest.mark.parametrize(
    ("fields", "recorded", "own"),
    [
        ({"rates": "2/s"}, "", OLD),
        ({"rates": "2/s", "change_reason": f" {WHY} "}, WHY, OLD),
        ({"reason": WHY}, WHY, WHY),
        ({"reason": ""}, "", ""),
        ({"reason": "Contract 7", "change_reason": WHY}, WHY, "Contract 7"),
    ],
    ids=["none", "given", "own", "own erased", "both"],
)
def test_an_edited_policy(
    operator: Client, policy: RatePolicy, fields: dict[str, str], recorded: str, own: str
) -> None:
    """An edit of the rates, a month later, was recorded with the reason that the policy was made for."""
    path = f"{BASE}/ratepolicy/{policy.pk}/change/"
    assert FIELD in operator.get(path).content.decode()
    assert operator.post(path, policy_form(policy, **fields)).status_code == 302
    policy.refresh_from_db()
    assert (last().action, last().reason, policy.reason) == ("update", recorded, own)
    assert "for this change" not in LogEntry.objects.latest("pk").get_change_message()


def test_a_new_policy_says_why_by_itself(operator: Client, policy: RatePolicy) -> None:
    path = f"{BASE}/ratepolicy/add/"
    assert FIELD not in operator.get(path).content.decode()
    operator.post(path, policy_form(policy, counted_per="ip", reason=WHY))
    assert (last().action, last().reason) == ("create", WHY)


@pytest.mark.parametrize("why", ["", WHY])
def test_a_plan_and_its_table(operator: Client, policy: RatePolicy, why: str) -> None:
    path = f"{BASE}/plan/{policy.plan_id}/change/"
    assert operator.get(path).content.decode().count(FIELD) == 1
    form = plan_form(policy.plan, row_of(policy, rates="2/s"), {"rates": "9/s", "counted_per": "ip"}, initial=1)
    assert operator.post(path, {**form, "description": "Try it", "change_reason": why}).status_code == 302
    recorded = [
        (entry.model, entry.action, entry.reason) for entry in PolicyChange.objects.filter(actor__isnull=False)
    ]
    assert sorted(recorded) == [
        ("plan", "update", why),
        ("ratepolicy", "create", why),
        ("ratepolicy", "update", why),
    ]
    policy.refresh_from_db()
    assert policy.reason == OLD


@pytest.mark.parametrize("why", ["", WHY])
def test_a_new_plan_and_an_endpoint(operator: Client, why: str) -> None:
    assert FIELD in operator.get(f"{BASE}/plan/add/").content.decode()
    form = plan_form(Plan(name="Pro", slug="pro"), {"rates": "9/s"})
    assert operator.post(f"{BASE}/plan/add/", {**form, "change_reason": why}).status_code == 302
    endpoint = {"name": "search", "description": "", "routes": "", "methods": "", "cost": "1", "change_reason": why}
    endpoint |= {"policies-TOTAL_FORMS": "0", "policies-INITIAL_FORMS": "0"}
    assert operator.post(f"{BASE}/endpoint/add/", endpoint).status_code == 302
    path = f"{BASE}/endpoint/{Endpoint.objects.get().pk}/change/"
    assert FIELD in operator.get(path).content.decode()
    assert operator.post(path, {**endpoint, "cost": "2"}).status_code == 302
    recorded = PolicyChange.objects.order_by("pk").values_list("model", "action", "reason")
    assert list(recorded) == [
        ("plan", "create", why),
        ("ratepolicy", "create", why),
        ("endpoint", "create", why),
        ("endpoint", "update", why),
    ]


def test_an_assignment(operator: Client, free: Plan) -> None:
    path, form = f"{BASE}/planassignment/add/", {"plan": str(free.pk), "starts_at_0": "2026-01-01"}
    form |= {"user": str(User.objects.get().pk), "starts_at_1": "00:00", "reason": OLD}
    assert FIELD not in operator.get(path).content.decode()
    operator.post(path, form)
    assert last().reason == OLD
    path = f"{BASE}/planassignment/{PlanAssignment.objects.get().pk}/change/"
    for hour, why in (("01", ""), ("02", WHY)):
        operator.post(path, {**form, "starts_at_1": f"{hour}:00", "change_reason": why})
        assert (last().model, last().action, last().reason) == ("planassignment", "update", why)


@pytest.mark.parametrize("why", ["", WHY])
def test_the_list(operator: Client, policy: RatePolicy, why: str) -> None:
    assert operator.get(f"{BASE}/ratepolicy/").content.decode().count(FIELD) == 1
    form = {**list_form(policy, mode="log"), "change_reason": why}
    assert operator.post(f"{BASE}/ratepolicy/", form).status_code == 302
    policy.refresh_from_db()
    assert (policy.mode, policy.reason, last().reason) == ("log", OLD, why)


def test_a_list_with_a_mistake_keeps_the_reason(operator: Client, policy: RatePolicy) -> None:
    page = operator.post(f"{BASE}/ratepolicy/", {**list_form(policy, mode="nonsense"), "change_reason": WHY})
    assert f'value="{WHY}"' in page.content.decode()


@pytest.mark.parametrize("why", ["x" * 500, "a\x00b", "\u202e<b>"])
def test_any_text_is_taken_by_the_list(operator: Client, policy: RatePolicy, why: str) -> None:
    form = {**list_form(policy, mode="log"), "change_reason": why}
    assert operator.post(f"{BASE}/ratepolicy/", form).status_code == 302
    assert last().reason == why.replace("\x00", "")[:200]
    assert "<b>" not in operator.get(f"{BASE}/policychange/").content.decode()


@pytest.mark.parametrize(
    ("why", "told"), [("x" * 201, "at most 200 characters"), ("a\x00b", "Null characters are not allowed.")]
)
def test_a_page_tells_what_is_no_reason(operator: Client, policy: RatePolicy, why: str, told: str) -> None:
    plan = f"{BASE}/plan/{policy.plan_id}/change/"
    own = f"{BASE}/ratepolicy/{policy.pk}/change/"
    for path, form in ((plan, plan_form(policy.plan, row_of(policy), initial=1)), (own, policy_form(policy))):
        page = operator.post(path, {**form, "change_reason": why}).content.decode()
        assert page.count(told) == 1
    assert last().actor is None, "nothing was saved"


def test_a_deletion_has_no_reason_of_old(operator: Client, policy: RatePolicy) -> None:
    operator.post(f"{BASE}/plan/{policy.plan_id}/delete/", {"post": "yes"})
    recorded = PolicyChange.objects.filter(action="delete").values_list("model", "reason")
    assert sorted(recorded) == [("plan", ""), ("ratepolicy", "")]


def test_viewers_are_not_asked(policy: RatePolicy) -> None:
    viewer = client_of("view_plan", "view_ratepolicy")
    for path in (f"plan/{policy.plan_id}/change/", f"ratepolicy/{policy.pk}/change/", "ratepolicy/", "plan/"):
        assert FIELD not in viewer.get(f"{BASE}/{path}").content.decode()
    own = PolicyChange.objects.get(model="ratepolicy")
    assert (
        FIELD
        not in client_of(superuser=True, name="root").get(f"{BASE}/policychange/{own.pk}/change/").content.decode()
    )


def test_code_gives_the_reason_by_the_object(policy: RatePolicy) -> None:
    """Or by ``recorded_as``; what the object said before is the reason of an earlier change."""
    changes: list[Any] = []
    for fields in ({"rates": "2/s"}, {"rates": "3/s", "reason": WHY}, {"rates": "4/s"}, {"reason": ""}):
        for name, value in fields.items():
            setattr(policy, name, value)
        policy.save()
        changes.append(last().reason)
    assert changes == ["", WHY, "", ""]
    RatePolicy.objects.update(rates="5/s")
    assert last().reason == ""
    RatePolicy.objects.update(reason=OLD)
    assert last().reason == OLD
    RatePolicy.objects.all().delete()
    assert (last().action, last().reason) == ("delete", "")
