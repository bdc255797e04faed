"""Months that begin on the customer's day: each is a counter and a row of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota import Bucket, Decision, Limiter, Rate, check_request
from django_ratequota.ledger.book import flush, window_of
from django_ratequota.ledger.corrections import share
from django_ratequota.ledger.rows import Part
from django_ratequota.models import Plan, PlanAssignment, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.operations import counters
from django_ratequota.operations.past_windows import Invoices
from django_ratequota.runtime import process
from tests.conftest import Clock
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]

Ask = Callable[..., Decision]


@pytest.fixture
def ask(alice: User, free: Plan, clock: Clock, limiter: Limiter, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Make a request of alice's at a time, under 100/month from a day of the month."""
    RatePolicy.objects.create(rates="100/month")
    assignment = PlanAssignment.objects.create(user=alice, plan=free, starts_at=moment("2024-01-01"))
    monkeypatch.setattr(process, "limiter", lambda: limiter)

    def ask(at: str, anchor: int, cost: int = 1) -> Decision:
        clock.now_us = round(moment(at).timestamp()) * 10**6
        if assignment.anchor != anchor:
            assignment.anchor = anchor
            assignment.save()
        return check_request(request_from(alice), cost=cost)

    return ask


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def rows() -> list[tuple[str, str, int]]:
    """(begins, ends, used) of each window."""
    found = QuotaWindow.objects.order_by("starts_at")
    return [(f"{row.starts_at:%m-%d}", f"{row.ends_at:%m-%d}", row.used) for row in found]


def invoiced(month: str) -> int:
    return sum(line.used for line in Invoices(month=month).lines())


def test_a_refund_after_midnight_is_of_the_month_of_its_charge(ask: Ask, clock: Clock) -> None:
    """On the invoices there were 540 instead of 190."""
    RatePolicy.objects.update(rates="1000/month")
    ask("2025-11-30", 1, 10)
    reserved = ask("2025-11-30 23:59:50", 1, 500)
    clock.advance(20)
    reserved.settle(180)
    assert ask("2025-12-01 00:01", 1).remaining == 999
    flush()
    assert (rows(), invoiced("2025-11")) == ([("11-01", "12-01", 190), ("12-01", "01-01", 1)], 190)
    days = QuotaDay.objects.order_by("day").filter(first_day="2025-11-01").values_list("charged", "refunded")
    assert list(days) == [(510, 0), (0, 320)]


def test_the_month_of_an_invoice_begins_on_the_customers_day_where_code_names_the_plan(
    ask: Ask, alice: User, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "tests.project.views.plan_of_some"}
    Plan.objects.create(name="Staff", slug="staff")
    for alice.is_staff in (False, True):
        ask("2025-11-14", 13, 5)
    flush()
    assert (rows(), invoiced("2025-11")) == ([("11-13", "12-13", 10)], 10)


def test_a_refund_is_shared_by_the_policies_and_rates_that_limited_the_month(limiter: Limiter) -> None:
    """First that of the policy and rate that limit now, then those of the others, the last one first."""
    rate, less, at_us = Rate.parse("100/month"), Rate.parse("50/month"), limiter.now_us
    limited = {(0, rate): 5, (2, less): 30, (2, rate): 20, (3, rate): 10}
    for units, shares in (
        (20, [(2, rate, 20)]),
        (25, [(2, rate, 20), (3, rate, 5)]),
        (63, [(2, rate, 20), (3, rate, 10), (2, less, 30), (None, rate, 3)]),
    ):
        bucket = Bucket("user:1", rate, policy_id=2, durable=True)
        own = Part(bucket, window_of(bucket, at_us, UTC), date(2025, 11, 21))
        parts = [own, *share(own, units, 65, limited)]
        assert [(part.bucket.policy_id, part.bucket.rate, part.refunded) for part in parts] == shares


def test_a_reset_over_midnight_is_of_the_month_that_was_shown(
    ask: Ask, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was given back to the new month, which so had room for 140 units."""
    bucket = ask("2025-11-30 23:59:59", 1, 40).statuses[0].bucket
    real = counters.write_counted
    monkeypatch.setattr(
        counters, "write_counted", lambda *args, **fields: (clock.advance(2), real(*args, **fields))[1]
    )
    counters.give_back([bucket])
    assert ask("2025-12-01 00:01", 1, 100).remaining == 0
    flush()
    assert rows() == [("11-01", "12-01", 0), ("12-01", "01-01", 100)]
    assert not ask("2025-12-01 00:02", 1).allowed
