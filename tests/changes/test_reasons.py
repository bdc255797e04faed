"""Reasons of changes: entered with each save in the admin, and never copied from an earlier change."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from tests.admin.test_admin import BASE, list_form, plan_form, row_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

OLD_REASON = "Migration week, ticket 4711"
REASON = "Ticket 4712"
FIELD = 'name="change_reason"'


@pytest.fixture
def policy(free: Plan) -> RatePolicy:
    return RatePolicy.objects.create(plan=free, rates="1/s", reason=OLD_REASON)


def policy_form(policy: RatePolicy, **fields: str) -> dict[str, str]:
    form = {"plan": str(policy.plan_id), "counted_per": "caller", "algorithm": "token_bucket", "mode": "enforce"}
    return {**form, "rates": policy.rates, "reason": policy.reason, "change_reason": "", **fields}


def last() -> PolicyChange:
    change = PolicyChange.objects.first()
    assert change is not None
    return change


@pytest.mark.parametrize(
    ("fields", "recorded", "own"),
    [
        ({"rates": "2/s"}, "", OLD_REASON),
        ({"rates": "2/s", "change_reason": f" {REASON} "}, REASON, OLD_REASON),
        ({"reason": REASON}, REASON, REASON),
        ({"reason": ""}, "", ""),
        ({"reason": "Contract 7", "change_reason": REASON}, REASON, "Contract 7"),
    ],
    ids=["none", "given", "own", "own erased", "both"],
)
def test_the_change_reason_of_an_edited_policy_is_recorded(
    operator: Client, policy: RatePolicy, fields: dict[str, str], recorded: str, own: str
) -> None:
    """An edit of the rates, a month later, was recorded with the reason for creating the policy."""
    path = f"{BASE}/ratepolicy/{policy.pk}/change/"
    assert FIELD in operator.get(path).content.decode()
    assert operator.post(path, policy_form(policy, **fields)).status_code == 302
    policy.refresh_from_db()
    assert (last().action, last().reason, policy.reason) == ("update", recorded, own)
    assert "for this change" not in LogEntry.objects.latest("pk").get_change_message()


def test_new_objects_and_endpoints_and_assignments_have_reasons_too(operator: Client, policy: RatePolicy) -> None:
    assert FIELD in operator.get(f"{BASE}/plan/add/").content.decode()
    plan = plan_form(Plan(name="Pro", slug="pro"), {"rates": "9/s"})
    endpoint = {"name": "search", "description": "", "routes": "", "methods": "", "cost": "1", "limits": "own"}
    endpoint |= {"policies-TOTAL_FORMS": "0", "policies-INITIAL_FORMS": "0"}
    assignment = {"plan": str(policy.plan_id), "user": str(User.objects.get().pk), "starts_at_0": "2026-01-01"}
    for path, form, field in (
        ("plan/add/", plan, "change_reason"),
        ("endpoint/add/", endpoint, "change_reason"),
        ("ratepolicy/add/", policy_form(policy, counted_per="ip"), "reason"),
        ("planassignment/add/", {**assignment, "starts_at_1": "00:00"}, "reason"),
    ):
        assert (FIELD in operator.get(f"{BASE}/{path}").content.decode()) is (field == "change_reason")
        assert operator.post(f"{BASE}/{path}", {**form, field: REASON}).status_code == 302
        assert (last().action, last().reason) == ("create", REASON), path
    for row, form in ((Endpoint.objects.get(), endpoint), (PlanAssignment.objects.get(), assignment)):
        path = f"{BASE}/{row._meta.model_name}/{row.pk}/change/"
        edit = {**form, "cost": "2", "starts_at_1": "01:00", "reason": REASON, "change_reason": "Another"}
        assert operator.post(path, edit).status_code == 302
        assert (last().action, last().reason) == ("update", "Another")


@pytest.mark.parametrize("reason", ["", REASON, "x" * 500, "a\x00b", "\u202e<b>"])
def test_the_list_records_any_text_as_reason_of_its_edits(operator: Client, policy: RatePolicy, reason: str) -> None:
    path = f"{BASE}/ratepolicy/"
    assert operator.get(path).content.decode().count(FIELD) == 1
    assert operator.post(path, {**list_form(policy, mode="log"), "change_reason": reason}).status_code == 302
    policy.refresh_from_db()
    assert (policy.mode, policy.reason, last().reason) == ("log", OLD_REASON, reason.replace("\x00", "")[:200])
    assert "<b>" not in operator.get(f"{BASE}/policychange/").content.decode()


def test_an_invalid_list_keeps_the_entered_reason(operator: Client, policy: RatePolicy) -> None:
    page = operator.post(f"{BASE}/ratepolicy/", {**list_form(policy, mode="nonsense"), "change_reason": REASON})
    assert f'value="{REASON}"' in page.content.decode()


def test_invalid_reasons_are_reported(operator: Client, policy: RatePolicy) -> None:
    plan = f"{BASE}/plan/{policy.plan_id}/change/"
    own = f"{BASE}/ratepolicy/{policy.pk}/change/"
    for path, form in ((plan, plan_form(policy.plan, row_of(policy), initial=1)), (own, policy_form(policy))):
        for reason, text in (("x" * 201, "at most 200 characters"), ("a\x00b", "Null characters are not allowed.")):
            page = operator.post(path, {**form, "change_reason": reason}).content.decode()
            assert page.count(text) == 1
    assert last().actor is None, "nothing was saved"


def test_the_reason_of_a_saved_object_is_recorded_when_it_changes(policy: RatePolicy) -> None:
    changes: list[Any] = []
    for fields in ({"rates": "2/s"}, {"rates": "3/s", "reason": REASON}, {"rates": "4/s"}, {"reason": ""}):
        for name, value in fields.items():
            setattr(policy, name, value)
        policy.save()
        changes.append(last().reason)
    assert changes == ["", REASON, "", ""]
    RatePolicy.objects.update(rates="5/s")
    assert last().reason == ""
    RatePolicy.objects.update(reason=OLD_REASON)
    assert last().reason == OLD_REASON
    RatePolicy.objects.all().delete()
    assert (last().action, last().reason) == ("delete", "")
