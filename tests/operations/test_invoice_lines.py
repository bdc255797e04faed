"""Invoices: a line for each plan of a month, exact after changes, resets, deletions and the rollup."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import time_machine
from django.contrib.auth.models import User
from django.db import transaction

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.keys import counter_name
from django_ratequota.ledger import book, corrections
from django_ratequota.ledger.book import Entry
from django_ratequota.models import Endpoint, Plan, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.monitoring.rollup import forget_windows
from django_ratequota.operations.near import correct
from django_ratequota.operations.past_windows import InvoiceLine, Invoices, previous_month
from tests.conftest import Clock
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]

ACME = "tenant:acme"


@pytest.fixture(autouse=True)
def _organisations(settings: Any) -> None:
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"tenant": "tests.project.views.tenant"},
        "SUBJECT_NAMES": "tests.operations.test_invoice_lines.names",
    }


def names(subjects: list[str]) -> dict[str, str]:
    return {ACME: "Acme GmbH"} if ACME in subjects else {}


def policy(rates: str, plan: str = "", **fields: Any) -> RatePolicy:
    """Make a policy, of a plan with this slug."""
    row = Plan.objects.get_or_create(slug=plan, defaults={"name": plan.title()})[0] if plan else None
    return RatePolicy.objects.create(plan=row, rates=rates, counted_per="tenant", **fields)


def bucket_of(row: RatePolicy) -> Bucket:
    fields: dict[str, Any] = {"policy_id": row.pk, "endpoint_id": row.endpoint_id}
    return Bucket(ACME, Rate.parse(row.rates), durable=True, counted_per="tenant", **fields)


def note(row: RatePolicy, units: int, day: int, refunded: int = 0) -> None:
    """Charge on a day of October 2025, or refund on a later one."""
    charged, given = (datetime(2025, 10, at or 1, 12, tzinfo=UTC).timestamp() * 10**6 for at in (day, refunded))
    book.ledger.entries.append(Entry(bucket_of(row), units, round(charged), round(given) if refunded else 0))
    book.flush()


def lines(**chosen: Any) -> list[InvoiceLine]:
    return list(Invoices(month="2025-10", **chosen).lines())


def told(found: list[InvoiceLine]) -> list[tuple[str, str, int, int]]:
    return [(line.plan, line.rate, line.used, line.over) for line in found]


def test_a_line_has_what_a_bookkeeper_needs() -> None:
    search = Endpoint.objects.create(name="search")
    row = policy("100 requests/month", "pro", endpoint=search, mode="log")
    note(row, 130, 5)
    QuotaWindow.objects.update(written_at=datetime(2025, 10, 6, tzinfo=UTC))
    with time_machine.travel(datetime(2025, 10, 31, 23, 59, tzinfo=UTC)):
        assert not lines()[0].complete
    with time_machine.travel(datetime(2025, 11, 1, tzinfo=UTC)):
        [line] = lines()
    assert line == InvoiceLine(
        name="Acme GmbH",
        subject=ACME,
        plan="Pro",
        endpoint="search",
        counted_per="tenant",
        unit="requests",
        rate="100 requests/month",
        limit=100,
        used=130,
        over=30,
        mode="log",
        begins=date(2025, 10, 1),
        ends=date(2025, 11, 1),
        complete=True,
        changed_at=datetime(2025, 10, 6, tzinfo=UTC),
        policy=row.pk,
    )
    endpoint = str(search.pk)
    search.delete()
    [line] = lines()
    assert (line.endpoint, line.plan, line.counted_per, line.mode) == ("#" + endpoint, "Pro", "tenant", "")


def test_a_downgrade_has_a_line_for_each_plan(settings: Any) -> None:
    """The month's line had the limit of the last plan: 320 of 100."""
    pro, free = policy("1000/month", "pro"), policy("100/month", "free")
    note(pro, 300, 5)
    note(free, 50, 20)
    note(pro, 30, 5, refunded=21)  # a reservation of before the downgrade
    expected = [("Pro", "1000/month", 270, 0), ("Free", "100/month", 50, 50)]
    assert told(lines()) == expected
    assert QuotaWindow.objects.get().limit == 100, "a refund brings no limit back"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_DAYS": 1}
    with time_machine.travel(datetime(2026, 3, 1, tzinfo=UTC)):
        assert forget_windows() <= 1, "at most the ledger's writer"
    assert told(lines()) == expected
    Plan.objects.all().delete()
    assert told(lines()) == expected, "the history knows the plans"
    PolicyChange.objects.all().delete()
    assert [line.plan for line in lines()] == [f"policy {row} (deleted)" for row in (pro.pk, free.pk)]
    QuotaWindow.objects.all().delete()
    with time_machine.travel(datetime(2026, 3, 1, tzinfo=UTC)):
        forget_windows()
    assert not QuotaDay.objects.exists(), "the days go with their month"


def test_policies_of_a_plan_are_one_line_and_overrides_are_their_own() -> None:
    pro = policy("100/month", "pro", reason="the one")
    note(pro, 60, 1)
    boost = policy("200/month", subject=ACME, ends_at=datetime(2025, 10, 9, tzinfo=UTC))
    note(boost, 100, 5)
    other = policy("90/month", "pro", ends_at=datetime(2030, 1, 1, tzinfo=UTC))
    note(other, 7, 10)
    RatePolicy.objects.filter(pk=other.pk).update(rates="80/month")
    other.refresh_from_db()
    note(other, 8, 11)
    second = policy("300/month", subject=ACME, ends_at=datetime(2025, 10, 13, tzinfo=UTC))
    note(second, 1, 12)
    found = lines()
    expected = [("", "200/month", 100, 0), ("Pro", "80/month", 75, 75), ("", "300/month", 1, 0)]
    assert told(found) == expected
    assert [line.policy for line in found] == [boost.pk, other.pk, second.pk]
    RatePolicy.objects.all().delete()
    Endpoint.objects.create(pk=second.pk, name="of the same number").delete()
    assert told(lines()) == expected, "the history knows whose they were"


def test_a_reset_after_a_downgrade_leaves_no_negative_line() -> None:
    pro, free = policy("1000/month", "pro"), policy("100/month", "free")
    note(pro, 300, 5)
    note(free, 50, 20)
    note(free, 350, 20, refunded=21)
    assert told(lines()) == [("Free", "100/month", 0, 0)]
    note(pro, 10, 25)
    assert told(lines()) == [("Pro", "1000/month", 10, 0)]


def test_a_reset_gives_back_what_each_plan_has_limited(limiter: Limiter, clock: Clock) -> None:
    """What was used after the reset was the other plan's."""
    free, pro = policy("100/month", "free"), policy("1000/month", "pro")
    note(free, 50, 5)
    note(pro, 300, 10)
    clock.now_us = round(datetime(2025, 10, 20, tzinfo=UTC).timestamp()) * 10**6
    for units, left in ((310, [("Free", "100/month", 40, 0)]), (None, [("Pro", "1000/month", 0, 0)])):
        with transaction.atomic():
            bucket = bucket_of(pro)
            books = corrections.read(limiter, {bucket: book.window_of(bucket, clock.now_us, UTC)})
            corrections.refund(limiter, books.values(), units)
        assert told(lines()) == left
    note(pro, 7, 25)
    assert told(lines()) == [("Pro", "1000/month", 7, 0)]


def test_days_and_weeks_are_added_up_by_plan() -> None:
    pro, free = policy("10/day fixed_window", "pro"), policy("5/day fixed_window", "free")
    for row, units, day in ((pro, 12, 1), (pro, 3, 2), (free, 9, 3)):
        note(row, units, day)
    last = datetime(2025, 10, 9, tzinfo=UTC)
    QuotaWindow.objects.filter(first_day=date(2025, 10, 1)).update(written_at=last)
    QuotaWindow.objects.exclude(first_day=date(2025, 10, 1)).update(written_at=last - timedelta(days=5))
    found = lines()
    assert told(found) == [("Pro", "10/day fixed_window", 15, 2), ("Free", "5/day fixed_window", 9, 4)]
    assert found[0].changed_at == last
    assert [(line.begins.day, line.ends.day) for line in found] == [(1, 3), (3, 4)]


def test_an_edit_that_only_a_page_saw_makes_no_line() -> None:
    pro, free = policy("1000/month", "pro"), policy("100/month", "free")
    note(pro, 300, 5)
    correct(QuotaWindow.objects.get(), bucket_of(free))
    assert QuotaWindow.objects.get().limit == 100
    assert told(lines()) == [("Pro", "1000/month", 300, 0)]
    note(free, 20, 4)
    correct(QuotaWindow.objects.get(), bucket_of(free))
    assert told(lines()) == [("Free", "100/month", 20, 0), ("Pro", "1000/month", 300, 0)], (
        "what was first stays within"
    )


def test_pages_and_filters_have_the_same_lines() -> None:
    pro, free = policy("1000/month", "pro"), policy("100/month", "free")
    note(pro, 300, 5)
    note(free, 50, 20)
    users = [User.objects.create(username=f"user{number}") for number in range(3)]
    search = Endpoint.objects.create(name="search")
    for user in users:
        for day in range(1, 32):
            starts_at = datetime(2025, 10, day, tzinfo=UTC)
            fields: dict[str, Any] = {"subject": f"user:{user.pk}", "starts_at": starts_at, "used": 7, "limit": 9}
            ends_at = starts_at + timedelta(days=1)
            counted(**fields, ends_at=ends_at, period="day", policy_id=pro.pk, endpoint_id=search.pk)
    found = lines()
    assert sorted((line.name, line.plan, line.used) for line in found) == [
        *(("Acme GmbH", plan, used) for plan, used in (("Free", 50), ("Pro", 300))),
        *((f"user{number}", "Pro", 217) for number in range(3)),
    ]
    paged, start, sizes = list[InvoiceLine](), "", list[int]()
    while not sizes or start:
        page, start = Invoices(month="2025-10").page(start, 2)
        paged += page
        sizes.append(len({line.subject for line in page}))
    assert (sizes, sorted(map(str, paged))) == ([2, 2], sorted(map(str, found)))
    assert lines(subject=ACME) == found[:2]
    assert lines(subject="tenant:acm") == list(Invoices(month="2025-11").lines()) == []
    assert list(Invoices(month="2025-10", policies=RatePolicy.objects.filter(pk=free.pk)).lines()) == found[1:2]


def test_a_window_without_a_policy_is_a_line_without_a_plan() -> None:
    starts_at, ends_at = (datetime(2025, month, 1, tzinfo=UTC) for month in (10, 11))
    counted(subject=ACME, starts_at=starts_at, ends_at=ends_at, used=7, limit=9)
    [line] = lines()
    assert (line.plan, line.counted_per, line.mode, line.policy, line.used) == ("", "", "", None, 7)


def test_two_months_that_began_in_one_are_two_lines() -> None:
    """Each has the limit: the customer's months began on another day meanwhile."""
    days = [datetime(2025, *day, tzinfo=UTC) for day in ((10, 1), (10, 15), (11, 15))]
    for (starts_at, ends_at), used in zip(pairwise(days), (8, 5), strict=True):
        counted(subject=ACME, starts_at=starts_at, ends_at=ends_at, used=used, limit=9)
    assert [(line.ends, line.used, line.over) for line in lines()] == [
        (date(2025, 10, 15), 8, 0),
        (date(2025, 11, 15), 5, 0),
    ]


@pytest.mark.parametrize(
    ("zone", "now", "month"),
    [
        ("UTC", datetime(2026, 1, 31, tzinfo=UTC), "2025-12"),
        ("UTC", datetime(2025, 12, 31, 20, tzinfo=UTC), "2025-11"),
        ("Asia/Tokyo", datetime(2025, 12, 31, 20, tzinfo=UTC), "2025-12"),
    ],
)
def test_the_previous_month_is_that_of_the_time_zone(settings: Any, zone: str, now: datetime, month: str) -> None:
    settings.TIME_ZONE = zone
    with time_machine.travel(now):
        assert previous_month() == month


def test_the_key_of_a_day_names_its_policy() -> None:
    """Two policies in one flush, the last of them the one of the flush before."""
    pro, free = policy("1000/month", "pro"), policy("100/month", "free")
    for flushed in (((pro, 3),), ((free, 4), (pro, 5))):
        for row, units in flushed:
            at_us = round(datetime(2025, 10, 5, tzinfo=UTC).timestamp()) * 10**6
            book.ledger.entries.append(Entry(bucket_of(row), units, at_us))
        book.flush()
    rows = QuotaDay.objects.order_by("policy_id").values_list("counter", "policy_id", "charged", "rate")
    counter = counter_name(bucket_of(free))
    assert list(rows) == [(counter, pro.pk, 8, "1000/month"), (counter, free.pk, 4, "100/month")]
    window = QuotaWindow.objects.get()
    assert (window.mixed, window.used, window.policy_id) == (True, 12, pro.pk)
