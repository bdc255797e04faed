"""Months that begin on the customer's day: checkpoints, and what is restored of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
import redis
from django.contrib.auth.models import User
from django_ratequota.monitoring.checkpoint_rows import batches
from django_ratequota.monitoring.checkpoints import flush

from django_ratequota import Decision, Limiter, check_request
from django_ratequota.engine.keys import bucket_key
from django_ratequota.models import Plan, PlanAssignment, QuotaWindow, RatePolicy
from django_ratequota.monitoring import checkpoints
from django_ratequota.operations.past_windows import used_in_month
from django_ratequota.runtime import default_limiter, process
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

    def ask(at: str, anchor: int, cost: int = 1, user: User = alice) -> Decision:
        clock.now_us = round(moment(at).timestamp()) * 10**6
        if assignment.anchor != anchor:
            assignment.anchor = anchor
            assignment.save()
        return check_request(request_from(user), cost=cost)

    return ask


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def rows() -> list[tuple[str, str, int]]:
    """(begins, ends, used) of each window."""
    found = QuotaWindow.objects.order_by("starts_at")
    return [(f"{row.starts_at:%m-%d}", f"{row.ends_at:%m-%d}", row.used) for row in found]


def invoiced(month: str) -> int:
    return sum(used.used for used in used_in_month(month))


def test_a_checkpoint_has_the_customer_s_month(ask: Ask) -> None:
    ask("2025-11-20", 15, 3)
    ask("2025-12-14 23:59", 15, 4)
    ask("2025-12-15", 15, 5)
    assert (flush(), rows()) == (2, [("11-15", "12-15", 7), ("12-15", "01-15", 5)])
    assert (invoiced("2025-11"), invoiced("2025-12"), invoiced("2026-01")) == (7, 5, 0)


def test_a_month_that_began_before_the_data_is_restored(ask: Ask, redis_client: redis.Redis) -> None:
    """The calendar's own month began after the data did: nothing was read, and 90 units came back."""
    ask("2025-11-28", 15, 90)
    flush()
    redis_client.flushall()
    ask("2025-11-29", 15, user=User.objects.create(username="bob"))
    assert ask("2025-12-03", 15).remaining == 9
    assert ask("2025-12-15", 15).remaining == 99


def test_a_month_with_a_later_beginning_ends_the_one_before(ask: Ask) -> None:
    ask("2025-11-19", 1, 7)
    flush()
    ask("2025-11-19 12:00", 1, 2)
    late = dict(checkpoints._dirty)
    checkpoints.forget()
    assert ask("2025-11-20", 15, 30).remaining == 70
    flush()
    assert rows() == [("11-01", "11-20", 7), ("11-15", "12-15", 30)]
    checkpoints._dirty.update(late)  # of another process, which writes it later
    flush()
    assert rows() == [("11-01", "11-20", 9), ("11-15", "12-15", 30)]
    assert invoiced("2025-11") == 39


def test_a_month_with_an_earlier_beginning_goes_on_in_its_row(ask: Ask, redis_client: redis.Redis) -> None:
    ask("2025-11-19", 1, 7)
    flush()
    assert ask("2025-11-20", 25, 30).remaining == 63
    flush()
    assert rows() == [("11-01", "11-25", 37)]
    redis_client.flushall()
    assert ask("2025-11-21", 25, 3).remaining == 60
    flush()
    assert rows() == [("11-01", "11-25", 40)]
    assert ask("2025-11-25", 25, 8).remaining == 92
    flush()
    assert rows() == [("11-01", "11-25", 40), ("11-25", "12-25", 8)]
    assert (invoiced("2025-10"), invoiced("2025-11")) == (0, 48)


def test_a_month_that_goes_on_is_restored_where_redis_went_back_in_time(ask: Ask, redis_client: redis.Redis) -> None:
    """Its stored beginning is later than that of the month that the customer's day now means."""
    bucket = ask("2025-11-18", 1, 10).statuses[0].bucket
    key = bucket_key("rqtest", bucket)
    earlier = redis_client.get(key)
    ask("2025-11-19", 1, 50)
    flush()
    redis_client.set(key, earlier)
    default_limiter().publish(lost=True)
    assert ask("2025-11-20", 25, 3).remaining == 37
    flush()
    assert rows() == [("11-01", "11-25", 63)]


def test_a_beginning_that_is_taken_back_continues_the_newest_month(ask: Ask) -> None:
    ask("2025-11-19", 1, 70)
    flush()
    ask("2025-11-20", 15, 3)
    flush()
    ask("2025-11-21", 1, 2)
    revision = default_limiter().stored_revision()
    for day in (22, 23):
        flush()
        ask(f"2025-11-{day}", 1, 2)
    flush()
    assert rows() == [("11-01", "11-20", 70), ("11-15", "12-01", 9)]
    assert default_limiter().stored_revision() == revision, "nothing was lost"
    ask("2025-12-01", 1)
    flush()
    assert rows()[2:] == [("12-01", "01-01", 1)]


def test_a_month_whose_end_was_moved_and_taken_back_is_counted_to_its_end(ask: Ask) -> None:
    """Its row ended on the 20th for good: what was used until 15 December was on no invoice."""
    ask("2025-11-16", 15, 5)
    flush()
    ask("2025-11-18", 20, 1)
    flush()
    assert rows() == [("11-15", "11-20", 6)]
    ask("2025-11-19", 15, 2)
    revision = default_limiter().stored_revision()
    flush()
    ask("2025-11-28", 15, 30)
    flush()
    ask("2025-12-14", 15, 4)
    flush()
    assert rows() == [("11-15", "12-15", 42)]
    assert default_limiter().stored_revision() == revision, "nothing was lost"
    ask("2025-12-15", 15, 1)
    flush()
    assert rows()[1:] == [("12-15", "01-15", 1)]


@pytest.mark.parametrize("seed", range(5))
def test_invoices_count_each_unit_once_however_often_the_day_changes(
    ask: Ask, redis_client: redis.Redis, seed: int
) -> None:
    """A random walk through a year, in which Redis is lost now and then, always right after a checkpoint."""
    RatePolicy.objects.update(rates="1000000/month")
    choose = random.Random(seed)
    at, anchor, admitted = datetime(2025, 1, 1), 1, 0
    while at.year == 2025:
        at += timedelta(hours=choose.choice([1, 5, 24, 200, 400]))
        what = choose.choice(["ask", "ask", "ask", "flush", "move", "lose"])
        if what != "ask":
            flush()
        if what == "move":
            anchor = choose.randint(1, 31)
        if what == "lose":
            redis_client.flushall()
        cost = choose.randint(1, 9)
        assert ask(at.isoformat(), anchor, cost).allowed
        admitted += cost
    flush()
    found = QuotaWindow.objects.order_by("starts_at")
    assert sum(found.values_list("used", flat=True)) == admitted
    ends = [(row.ends_at, following.ends_at) for row, following in pairwise(found)]
    assert all(end < following for end, following in ends)


def test_batches_are_in_one_order_and_have_a_counter_once() -> None:
    windows = [(f"{number * 7 % 20:02}", start_us) for start_us in (2, 1) for number in range(20)]
    found = list(batches(windows, 6))
    assert [len(batch) for batch in found] == [6, 6, 6, 2] * 2
    assert [counter for batch in found for counter, _ in batch] == [f"{number:02}" for number in range(20)] * 2
    assert sorted(window for batch in found for window in batch) == sorted(windows)
