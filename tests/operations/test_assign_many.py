"""Assigning a plan to many customers: all of the lines or none, in one save and few queries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota.models import Plan, PlanAssignment, PolicyChange
from django_ratequota.operations.pasted_lines import Assigned, assign, lines_of
from tests.support.operators import client_of, words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "api_keys")]

DAY = timedelta(days=1)


@pytest.fixture
def pro(free: Plan) -> Plan:
    return Plan.objects.create(name="Pro", slug="pro")


def test_who_is_on_the_plan_already_is_left_alone(free: Plan, pro: Plan) -> None:
    now = timezone.now()
    names = ("new", "on-pro", "on-pro-until-tomorrow", "free", "trial", "was-on-pro")
    users = {name: User.objects.create(username=name) for name in names}
    assigned: dict[str, dict[str, Any]] = {
        "on-pro": {"plan": pro},
        "on-pro-until-tomorrow": {"plan": pro, "ends_at": now + DAY},
        "free": {"plan": free},
        "trial": {"plan": free, "ends_at": now + DAY},
        "was-on-pro": {"plan": pro, "starts_at": now - 2 * DAY, "ends_at": now - DAY},
    }
    for name, fields in assigned.items():
        PlanAssignment.objects.create(user=users[name], **fields)
    PlanAssignment.objects.create(subject="tenant:acme", plan=free)
    before = set(PlanAssignment.objects.values_list("pk", flat=True))
    lines = lines_of("\n".join([*names, "tenant:acme", f"user:{users['free'].pk}"]))
    assert assign(pro, lines) == Assigned(new=6, later=2, present=2)
    new = PlanAssignment.objects.exclude(pk__in=before)
    assert {row.user_id or row.subject for row in new} == {
        *(users[name].pk for name in names if name != "on-pro"),
        "tenant:acme",
    }


def test_an_assignment_that_lasts_as_long_is_enough(pro: Plan) -> None:
    PlanAssignment.objects.create(subject="tenant:a", plan=pro, ends_at=datetime(3000, 1, 1, tzinfo=UTC))
    found = [assign(pro, lines_of(f"tenant:a until {day}")).present for day in ("2998-12-31", "2999-12-31")]
    assert found == [1, 1]


def test_the_lines_reasons_come_before_that_of_all(pro: Plan) -> None:
    assign(pro, lines_of("tenant:a\ntenant:b until 2999-12-31 # Contract"), reason="Move")
    found = [(row.ends_at and row.ends_at.year, row.reason) for row in PlanAssignment.objects.order_by("subject")]
    assert found == [(None, "Move"), (3000, "Contract")]


def test_two_hundred_customers_are_moved_in_one_save(operator: Client, free: Plan, pro: Plan) -> None:
    users = [User.objects.create(username=f"customer{number}@example.com") for number in range(200)]
    PlanAssignment.objects.bulk_create([PlanAssignment(user=user, plan=free) for user in users[:150]])
    path = f"/admin/django_ratequota/plan/{pro.pk}/assign/"
    text = "\n".join(user.username for user in users)
    refused = words_of(operator.post(path, {"text": f"gone\n{text}", "change_reason": "Migration"}))
    assert "Line 1, “gone”: There is no such user." in refused
    assert PlanAssignment.objects.filter(plan=pro).count() == 0
    last = PolicyChange.objects.latest("pk").pk
    with CaptureQueriesContext(connection) as queries:
        done = operator.post(path, {"text": text, "change_reason": "Migration"})
    assert done.status_code == 302
    assert len(queries) < 30
    assert PlanAssignment.objects.filter(plan=pro, created_by__username="operator", reason="Migration").count() == 200
    changes = PolicyChange.objects.filter(pk__gt=last)
    assert (changes.count(), changes.values("change_id").distinct().count()) == (200, 1)
    assert "Pro: 200 customers were assigned." in words_of(operator.get(done["Location"]))


def test_a_file_in_csv_has_a_column_of_customers(operator: Client, pro: Plan) -> None:
    User.objects.create(username="alice")
    upload = SimpleUploadedFile("customers.csv", b"customer;end;why\nalice;2999-12-31;Contract 7\n")
    operator.post(f"/admin/django_ratequota/plan/{pro.pk}/assign/", {"file": upload})
    row = PlanAssignment.objects.get()
    assert (row.user.username, row.reason) == ("alice", "Contract 7")


@pytest.mark.parametrize(
    ("permissions", "status"),
    [
        (["add_planassignment", "view_plan"], 200),
        (["add_planassignment"], 403),
        (["view_plan"], 403),
    ],
)
def test_the_page_is_for_those_who_see_the_plan_and_may_assign_it(
    pro: Plan, permissions: list[str], status: int
) -> None:
    assert client_of(*permissions).get(f"/admin/django_ratequota/plan/{pro.pk}/assign/").status_code == status
