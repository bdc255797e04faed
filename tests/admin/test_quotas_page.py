"""The Quotas page and its CSV: what they list, for whom, and what they say without Redis."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from django_ratequota.admin.formatting import clock_and_wait
from django_ratequota.ledger import book
from django_ratequota.models import Endpoint, QuotaWindow, RatePolicy
from tests.support.operators import client_of, text_of
from tests.support.requests import check_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "recording", "checkpointing"),
]

PAGE = "/admin/django_ratequota/ratepolicy/quotas/"
CSV = f"{PAGE}?csv=1"


def spend(user: Any, times: int, **more: Any) -> None:
    for _ in range(times):
        check_from(user, **more)
    book.flush()


def month() -> RatePolicy:
    return RatePolicy.objects.create(rates="10/month")


def table(page: Any) -> list[dict[str, str]]:
    """The rows of an export."""
    assert page.status_code == 200
    return list(csv.DictReader(io.StringIO(page.getvalue().decode("utf-8-sig"))))


def test_the_list_is_filtered(operator: Client, alice: User, search: Endpoint) -> None:
    everywhere = month()
    there = RatePolicy.objects.create(endpoint=search, rates="10/month, 10/day fixed_window")
    bob = User.objects.create(username="bob")
    spend(alice, 9, scope="search")
    spend(bob, 6)

    def found(query: str) -> set[tuple[str, int]]:
        rows = operator.get(f"{PAGE}?{query}").context["rows"]
        return {(row["name"], int(row["policy_url"].rstrip("/").split("/")[-2])) for row in rows}

    both = {("user alice", everywhere.pk), ("user alice", there.pk)}
    assert found("") == both
    assert found("level=50") == both | {("user bob", everywhere.pk)}
    assert found("level=100") == set()
    assert found("level=50&q=BO") == found(f"level=50&q=user:{bob.pk}") == {("user bob", everywhere.pk)}
    assert found(f"level=50&q=user:{bob.pk}0") == found("level=0&q=er:") == set()
    assert found("level=0") == found("level=50")
    assert found(f"policy={there.pk}") == {("user alice", there.pk)}
    assert found("window=day") == {("user alice", there.pk)}
    assert found("level=50&start=89-0") == {("user bob", everywhere.pk)}


def test_subjects_are_found_as_a_whole_and_by_their_names(operator: Client, settings: Any) -> None:
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"tenant": "tests.operations.test_near.acme"},
        "SUBJECT_NAMES": "tests.operations.test_subjects.names_of",
    }
    RatePolicy.objects.create(rates="10/month", counted_per="tenant")
    RatePolicy.objects.create(rates="9/month", counted_per="ip", durable=True)
    spend(None, 1)
    found = {"tenant:acme": ["10/month"], "GmbH": ["10/month"], "ip:203.0.113.7": ["9/month"], "tenant:ac": []}
    for text, rates in found.items():
        page = operator.get(PAGE, {"level": 0, "q": text})
        assert [row["rate"] for row in page.context["rows"]] == rates, text


def test_unknown_values_are_ignored_with_a_warning(operator: Client, alice: User) -> None:
    month()
    spend(alice, 9)
    nines = "9" * 99
    for query in ("window=x", "level=81", f"level={nines}", "policy=-1", "start=4"):
        text = text_of(operator.get(f"{PAGE}?{query}"))
        assert "was ignored, because the value is unknown." in text, query
        assert "user alice" in text, query
    assert "was ignored" not in text_of(operator.get(f"{PAGE}?q=%00"))


def test_the_export_has_all_rows_in_batches(operator: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr("django_ratequota.operations.near._BATCH", 2)
    monkeypatch.setattr("django_ratequota.admin.quotas.QuotasPage.page_size", 2)
    month()
    for number in range(5):
        spend(User.objects.create(username=f"user{number}"), 9)
    page = operator.get(PAGE)
    assert len(page.context["rows"]) == 2
    pk = QuotaWindow.objects.order_by("pk")[1].pk
    assert f'href="?start=90-{pk}">Next page</a>' in text_of(page)
    assert {row["name"] for row in table(operator.get(CSV))} == {f"user user{number}" for number in range(5)}
    assert table(operator.get(f"{CSV}&level=100")) == []


@pytest.mark.parametrize(
    ("permission", "seen"),
    [
        ("view_ratepolicy", {"user alice", "user bob"}),
        ("change_ratepolicy", {"user alice", "user bob"}),
        ("grant_override", {"user bob"}),
        ("reset_usage", {"user bob"}),
    ],
)
def test_operators_see_the_rows_of_the_policies_that_they_may_see(
    alice: User, permission: str, seen: set[str]
) -> None:
    month()
    bob = User.objects.create(username="bob")
    RatePolicy.objects.create(user=bob, rates="20/month")
    spend(alice, 9)
    spend(bob, 18)
    client = client_of(permission)
    page = client.get(PAGE)
    assert {row["name"] for row in page.context["rows"]} == seen
    assert {row["name"] for row in table(client.get(CSV))} == seen
    assert ("boost/?" in text_of(page)) is (permission == "grant_override")


@pytest.mark.parametrize("off_us", [-1_500_000, -1, 0, 900_000, 1_500_000])
def test_a_month_ends_at_midnight_whenever_its_end_was_computed(off_us: int) -> None:
    """It ended at 00:00:01 on some pages."""
    midnight_us, minute_us = round(datetime(2025, 12, 1, tzinfo=UTC).timestamp()) * 10**6, 60 * 10**6
    text = clock_and_wait(midnight_us - 30 * minute_us, 30 * minute_us + off_us)
    assert text.startswith("12/01/2025 00:00 UTC (in ")
    assert clock_and_wait(midnight_us, minute_us) == "12/01/2025 00:01:00 UTC (in 60 s)"
    assert clock_and_wait(midnight_us, minute_us + 1).startswith("12/01/2025 00:01:01 UTC"), "rounded up"


def test_shared_counters_lead_to_their_policy_only(operator: Client, alice: User) -> None:
    for counted_per in ("caller", "everyone"):
        RatePolicy.objects.create(rates="10/month", counted_per=counted_per, mode="log")
    spend(alice, 9)
    rows = operator.get(PAGE).context["rows"]
    found = {row["name"]: (bool(row["explain"]), row["boost"], row["logs"]) for row in rows}
    # There is nothing to boost where nothing is refused.
    assert found == {"everyone": (False, "", True), "user alice": (True, "", True)}


def test_the_page_is_linked_from_the_index_and_from_policies(operator: Client) -> None:
    policy = month()
    assert f'href="{PAGE}"' in text_of(operator.get("/admin/django_ratequota/"))
    change = text_of(operator.get(f"/admin/django_ratequota/ratepolicy/{policy.pk}/change/"))
    assert f'href="{PAGE}?policy={policy.pk}&amp;level=50"' in change
