"""``django_ratequota.quotas``: refunds and resets by a project's own code."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.utils import timezone

from django_ratequota import check_caller, check_request
from django_ratequota.ledger.book import flush
from django_ratequota.models import Endpoint, PlanAssignment, PolicyChange, QuotaWindow, RatePolicy
from django_ratequota.quotas import refund, reset
from tests.project.views import request_from
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]

OCTOBER = date(2025, 10, 1)


def used() -> dict[tuple[int | None, str], int]:
    flush()
    return {(row.endpoint_id, row.rate): row.used for row in QuotaWindow.objects.all()}


def test_a_customer_is_refunded_by_name_or_object(alice: User, search: Endpoint) -> None:
    RatePolicy.objects.create(rates="100/month, 90 requests/month, 80/day fixed_window")
    RatePolicy.objects.create(endpoint=search, rates="70/month")
    for _ in range(2):
        check_request(request_from(alice), scope="search", cost=20)
    for written in (False, True):  # at first all is in Redis alone, as far as other workers know
        [made] = refund(alice, 5, reason="Ticket 4711")
        assert (made.subject, made.title, made.units) == (f"user:{alice.pk}", "all/month", 5)
        [made] = refund(f"user:{alice.pk}", 6, endpoint="search", key=f"evt_{written}")
        [made] = refund(alice, 7, period="day")
        flush()
    day = {(None, "80/day fixed_window"): 26}
    assert used() == {(None, "100/month"): 30, (None, "90 requests/month"): 2, (search.pk, "70/month"): 28, **day}
    assert len(reset(alice)) == 2
    assert used() == {(None, "100/month"): 0, (None, "90 requests/month"): 0, (search.pk, "70/month"): 28, **day}
    assert PolicyChange.objects.filter(reason="Ticket 4711").count() == 2


def test_an_endpoint_that_counts_posts_is_refunded_before_anything_is_written(alice: User) -> None:
    """Regression: it was looked up as for GET, so the customer had no counter there."""
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="upload", methods="POST"), rates="70/month")
    check_request(request_from(alice, method="POST"), scope="upload", cost=20)
    refund(alice, 6, endpoint="upload")
    assert [*used().values()] == [14]


def test_the_key_of_a_webhook_refunds_once(alice: User) -> None:
    RatePolicy.objects.create(rates="100/month")
    check_request(request_from(alice), cost=20)
    first = refund(alice, 5, key="evt_1")
    for again in (refund(alice, 7, key="evt_1"), reset("user:none", period="day", key="evt_1")):
        assert again == first
        assert again[0].repeated
    assert used() == {(None, "100/month"): 15}


def test_the_month_that_began_on_the_customers_day_is_refunded(alice: User, settings: Any) -> None:
    RatePolicy.objects.create(rates="100/month")
    check_request(request_from(alice), cost=20)
    flush()
    today = timezone.now().astimezone(UTC).day
    PlanAssignment.objects.create(user=alice, plan=RatePolicy.objects.get().plan or plan(), anchor=today)
    check_request(request_from(alice), cost=9)
    flush()
    refund(alice, 2)
    rows = list(QuotaWindow.objects.order_by("first_day").values_list("used", flat=True))
    assert rows in ([20, 7], [27]), "the newest of the months that run"


def plan() -> Any:
    from django_ratequota.models import Plan

    return Plan.objects.create(name="Pro", slug="pro")


def test_a_month_that_is_over_is_refunded(alice: User) -> None:
    subject, ends_at = f"user:{alice.pk}", datetime(2025, 11, 1, tzinfo=UTC)
    counter = f"{{{subject}}}:0:fwmonth"
    counted(
        subject=subject,
        starts_at=datetime(2025, 10, 1, tzinfo=UTC),
        ends_at=ends_at,
        used=30,
        limit=100,
        counter=counter,
    )
    [made] = refund(alice, 10, first_day=OCTOBER)
    assert (made.first_day, made.used_before, made.used_after) == (OCTOBER, 30, 20)
    reset(alice, first_day=OCTOBER)
    assert QuotaWindow.objects.get().used == 0


def test_a_check_without_a_request_is_refunded(settings: Any) -> None:
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"tenant": "tests.project.views.tenant"},
        "CALLER": ["tenant", "user", "ip"],
    }
    RatePolicy.objects.create(rates="100/month", subject="tenant:acme")
    check_caller(identifiers={"tenant": "acme"}, cost=12)
    refund("tenant:acme", 2)
    assert used() == {(None, "100/month"): 10}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("acme", 1), "Enter a subject such as user:42 or tenant:acme."),
        (("user:42", 0), "The units are a whole number, 1 or more."),
        (("user:42", 1.5), "The units are a whole number, 1 or more."),
        (("user:42", 1), "user:42 has no counter per month here. Check the subject, the endpoint and the first day."),
    ],
)
def test_what_cannot_be_refunded_is_said(arguments: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        refund(*arguments)
    with pytest.raises(ValidationError, match=r"There is no endpoint 'nowhere'\."):
        refund("user:42", 1, endpoint="nowhere")
    with pytest.raises(ValidationError, match="has no counter per week here"):
        reset("user:42", period="week", first_day=OCTOBER)
