"""A month by its days: what each charged and refunded, and what operators gave back, by whom and why."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest
from django.contrib.auth.models import User

from django_ratequota import Limiter, check_request
from django_ratequota.changes.writer import changed_by
from django_ratequota.engine.decision import Decision
from django_ratequota.ledger.book import flush
from django_ratequota.models import Plan, PlanAssignment, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.operations import counters
from django_ratequota.operations.past_windows import Month, by_day, given_back
from django_ratequota.runtime import process
from tests.conftest import Clock
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]


def test_days_add_up_to_the_window_and_returns_have_their_makers(
    alice: User, free: Plan, clock: Clock, limiter: Limiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "limiter", lambda: limiter)
    RatePolicy.objects.create(rates="100/month, 1000/day")
    assignment = PlanAssignment.objects.create(user=alice, plan=free, starts_at=datetime(2024, 1, 1, tzinfo=UTC))

    def ask(at: str, cost: int) -> Decision:
        clock.now_us = round(datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()) * 10**6
        return check_request(request_from(alice), cost=cost)

    def months(first: date) -> list[Month]:
        flush()
        return by_day(QuotaWindow.objects.all(), first)

    def returns(first: date) -> list[tuple[str, str, str, int]]:
        found = given_back(months(first))
        return [(change.action, str(change.actor), change.reason, units) for change, _window, units in found]

    ask("2025-11-03", 30)
    buckets = [status.bucket for status in ask("2025-11-20", 20).statuses]
    with changed_by(alice, "Ticket 4711"):
        counters.give_back(buckets, 10)
    reserved = ask("2025-11-30 23:59:50", 15)
    clock.advance(20)
    reserved.settle(5)
    first = date(2025, 11, 1)
    [month] = months(first)
    under = (RatePolicy.objects.get().pk, "100/month")
    assert month.days == [
        (date(2025, 11, 3), *under, 30, 0),
        (date(2025, 11, 20), *under, 20, 10),
        (date(2025, 11, 30), *under, 15, 0),
        (date(2025, 12, 1), *under, 0, 10),
    ]
    assert month.total == (month.window.charged, month.window.refunded) == (65, 20)
    assert returns(first) == [("grant", "alice", "Ticket 4711", 10)], "of the window, not of the limit by the day"
    QuotaDay.objects.filter(day__lt=date(2025, 11, 20)).delete()
    [less] = months(first)
    assert (less.days[0], less.total) == ((None, *under, 30, 0), month.total)

    # Beyond the limit, in a month that began on another day while the first went on.
    assignment.anchor = 15
    assignment.save()
    reserved = ask("2025-11-22", 90)
    reserved.settle(130)
    flush()
    counters.give_back([status.bucket for status in reserved.statuses], reason="Trial")
    assert returns(date(2025, 11, 15)) == [("reset", "None", "Trial", 130)]
    assert months(date(2025, 11, 15))[0].total == (130, 130)
    assert len(returns(first)) == 1, "that window was not reset"
