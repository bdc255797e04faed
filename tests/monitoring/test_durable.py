"""Durable counts: checkpoints in the database, and what is restored from them after Redis has lost its data."""

from __future__ import annotations

import csv
import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import time_machine
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.db import DatabaseError, DataError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_ratequota import Decision, check_request
from django_ratequota.conf import settings as settings_in_force
from django_ratequota.engine.keys import bucket_key
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, LedgerWriter, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.monitoring import ledger, ledger_rows, restoring
from django_ratequota.monitoring.ledger import flush
from django_ratequota.monitoring.rollup import forget_windows
from django_ratequota.operations.caller_limits import caller_limits
from django_ratequota.operations.counters import grant, peek, reset
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.runtime import default_limiter, process
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.windows import counted

Ask = Callable[..., Decision]
Later = Callable[[float], None]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]


@pytest.fixture
def ask(alice: User) -> Ask:
    """Makes a request of alice's, under ten units a month, or what the test says."""
    RatePolicy.objects.create(rates="10/month")
    return lambda cost=1: check_request(request_from(alice), cost=cost)


def used() -> list[int]:
    return list(QuotaWindow.objects.order_by("rate").values_list("used", flat=True))


def flush_redis() -> None:
    default_limiter().store.execute(("FLUSHALL",))


def lose() -> None:
    """Write a checkpoint, and lose what Redis has counted."""
    flush()
    flush_redis()


# --- Checkpoints. ---


def test_a_checkpoint_says_who_has_used_how_much_of_which_window(alice: User) -> None:
    endpoint = Endpoint.objects.create(name="search")
    policy = RatePolicy.objects.create(rates="100/month", endpoint=endpoint)
    decisions = [check_request(request_from(alice), "search", cost) for cost in (3, 4)]
    assert flush() == 1
    row = QuotaWindow.objects.get()
    status = decisions[-1].statuses[0]
    assert (row.subject, row.policy_id, row.endpoint_id) == (f"user:{alice.pk}", policy.pk, endpoint.pk)
    assert (row.used, row.limit, row.rate) == (7, 100, "100/month")
    assert row.counter == bucket_key("rq", status.bucket)[3:]
    assert (row.ends_at - row.starts_at).total_seconds() * 10**6 == status.window_us
    assert row.starts_at.day == row.ends_at.day == 1
    assert flush() == 0


@pytest.mark.parametrize("rates", ["10/min", "10/day", "10/hour fixed_window", "10/2days fixed_window", "unlimited"])
def test_other_rates_than_calendar_windows_are_not_kept(ask: Ask, rates: str) -> None:
    RatePolicy.objects.update(rates=rates)
    ask()
    assert (flush(), used()) == (0, [])


def test_what_is_not_durable_is_not_kept(ask: Ask, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    RatePolicy.objects.update(durable=False)
    ask()
    RatePolicy.objects.update(durable=True)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CHECKPOINT_SECONDS": 0}
    ask()
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CHECKPOINT_SECONDS": 10}
    assert ask().remaining == 7
    ledger.forget()
    monkeypatch.undo()  # as in other tests
    ask()
    assert (flush(), used()) == (0, [])


def test_refused_requests_change_no_checkpoint(ask: Ask) -> None:
    RatePolicy.objects.update(rates="2/month")
    assert [ask().allowed for _ in range(4)] == [True, True, False, False]
    flush()
    assert used() == [2]


def test_refunds_and_charges_by_hand_are_kept_and_so_are_debts(ask: Ask) -> None:
    decision = ask(5)
    flush()
    decision.refund(2)
    flush()
    assert used() == [3]
    decision.charge(11)
    flush()
    assert used() == [14]
    decision.refund(14)
    assert (flush(), used()) == (1, [0])


def test_units_and_requests_have_a_row_each(ask: Ask) -> None:
    RatePolicy.objects.update(rates="10 requests/month, 100/month")
    ask(7)
    flush()
    assert used() == [1, 7]


def test_what_waits_is_late_while_it_cannot_be_written(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, own = [time.time()], ledger.ledger
    monkeypatch.setattr(ledger, "time", SimpleNamespace(time=lambda: moved[0]))

    def later(seconds: int) -> int:
        moved[0] += seconds
        return round(moved[0] - own.written_until())

    def fail(*_: Any) -> int:
        raise DatabaseError("gone")

    assert later(7) == 0, "nothing waits"
    ask()
    with monkeypatch.context() as context:
        context.setattr(ledger, "add", fail)
        flush()
        assert later(60) == 60, "it has never been able to write"
    flush()
    assert later(7) == 0
    ask()
    assert later(7) == 7, "an idle process is not late when it counts again"
    flush()
    assert later(0) == 0


# --- Restoring. ---


def test_a_redis_that_lost_its_data_goes_on_from_the_checkpoint(ask: Ask) -> None:
    RatePolicy.objects.update(rates="10/month, 100/min")
    for _ in range(7):
        ask()
    lose()
    decision = ask()
    assert [status.remaining for status in decision.statuses] == [2, 99]
    assert [ask().allowed for _ in range(3)] == [True, True, False]


def test_a_redis_in_which_nobody_has_published_goes_on_from_the_checkpoint(ask: Ask) -> None:
    """A process that started with an empty Redis noticed no loss before the second checkpoint after."""
    flush_redis()
    process.policies.forget()
    assert [ask(4).allowed, ask(5).allowed] == [True, True]
    lose()
    assert [ask().allowed for _ in range(2)] == [True, False]


def test_a_lost_quota_that_was_used_up_stays_used_up(ask: Ask) -> None:
    RatePolicy.objects.update(rates="3/month")
    assert [ask().allowed for _ in range(4)] == [True, True, True, False]
    lose()
    assert not any(ask().allowed for _ in range(3))


def test_what_is_lost_is_what_other_processes_had_not_written(ask: Ask) -> None:
    ask(4)
    flush()
    ask(3)
    ledger.forget()
    flush_redis()
    assert ask().remaining == 5


def test_a_refused_first_request_does_not_forget_the_checkpoint(ask: Ask) -> None:
    everyone = RatePolicy.objects.create(rates="1/month", counted_per="everyone")
    ask()
    lose()
    assert not ask().allowed
    everyone.delete()
    assert ask().remaining == 8


def test_a_request_reads_nothing_itself_and_each_counter_once(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    RatePolicy.objects.update(rates="10/month, 9/week fixed_window, 8/day fixed_window")
    RatePolicy.objects.create(rates="100/month", counted_per="everyone")
    read: list[int] = []
    real = restoring.totals_of
    monkeypatch.setattr(restoring, "totals_of", lambda windows: read.append(len(windows)) or real(windows))
    ask()
    lose()
    with CaptureQueriesContext(connection) as queries:
        assert [status.remaining for status in ask().statuses] == [8, 7, 6, 98]
        ask()
    assert not any("quotawindow" in query["sql"] for query in queries)
    assert read == [4, 4], "before the first request, and after the loss"


def test_without_the_database_requests_go_on(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(6)
    lose()

    def fail(*_: Any) -> Any:
        raise DatabaseError("gone")

    with monkeypatch.context() as context:
        context.setattr(restoring, "totals_of", fail)
        assert ask().remaining == 9
    flush()
    assert ask().remaining == 2, "the next flush raises what was counted on without"


def test_a_database_that_does_not_answer_delays_a_request_by_its_timeout(
    ask: Ask, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TIMEOUT": 0.05}
    locked, real = threading.Event(), restoring.totals_of
    monkeypatch.setattr(restoring, "totals_of", lambda windows: locked.wait(20) and real(windows))
    began_at = time.monotonic()
    assert ask().remaining == 9
    assert time.monotonic() - began_at < 5
    locked.set()


# --- What operators do. ---


@pytest.mark.parametrize(("give_back", "left"), [(reset, 0), (lambda buckets, why: grant(buckets, 3, why), 4)])
def test_what_operators_give_back_is_not_lost_again(ask: Ask, give_back: Callable[..., object], left: int) -> None:
    bucket = ask(7).statuses[0].bucket
    flush()
    give_back([bucket], "A mistake of ours")
    assert used() == [left], "written at once"
    flush_redis()
    assert ask().remaining == 10 - left - 1


def test_without_redis_nothing_is_given_back_in_the_database(ask: Ask, settings: Any) -> None:
    """The row had refunds without the charges, and was below zero."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "memory://"}
    reset([ask(7).statuses[0].bucket])
    assert (ask().remaining, flush(), used()) == (9, 0, [])


def test_units_can_be_given_back_after_a_loss_that_nobody_has_noticed(ask: Ask) -> None:
    bucket = ask(7).statuses[0].bucket
    lose()
    grant([bucket], 3, "A mistake of ours")
    assert (used(), ask().remaining) == ([4], 5)


def test_units_charged_by_hand_after_a_loss_are_added_to_what_is_restored(ask: Ask) -> None:
    """A process that settles a request from before the loss wrote a count that lacked the checkpoint's units."""
    RatePolicy.objects.update(rates="100/month")
    decision = ask(40)
    lose()
    check_request(request_from(User.objects.create(username="bob")))  # who notices it
    decision.charge(30)
    assert ask().remaining == 29
    flush()
    assert sorted(used()) == [1, 71]


def test_a_subject_that_no_database_takes_spoils_no_other_figure(ask: Ask) -> None:
    decision = ask(4)
    bucket = replace(decision.statuses[0].bucket, subject="api_key:\ud800\0")
    ledger.note([ledger.Entry(bucket, 4, decision.at_us)])
    assert (flush(), used()) == (2, [4, 4])
    assert QuotaWindow.objects.filter(subject="api_key:\\ud800\\0").exists()


def test_a_subject_that_a_database_s_encoding_lacks_spoils_no_other_figure(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a letter of a client's name in latin1: nothing of its process was written any more."""
    real = ledger_rows.add_once

    def refuse(sums: Any) -> Any:
        if not all(each.bucket.subject.isascii() for each in sums.values()):
            raise DataError("Incorrect string value")
        return real(sums)

    monkeypatch.setattr(ledger_rows, "add_once", refuse)
    decision = ask(4)
    bucket = replace(decision.statuses[0].bucket, subject="api_key:\U0001f600")
    ledger.note([ledger.Entry(bucket, 4, decision.at_us)])
    assert (flush(), used()) == (2, [4, 4])
    assert QuotaWindow.objects.filter(subject="api_key:\\U0001f600").exists()


def test_pages_and_clients_see_what_will_be_restored(ask: Ask, alice: User) -> None:
    bucket = ask(7).statuses[0].bucket
    lose()
    caller = DescribedCaller(user_id=str(alice.pk), address=None)
    [(_, status)] = caller_limits(caller).limits
    assert status is not None
    assert status.remaining == 3
    assert peek([bucket])[bucket].remaining == 3
    assert explain_caller(caller, scope=None).decision.remaining == 3


# --- Ended windows. ---


def window(subject: str, month: int, used: int, *, day: int = 1, rate: str = "100/month") -> QuotaWindow:
    starts_at, period = datetime(2026, month, day, tzinfo=UTC), "day" if "day" in rate else "month"
    ends_at = starts_at + timedelta(days=1 if period == "day" else 30)
    named = {"subject": subject, "rate": rate, "period": period, "policy_id": 7}
    row: QuotaWindow = counted(starts_at=starts_at, ends_at=ends_at, used=used, limit=100, **named)
    return row


def test_usage_of_a_month_is_the_sum_of_its_windows() -> None:
    window("user:1", 9, 5)
    window("user:1", 10, 70)
    window("user:2", 10, 30)
    for day in (1, 2, 31):
        window("user:2", 10, day, day=day, rate="100/day fixed_window")
    window("user:2", 11, 9)
    with time_machine.travel(datetime(2026, 11, 1, tzinfo=UTC)):
        assert run("usage").splitlines() == [
            "user:1  all endpoints  100/month: 70 of 100",
            "user:2  all endpoints  100/day fixed_window: 34 of 100 in 3 windows",
            "user:2  all endpoints  100/month: 30 of 100",
        ]
        [line] = run("usage", "--month", "2026-11").splitlines()
        assert line == "user:2  all endpoints  100/month: 9 of 100, so far: until 2026-12-01"
    assert run("usage", "--month", "2026-10", "--subject", "user:1", "--format", "csv").splitlines() == [
        "subject,endpoint,rate,windows,used,limit,begins,ends,policy",
        "user:1,,100/month,1,70,100,2026-10-01,2026-10-31,7",
    ]
    [line] = run("usage", "--month", "2026-09", "--format", "json").splitlines()
    assert json.loads(line) == {
        "subject": "user:1",
        "endpoint": None,
        "rate": "100/month",
        "windows": 1,
        "used": 5,
        "limit": 100,
        "begins": "2026-09-01",
        "ends": "2026-10-01",
        "policy": 7,
    }


def test_usage_has_a_line_for_each_month_that_a_new_first_day_made() -> None:
    """Added up they were 130 of 50, an overage that nobody had."""
    window("tenant:acme", 10, 120)
    second = window("tenant:acme", 10, 10, day=20)
    QuotaWindow.objects.filter(pk=second.pk).update(rate="50/month", limit=50, policy_id=8)
    found = [json.loads(line) for line in run("usage", "--month", "2026-10", "--format", "json").splitlines()]
    assert [(row["rate"], row["windows"], row["used"], row["limit"], row["policy"]) for row in found] == [
        ("100/month", 1, 120, 100, 7),
        ("50/month", 1, 10, 50, 8),
    ]


def test_a_subject_forges_no_line_of_usage() -> None:
    subject = "tenant:x\ntenant:acme,,100/month,1,9,100"
    window(subject, 10, 5)
    assert len(run("usage", "--month", "2026-10").splitlines()) == 1
    text = run("usage", "--month", "2026-10", "--format", "csv")
    assert [row["subject"] for row in csv.DictReader(io.StringIO(text))] == [subject]


@pytest.mark.parametrize("month", ["October", "9999-12"])
def test_a_month_of_another_form_is_refused(month: str) -> None:
    with pytest.raises(CommandError, match=f"Write the month as in 2026-10, not '{month}'"):
        run("usage", "--month", month)


def test_old_windows_are_forgotten_by_rollup(settings: Any) -> None:
    now = timezone.now()
    for days in (10, 800):
        row = window(f"user:{days}", 1, 1)
        row.ends_at = now - timedelta(days=days)
        row.save()
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_MONTHS": 0}
    assert forget_windows() == 0
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_MONTHS": 24}
    assert forget_windows() == 1
    assert QuotaWindow.objects.get().subject == "user:10"


def test_old_days_are_forgotten_by_rollup(settings: Any) -> None:
    today = timezone.localdate(timezone=settings_in_force.time_zone)
    for days in (61, 62, 63):
        day = today - timedelta(days=days)
        QuotaDay.objects.create(
            counter="{user:1}:0:fwmonth", first_day=day.replace(day=1), day=day, charged=days, refunded=0
        )
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_DAYS": 0}
    assert forget_windows() == 0
    settings.RATEQUOTA = {**settings.RATEQUOTA, "KEEP_QUOTA_DAYS": 62}
    assert forget_windows() == 1
    assert set(QuotaDay.objects.values_list("charged", flat=True)) == {61, 62}


def test_a_writer_that_was_idle_for_long_goes_on_after_rollup(ask: Ask) -> None:
    ask(3)
    flush()
    LedgerWriter.objects.create(id=uuid4(), batches=7, written_at=timezone.now())
    with time_machine.travel(timezone.now() + timedelta(days=34)):
        assert forget_windows() == 0
    LedgerWriter.objects.exclude(batches=7).update(written_at=timezone.now() - timedelta(days=36))
    assert forget_windows() == 1
    ask(2)
    flush()
    ask(1)
    flush()
    assert (used(), set(LedgerWriter.objects.values_list("batches", flat=True))) == ([6], {7, 3})


def test_redis_gets_a_reset_that_it_missed_by_the_next_flush(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full counter is charged no more, so no batch of its own raised it: it stayed full until the month's end."""

    def fail(_command: Any) -> None:
        raise StoreError("connection", "gone")

    bucket = ask(10).statuses[0].bucket
    with monkeypatch.context() as patch:
        with transaction.atomic():
            reset([bucket], "A mistake of ours")
            patch.setattr(default_limiter().store, "execute", fail)
        flush()
    assert peek([bucket])[bucket].used == 10
    flush()
    assert (used(), peek([bucket])[bucket].used) == ([0], 0)


def test_two_resets_at_once_give_back_once(ask: Ask) -> None:
    """The second had read the counter before the first was carried out: the row became -10."""
    bucket = ask(10).statuses[0].bucket
    with transaction.atomic():
        reset([bucket])
        assert peek([bucket])[bucket].used == 10
        reset([bucket])
    flush()
    assert (used(), peek([bucket])[bucket].used) == ([0], 0)


def test_without_figures_no_limiter_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command writes a last checkpoint, also in projects without Redis."""
    monkeypatch.setattr(ledger, "default_limiter", lambda: pytest.fail("a limiter was made"))
    assert flush() == 0
