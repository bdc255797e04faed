"""Who is near a limit: which rows of the ledger are listed, in which order, with which figures."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from django_ratequota.ledger.book import flush
from django_ratequota.models import Endpoint, Plan, PlanAssignment, QuotaWindow, RatePolicy
from django_ratequota.operations.near import Chosen, Row, current_periods, near_rows
from tests.support.commands import run
from tests.support.requests import check_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "recording", "checkpointing"),
]


def spend(user: Any, times: int, **more: Any) -> None:
    """Make that many requests of one unit, and write what was noted."""
    for _ in range(times):
        check_from(user, **more)
    flush()


def part(start: str = "", most: int = 50, **chosen: Any) -> tuple[list[Row], str]:
    return near_rows("month", Chosen(**chosen), start, most)


def listed(**chosen: Any) -> list[tuple[str, int, int]]:
    """(subject, used, limit) of each row."""
    return [(row.bucket.subject, row.used, row.limit) for row in part(**chosen)[0]]


@pytest.fixture
def users() -> list[User]:
    return [User.objects.create(username=f"user{number}") for number in range(5)]


def test_only_durable_calendar_windows_are_listed(alice: User, settings: Any) -> None:
    RatePolicy.objects.create(rates="10/month, 10/day fixed_window, 10/day, 10/week fixed_window, 10/hour")
    RatePolicy.objects.create(rates="10/month", durable=False, counted_per="everyone")
    spend(alice, 5)
    assert current_periods() == ["month", "week", "day"]
    assert {row.bucket.subject for one in current_periods() for row in near_rows(one, Chosen(), "", 9)[0]} == {
        f"user:{alice.pk}"
    }


def test_all_subjects_are_listed_the_fullest_first_and_parts_follow(users: list[User]) -> None:
    RatePolicy.objects.create(rates="10/month")
    for number, user in enumerate(users):
        spend(user, 2 + 2 * number)
    rows = listed()
    assert [used for _subject, used, _limit in rows] == [10, 8, 6, 4, 2]
    first = part(most=2)
    second = part(first[1], most=2)
    last = part(second[1], most=2)
    assert [row.used for rows, _following in (first, second, last) for row in rows] == [10, 8, 6, 4, 2]
    assert (bool(second[1]), last[1]) == (True, "")
    assert [len(listed(level=level)) for level in (0, 50, 80, 100)] == [5, 3, 2, 1]


def test_of_equally_full_rows_none_is_listed_twice_or_left_out(users: list[User]) -> None:
    RatePolicy.objects.create(rates="10/month")
    for user in users:
        spend(user, 8)
    subjects, start = [], ""
    for _ in range(3):
        rows, start = part(start, most=2)
        subjects += [row.bucket.subject for row in rows]
    assert (sorted(subjects), start) == (sorted(f"user:{user.pk}" for user in users), "")


@pytest.mark.parametrize(
    "changes", [{"REDIS_URL": "redis://127.0.0.1:1/0"}, {"REDIS_URL": "memory://"}, {"ENABLED": False}]
)
def test_no_redis_is_needed(alice: User, settings: Any, changes: dict[str, Any]) -> None:
    RatePolicy.objects.create(rates="10/month")
    spend(alice, 8)
    settings.RATEQUOTA = {**settings.RATEQUOTA, **changes}
    [row] = part()[0]
    assert (row.used, row.percent, row.ends_at) == (8, 80, QuotaWindow.objects.get().ends_at)


def test_an_edited_limit_a_boost_and_another_plan_count_at_once(alice: User, free: Plan) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="10/month")
    PlanAssignment.objects.create(user=alice, plan=free)
    subject = f"user:{alice.pk}"
    spend(alice, 8)
    policy.rates = "12/month"
    policy.save()
    assert listed() == [(subject, 8, 12)]
    boost = RatePolicy.objects.create(user=alice, rates="16/month", ends_at=timezone.now() + timedelta(hours=1))
    assert [(row.policy, row.percent) for row in part()[0]] == [(boost, 50)]
    boost.delete()
    pro = Plan.objects.create(name="Pro", slug="pro")
    RatePolicy.objects.create(plan=pro, rates="10/s")
    PlanAssignment.objects.create(user=alice, plan=pro)
    assert listed() == []


def test_rows_whose_limit_was_raised_are_written_again(users: list[User]) -> None:
    """Else they would stay at the top of the list until their customers' next requests."""
    policy = RatePolicy.objects.create(rates="10/month")
    for user in users:
        spend(user, 8)
    assert [row.percent for row in QuotaWindow.objects.all()] == [80] * 5
    policy.rates = "100/month"
    policy.save()
    assert listed(level=50) == []
    flush()
    assert {(row.percent, row.limit, row.rate, row.used) for row in QuotaWindow.objects.all()} == {
        (8, 100, "100/month", 8)
    }


def test_raised_limits_make_room_for_those_who_are_near(search: Endpoint) -> None:
    raised = RatePolicy.objects.create(endpoint=search, rates="10/month", durable=True)
    reports = Endpoint.objects.create(name="reports")
    other = RatePolicy.objects.create(endpoint=reports, rates="10/month", durable=True)
    for scope, subjects, times in (("search", 20, 9), ("reports", 4, 6)):
        for number in range(subjects):
            for _ in range(times):
                check_from(None, address=f"10.0.0.{number}", scope=scope)
    flush()
    RatePolicy.objects.filter(pk=raised.pk).update(rates="1000/month")
    rows, following = part(most=3, level=50)
    assert ([row.policy for row in rows], following) == ([other] * 4, "")


def test_a_customer_on_a_plan_by_another_identifier_is_listed_under_it(
    alice: User, free: Plan, settings: Any
) -> None:
    """Her subject alone does not tell that; the policy that limited her last does."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.operations.test_near.acme"}}
    pro = Plan.objects.create(name="Pro", slug="pro")
    PlanAssignment.objects.create(subject="tenant:acme", plan=pro)
    Plan.objects.filter(pk=free.pk).update(default_for="authenticated")
    RatePolicy.objects.create(plan=free, rates="10/month")
    RatePolicy.objects.create(plan=pro, rates="20/month")
    spend(alice, 3)
    assert listed() == [(f"user:{alice.pk}", 3, 20)]


def acme(_request: Any) -> str:
    return "acme"


def test_months_of_customers_end_on_days_of_their_own(users: list[User], free: Plan) -> None:
    RatePolicy.objects.create(plan=free, rates="10/month")
    for user, anchor in zip(users, (1, 10, 20), strict=False):
        PlanAssignment.objects.create(user=user, plan=free, anchor=anchor)
        spend(user, 5)
    windows = {window.subject: window.ends_at for window in QuotaWindow.objects.all()}
    assert len(windows) == len(set(windows.values())) == 3
    for row in part()[0]:
        assert row.ends_at == windows[row.bucket.subject]


def test_debts_are_used_units(alice: User) -> None:
    RatePolicy.objects.create(rates="10/month")
    check_from(alice, cost=4).charge(8)
    flush()
    assert [(row.used, row.percent) for row in part()[0]] == [(12, 120)]


def test_policies_that_no_longer_apply_are_listed_no_more(alice: User, search: Endpoint) -> None:
    deleted, off, shared = (
        RatePolicy.objects.create(endpoint=endpoint, counted_per=per, rates="10/month", durable=True)
        for endpoint, per in ((None, "caller"), (search, "everyone"), (None, "ip"))
    )
    spend(alice, 8, scope="search")
    assert {subject for subject, *_ in listed()} == {f"user:{alice.pk}", "everyone", "ip:203.0.113.7"}
    deleted.delete()
    off.mode = "off"
    off.save()
    assert listed() == [("ip:203.0.113.7", 8, 10)]
    search.delete()
    shared.rates = "10/day"
    shared.save()
    assert listed() == []


def test_a_plan_and_an_identifier_are_listed_by_the_policy_that_applied(
    alice: User, free: Plan, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.operations.test_near.acme"}}
    PlanAssignment.objects.create(user=alice, plan=free)
    RatePolicy.objects.create(plan=free, counted_per="plan", rates="10/month")
    per_tenant = RatePolicy.objects.create(plan=free, counted_per="tenant", rates="5/month")
    spend(alice, 5)
    assert set(listed()) == {(f"plan:{free.pk}", 5, 10), ("tenant:acme", 5, 5)}
    per_tenant.ends_at = timezone.now() - timedelta(hours=1)
    per_tenant.save()
    assert listed() == [(f"plan:{free.pk}", 5, 10)]


def test_ended_windows_are_not_listed(alice: User) -> None:
    RatePolicy.objects.create(rates="10/month")
    spend(alice, 5)
    QuotaWindow.objects.update(ends_at=timezone.now() - timedelta(seconds=1))
    assert (current_periods(), listed()) == ([], [])


def test_the_command_lists_them(alice: User, search: Endpoint, settings: Any, capsys: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.operations.test_near.hostile"}}
    assert run("near") == ""
    assert capsys.readouterr().err == "All customers are below 80 % of their calendar limits\n"
    policy = RatePolicy.objects.create(endpoint=search, rates="10/month, 10/day fixed_window")
    RatePolicy.objects.create(counted_per="tenant", rates="9/month")
    spend(alice, 8, scope="search")
    text = f" 80 %  8 of 10  user:{alice.pk}: 10/month for search (policy {policy.pk})"
    assert text in run("near").splitlines()
    assert " 88 %  8 of 9  tenant:acme\\n“é”: 9/month for all endpoints" in run("near")
    assert run("near", "--window", "day").count("10/day") == 1
    assert capsys.readouterr().err == ""
    assert run("near", "--level", "100") == ""
    assert capsys.readouterr().err == "All customers are below 100 % of their calendar limits\n"


def hostile(_request: Any) -> str:
    """An identifier with characters that a list could stumble over."""
    return "acme\n“é”"
