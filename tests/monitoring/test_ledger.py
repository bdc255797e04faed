"""The ledger: rows are sums of what was admitted and given back, and Redis is raised to them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core import mail
from django.db import DatabaseError

from django_ratequota import Decision, check_request
from django_ratequota.exceptions import StoreError
from django_ratequota.models import LedgerWriter, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.monitoring import ledger
from django_ratequota.monitoring.background import Background
from django_ratequota.runtime import default_limiter
from tests.faults import poll
from tests.project.views import request_from
from tests.support.spending import flush_all

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]


def ask(user: User, cost: int = 1) -> Decision:
    return check_request(request_from(user), cost=cost)


def used() -> list[tuple[int, int]]:
    return list(QuotaWindow.objects.order_by("counter").values_list("charged", "refunded"))


@pytest.fixture
def monthly(db: None) -> RatePolicy:
    return RatePolicy.objects.create(rates="10000/month")


def test_a_row_is_the_sum_of_what_was_charged_and_refunded(alice: User, monthly: RatePolicy) -> None:
    first = ask(alice, 100)
    first.refund(30)
    ask(alice, 5).charge(7)
    assert ledger.flush() == 1
    row = QuotaWindow.objects.get()
    assert (row.charged, row.refunded, row.used, row.percent, row.limit) == (112, 30, 82, 0, 10_000)
    assert (row.policy_id, row.rate, row.subject) == (monthly.pk, "10000/month", f"user:{alice.pk}")
    assert list(QuotaDay.objects.values_list("charged", "refunded")) == [(112, 30)]
    assert (ledger.flush(), ledger.ledger.raised) == (0, 0)


def test_two_processes_that_settle_in_any_order_lose_nothing(alice: User, monthly: RatePolicy) -> None:
    a, b = ledger.ledger, ledger.Ledger()
    decisions = [ask(alice, 1000) for _ in range(3)]
    ledger.flush()
    for own, decision in zip((a, b, a), decisions, strict=True):
        ledger.ledger = own
        decision.settle(10)
    for own in (b, a):
        ledger.ledger = own
        ledger.flush()
    assert used() == [(3000, 2970)]
    last = ask(alice, 2)
    assert (last.remaining, a.raised, b.raised) == (10_000 - 32, 0, 0)


def test_what_redis_lost_is_back_before_the_next_request_is_counted(
    alice: User, monthly: RatePolicy, redis_client: redis.Redis
) -> None:
    ask(alice, 9000)
    ledger.flush()
    ask(alice, 500)  # not written yet
    redis_client.flushall()
    refused = ask(alice, 501)
    assert (refused.allowed, refused.remaining) == (False, 500)
    assert ask(alice, 500).remaining == 0
    ledger.flush()
    assert used() == [(10_000, 0)]


def test_an_older_snapshot_is_raised_at_the_next_flush(
    alice: User, monthly: RatePolicy, redis_client: redis.Redis
) -> None:
    ask(alice, 100)
    key = redis_client.keys("rqtest:*fwmonth*")[0]
    older = redis_client.get(key)
    ask(alice, 900).refund(50)
    ledger.flush()
    redis_client.set(key, older, ex=1000)  # type: ignore[arg-type]
    ask(alice, 1)
    ledger.flush()
    assert ledger.ledger.raised == 900 + 50
    assert ask(alice, 1).remaining == 10_000 - 952


def test_a_refund_whose_reply_is_lost_is_billed_as_a_refund(
    alice: User, monthly: RatePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(User.objects.create(username="bob"), 990)
    decision = ask(alice, 5010)
    with monkeypatch.context() as patch:
        _lose_replies(patch)
        decision.settle(110)
    ledger.flush()
    assert sorted(used()) == [(990, 0), (5010, 4900)]
    assert ask(alice).remaining == 10_000 - 111


def test_a_settlement_whose_reply_is_lost_is_settled_by_the_next(
    alice: User, monthly: RatePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = ask(alice, 100)
    with monkeypatch.context() as patch:
        _lose_replies(patch)
        decision.settle(500)
    decision.settle(200)
    ledger.flush()
    assert used() == [(500, 300)]
    assert ask(alice).remaining == 10_000 - 201


@pytest.mark.parametrize("committed", [True, False])
def test_a_batch_whose_commit_is_in_doubt_is_added_once(
    alice: User, monthly: RatePolicy, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    real = ledger.add

    def add(*args: Any) -> Any:
        if committed:
            real(*args)
        raise DatabaseError("the connection is gone")

    ask(alice, 3)
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "add", add)
        assert ledger.flush() == 0
        ask(alice, 4)
        assert ledger.flush() == 0
    assert ledger.flush() == 2  # the batch in doubt, and what came after it
    assert used() == [(7, 0)]


def test_a_flush_ends_although_requests_go_on(
    alice: User, monthly: RatePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch left what had come meanwhile for another: a busy process wrote without pause."""
    real, batches = ledger.add, list[int]()

    def add(*args: Any) -> Any:
        batches.append(len(args[0]))
        if len(batches) < 5:
            ask(alice, 1)
        return real(*args)

    ask(alice, 3)
    monkeypatch.setattr(ledger, "add", add)
    assert flush_all(), "what was noted before is written"
    assert (batches, used(), ledger.ledger.waits()) == ([1], [(3, 0)], True)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_process_that_ends_writes_the_rest_and_waits_two_seconds_at_most(
    alice: User, monthly: RatePolicy, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    """While the database hung, the process did for 25 s."""
    real, answers = ledger.add, threading.Event()
    monkeypatch.setattr(ledger, "background", Background("ratequota-ending", lambda: 3600, ledger.flush))
    if hangs:
        monkeypatch.setattr(ledger, "add", lambda *args: answers.wait(20) and real(*args))
    else:
        poll(lambda: ledger.background.keep() or not ledger.ledger.waits(), 20, "the thread has begun")
    ask(alice, 3)
    began_at = time.monotonic()
    assert ledger.end() is not hangs
    assert (time.monotonic() - began_at < 2) is not hangs
    assert time.monotonic() - began_at < 10
    answers.set()
    poll(lambda: used() == [(3, 0)], 20, "the thread goes on where the process does")
    poll(lambda: all(one.name != "ratequota-ending" for one in threading.enumerate()), 20, "the thread ends")


def test_a_mail_to_memory_stops_nothing(alice: User, monthly: RatePolicy) -> None:
    """``mail.outbox`` stood for a test run, and one mail by Django's locmem backend ended all checkpoints."""
    mail.send_mail("subject", "body", "from@example.com", ["to@example.com"])
    assert hasattr(mail, "outbox")
    ask(alice, 3)
    ledger.flush()
    assert used() == [(3, 0)]


@pytest.mark.parametrize(("durable", "rows"), [(None, 0), (True, 2 * 20)])
def test_addresses_have_rows_where_their_policy_asks_for_it(alice: User, durable: bool | None, rows: int) -> None:
    """Six thousand anonymous addresses had twelve thousand rows."""
    RatePolicy.objects.create(rates="1000/month, 100/day fixed_window", durable=durable)
    for number in range(20):
        assert check_request(request_from(address=f"2001:db8:0:{number:x}::1")).allowed
    assert ledger.flush() == rows
    ask(alice)
    assert ledger.flush() == 2


def test_a_killed_process_leaves_its_last_second_unwritten_both_ways(alice: User, monthly: RatePolicy) -> None:
    """A low count was then taken for a loss, and 120 units in Redis became 5010."""
    decision = ask(alice, 5010)
    ledger.flush()
    decision.settle(120)
    ask(alice, 7)
    ledger.forget()
    assert ask(alice).remaining == 10_000 - 128, "Redis has both"
    ledger.flush()
    assert (used(), ledger.ledger.raised) == ([(5011, 0)], 0)
    assert ask(alice).remaining == 10_000 - 129


def test_a_database_that_hangs_loses_no_requests(alice: User, monthly: RatePolicy) -> None:
    """Of more than 100,000 that nobody could add up meanwhile, the oldest were forgotten, and no log said so."""
    decision = ask(alice)
    entry = ledger.Entry(decision.statuses[0].bucket, 1, decision.at_us)
    for _ in range(3):
        ledger.note([entry] * 50_000)
    assert len(ledger.ledger.entries) < 20_000
    ledger.flush()
    assert used() == [(150_001, 0)]


def test_a_writer_whose_row_is_gone_loses_nothing(alice: User, monthly: RatePolicy) -> None:
    """A database that was restored from a backup, for one."""
    ask(alice, 3)
    ledger.flush()
    LedgerWriter.objects.all().delete()
    for _ in range(2):
        ask(alice, 4)
        assert ledger.flush() == 1
    assert used() == [(11, 0)]


def test_rows_are_written_in_one_order(alice: User, monthly: RatePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that add to the same days in different orders would deadlock."""
    decision = ask(alice)
    bucket, at_us = decision.statuses[0].bucket, decision.at_us - decision.at_us % _DAY_US
    begins_us = at_us - 40 * _DAY_US
    ledger.note([ledger.Entry(bucket, 1, begins_us, begins_us + day * _DAY_US) for day in (9, 2, 30, 4, 17, 5, 1)])
    ledger.flush()
    days = list(QuotaDay.objects.order_by("pk").values_list("first_day", "day"))
    assert days == sorted(days)


_DAY_US = 86_400 * 10**6


def _lose_replies(patch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any, **__: Any) -> Any:
        raise StoreError("timeout", "no reply")

    patch.setattr(default_limiter().backend, "ask", lose)
