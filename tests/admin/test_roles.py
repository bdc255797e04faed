"""The permission sets of docs/support/permissions.md: each role can do its tasks and no others."""

from __future__ import annotations

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission, User
from django.test import Client

from django_ratequota.models import Endpoint, Plan, RatePolicy, SubjectList
from tests.support.operators import client_of
from tests.support.snippets import ROOT

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

APP = "/admin/django_ratequota/"
_HEAD, _RULE, *ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/support/permissions.md").read_text().splitlines()
    if line.startswith("|")
]
NAMES = {codename.strip("`"): name for name, codename, *_ in ROWS}
ROLES = {
    role: [codename.strip("`") for _, codename, *cells in ROWS if cells[column]]
    for column, role in enumerate(_HEAD[2:])
}
EVERYBODY = set(ROLES)
#: Task -> its address and the roles that may do it. A page that is refused answers 403.
TASKS = {
    "explain": ("ratepolicy/explain/?user={alice}&endpoint=search", EVERYBODY),
    "traffic": ("ratepolicy/traffic/", EVERYBODY),
    "quotas": ("ratepolicy/quotas/", EVERYBODY),
    "invoices": ("ratepolicy/invoices/", EVERYBODY),
    "history": ("policychange/", EVERYBODY),
    "matrix": ("plan/matrix/", EVERYBODY),
    "raise": ("ratepolicy/boost/?user={alice}&endpoint=search&policy={policy}", {"Senior support"}),
    "refund": ("ratepolicy/counters/?user={alice}&endpoint=search&bucket=search/hour", {"Senior support"}),
    "block": ("ratepolicy/block/?caller=ip:203.0.113.7", {"Senior support", "Abuse team"}),
    "assign a plan": ("planassignment/add/", {"Senior support", "Plan managers"}),
    "assign to many": ("plan/{plan}/assign/", {"Senior support", "Plan managers"}),
    "add members": ("subjectlist/{bots}/add-members/", {"Abuse team"}),
    "remove members": ("subjectlist/{bots}/remove-members/", {"Abuse team"}),
    "copy a plan": ("plan/{plan}/copy/", {"Plan managers"}),
    "add a plan": ("plan/add/", {"Plan managers"}),
    "add a policy": ("ratepolicy/add/", {"Senior support", "Plan managers"}),
    "add an endpoint": ("endpoint/add/", {"Plan managers"}),
    "add a list": ("subjectlist/add/", {"Plan managers"}),
    "roll out a policy": ("ratepolicy/{trial}/roll-out/", {"Plan managers"}),
    "delete a policy": ("ratepolicy/{policy}/delete/", {"Plan managers"}),
}


@pytest.fixture
def ids() -> dict[str, int]:
    plan = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    search = Endpoint.objects.create(name="search")
    return {
        "alice": User.objects.create(username="alice").pk,
        "plan": plan.pk,
        "policy": RatePolicy.objects.create(plan=plan, endpoint=search, rates="10/hour").pk,
        "trial": RatePolicy.objects.create(plan=plan, endpoint=search, rates="5/hour", mode="log").pk,
        "bots": SubjectList.objects.create(name="Bots").pk,
    }


def member_of(role: str) -> Client:
    return client_of(*ROLES[role], name=role)


def test_each_permission_exists_under_its_name() -> None:
    held = dict(Permission.objects.values_list("codename", "name"))
    of_users = f"view_{get_user_model()._meta.model_name}"
    assert {code: held.get(of_users if code == "view_user" else code) for code in NAMES} == NAMES


@pytest.mark.parametrize("task", TASKS)
def test_each_task_is_open_to_its_roles_alone(task: str, ids: dict[str, int]) -> None:
    path, allowed = TASKS[task]
    status = {role: member_of(role).get(APP + path.format(**ids)).status_code for role in ROLES}
    assert status == {role: 200 if role in allowed else 403 for role in ROLES}
