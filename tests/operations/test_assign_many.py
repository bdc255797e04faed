"""Assigning a plan to many customers: what it says it would do is what it does, in few queries."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota.models import Plan, PlanAssignment, PolicyChange
from django_ratequota.operations.assign_many import Assigning, assigning
from django_ratequota.operations.list_members import lines_of
from tests.support.operators import words_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def _tenants(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.api_key"}}


@pytest.fixture
def pro(free: Plan) -> Plan:
    return Plan.objects.create(name="Pro", slug="pro")


def outlook(plan: Plan, text: str, **fields: Any) -> Assigning:
    return assigning(plan, lines_of(text), **{"starts_at": timezone.now(), "ends_at": None, **fields})


def test_customers_are_told_apart_by_the_plan_they_are_on(free: Plan, pro: Plan) -> None:
    now = timezone.now()
    names = ("new", "on pro", "on pro until tomorrow", "free", "trial", "was on pro")
    users = {name: User.objects.create(username=name.replace(" ", "-")) for name in names}
    assigned: dict[str, dict[str, Any]] = {
        "on pro": {"plan": pro},
        "on pro until tomorrow": {"plan": pro, "ends_at": now + DAY},
        "free": {"plan": free},
        "trial": {"plan": free, "ends_at": now + DAY},
        "was on pro": {"plan": pro, "starts_at": now - 2 * DAY, "ends_at": now - DAY},
    }
    for name, fields in assigned.items():
        PlanAssignment.objects.create(user=users[name], **fields)
    PlanAssignment.objects.create(subject="tenant:acme", plan=free)
    text = "\n".join(["customer", "gone", *(user.username for user in users.values()), "tenant:acme", "user:free"])
    found = outlook(pro, f"{text}\nip:203.0.113.7\ntenant:beta until 2001-01-01")
    assert found.moved == {None: 2, pro.pk: 1, free.pk: 3}
    assert (found.present, found.later) == (1, 2)
    assert [problem.partition(",")[0] for problem in found.problems] == ["Line 11", "Line 1", "Line 2", "Line 12"]
    assert {one.user_id or one.subject for one in found.new} == {
        *(users[name].pk for name in names if name != "on pro"),
        "tenant:acme",
    }


def test_the_lines_dates_and_reasons_come_before_those_of_all(pro: Plan) -> None:
    end = timezone.now() + 9 * DAY
    found = outlook(pro, "tenant:a\ntenant:b until 2999-12-31 # Contract", ends_at=end, reason="Move")
    assert [(one.ends_at.year, one.reason) for one in found.new] == [(end.year, "Move"), (3000, "Contract")]
    assert outlook(pro, "tenant:a", starts_at=end + DAY, ends_at=end).problems == (
        "Line 1, “tenant:a”: The end must lie after the start.",
    )


def test_two_hundred_customers_are_moved_in_one_save(operator: Client, free: Plan, pro: Plan) -> None:
    users = [User.objects.create(username=f"customer{number}@example.com") for number in range(200)]
    PlanAssignment.objects.bulk_create([PlanAssignment(user=user, plan=free) for user in users[:150]])
    path = f"/admin/django_ratequota/plan/{pro.pk}/assign/"
    form = {"text": "\n".join(["gone", *(user.username for user in users)]), "change_reason": "Migration"}
    page = operator.post(path, form)
    words = words_of(page)
    assert "200 customers are put on this plan" in words
    effects = [(str(text), count) for text, count in page.context["effects"]]
    assert effects == [("Free", 150), ("no assignment", 50), ("lines skipped", 1)]
    assert "Line 1, “user:gone”: There is no user with this login name." in words
    assert PlanAssignment.objects.filter(plan=pro).count() == 0
    last = PolicyChange.objects.latest("pk").pk
    sent = {field.html_name: field.value() or "" for field in page.context["form"] if field.name == "text"}
    with CaptureQueriesContext(connection) as queries:
        done = operator.post(path, {**sent, "change_reason": "Migration", "confirmed": "1"})
    assert done.status_code == 302
    assert len(queries) < 30
    assert PlanAssignment.objects.filter(plan=pro, created_by__username="operator", reason="Migration").count() == 200
    changes = PolicyChange.objects.filter(pk__gt=last)
    assert (changes.count(), changes.values("change_id").distinct().count()) == (200, 1)
    assert "Pro: Assigned: 200. On it already: 0. Lines skipped: 1." in words_of(operator.get(done["Location"]))


def test_a_file_in_csv_is_confirmed_as_text(operator: Client, pro: Plan) -> None:
    User.objects.create(username="alice")
    upload = SimpleUploadedFile("customers.csv", b"who;end;why\nalice;2999-12-31;Contract 7\n")
    page = operator.post(f"/admin/django_ratequota/plan/{pro.pk}/assign/", {"file": upload})
    assert page.context["form"]["text"].value() == "alice until 2999-12-31 # Contract 7"
