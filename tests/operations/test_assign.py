"""Putting one customer on a plan: what becomes of the customer's other assignments, and what the history records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ValidationError
from django.db import OperationalError, transaction
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import check_caller
from django_ratequota.models import Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policies.facts import UserEntry, assignment_facts, to_us
from django_ratequota.quotas import assign
from django_ratequota.testing import Clock, isolated
from tests.support.connections import close_connections
from tests.support.properties import examples
from tests.support.threads import on_threads

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "plans")]

ACME = "tenant:acme"
START = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture(autouse=True)
def identifiers(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.tenant"}}


@pytest.fixture
def plans() -> dict[str, Plan]:
    return {name: Plan.objects.create(name=name.title(), slug=name) for name in ("free", "pro", "max")}


@pytest.fixture
def clock() -> Iterator[Clock]:
    with isolated() as scene:
        yield scene.clock


def day(number: int | None) -> datetime | None:
    return None if number is None else START + number * DAY


def number(at: datetime | None) -> int | None:
    return None if at is None else (at - START).days


def entry() -> UserEntry:
    return UserEntry(assignments=tuple(assignment_facts(row) for row in PlanAssignment.objects.all()))


def plans_at(days: list[float]) -> list[str]:
    """Return the slugs of the plans in force at these times; "" = none."""
    slugs, stored = dict(Plan.objects.values_list("pk", "slug")), entry()
    found = (stored.assignment(to_us(START + one * DAY)) for one in days)
    return ["" if one is None else slugs[one.plan_id] for one in found]


#: Each call is (today, plan, starts, ends); afterwards there are the rows (plan, starts, ends). Days, None = open.
HISTORIES: dict[str, tuple[list[Any], list[Any]]] = {
    "signs up": ([(1, "free", None, None)], [("free", 1, None)]),
    "tries": ([(1, "free", None, None), (3, "pro", None, 17)], [("free", 1, None), ("pro", 3, 17)]),
    "buys during the trial": (
        [(1, "free", None, None), (3, "pro", None, 17), (9, "pro", None, None)],
        [("free", 1, 9), ("pro", 3, 9), ("pro", 9, None)],
    ),
    "ends the trial": (
        [(1, "free", None, None), (3, "pro", None, 17), (9, "free", None, None)],
        [("free", 1, 9), ("pro", 3, 9), ("free", 9, None)],
    ),
    "cancels for the end of the month": (
        [(1, "pro", None, None), (9, "free", 31, None)],
        [("pro", 1, 31), ("free", 31, None)],
    ),
    "cancels, then upgrades": (
        [(1, "pro", None, None), (9, "free", 31, None), (20, "max", None, None)],
        [("pro", 1, 20), ("max", 20, None)],
    ),
    "cancels, then stays": (
        [(1, "pro", None, None), (9, "free", 31, None), (20, "pro", None, None)],
        [("pro", 1, 20), ("pro", 20, None)],
    ),
    "cancels for another day": (
        [(1, "pro", None, None), (9, "free", 31, None), (10, "free", 20, None)],
        [("pro", 1, 20), ("free", 20, None)],
    ),
    "tries after a cancellation": (
        [(1, "pro", None, None), (9, "free", 31, None), (20, "max", None, 40)],
        [("pro", 1, 20), ("free", 31, None), ("max", 20, 40)],
    ),
    # The cancellation stays open: with an end, it would have applied before the trial on day 31.
    "buys in a trial after a cancellation": (
        [(1, "pro", None, None), (9, "free", 31, None), (20, "max", None, 40), (33, "pro", None, None)],
        [("pro", 1, 20), ("free", 31, None), ("max", 20, 33), ("pro", 33, None)],
    ),
    "tries within a longer contract": (
        [(1, "free", None, None), (2, "pro", None, 90), (20, "max", None, 40)],
        [("free", 1, None), ("pro", 2, 90), ("max", 20, 40)],
    ),
    "tries while a week is planned": (
        [(1, "free", None, None), (2, "max", 15, 22), (3, "pro", None, 17)],
        [("free", 1, None), ("max", 17, 22), ("pro", 3, 17)],
    ),
    "tries for longer": (
        [(1, "free", None, None), (3, "pro", None, 17), (9, "pro", None, 30)],
        [("free", 1, None), ("pro", 3, 9), ("pro", 9, 30)],
    ),
    "is put on a plan afterwards": (
        [(1, "free", None, None), (9, "pro", None, 17), (20, "max", 5, None)],
        [("free", 1, 5), ("max", 5, None)],
    ),
    "got a trial afterwards": (
        [(1, "free", None, None), (20, "pro", 5, 9)],
        [("free", 1, None), ("pro", 5, 9)],
    ),
    "a repeated purchase": ([(1, "pro", None, None), (2, "pro", None, None)], [("pro", 1, None)]),
    "a repeated trial": ([(1, "pro", None, 17), (2, "pro", None, 17)], [("pro", 1, 17)]),
    "a repeated cancellation": (
        [(1, "pro", None, None), (9, "free", 31, None), (10, "free", 31, None), (40, "free", 31, None)],
        [("pro", 1, 31), ("free", 31, None)],
    ),
    "a purchase while another plan is planned for some days": (
        [(1, "pro", None, None), (2, "free", 31, 40), (3, "pro", None, None)],
        [("pro", 1, None)],
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_histories(name: str, clock: Clock) -> None:
    calls, rows = HISTORIES[name]
    for today, plan, starts, ends in calls:
        clock.move_to(START + today * DAY)
        assign(ACME, plan, starts_at=day(starts), ends_at=day(ends))
    found = PlanAssignment.objects.order_by("pk").values_list("plan__slug", "starts_at", "ends_at")
    assert [(slug, number(starts), number(ends)) for slug, starts, ends in found] == rows


@pytest.mark.parametrize("below", ["free", "max"])
def test_assignments_that_go_on_after_a_trial_keep_their_precedence(below: str) -> None:
    """Both then begin at the end of the trial, and of equal ones the last in the table applies."""
    for slug, first, last in ((below, 0, None), ("max", 15, 22), ("pro", 12, 30)):
        plan = Plan.objects.get(slug=slug)
        PlanAssignment.objects.create(subject=ACME, plan=plan, starts_at=day(first), ends_at=day(last))
    assign(ACME, "free", starts_at=day(10), ends_at=day(17))
    found = plans_at([9, 10, 16, 17, 21, 22, 29, 30])
    assert found == [below, "free", "free", "max", "max", "pro", "pro", below]


def test_who_upgrades_after_a_cancellation_stays_upgraded(clock: Clock) -> None:
    """With a row created for each event, the cancellation took effect at the end of the month nevertheless."""
    for slug, limit in (("free", 1), ("max", 3)):
        RatePolicy.objects.create(plan=Plan.objects.get(slug=slug), rates=f"{limit}/hour")
    clock.move_to(START)
    assign(ACME, "pro")
    assign(ACME, "free", starts_at=day(31))
    clock.move_to(START + 20 * DAY)
    assign(ACME, "max")
    for today in (20, 31, 40):
        clock.move_to(START + today * DAY)
        assert check_caller(ip=None, identifiers={"tenant": "acme"}).binding.limit == 3


#: Of rows and calls: the plan, the first day, the days that it lasts (None = open) and the day on which months begin.
ASSIGNED = st.tuples(
    st.sampled_from(["free", "pro", "max"]),
    st.integers(0, 12),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(1, 31),
)


@given(rows=st.lists(ASSIGNED, max_size=6), call=ASSIGNED, today=st.integers(0, 24))
@examples(200)
def test_the_plan_is_in_force_within_the_dates_and_nothing_else_changes(
    rows: list[Any], call: tuple[str, int, int | None, int | None], today: int
) -> None:
    plans = {plan.slug: plan for plan in Plan.objects.all()}
    PlanAssignment.objects.all().delete()
    PlanAssignment.objects.bulk_create(
        PlanAssignment(
            subject=ACME,
            plan=plans[slug],
            starts_at=day(first),
            ends_at=None if days is None else day(first + days),
            anchor=anchor,
        )
        for slug, first, days, anchor in rows
    )
    slug, first, days, anchor = call
    ends = None if days is None else first + days
    moments = [half / 2 for half in range(-1, 60)]
    before, months = plans_at(moments), entry()
    with isolated() as scene:
        scene.clock.move_to(START + today * DAY)
        asked: dict[str, Any] = {"starts_at": day(first), "ends_at": day(ends), "anchor": anchor}
        made = assign(ACME, slug, **asked)
        inside = [first <= moment and (ends is None or moment < ends) for moment in moments]
        expected = [slug if within else was for within, was in zip(inside, before, strict=True)]
        assert plans_at(moments) == expected
        if ends is None or today < ends:
            at_us = to_us(START + max(today, first) * DAY)
            is_new = made.pk not in [one.id for one in months.assignments]
            # A new assignment replaces one that would have begun at the same time, whose day has not applied yet.
            kept = months.anchor(max(to_us(START + today * DAY), to_us(START + first * DAY) - is_new))
            expected_day = anchor or kept
            assert expected_day in (0, entry().anchor(at_us))  # 0 = no day had applied yet
        last = PolicyChange.objects.latest("pk").pk
        assert assign(ACME, slug, **asked) == made
        assert PolicyChange.objects.latest("pk").pk == last


def test_the_customer_is_a_user_or_a_subject() -> None:
    user = User.objects.create(username="alice")
    found = [assign(customer, "pro") for customer in (user, f"user:{user.pk}", " tenant:acme ")]
    assert [(row.user_id, row.subject) for row in found] == [(user.pk, None)] * 2 + [(None, ACME)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("customer", "fields", "message"),
    [
        (ACME, {"plan": "gold"}, "There is no plan with the slug gold. Known slugs: free, max, pro."),
        ("user:4711", {}, "There is no such user."),
        ("acme", {}, "Enter kind:value, such as tenant:acme. The kind is one of tenant."),
        (ACME, {"anchor": 32}, "Ensure this value is less than or equal to 31."),
        (ACME, {"ends_at": START}, "The end must be after the start."),
        (ACME, {"ends_at": datetime.max.replace(tzinfo=UTC)}, "The year must be between 2 and 9998."),
    ],
)
def test_what_is_wrong_with_the_arguments(customer: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        assign(customer, **{"plan": "pro", **fields})
    assert message in " ".join(caught.value.messages)
    assert not PlanAssignment.objects.exists()


@pytest.mark.parametrize("customer", [AnonymousUser(), Plan(pk=7), 7, None])
def test_other_objects_are_no_customers(customer: Any) -> None:
    with pytest.raises(TypeError, match="customer is a user or a subject such as 'tenant:acme', not"):
        assign(customer, "pro")


def test_the_billing_day_is_kept_although_the_row_that_has_it_is_dropped(clock: Clock) -> None:
    """Sign-up and purchase within a second: the second row takes the place of the first one."""
    clock.move_to(START)
    assign(ACME, "free", anchor=15)
    row = assign(ACME, "pro")
    assert list(PlanAssignment.objects.all()) == [row]
    assert row.anchor == 15


def test_naive_times_are_in_the_current_time_zone() -> None:
    with timezone.override("Europe/Berlin"):
        assert assign(ACME, "pro", starts_at=datetime(2026, 1, 1, 1)).starts_at == START


def test_a_call_is_one_save_with_its_reason(clock: Clock) -> None:
    clock.move_to(START)
    assign(ACME, "pro", reason="Order 1")
    assign(ACME, "free", starts_at=day(31))
    last = PolicyChange.objects.latest("pk").pk
    clock.advance(3600)
    row = assign(ACME, "max", reason="Order 2")
    changes = PolicyChange.objects.filter(pk__gt=last)
    assert sorted(changes.values_list("action", "reason")) == [
        ("create", "Order 2"),
        ("delete", "Order 2"),
        ("update", "Order 2"),
    ]
    assert changes.values("change_id").distinct().count() == 1
    assert row.reason == "Order 2"


def test_another_reason_or_billing_day_is_another_assignment(clock: Clock) -> None:
    clock.move_to(START)
    first = assign(ACME, "pro", reason="Order 1", anchor=15)
    assert assign(ACME, "pro", reason="Order 1", anchor=15) == assign(ACME, "pro") == first
    clock.advance(3600)
    assert assign(ACME, "pro", reason="Order 2").reason == "Order 2"
    assert assign(ACME, "pro", anchor=16).anchor == 16


def test_two_calls_at_once_make_one_assignment() -> None:
    def buy() -> PlanAssignment:
        try:
            while True:
                # An SQLite database in memory refuses a second writer instead of having it wait.
                with suppress(OperationalError):
                    return assign(ACME, "pro")
        finally:
            close_connections()

    found = on_threads(4, buy)
    assert PlanAssignment.objects.get() == found[0]
    assert len({row.pk for row in found}) == 1


def test_a_rollback_of_the_callers_transaction_takes_it_back() -> None:
    assign(ACME, "free")
    with transaction.atomic():
        assign(ACME, "pro")
        transaction.set_rollback(True)
    assert PlanAssignment.objects.get().plan.slug == "free"
