"""Invoices: a line for each plan and rate of a month, exact after changes, resets, deletions and the rollup."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
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
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.monitoring.rollup import forget_windows
from django_ratequota.operations.assign import assign
from django_ratequota.operations.near import correct
from django_ratequota.operations.past_windows import InvoiceLine, Invoices, previous_month
from tests.conftest import Clock
from tests.support.properties import thorough_after
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
        reason="",
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
        first_day=date(2025, 10, 5),
        last_day=date(2025, 10, 5),
        complete=True,
        changed_at=datetime(2025, 10, 6, tzinfo=UTC),
        policy=row.pk,
    )
    endpoint = str(search.pk)
    search.delete()
    [line] = lines()
    assert (line.endpoint, line.plan, line.counted_per, line.mode) == ("#" + endpoint, "Pro", "tenant", "log")


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


def test_policies_and_rates_of_a_plan_are_lines_of_their_own() -> None:
    pro = policy("100/month", "pro", reason="the one")
    note(pro, 60, 1)
    boost = policy("200/month", subject=ACME, ends_at=datetime(2025, 10, 9, tzinfo=UTC))
    note(boost, 100, 5)
    other = policy("90/month", "pro", ends_at=datetime(2030, 1, 1, tzinfo=UTC))
    note(other, 7, 10)
    RatePolicy.objects.filter(pk=other.pk).update(rates="80/month")
    other.refresh_from_db()
    note(other, 8, 11)
    found = lines()
    expected = [("Pro", "100/month", 60, 0), ("", "200/month", 100, 0), ("Pro", "90/month", 7, 7)]
    assert told(found) == [*expected, ("Pro", "80/month", 8, 8)]
    assert [line.policy for line in found] == [pro.pk, boost.pk, other.pk, other.pk]
    RatePolicy.objects.all().delete()
    Endpoint.objects.create(pk=boost.pk, name="of the same number").delete()
    assert told(lines())[:3] == expected, "the history knows whose they were"


def test_over_is_what_exceeded_the_limit_of_its_day(settings: Any) -> None:
    """A higher limit for the days to come made it 0."""
    row = policy("1000/month", "free")
    note(row, 1500, 5)
    RatePolicy.objects.update(rates="2000/month")
    row.refresh_from_db()
    expected = [("Free", "1000/month", 1500, 500)]
    assert told(lines()) == expected
    correct(QuotaWindow.objects.get(), bucket_of(row))
    assert (told(lines()), QuotaWindow.objects.get().mixed) == (expected, True)
    note(row, 700, 20)
    assert told(lines()) == [*expected, ("Free", "2000/month", 700, 0)]
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_DAYS": 1}
    with time_machine.travel(datetime(2026, 3, 1, tzinfo=UTC)):
        forget_windows()
    assert told(lines()) == [*expected, ("Free", "2000/month", 700, 0)]


def test_plans_pay_what_is_within_the_limit_of_their_day() -> None:
    free, pro = policy("1000/month", "free"), policy("10000/month", "pro")
    for row, units, day in ((free, 1500, 1), (pro, 8800, 6), (free, 300, 21)):
        note(row, units, day)
    found = lines()
    assert told(found) == [("Free", "1000/month", 1800, 800), ("Pro", "10000/month", 8800, 0)]
    days = [(line.first_day, line.last_day) for line in found]
    assert days == [(date(2025, 10, 1), date(2025, 10, 21)), (date(2025, 10, 6),) * 2]


@pytest.mark.parametrize("assigned", ["subject", "user"])
def test_a_trial_and_the_bought_plan_are_two_lines(
    assigned: str, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = ACME if assigned == "subject" else f"user:{alice.pk}"
    monkeypatch.setitem(globals(), "ACME", subject)
    pro, other = policy("100/month", "pro"), policy("90/month")
    who: dict[str, Any] = {"subject": ACME} if assigned == "subject" else {"user": alice}
    fields = {**who, "plan": pro.plan}
    first, bought_at, ends_at = (datetime(2025, 10, day, tzinfo=UTC) for day in (1, 15, 16))
    trial = PlanAssignment.objects.create(**fields, starts_at=first, ends_at=ends_at, reason="Trial")
    PlanAssignment.objects.create(**fields, starts_at=bought_at)
    PlanAssignment.objects.create(subject="tenant:other", plan=pro.plan, reason="Of another")
    for row, units, day in ((pro, 30, 14), (pro, 10, 15), (pro, 2, 16), (other, 5, 14)):
        note(row, units, day)

    def shown() -> list[tuple[Any, ...]]:
        return [(line.plan, line.reason, line.used, line.first_day, line.last_day) for line in lines()]

    expected = [
        ("Pro", "Trial", 40, date(2025, 10, 14), date(2025, 10, 15)),
        ("", "", 5, date(2025, 10, 14), date(2025, 10, 14)),
        ("Pro", "", 2, date(2025, 10, 16), date(2025, 10, 16)),
    ]
    assert shown() == expected
    note(pro, 5, 14, refunded=21)
    assert [line[:3] for line in shown()] == [("Pro", "Trial", 37), ("", "", 5)], "the bought plan's first"
    trial.delete()
    assert [line[:3] for line in shown()] == [("Pro", "", 30), ("", "", 5), ("Pro", "", 7)], "no assignment, then one"


def test_a_day_on_which_an_assignment_follows_another_is_the_first_ones() -> None:
    """Also after the second has got an end, which would precede others then."""
    pro = policy("100/month", "pro")
    free = policy("10/month", "free").plan
    first, bought_at, cancelled_at = (datetime(2025, 10, day, 9, tzinfo=UTC) for day in (1, 15, 25))
    assign(ACME, "pro", starts_at=first, ends_at=cancelled_at, reason="Trial")
    assign(ACME, "pro", starts_at=bought_at)
    for day in (14, 15, 16):
        note(pro, day, day)
    for _ in range(2):
        assert [(line.reason, line.used) for line in lines()] == [("Trial", 29), ("", 16)]
        assign(ACME, free, starts_at=cancelled_at)


def test_without_its_days_a_month_keeps_its_line(settings: Any) -> None:
    pro = policy("100/month", "pro")
    first = datetime(2025, 10, 1, tzinfo=UTC)
    PlanAssignment.objects.create(subject=ACME, plan=pro.plan, starts_at=first, reason="Order 4711")
    note(pro, 130, 5)
    note(pro, 7, 30)
    before = lines()
    QuotaDay.objects.filter(day__lt=date(2025, 10, 9)).delete()
    assert lines() == [replace(before[0], first_day=None)]
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_DAYS": 1}
    with time_machine.travel(datetime(2026, 3, 1, tzinfo=UTC)):
        forget_windows()
        assert not QuotaDay.objects.exists()
        assert lines() == [replace(before[0], first_day=None, last_day=None)]
    assert (before[0].used, before[0].over, before[0].reason) == (137, 37, "Order 4711")


#: A policy and its limit.
Under = tuple[int, int]


def drawn_month(dice: random.Random, *, resets: bool) -> dict[tuple[int, Under], int]:
    """Draw what a month's days used under each policy and limit, in the order in which they began to.

    Resets refund what others have used, too.
    """
    day, under, days = 1, (1, 10), dict[tuple[int, Under], int]()
    for _ in range(dice.randint(4, 30)):
        day = min(31, day + dice.choice([0, 0, 1, 1, 2, 5]))
        units, chosen = dice.choice([1, 1, 3, 9, 30]), dice.random()
        if chosen < 0.25:
            under = dice.choice([(1, 10), (1, 20), (2, 100), (3, 5)])
        elif chosen < 0.9:
            days[day, under] = days.get((day, under), 0) + units
        else:
            used = Counter[Under]()
            for (_day, one), had in days.items():
                used[one] += had
            if +used:
                one = dice.choice(list(+used))
                most = max(0, used.total()) if resets else used[one]
                days[day, one] = days.get((day, one), 0) - min(units, most)
    return days


def owed(days: dict[tuple[int, Under], int]) -> dict[Under, tuple[int, int]]:
    """Return what is used and over, unit by unit: a plan pays a unit while those paid are below the limit."""
    paid, over = Counter[Under](), Counter[Under]()
    for (_day, under), units in days.items():
        for _ in range(units):
            (paid if paid.total() < under[1] else over)[under] += 1
        for _ in range(-units):
            (over if over[under] else paid)[under] -= 1
    return {under: (paid[under] + over[under], over[under]) for under in paid | over}


@pytest.mark.parametrize("part", thorough_after(1, range(10)))
def test_the_lines_of_any_month_are_those_of_its_days(part: int) -> None:
    """A thousand months with edits: each as it ended, and as it was on a day before."""
    months, plans = {}, [policy("1/month", f"plan{number}").plan for number in (1, 2, 3)]
    rows = dict(zip((1, 2, 3), RatePolicy.objects.order_by("pk"), strict=True))
    for number in range(part * 100, part * 100 + 100):
        dice = random.Random(number)
        days, until = drawn_month(dice, resets=number % 4 == 1), dice.randint(1, 31)
        months[f"tenant:{number}"] = days
        months[f"tenant:{number}-until"] = {key: units for key, units in days.items() if key[0] <= until}
        if number % 4 == 0:
            for name in (f"tenant:{number}", f"tenant:{number}-until"):
                for day in (1, until):
                    starts_at = datetime(2025, 10, day, 12, tzinfo=UTC)
                    PlanAssignment.objects.create(subject=name, plan=plans[0], starts_at=starts_at)
    windows, own_days = [], []
    for subject, days in months.items():
        named = {"counter": f"{{{subject}}}:0:fwmonth", "first_day": date(2025, 10, 1)}
        ends = {"starts_at": datetime(2025, 10, 1, tzinfo=UTC), "ends_at": datetime(2025, 11, 1, tzinfo=UTC)}
        figures = {"charged": sum(days.values()), "refunded": 0, "limit": 10, "rate": "10/month", "period": "month"}
        fields = {**ends, **figures, "subject": subject, "policy_id": rows[1].pk, "written_at": ends["starts_at"]}
        windows.append(QuotaWindow(**named, **fields))
        for (day, (number, limit)), units in days.items():
            under = {"policy_id": rows[number].pk, "rate": f"{limit}/month", "day": date(2025, 10, day)}
            units = {"charged": max(0, units), "refunded": max(0, -units)}
            own_days.append(QuotaDay(**named, **under, **units))
    QuotaWindow.objects.bulk_create(windows)
    QuotaDay.objects.bulk_create(own_days)
    assert_lines(months, {row.pk: number for number, row in rows.items()})


def assert_lines(months: dict[str, dict[tuple[int, Under], int]], policies: dict[int, int]) -> None:
    found: dict[str, list[InvoiceLine]] = {subject: [] for subject in months}
    for line in lines():
        found[line.subject].append(line)
        assert 0 <= line.over <= line.used
    over = {subject: sum(line.over for line in own) for subject, own in found.items()}
    for subject, days in months.items():
        assert sum(line.used for line in found[subject]) == sum(days.values())
        if int(subject.removeprefix("tenant:").partition("-")[0]) % 4 > 1:
            expected = {under: figures for under, figures in owed(days).items() if figures[0]}
            own = {(policies[line.policy or 0], line.limit): (line.used, line.over) for line in found[subject]}
            assert {under: figures for under, figures in own.items() if figures[0]} == expected
        earlier = months.get(f"{subject}-until", {})
        if all(units >= 0 for key, units in days.items() if earlier.get(key) != units):
            assert over[subject] >= over.get(f"{subject}-until", 0), "less, without a refund"


def test_a_reset_after_a_downgrade_leaves_no_negative_line() -> None:
    pro, free = policy("1000/month", "pro"), policy("100/month", "free")
    note(pro, 300, 5)
    note(free, 50, 20)
    note(free, 350, 20, refunded=21)
    assert told(lines()) == [("Free", "100/month", 0, 0)]
    note(pro, 10, 25)
    assert told(lines()) == [("Pro", "1000/month", 10, 0)]
    note(free, 15, 20, refunded=26)
    assert told(lines()) == [("Free", "100/month", -5, 0)], "what was reserved was refunded twice"


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
    assert told(lines()) == [("Free", "100/month", 20, 0), ("Pro", "1000/month", 300, 0)], "the first ones pay first"


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


def test_the_key_of_a_day_names_its_policy_and_rate() -> None:
    """Two policies in one flush, the last of them the one of the flush before; then another rate of it."""
    pro, free, more = policy("1000/month", "pro"), policy("100/month", "free"), policy("2000/month")
    more.pk = pro.pk
    at_us = round(datetime(2025, 10, 5, tzinfo=UTC).timestamp()) * 10**6
    for flushed in (((pro, 3),), ((free, 4), (pro, 5), (more, 2))):
        for row, units in flushed:
            at_us += 1
            book.ledger.entries.append(Entry(bucket_of(row), units, at_us))
        book.flush()
    rows = QuotaDay.objects.order_by("policy_id", "pk").values_list("counter", "policy_id", "charged", "rate")
    counter = counter_name(bucket_of(free))
    assert list(rows) == [
        (counter, pro.pk, 8, "1000/month"),
        (counter, pro.pk, 2, "2000/month"),
        (counter, free.pk, 4, "100/month"),
    ]
    window = QuotaWindow.objects.get()
    assert (window.mixed, window.used, window.policy_id, window.rate) == (True, 14, pro.pk, "2000/month")


def test_another_rate_alone_makes_a_month_mixed() -> None:
    row = policy("1000/month", "pro")
    note(row, 3, 5)
    note(row, 3, 6)
    assert not QuotaWindow.objects.get().mixed
    row.rates = "2000/month"
    note(row, 3, 7)
    assert QuotaWindow.objects.get().mixed
