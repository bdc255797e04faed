"""Notices of limits that the database counts: of what is used, once, whichever worker notices it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import OperationalError

from django_ratequota import Decision, check_request
from django_ratequota.ledger import batches, book
from django_ratequota.ledger.book import flush
from django_ratequota.models import QuotaWindow, RatePolicy
from django_ratequota.monitoring import alerts
from django_ratequota.signals import quota_threshold
from tests.project.views import request_from
from tests.support.properties import thorough_after
from tests.support.threads import by_hand

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]

#: Level, units used, limit, and the cost of a refused request.
Notice = tuple[int, int, int, int]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Notice]]:
    by_hand(monkeypatch, alerts.claiming, alerts.delivering)
    alerts.forget()
    heard: list[Notice] = []

    def hear(level: int, status: Any, cost: int, **_: Any) -> None:
        heard.append((level, status.used + status.debt, status.limit, cost))

    quota_threshold.connect(hear)
    yield heard
    quota_threshold.disconnect(hear)
    alerts.forget()


@pytest.fixture
def ask(alice: User) -> Callable[..., Decision]:
    RatePolicy.objects.create(rates="20000/month")
    return lambda cost=1: check_request(request_from(alice), cost=cost)


def tell() -> None:
    flush()
    alerts.send()


def test_reservations_are_no_usage(alice: User, ask: Any, heard: list[Notice]) -> None:
    """A customer was mailed "16,000 of 20,000 used" at a true 480, and nothing at the real 80 %."""
    requests = [request_from(alice) for _ in range(20)]
    decisions = [check_request(request, cost=1000) for request in requests]
    assert not ask(1000).allowed
    tell()
    assert heard == []
    for decision in decisions:
        decision.settle(30)
    tell()
    assert heard == []
    ask(15_400)
    tell()
    assert heard == [(80, 16_000, 20_000, 0)]
    ask(3500)
    ask(1000)
    tell()
    assert heard[1:] == [(100, 19_500, 20_000, 1000)], "a request was refused"


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ((15_999,), []),
        ((16_000, 1, 1), [(80, 16_000, 20_000, 0)]),
        ((20_000,), [(100, 20_000, 20_000, 0)]),
        ((12_000, 12_000), []),
        ((16_000, 20_001), [(80, 16_000, 20_000, 0)]),
    ],
    ids=["below", "once", "both at once", "a refusal below 80 %", "a cost that never fits"],
)
def test_levels(ask: Any, heard: list[Notice], costs: tuple[int, ...], expected: list[Notice]) -> None:
    for cost in costs:
        ask(cost)
        tell()
    assert heard == expected


def test_each_limit_is_told_once(ask: Any, heard: list[Notice]) -> None:
    ask(16_000)
    tell()
    for limit in (40_000, 20_000, 18_000, 16_500, 20_000, 18_000):
        RatePolicy.objects.update(rates=f"{limit}/month")
        ask(1)
        tell()
    assert heard == [(80, 16_000, 20_000, 0), (80, 16_003, 18_000, 0), (80, 16_004, 16_500, 0)]


def test_a_second_worker_does_not_tell_again(ask: Any, heard: list[Notice]) -> None:
    ask(16_000)
    tell()
    book.ledger.clear()
    alerts.forget()
    ask(1)
    tell()
    assert len(heard) == 1


def test_nothing_is_told_that_was_not_committed(
    ask: Any, heard: list[Notice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OperationalError("gone")

    ask(16_000)
    with monkeypatch.context() as patch:
        patch.setattr("django_ratequota.ledger.batches.claim", fail)
        tell()
    assert (heard, QuotaWindow.objects.count()) == ([], 0)
    tell()
    assert len(heard) == 1


def test_refusals_of_a_used_up_limit_write_nothing(ask: Any, heard: list[Notice]) -> None:
    ask(20_000)
    tell()
    assert [ask(1).allowed for _ in range(3)] == [False] * 3
    assert flush() == 0


def test_without_receivers_nothing_is_claimed(ask: Any) -> None:
    ask(20_000)
    ask(1)
    flush()
    assert QuotaWindow.objects.get().notified == ""


@pytest.mark.parametrize("seed", thorough_after(3, range(60)))
def test_random_months(alice: User, heard: list[Notice], seed: int) -> None:
    """No notice is below its level, none comes twice, and none is missing in the end."""
    dice, used, held, full = random.Random(seed), 0, [], False
    RatePolicy.objects.create(rates="1000/month")
    requests: list[Any] = []
    for _ in range(40):
        chosen = dice.random()
        if chosen < 0.5:
            cost = dice.choice([1, 30, 100])
            requests.append(request_from(alice))
            decision = check_request(requests[-1], cost=cost)
            if decision.allowed:
                held.append((decision, cost))
            full |= not decision.allowed and used >= 800 and used + cost > 1000
        elif chosen < 0.8 and held:
            decision, cost = held.pop(dice.randrange(len(held)))
            actual = dice.choice([cost, cost, cost // 2])
            decision.settle(actual)
            used += actual
        else:
            before = len(heard)
            tell()
            for level, told, limit, cost in heard[before:]:
                assert (told, limit) == (used, 1000)
                assert told * 100 >= level * limit or (level == 100 and told * 5 >= limit * 4 and told + cost > limit)
    for decision, _cost in held:
        decision.settle(0)
    tell()
    levels = [level for level, *_ in heard]
    assert levels in ([], [80], [100], [80, 100])
    assert bool(levels) == (used >= 800)
    if used >= 1000:
        assert levels[-1] == 100


def test_a_limit_that_no_longer_applies_is_not_told(alice: User, heard: list[Any]) -> None:
    RatePolicy.objects.create(rates="1000/month")
    request = request_from(alice)
    decision = check_request(request, cost=100)
    tell()
    RatePolicy.objects.update(rates="10000/month")
    check_request(request_from(alice), cost=4000)
    tell()
    assert heard == []
    decision.settle(50)
    tell()
    assert heard == []


def test_a_refund_tells_nothing(alice: User, heard: list[Any]) -> None:
    RatePolicy.objects.create(rates="1000/month")
    request = request_from(alice)
    decision = check_request(request, cost=100)
    decision.settle(100)
    tell()
    RatePolicy.objects.update(rates="10000/month")
    check_request(request_from(alice), cost=4000)
    tell()
    assert heard == []
    decision.refund(50)
    tell()
    assert heard == []


def test_a_refused_cost_counts_whatever_part_is_last(alice: User, heard: list[Any]) -> None:
    a = RatePolicy.objects.create(rates="1000/month")
    check_request(request_from(alice), cost=950)
    tell()
    assert [one[0] for one in heard] == [80]
    assert not check_request(request_from(alice), cost=100).allowed
    a.delete()
    RatePolicy.objects.create(rates="1000/month")
    check_request(request_from(alice), cost=1)
    tell()
    assert [one[0] for one in heard] == [80, 100]


def test_a_lost_reply_of_a_commit_loses_no_notice(
    alice: User, heard: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    RatePolicy.objects.create(rates="1000/month")
    check_request(request_from(alice), cost=1000)
    real = batches.committing

    @contextmanager
    def lost(model: Any) -> Any:
        with real(model) as alias:
            yield alias
        raise OperationalError("the reply is lost")

    with monkeypatch.context() as patch:
        patch.setattr(batches, "committing", lost)
        tell()
    tell()
    assert [one[0] for one in heard] == [100]


def test_many_customers_at_once_are_all_told(heard: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 600 customers that one flush brought to 100 %, a hundred never got a notice."""
    monkeypatch.setattr(book, "_BATCH", 5)
    monkeypatch.setattr(alerts, "_MAX_OF_LIMIT", 5)
    RatePolicy.objects.create(rates="1000/month")
    for number in range(15):
        check_request(request_from(User.objects.create(username=f"u{number}")), cost=1000).settle(1000)
    for _ in range(10):
        tell()
    assert len(heard) == 15
