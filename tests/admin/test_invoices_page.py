"""The Invoices page: its table, its filters, the CSV, and who may see which lines."""

from __future__ import annotations

import csv
import io
from datetime import UTC, date, datetime
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from django_ratequota.models import Endpoint, Plan, QuotaDay, QuotaWindow, RatePolicy
from tests.support.operators import client_of, text_of
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies", "redis_client")]

PAGE = "/admin/django_ratequota/ratepolicy/invoices/"
OCTOBER = {"month": "2025-10"}


def window(subject: str, used: int, policy: RatePolicy, **fields: Any) -> QuotaWindow:
    starts_at, ends_at = (datetime(2025, month, 1, tzinfo=UTC) for month in (10, 11))
    named = {"limit": 100, "policy_id": policy.pk, "endpoint_id": policy.endpoint_id, **fields}
    row: QuotaWindow = counted(subject=subject, starts_at=starts_at, ends_at=ends_at, used=used, **named)
    return row


def table(page: Any) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(page.getvalue().decode("utf-8-sig"))))


def test_the_page_shows_the_lines_of_a_month(operator: Client, alice: User, free: Plan, search: Endpoint) -> None:
    policy = RatePolicy.objects.create(plan=free, endpoint=search, rates="100/month")
    window(f"user:{alice.pk}", 1130, policy)
    window("tenant:acme", 5, RatePolicy.objects.create(rates="100/month", mode="log"))
    page = operator.get(PAGE, OCTOBER)
    acme, own = page.context["lines"]
    shown = [(line["caller"], line["plan"], line["endpoint"], line["over"]) for line in (acme, own)]
    assert shown == [("tenant:acme", "", "all endpoints", ""), ("user alice", "Free", "search", "1,030")]
    assert acme["line"].mode == "log"
    text = text_of(page)
    assert "1,130 of 100 units" in text
    assert "Invoices: October 2025" in text
    assert [own[name] for name in ("begins", "ends", "changed")] == [
        "10/01/2025",
        "11/01/2025",
        "10/01/2025 00:00 UTC",
    ]
    assert f'href="/admin/django_ratequota/ratepolicy/quotas/history/?subject=user%3A{alice.pk}"' in text
    for query, callers in (
        ({"subject": "tenant:acme"}, ["tenant:acme"]),
        ({"month": "2025-11"}, []),
    ):
        page = operator.get(PAGE, {**OCTOBER, **query})
        assert [line["caller"] for line in page.context["lines"]] == callers, query
    assert "No usage is recorded for this month." in text_of(page)
    page = operator.get(PAGE, {"month": "2025-11", "subject": "tenant:acme"})
    assert "No line in this month matches your choice." in text_of(page)
    assert f'href="{PAGE}"' in text_of(operator.get("/admin/django_ratequota/"))


def test_days_are_added_up_and_have_the_limit_each(operator: Client) -> None:
    """Regression: their sum stood as "160 of 100", as if it were above the limit."""
    policy = RatePolicy.objects.create(rates="100 requests/day fixed_window")
    for day in (1, 2):
        times = {"starts_at": datetime(2025, 10, day, tzinfo=UTC), "ends_at": datetime(2025, 10, day + 1, tzinfo=UTC)}
        named = {"counter": "{tenant:acme}:0:fwday", "policy_id": policy.pk, "period": "day", "rate": policy.rates}
        counted(subject="tenant:acme", used=80, limit=100, **times, **named)
    [line] = operator.get(PAGE, OCTOBER).context["lines"]
    assert (line["used"], line["over"]) == ("160 requests (100 each day)", "")


def test_the_file_has_what_the_command_prints(operator: Client, free: Plan) -> None:
    window("tenant:a;=1+1", 5, RatePolicy.objects.create(plan=free, rates="100/month"))
    page = operator.get(PAGE, {**OCTOBER, "csv": "1"})
    assert page["Content-Disposition"] == 'attachment; filename="ratequota-invoices-2025-10.csv"'
    [row] = table(page)
    assert (row["subject"], row["plan"], row["used"], row["complete"]) == ("tenant:a;'=1+1", "Free", "5", "True")


def test_a_typo_and_unknown_values_are_told(operator: Client, free: Plan, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.tenant"}}
    window("tenant:acme", 5, RatePolicy.objects.create(plan=free, rates="100/month"))
    page = operator.get(PAGE, {**OCTOBER, "subject": "tenant:acmee"})
    assert "No usage is recorded for this subject." in text_of(page)
    for query in ("month=October", "month=9999-12", "month=%00"):
        assert "was ignored, because the value is unknown." in text_of(operator.get(f"{PAGE}?{query}")), query


@pytest.mark.parametrize(("permission", "seen"), [("view_ratepolicy", ["", "Free"]), ("grant_override", [""])])
def test_operators_see_the_lines_of_policies_that_they_may_see(
    free: Plan, permission: str, seen: list[str], settings: Any
) -> None:
    """Also of a month that two policies have limited, of which they may see one."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.tenant"}}
    plan = RatePolicy.objects.create(plan=free, rates="100/month")
    own = RatePolicy.objects.create(subject="tenant:acme", rates="200/month")
    row = window("tenant:acme", 30, own, mixed=True)
    day = {"counter": row.counter, "first_day": row.first_day, "day": date(2025, 10, 2), "policy_id": plan.pk}
    QuotaDay.objects.create(**day, charged=10, refunded=0, rate="100/month")
    client = client_of(permission)
    assert [line["plan"] for line in client.get(PAGE, OCTOBER).context["lines"]] == seen
    assert [line["plan"] for line in table(client.get(PAGE, {**OCTOBER, "csv": "1"}))] == seen


def test_a_page_of_many_lines_is_bounded(operator: Client, free: Plan) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="100/month")
    row = window("tenant:t", 1, policy)
    fields = {
        field.attname: getattr(row, field.attname)
        for field in row._meta.concrete_fields
        if field.attname not in ("id", "counter", "subject", "used", "percent")
    }
    QuotaWindow.objects.bulk_create(
        QuotaWindow(counter=f"{{tenant:{number:05}}}:0:fwmonth", subject=f"tenant:{number:05}", **fields)
        for number in range(2_000)
    )
    operator.get(PAGE, OCTOBER)
    with CaptureQueriesContext(connection) as captured:
        page = operator.get(PAGE, OCTOBER)
    assert len(captured) < 15
    assert len(page.content) < 100_000
    assert len(page.context["lines"]) == 50
    following = page.context["next"]
    assert f'href="?month=2025-10&amp;start={quote(following)}">Next page</a>' in text_of(page)
    page = operator.get(PAGE, {**OCTOBER, "start": following})
    assert [line["caller"] for line in page.context["lines"]][::49] == ["tenant:00050", "tenant:00099"]
    assert 'href="?month=2025-10&amp;start=">First page</a>' in text_of(page)
    QuotaWindow.objects.update(mixed=True)
    text = text_of(client_of("grant_override", name="support").get(PAGE, OCTOBER))
    assert "No line on this page matches your choice." in text
    assert "Next page" in text
    assert "All rows as CSV" in text
