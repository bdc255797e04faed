"""The history of a caller's quotas: its own windows, and nobody else's."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, date, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_ratequota import check_request
from django_ratequota.api import QuotaWindowSerializer, UsageHistoryView
from django_ratequota.ledger.book import flush
from django_ratequota.models import Endpoint, Plan, QuotaWindow, RatePolicy
from tests.project.views import request_from
from tests.support.windows import counted, of_day

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

URL = "/quota/usage/history/"


def window(subject: str, month: int = 10, **fields: Any) -> QuotaWindow:
    starts_at = datetime(2025, month, 1, tzinfo=UTC)
    values: dict[str, Any] = {
        "subject": subject,
        "starts_at": starts_at,
        "ends_at": (starts_at + timedelta(days=32)).replace(day=1),
        "rate": "100/month",
        "used": 40,
        "limit": 100,
        **fields,
    }
    return counted(**values)


def history(client: Client, **query: Any) -> Any:
    response = client.get(URL, query)
    assert response.status_code == 200, response.content
    return response.json()["results"]


def tenant(request: Any) -> str | None:
    return request.META.get("HTTP_X_TENANT")


def broken(request: Any) -> str:
    raise ValueError


@pytest.fixture
def _tenants(settings: Any) -> None:
    names = {name: f"{__name__}.{name}" for name in ("tenant", "broken")}
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": names}


def test_what_anybody_may_write_or_share_names_no_caller(client: Client, settings: Any) -> None:
    names = {name: f"django_ratequota.identifiers.{name}" for name in ("login_name", "login_pair", "network")}
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": names}
    for subject in ("login_name:victim", "login_pair:127.0.0.1 victim", "network:127.0.0.0/24"):
        window(subject)
    body = '{"username": "victim"}'
    response = client.generic("GET", URL, body, content_type="application/json")
    assert response.json()["results"] == []


@pytest.mark.parametrize("position", ["garbage", "0001-01-01T00:00:00+14:00"])
def test_an_edited_cursor_is_not_found(client: Client, alice: User, position: str) -> None:
    client.force_login(alice)
    cursor = b64encode(urlencode({"p": position}).encode()).decode()
    assert client.get(URL, {"cursor": cursor}).status_code == 404


def test_a_window_says_what_was_used_of_which_limit(client: Client, alice: User) -> None:
    search = Endpoint.objects.create(name="search")
    window(f"user:{alice.pk}", endpoint_id=search.pk)
    window(f"user:{alice.pk}", 9, endpoint_id=4711, rate="100 requests/month")
    client.force_login(alice)
    response = client.get(URL)
    assert response["Cache-Control"] == "no-store"
    found = response.json()
    starts, ends = "2025-10-01T00:00:00Z", "2025-11-01T00:00:00Z"
    newest, older = found["results"]
    assert newest.keys() == QuotaWindowSerializer().fields.keys() - {"days"}
    assert list(newest.values()) == [
        *(
            "search: 100/month",
            "search/month",
            "search",
            "month",
            "100/month",
            "units",
            "user",
            100,
            40,
            starts,
            ends,
            0,
        ),
        [{"plan": "", "rate": "100/month", "first_day": None, "last_day": None, "used": 40, "over": 0}],
    ]
    assert (older["name"], older["scope"], older["unit"]) == ("#4711/month requests", "#4711", "requests")


@pytest.mark.usefixtures("_tenants")
def test_what_requests_have_used_is_there_as_in_usage(client: Client, alice: User, checkpointing: None) -> None:
    RatePolicy.objects.create(rates="10/month, 10/min")
    RatePolicy.objects.create(rates="20/month, 30/day fixed_window", counted_per="tenant")
    client.force_login(alice)
    request = request_from(alice, headers={"X-Tenant": "acme"})
    check_request(request, cost=3).charge(10)
    flush()
    rows = client.get(URL, headers={"X-Tenant": "acme"}).json()["results"]
    limits = client.get("/quota/usage/", headers={"X-Tenant": "acme"}).json()["limits"]
    # What usage/ says of each limit by the calendar, in the same words.
    told = {limit["title"]: {**limit, "resets_in": 0} for limit in limits if limit["period"]}
    assert len(rows) == len(told) == 3
    for row in rows:
        lines = [(line["rate"], line["used"], line["over"]) for line in row.pop("lines")]
        assert lines == [(row["rate"], 13, max(0, 13 - row["limit"]))]
        assert 0 < row["resets_in"] <= 31 * 86_400
        assert {**row, "resets_in": 0}.items() <= told[row["title"]].items()
        assert row["used"] == 13


@pytest.mark.usefixtures("_tenants")
def test_the_history_of_another_customer(client: Client, alice: User) -> None:
    bob = User.objects.create(username="bob")
    others = ("tenant:other", "broken:", "tenant:", "everyone", "plan:1", "ip:127.0.0.1", f"user:{bob.pk}")
    for subject in (f"user:{alice.pk}", "tenant:acme", *others):
        window(subject)
    assert history(client) == []
    client.force_login(alice)
    assert [row["counted_per"] for row in history(client)] == ["user"]
    response = client.get(URL, headers={"X-Tenant": "acme"})
    assert sorted(row["counted_per"] for row in response.json()["results"]) == ["tenant", "user"]
    client.logout()
    response = client.get(URL, headers={"X-Tenant": "acme"})
    assert [row["counted_per"] for row in response.json()["results"]] == ["tenant"]


def test_reading_limits_that_only_log(client: Client, alice: User) -> None:
    logged = RatePolicy.objects.create(rates="5/month", mode="log")
    window(f"user:{alice.pk}", policy_id=logged.pk, rate="5/month")
    window(f"user:{alice.pk}", policy_id=4711)
    client.force_login(alice)
    assert [row["rate"] for row in history(client)] == ["100/month"]


def test_a_month_has_the_lines_of_its_invoice_but_for_limits_that_only_log(client: Client, alice: User) -> None:
    plans = [Plan.objects.create(name=name, slug=name.lower()) for name in ("Free", "Pro", "Test")]
    rows = [RatePolicy.objects.create(plan=plan, rates="10/month") for plan in plans]
    rows[2].mode = "log"
    rows[2].save()
    one = window(f"user:{alice.pk}", policy_id=rows[0].pk, used=21)
    for row, day, units in zip((*rows, rows[0]), (2, 5, 6, 9), (15, 3, 1, 2), strict=True):
        one.policy_id, one.rate = row.pk, "100/month" if row is rows[1] else "10/month"
        of_day(one, date(2025, 10, day), units)
    client.force_login(alice)
    [found] = history(client)
    assert [tuple(line.values()) for line in found["lines"]] == [
        ("Free", "10/month", "2025-10-02", "2025-10-09", 17, 7),
        ("Pro", "100/month", "2025-10-05", "2025-10-05", 3, 0),
    ]


def test_the_newest_come_first_page_by_page(client: Client, alice: User) -> None:
    for month in range(1, 10):
        window(f"user:{alice.pk}", month)
        window(f"user:{alice.pk}", month, rate="9/day fixed_window", period="day")
    client.force_login(alice)
    rows, url, pages = [], f"{URL}?page_size=5", 0
    while url:
        found = client.get(url).json()
        rows += found["results"]
        url, pages = found["next"], pages + 1
    assert pages == 4
    assert [row["starts_at"][5:7] for row in rows] == [f"{month:02}" for month in range(9, 0, -1) for _ in range(2)]
    assert {row["period"] for row in history(client, period="day")} == {"day"}
    response = client.get(URL, {"period": "year"})
    assert (response.status_code, response.json()) == (400, {"period": ["Enter day, week or month."]})


def test_the_days_of_a_month_are_those_that_operators_see(client: Client, alice: User) -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    own, logged = RatePolicy.objects.create(plan=plan, rates="100/month"), RatePolicy.objects.create(rates="9/month")
    logged.mode = "log"
    logged.save()
    month = window(f"user:{alice.pk}", policy_id=own.pk, used=12)
    for day, units, policy in ((2, 3, own), (5, 5, own), (5, 1, logged)):
        month.policy_id = policy.pk
        of_day(month, date(2025, 10, day), units)
    window(f"user:{alice.pk}", 9, rate="9/day fixed_window", period="day")
    client.force_login(alice)
    found, of_the_day = history(client, days="1")
    assert [tuple(day.items()) for day in found["days"]] == [
        (("day", day), ("plan", plan), ("rate", "100/month"), ("used", used))
        for day, plan, used in ((None, "Pro", 3), ("2025-10-02", "Pro", 3), ("2025-10-05", "Pro", 5))
    ]
    assert "days" not in of_the_day
    assert "days" not in history(client, period="month")[0]


def test_usage_of_a_log_only_policy_stays_hidden_when_it_is_deleted(client: Client, alice: User) -> None:
    """Regression: the customer saw that it had exceeded a limit that was never in force."""
    own, trial = RatePolicy.objects.create(rates="100/month"), RatePolicy.objects.create(rates="5/month", mode="log")
    client.force_login(alice)
    month = window(f"user:{alice.pk}", policy_id=trial.pk, rate="5/month")
    assert history(client) == []
    trial.delete()
    assert history(client) == []
    of_day(month, date(2025, 10, 3), 10)
    QuotaWindow.objects.update(policy_id=own.pk)
    [found] = history(client, days="1")
    assert [day["used"] for day in found["days"]] == [line["used"] for line in found["lines"]] == [30]


def test_it_shares_the_limit_of_the_usage_endpoint(client: Client) -> None:
    usage = Endpoint.objects.create(name="usage")
    RatePolicy.objects.create(endpoint=usage, rates="2/hour")
    paths = (reverse("ratequota:usage"), reverse("ratequota:usage-history"))
    assert [client.get(path).status_code for path in (*paths, *paths)] == [200, 200, 429, 429]


def test_without_the_database_the_answer_is_503(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_self: Any) -> Any:
        raise OperationalError("gone")

    monkeypatch.setattr(UsageHistoryView, "get_queryset", fail)
    assert client.get(URL).status_code == 503


def test_one_query_reads_a_page(client: Client, alice: User) -> None:
    client.force_login(alice)
    for month in range(1, 10):
        window(f"user:{alice.pk}", month, endpoint_id=Endpoint.objects.create(name=f"e{month}").pk)
    history(client)
    with CaptureQueriesContext(connection) as captured:
        assert len(history(client)) == 9
    assert sum("quotawindow" in query["sql"] for query in captured) == 1
    assert len(captured) <= 6, "and the days, policies and assignments of all lines"
