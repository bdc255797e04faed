"""A subject's past quotas: the windows, the days of a month, and who may see them."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota.admin import quota_history
from django_ratequota.admin.formatting import day_text
from django_ratequota.engine.keys import beginning
from django_ratequota.models import Endpoint, Plan, PolicyChange, QuotaWindow, RatePolicy
from tests.support.operators import client_of, text_of, words_of
from tests.support.windows import counted, given_back, of_day

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies", "redis_client")]

PAGE = "/admin/django_ratequota/ratepolicy/quotas/history/"
ACME = f"{PAGE}?subject=tenant:acme"


def window(starts: date, used: int, ends: date | None = None, **fields: Any) -> QuotaWindow:
    ends = ends or (starts + timedelta(days=32)).replace(day=1)
    named = {"subject": "tenant:acme", "limit": 100} | fields
    row: QuotaWindow = counted(starts_at=at(starts), ends_at=at(ends), used=used, **named)
    return row


def at(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def this_month(back: int = 0) -> date:
    first = datetime.now(UTC).date().replace(day=1)
    for _ in range(back):
        first = (first - timedelta(days=1)).replace(day=1)
    return first


def test_the_page_lists_the_windows_the_newest_first(operator: Client, search: Endpoint) -> None:
    policy = RatePolicy.objects.create(endpoint=search, rates="100/month")
    window(date(2025, 3, 1), 40, policy_id=policy.pk, endpoint_id=search.pk)
    window(date(2025, 10, 1), 110, policy_id=policy.pk, endpoint_id=search.pk)
    window(date(2025, 10, 15), 3, date(2025, 11, 15), policy_id=4711, limit=9)
    window(date(2025, 10, 1), 8, subject="tenant:other")
    page = operator.get(ACME)
    names = ("begins", "ends", "endpoint", "used", "limit", "over", "policy")
    assert [tuple(row[name] for name in names) for row in page.context["rows"]] == [
        ("10/15/2025", "11/15/2025", "all endpoints", "3", "9", False, "deleted (id 4711)"),
        ("10/01/2025", "11/01/2025", "search", "110", "100", True, "everyone"),
        ("03/01/2025", "04/01/2025", "search", "40", "100", False, "everyone"),
    ]
    text = text_of(page)
    assert f'href="/admin/django_ratequota/ratepolicy/{policy.pk}/change/"' in text
    assert 'value="tenant:acme"' in text
    assert f'href="{PAGE}?subject=tenant%3Aacme&amp;month=2025-10-15"' in text


def test_the_longest_period_is_shown_first_and_others_can_be_chosen(operator: Client) -> None:
    today = datetime.now(UTC).date()
    window(this_month(), 40)
    window(today, 7, today + timedelta(days=1), period="day")
    page = operator.get(f"{ACME}&period=week")
    assert "was ignored, because the value is unknown." in text_of(page)
    [period] = page.context["choices"]
    assert period["options"] == [("month", "month", True), ("day", "day", False)]
    assert [(row["used"], bool(row["days"])) for row in page.context["rows"]] == [("40", True)]
    rows = operator.get(f"{ACME}&period=day").context["rows"]
    assert [(row["begins"], row["used"], row["days"]) for row in rows] == [(day_text(today), "7", "")]


def test_many_windows_and_the_counters_of_a_month_have_pages(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota_history.QuotaHistoryPage, "page_size", 2)
    for number in range(3):
        window(this_month(), 9 - number, limit=number + 10)
    for address, listed in ((ACME, "rows"), (f"{ACME}&month={this_month()}", "counters")):
        page = operator.get(address)
        assert [row["rate"] for row in page.context[listed]] == ["10/month", "11/month"]
        page = operator.get(f"{address}&start={page.context['next']}")
        assert [row["rate"] for row in page.context[listed]] == ["12/month"]
        assert (page.context["next"], "First page" in text_of(page)) == ("", True)


@pytest.mark.parametrize("subject", ["", "tenant:nobody", "\x00", "user:", "x" * 300, "tenant:\ud800"])
def test_subjects_without_windows(operator: Client, subject: str) -> None:
    text = text_of(operator.get(PAGE, {"subject": subject.encode("utf-8", "surrogatepass")}))
    assert "No usage is recorded for this subject." in text or "Enter a subject such as" in text


@pytest.mark.parametrize("month", ["2020-01-01", "October", "0001-01-01", "2025-02-30"])
def test_months_without_windows(operator: Client, month: str) -> None:
    window(this_month(), 1)
    text = text_of(operator.get(f"{ACME}&month={month}"))
    assert ("No usage is recorded for this month." in text) != ("was ignored, because the value is unknown." in text)


@pytest.mark.parametrize(("permission", "seen"), [("view_ratepolicy", 2), ("grant_override", 1), ("reset_usage", 1)])
def test_operators_see_windows_of_policies_that_they_may_see(permission: str, seen: int) -> None:
    own = RatePolicy.objects.create(subject="tenant:acme", rates="100/month")
    window(this_month(), 5, policy_id=own.pk)
    window(this_month(), 5, policy_id=RatePolicy.objects.create(rates="9/month").pk, limit=9)
    client = client_of(permission)
    assert len(client.get(ACME).context["rows"]) == seen


def disputed(search: Endpoint) -> None:
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


def test_a_month_is_shown_by_its_days_and_who_gave_back(operator: Client, search: Endpoint) -> None:
    disputed(search)
    first = this_month(1)
    page = operator.get(f"{ACME}&month={first}")
    text = text_of(page)
    exports, others = page.context["counters"]
    assert (exports["endpoint"], exports["rate"], exports["days"], exports["total"]) == (
        "search",
        "1000/month",
        [
            (day_text(first), "", "1000/month", "300", "0", "300"),
            (day_text(first + timedelta(days=19)), "", "1000/month", "600", "50", "550"),
            (day_text(this_month()), "", "1000/month", "0", "200", "-200"),
        ],
        ["900", "250", "650"],
    )
    assert (others["endpoint"], others["total"]) == ("all endpoints", ["7", "0", "7"])
    assert f"Last written: {day_text(first)} 00:00:00 UTC" in text
    assert [row[2:] for row in page.context["returns"]] == [
        ("code or a command", "reset", "all endpoints", "100/month", "3", ""),
        ("operator", "reset", "search", "1000/month", "200", "Ticket <4711>"),
    ]
    assert "Ticket &lt;4711&gt;" in text
    entry = PolicyChange.objects.get(reason="Ticket <4711>")
    assert f'href="/admin/django_ratequota/policychange/{entry.pk}/change/"' in text
    assert len(re.findall(r" \(units\)</h3>", text)) == 2
    assert "KEEP_QUOTA_DAYS" not in text


def test_a_day_has_a_row_for_each_plan_and_rate(operator: Client, free: Plan) -> None:
    """Those under policies that an operator may not see are left out."""
    own = RatePolicy.objects.create(subject="tenant:acme", rates="200/month")
    row = window(date(2025, 10, 1), 30, policy_id=own.pk, limit=200)
    of_day(row, date(2025, 10, 2), 20)
    row.policy_id, row.rate = RatePolicy.objects.create(plan=free, rates="100/month").pk, "100/month"
    of_day(row, date(2025, 10, 2), 10)
    days = [("10/02/2025", "", "200/month", "20", "0", "20"), ("10/02/2025", "Free", "100/month", "10", "0", "10")]
    for client, shown in ((operator, days), (client_of("grant_override", name="support"), days[:1])):
        [counter] = client.get(f"{ACME}&month=2025-10-01").context["counters"]
        assert (counter["days"], counter["total"][0]) == (shown, str(10 * (len(shown) + 1)))


def test_operators_see_days_and_returns_of_policies_that_they_may_see(search: Endpoint) -> None:
    client = client_of("reset_usage")
    disputed(search)
    page = client.get(f"{ACME}&month={this_month(1)}")
    assert [counter["total"] for counter in page.context["counters"]] == [["900", "250", "650"]]
    assert [row[1:3] for row in page.context["returns"]] == [("", "operator")]


REFUND = f"{PAGE}%s/refund/"


def test_operators_refund_past_periods_whose_policies_are_gone(operator: Client, checkpointing: None) -> None:
    row = window(date(2025, 10, 1), 110, counter=f"{beginning('tenant:acme')}0.tenant:fwmonth", policy_id=4711)
    assert f'href="{REFUND % row.pk}"' in text_of(operator.get(ACME))
    page = operator.get(REFUND % row.pk)
    assert "<td>110</td>" in text_of(page)
    assert "Period: 10/01/2025 00:00 to 11/01/2025 00:00 UTC" in words_of(page)
    form = {"units": "30", "reason": "Ticket 4711", "key": page.context["form"]["key"].value()}
    for _ in range(2):  # a double click
        done = operator.post(REFUND % row.pk, form)
        assert done["Location"] == f"{PAGE}?subject=tenant%3Aacme&period=month"
    shown = words_of(operator.get(ACME))
    assert "Refunded 30 to 1 counter." in shown
    assert "The form was sent twice. The counters changed only once." in shown
    row.refresh_from_db()
    assert row.used == 80
    [change] = PolicyChange.objects.filter(model="counter")
    assert (change.reason, str(change.actor), change.key) == ("Ticket 4711", "operator", form["key"])
    listed = operator.get(f"{ACME}&month=2025-10-01").context["returns"]
    assert [line[3:] for line in listed] == [("refunded", "all endpoints", "100/month", "30", "Ticket 4711")]
    page = operator.post(REFUND % row.pk, {"units": "81", "key": "another"})
    assert "Refund at most 80 to all endpoints: 100/month per tenant" in words_of(page)
    assert operator.post(REFUND % row.pk, {"key": "another"}).status_code == 302
    row.refresh_from_db()
    assert row.used == 0


@pytest.mark.parametrize("pk", ["x", "4711", "9" * 18, "9" * 40])
def test_unknown_periods_cannot_be_refunded(operator: Client, pk: str) -> None:
    assert operator.get(REFUND % pk).status_code == 404


def test_operators_refund_periods_of_policies_that_they_may_see(operator: Client) -> None:
    own = window(this_month(), 5, policy_id=RatePolicy.objects.create(subject="tenant:acme", rates="100/month").pk)
    other = window(this_month(), 5, policy_id=RatePolicy.objects.create(rates="9/month").pk, limit=9)
    plan = window(this_month(), 5, subject="plan:3", counter="{plan:3}:0:fwmonth", limit=10)
    seen = {}
    for permission in ("view_ratepolicy", "reset_usage"):
        client = client_of(permission, name=permission)
        assert ("/refund/" in text_of(client.get(ACME))) is (permission == "reset_usage")
        seen[permission] = [client.get(REFUND % row.pk).status_code for row in (own, other)]
    assert seen == {"view_ratepolicy": [403, 403], "reset_usage": [302, 404]}
    page = operator.get(REFUND % plan.pk, follow=True)
    assert "Select at least one of the customer's own counters." in words_of(page), "it is shared"


def test_explain_leads_there(operator: Client, alice: User) -> None:
    text = text_of(operator.get(f"/admin/django_ratequota/ratepolicy/explain/?user={alice.pk}"))
    assert f'href="{PAGE}?subject=user%3A{alice.pk}"' in text
