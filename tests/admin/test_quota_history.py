"""A subject's past windows: the charts, the days of a month, the CSV, and who may see them."""

from __future__ import annotations

import csv
import io
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota.admin import quota_history
from django_ratequota.models import Endpoint, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.operations.past_windows import past_of
from tests.support.operators import client_of, text_of
from tests.support.windows import counted, given_back, of_day

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies", "redis_client")]

PAGE = "/admin/django_ratequota/ratepolicy/quotas/history/"
CSV = f"{PAGE}?csv=1"
ENDS = {"month": 31, "week": 7, "day": 1}


def window(starts: date, used: int, ends: date | None = None, **fields: Any) -> QuotaWindow:
    ends = ends or (starts + timedelta(days=32)).replace(day=1)
    named = {"subject": "tenant:acme", "limit": 100} | fields
    return counted(starts_at=at(starts), ends_at=at(ends), used=used, **named)


def at(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def this_month(back: int = 0) -> date:
    first = datetime.now(UTC).date().replace(day=1)
    for _ in range(back):
        first = (first - timedelta(days=1)).replace(day=1)
    return first


def bars(windows: Any, today: date, most: int = 24) -> list[list[tuple[str, int, int]]]:
    found = past_of(windows, most, today)
    return [[(str(day), used, limit) for day, used, limit in row.windows] for row in found]


def test_months_without_use_are_bars_of_nothing() -> None:
    window(date(2026, 1, 1), 5)
    window(date(2026, 4, 1), 7)
    assert bars(QuotaWindow.objects.all(), date(2026, 5, 1)) == [
        [
            ("2026-01-01", 5, 100),
            ("2026-02-01", 0, 0),
            ("2026-03-01", 0, 0),
            ("2026-04-01", 7, 100),
            ("2026-05-01", 0, 0),
        ]
    ]
    assert bars(QuotaWindow.objects.all(), date(2026, 4, 30), 2) == [[("2026-03-01", 0, 0), ("2026-04-01", 7, 100)]]


def test_a_customer_s_months_begin_on_her_day() -> None:
    window(date(2027, 11, 30), 1, date(2027, 12, 31))
    window(date(2028, 4, 30), 2, date(2028, 5, 31))
    [row] = bars(QuotaWindow.objects.all(), date(2028, 5, 30))
    assert [day for day, *_ in row] == [
        *("2027-11-30", "2027-12-31", "2028-01-31", "2028-02-29", "2028-03-31", "2028-04-30")
    ]


def test_a_month_with_a_new_beginning_has_a_bar_of_its_own() -> None:
    window(date(2026, 1, 1), 5)
    window(date(2026, 1, 15), 6, date(2026, 2, 15))
    assert bars(QuotaWindow.objects.all(), date(2026, 2, 14)) == [[("2026-01-01", 5, 100), ("2026-01-15", 6, 100)]]


@pytest.mark.parametrize(("period", "step"), [("day", 1), ("week", 7)])
def test_days_and_weeks_follow_each_other(period: str, step: int) -> None:
    first = date(2026, 3, 2)
    for number in (0, 3):
        begins = first + timedelta(days=step * number)
        window(begins, number, begins + timedelta(days=step), period=period)
    [row] = bars(QuotaWindow.objects.all(), first + timedelta(days=step * 3))
    assert row == [
        (str(first + timedelta(days=step * n)), n if n == 3 else 0, 100 if n in (0, 3) else 0) for n in range(4)
    ]


def test_counters_used_last_and_most_come_first() -> None:
    window(date(2026, 1, 1), 90, limit=1)
    window(date(2026, 2, 1), 10, limit=2)
    window(date(2026, 2, 1), 20, limit=3)
    found = past_of(QuotaWindow.objects.all(), 24, date(2026, 2, 1))
    assert [row.window.rate for row in found] == ["3/month", "2/month", "1/month"]


def test_the_page_shows_a_chart_per_rate(operator: Client, search: Endpoint) -> None:
    policy = RatePolicy.objects.create(endpoint=search, rates="100/month")
    window(this_month(2), 40, policy_id=policy.pk, endpoint_id=search.pk)
    window(this_month(), 110, policy_id=policy.pk, endpoint_id=search.pk)
    window(this_month(), 3, policy_id=4711, limit=9)
    window(this_month(), 8, subject="tenant:other")
    page = operator.get(f"{PAGE}?subject=tenant:acme")
    text = text_of(page)
    assert [(plot.title, url != "") for plot, _policy, url in page.context["plots"]] == [
        (f"100/month: search, policy {policy.pk}", True),
        ("9/month: all endpoints, policy 4711", False),
    ]
    plot = page.context["plots"][0][0]
    assert plot.labels == [f"{this_month(back):%Y-%m}" for back in (2, 1, 0)]
    assert [list(one.values) for one in plot.series] == [[40, 0, 110], [60, 0, 0]]
    assert f'href="/admin/django_ratequota/ratepolicy/{policy.pk}/change/"' in text
    assert "deleted (id 4711)" in text
    assert 'value="tenant:acme"' in text


def test_the_longest_period_is_shown_first_and_others_can_be_chosen(operator: Client) -> None:
    today = datetime.now(UTC).date()
    window(this_month(), 40)
    window(today, 7, today + timedelta(days=1), period="day")
    page = operator.get(f"{PAGE}?subject=tenant:acme&period=week")
    assert page.context["periods"] == [("month", "month", True), ("day", "day", False)]
    page = operator.get(f"{PAGE}?subject=tenant:acme&period=day")
    assert [plot.labels for plot, *_ in page.context["plots"]] == [[str(today)]]


def test_a_subject_with_many_counters_has_pages(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_history, "_PAGE", 2)
    for number in range(3):
        window(this_month(), 9 - number, limit=number + 10)
    page = operator.get(f"{PAGE}?subject=tenant:acme")
    assert len(page.context["plots"]) == 2
    page = operator.get(page.context["next"])
    assert [plot.title[:8] for plot, *_ in page.context["plots"]] == ["12/month"]
    assert (page.context["next"], bool(page.context["first"])) == ("", True)
    assert operator.get(f"{PAGE}?subject=tenant:acme&start=-x").context["plots"]


@pytest.mark.parametrize("subject", ["", "tenant:nobody", "\x00", "user:", "x" * 300, "tenant:\ud800"])
def test_subjects_without_windows(operator: Client, subject: str) -> None:
    text = text_of(operator.get(PAGE, {"subject": subject.encode("utf-8", "surrogatepass")}))
    assert "Nothing is recorded of this subject." in text or "Name a subject as counters do" in text


def test_the_export_has_all_windows_without_formulas(operator: Client, search: Endpoint) -> None:
    window(date(2020, 1, 1), 40, subject="tenant:=1+1", endpoint_id=search.pk, policy_id=7)
    window(date(2020, 2, 1), 50, subject="tenant:=1+1", endpoint_id=99)
    page = operator.get(PAGE, {"csv": "1", "subject": "tenant:=1+1"})
    rows = list(csv.DictReader(io.StringIO(page.getvalue().decode("utf-8-sig"))))
    assert [(row["from"], row["endpoint"], row["used"], row["policy"]) for row in rows] == [
        ("2020-02-01T00:00:00+00:00", "#99", "50", ""),
        ("2020-01-01T00:00:00+00:00", "search", "40", "7"),
    ]
    assert {row["subject"] for row in rows} == {"tenant:=1+1"}


@pytest.mark.parametrize(("permission", "seen"), [("view_ratepolicy", 2), ("grant_override", 1), ("reset_usage", 1)])
def test_operators_see_windows_of_policies_that_they_may_see(permission: str, seen: int) -> None:
    own = RatePolicy.objects.create(subject="tenant:acme", rates="100/month")
    window(this_month(), 5, policy_id=own.pk)
    window(this_month(), 5, policy_id=RatePolicy.objects.create(rates="9/month").pk, limit=9)
    client = client_of(permission)
    assert len(client.get(f"{PAGE}?subject=tenant:acme").context["plots"]) == seen
    lines = client.get(f"{CSV}&subject=tenant:acme").getvalue().decode().splitlines()
    assert len(lines) == 1 + seen


def disputed(search: Endpoint) -> tuple[QuotaWindow, QuotaWindow]:
    """900 exports of which 250 were given back, and another limit that was not used in the first days."""
    first, root = this_month(1), User.objects.get(username="operator")
    own = RatePolicy.objects.create(subject="tenant:acme", endpoint=search, rates="1000/month")
    exports = window(first, 900, policy_id=own.pk, endpoint_id=search.pk, limit=1000)
    exports.charged, exports.refunded = 900, 250
    exports.save()
    of_day(exports, first, 300)
    of_day(exports, first + timedelta(days=19), 600, 50)
    of_day(exports, this_month(), 0, 200)
    others = window(first, 7, policy_id=RatePolicy.objects.create(rates="100/month").pk)
    of_day(others, first + timedelta(days=19), 7)
    given_back(exports, 200, at=at(first) + timedelta(days=19, hours=9), actor=root, reason="Ticket <4711>")
    given_back(others, 3, at=at(first) + timedelta(days=19, hours=10))
    given_back(window(this_month(), 5), 4, at=at(this_month()), reason="Another month")
    return exports, others


def test_a_month_is_shown_by_its_days_and_who_gave_back(operator: Client, search: Endpoint) -> None:
    exports, _others = disputed(search)
    first = this_month(1)
    page = operator.get(f"{PAGE}?subject=tenant:acme")
    assert [(value, text) for value, text, _selected in page.context["months"]] == [
        (str(one), f"{one:%Y-%m}") for one in (this_month(), first)
    ]
    page = operator.get(f"{PAGE}?subject=tenant:acme&period={first}")
    text = text_of(page)
    assert [(rate, endpoint) for rate, _written, endpoint, *_ in page.context["counters"]] == [
        ("1000/month", "search"),
        ("100/month", "all endpoints"),
    ]
    assert page.context["days"] == [
        (str(first), ["300", "0", "300", "0", "0", "0"]),
        (str(first + timedelta(days=19)), ["600", "50", "550", "7", "0", "7"]),
        (str(this_month()), ["0", "200", "-200", "0", "0", "0"]),
    ]
    assert page.context["total"] == ["900", "250", "650", "7", "0", "7"]
    assert [row[2:] for row in page.context["returns"]] == [
        ("code or a command", "reset", "all endpoints", "100/month", "3", ""),
        ("operator", "reset", "search", "1000/month", "200", "Ticket <4711>"),
    ]
    assert "Ticket &lt;4711&gt;" in text
    entry = PolicyChange.objects.get(reason="Ticket <4711>")
    assert f'href="/admin/django_ratequota/policychange/{entry.pk}/change/"' in text
    assert f'<option value="{first}" selected>' in text
    assert text.count(" (units)</th>") == text.count('<colgroup span="3">') == 2
    assert "KEEP_QUOTA_DAYS" not in text
    rows = list(csv.DictReader(io.StringIO(operator.get(page.context["csv"]).getvalue().decode("utf-8-sig"))))
    assert [(row["day"], row["endpoint"], row["charged"], row["refunded"], row["used"]) for row in rows] == [
        (str(first), "search", "300", "0", "300"),
        (str(first + timedelta(days=19)), "search", "600", "50", "550"),
        (str(this_month()), "search", "0", "200", "-200"),
        (str(first + timedelta(days=19)), "", "7", "0", "7"),
    ]
    assert {(row["subject"], row["policy"]) for row in rows} >= {("tenant:acme", str(exports.policy_id))}


def test_days_that_are_gone_are_one_row(operator: Client, search: Endpoint, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_DAYS": 40}
    disputed(search)
    QuotaDay.objects.filter(day=this_month(1)).delete()
    page = operator.get(f"{PAGE}?subject=tenant:acme&period={this_month(1)}")
    assert "KEEP_QUOTA_DAYS is 40." in text_of(page)
    assert page.context["days"][0] == ("earlier days", ["300", "0", "300", "0", "0", "0"])
    assert page.context["total"] == ["900", "250", "650", "7", "0", "7"]


def test_operators_see_days_and_returns_of_policies_that_they_may_see(search: Endpoint) -> None:
    client = client_of("reset_usage")
    disputed(search)
    page = client.get(f"{PAGE}?subject=tenant:acme&period={this_month(1)}")
    assert page.context["total"] == ["900", "250", "650"]
    assert [row[1:3] for row in page.context["returns"]] == [("", "operator")]
    lines = client.get(page.context["csv"]).getvalue().decode().splitlines()
    assert len(lines) == 1 + 3


def test_explain_leads_there(operator: Client, alice: User) -> None:
    text = text_of(operator.get(f"/admin/django_ratequota/ratepolicy/explain/?user={alice.pk}"))
    assert f'href="{PAGE}?subject=user%3A{alice.pk}">Past windows</a>' in text
