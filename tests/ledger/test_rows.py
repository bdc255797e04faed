"""The ledger: rows are sums of what was admitted and given back, each unit once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import time_machine
from django.contrib.auth.models import AnonymousUser, User
from django.core import mail
from django.db import DatabaseError, DataError, IntegrityError, OperationalError
from django.test import RequestFactory
from django.utils import timezone

from django_ratequota import Bucket, Decision, Rate, check_caller, check_request, monitoring
from django_ratequota.engine.keys import counter_name
from django_ratequota.exceptions import StoreError
from django_ratequota.identifiers import header_key
from django_ratequota.ledger import book, rows
from django_ratequota.ledger.book import Entry, flush
from django_ratequota.models import Endpoint, LedgerWriter, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.monitoring.health import process_name, report
from django_ratequota.monitoring.rollup import forget_windows
from django_ratequota.runtime import default_limiter
from django_ratequota.store.base import Call
from django_ratequota.testing import unlimited
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.projects import run_python
from tests.support.spending import flush_all

Ask = Callable[..., Decision]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]

_DAY_US = 86_400 * 10**6


@pytest.fixture
def ask(alice: User) -> Ask:
    """Makes a request of alice's, under ten thousand units a month, or what the test says."""
    RatePolicy.objects.create(rates="10000/month")
    return lambda cost=1, scope=None: check_request(request_from(alice), scope, cost)


def used() -> list[tuple[int, int]]:
    return sorted(QuotaWindow.objects.values_list("charged", "refunded"))


# --- What is written. ---


def test_a_row_is_the_sum_of_what_was_charged_and_refunded(ask: Ask, alice: User, search: Endpoint) -> None:
    RatePolicy.objects.update(rates="80/month, 10 requests/month", endpoint=search)
    ask(60, "search").refund(30)
    decision = ask(5, "search")
    decision.charge(47)
    assert (flush(), used()) == (2, [(2, 0), (112, 30)])
    row, status = QuotaWindow.objects.get(charged=112), decision.statuses[0]
    assert (row.used, row.percent, row.limit) == (82, 102, 80), "a debt, too"
    assert (row.policy_id, row.endpoint_id, row.rate) == (RatePolicy.objects.get().pk, search.pk, "80/month")
    assert (row.subject, row.counter) == (f"user:{alice.pk}", counter_name(status.bucket))
    assert (row.ends_at - row.starts_at).total_seconds() * 10**6 == status.window_us
    assert row.starts_at.day == row.ends_at.day == 1
    assert list(QuotaDay.objects.filter(counter=row.counter).values_list("charged", "refunded")) == [(112, 30)]
    assert (flush(), book.ledger.raised) == (0, 0)


def test_other_rates_than_calendar_windows_are_not_kept(ask: Ask) -> None:
    for rates in ("10/min", "10/day", "10/hour fixed_window", "10/2days fixed_window", "unlimited"):
        RatePolicy.objects.update(rates=rates)
        ask().charge(2)
    assert flush() == 0


def test_what_charges_nothing_is_not_kept(ask: Ask) -> None:
    ask(0)
    assert flush() == 0
    RatePolicy.objects.update(rates="5/month", mode="log")  # it would have refused the second
    for _ in range(2):
        ask(4)
    assert (flush(), used()) == (1, [(4, 0)])


any_key = header_key("X-Key")
known_key = header_key("X-Key", known=str.isdecimal)


def own_unverified(request: Any) -> str:
    return "anything"


own_unverified.ratequota_verified = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "verified"),
    [
        *[(f"django_ratequota.identifiers.{name}", False) for name in ("network", "login_name", "login_pair")],
        *[(f"{__name__}.any_key", False), (f"{__name__}.known_key", True)],
        *[(f"{__name__}.own_unverified", False), ("tests.project.views.tenant", True)],
    ],
)
def test_rows_of_made_up_names(ask: Ask, alice: User, settings: Any, path: str, verified: bool) -> None:
    """6,000 anonymous addresses wrote 12,000 rows, and 40 requests kept 40 names that were typed at a login."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"kind": path}}
    for counted_per in ("kind", "ip"):
        RatePolicy.objects.create(rates="10000/month, 10000/day fixed_window", counted_per=counted_per)
    for durable, kinds in ((None, {"user", "kind"}), (True, {"user", "kind", "ip"}), (False, set())):
        RatePolicy.objects.update(durable=durable)
        ask()
        for number in range(40):
            headers = {"X-Key": str(number), "X-Tenant": str(number)}
            request = RequestFactory().post("/", {"username": f"name{number}"}, headers=headers)
            request.META["REMOTE_ADDR"], request.user = f"203.0.{number}.1", AnonymousUser()
            check_request(request)
            request.close()
        flush()
        subjects = {subject.partition(":")[0] for subject in QuotaWindow.objects.values_list("subject", flat=True)}
        assert subjects == (kinds if durable or verified else kinds - {"kind"})
        assert ("unverified   policies " in run("status")) == bool(durable)
        QuotaWindow.objects.all().delete()


def test_rows_of_kinds_without_a_function(settings: Any, checkpointing: None) -> None:
    """Their values are what code passes on, such as the recipients that people type."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"recipient": None}}
    RatePolicy.objects.create(rates="6/month", counted_per="recipient")
    check_caller(identifiers={"recipient": "victim@example.com"})
    assert (flush(), QuotaWindow.objects.count()) == (0, 0)


def test_a_table_that_refuses_each_row_loses_none(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of this app may have added a column during a rolling deploy."""
    RatePolicy.objects.update(rates="1000/month, 1000/day fixed_window")
    ask()

    def refuse(sums: Any) -> Any:
        raise IntegrityError("NOT NULL constraint failed")

    with monkeypatch.context() as patch:
        patch.setattr(rows, "add_once", refuse)
        flush()
    assert (flush(), QuotaWindow.objects.count()) == (2, 2)


def test_nothing_is_kept_without_checkpoint_seconds_or_in_test_runs(
    ask: Ask, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CHECKPOINT_SECONDS": 0}
    ask()
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CHECKPOINT_SECONDS": 10}
    monkeypatch.undo()  # as in other tests: the plugin has switched it off
    ask()
    monkeypatch.setattr(monitoring, "writes_rows", True)
    with unlimited():
        """The first of these helpers that a test run uses does so, too."""
    ask()
    assert flush() == 0


@pytest.mark.parametrize(
    ("subject", "units", "limit", "expected"),
    [
        ("user:poison", 2**62, 7, [(2**53 - 1, 2**53 - 1)]),
        ("api_key:\ud800\0", 4, 7, [(8, 8)]),
        ("user:poison", 4, -1, []),
    ],
    ids=["beyond all bounds", "text that databases refuse", "number that databases refuse"],
)
def test_a_row_that_the_database_refuses(
    ask: Ask, caplog: Any, subject: str, units: int, limit: int, expected: list[tuple[int, int]]
) -> None:
    """One counter above 9.2 * 10^16 ended the ledger of its process on PostgreSQL and MariaDB."""
    decision, rate = ask(4), Rate.parse("7/month")
    object.__setattr__(rate, "capacity", limit)
    bucket, at_us = decision.statuses[0].bucket, decision.at_us
    others = [replace(bucket, subject=f"user:{number}") for number in range(1000, 1040)]
    poison = replace(bucket, subject=subject, rate=rate)
    for written in (41, 40):
        for one in (*others, poison):
            some = units if one is poison else 1
            book.note([Entry(one, some, at_us), Entry(one, some, at_us, at_us)])
        assert flush() == written + len(expected)
    assert used() == sorted([(4, 0), *[(2, 2)] * 40, *expected])
    report()
    lost = 0 if expected else 16
    assert book.ledger.set_aside == lost
    assert (f"these units are not recorded: {counter_name(poison)} of " in caplog.text) == bool(lost)
    line = f"ledger       the database refused rows with {lost} units, see the logs of {process_name()}\n"
    assert (line in run("status")) == bool(lost)


def test_a_subject_that_a_database_s_encoding_lacks_spoils_no_other_figure(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a letter of a client's name in latin1: nothing of its process was written any more."""
    real = rows.add_once

    def refuse(sums: Any) -> Any:
        if not all(part.bucket.subject.isascii() for parts in sums.values() for part in parts):
            raise DataError("Incorrect string value")
        return real(sums)

    monkeypatch.setattr(rows, "add_once", refuse)
    decision = ask(4)
    bucket = replace(decision.statuses[0].bucket, subject="api_key:\U0001f600")
    book.note([Entry(bucket, 4, decision.at_us)])
    assert (flush(), used()) == (2, [(4, 0), (4, 0)])
    assert QuotaWindow.objects.filter(subject="api_key:\U0001f600\0").exists()


def test_a_connection_that_breaks_changes_no_name(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    real, errors = rows.add_once, [OperationalError(2006, "gone")]

    def fail_once(sums: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(sums)

    monkeypatch.setattr(rows, "add_once", fail_once)
    decision = ask(4)
    book.note([Entry(replace(decision.statuses[0].bucket, subject="api_key:ö"), 4, decision.at_us)])
    assert (flush(), used()) == (0, [])
    assert (flush(), used()) == (2, [(4, 0), (4, 0)])
    assert QuotaWindow.objects.filter(subject="api_key:ö").exists()


def test_a_mail_to_memory_stops_nothing(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """``mail.outbox`` stood for a test run, and one mail by Django's locmem backend ended all checkpoints."""
    monkeypatch.setattr(mail, "outbox", [], raising=False)
    ask(3)
    flush()
    assert used() == [(3, 0)]


def test_without_figures_no_limiter_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command writes a last checkpoint, also in projects without Redis."""
    monkeypatch.setattr(book, "default_limiter", lambda: pytest.fail("a limiter was made"))
    assert flush() == 0


# --- What goes wrong meanwhile. ---


@pytest.mark.parametrize("committed", [True, False])
def test_a_batch_whose_commit_is_in_doubt_is_added_once(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    real = book.add

    def add(*args: Any) -> Any:
        if committed:
            real(*args)
        raise DatabaseError("the connection is gone")

    ask(3)
    with monkeypatch.context() as patch:
        patch.setattr(book, "add", add)
        assert flush() == 0
        ask(4)
        assert flush() == 0
    assert flush() == 2  # by the batch in doubt, and by what came after it
    assert used() == [(7, 0)]


def test_a_flush_ends_although_requests_go_on(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch left what had come meanwhile for another: a busy process wrote without pause."""
    real, batches = book.add, list[int]()

    def add(*args: Any) -> Any:
        batches.append(len(args[0]))
        if len(batches) < 5:
            ask()
        return real(*args)

    ask(3)
    monkeypatch.setattr(book, "add", add)
    assert flush_all(), "what was noted before is written"
    assert (batches, used(), book.ledger.waits()) == ([1], [(3, 0)], True)


def test_a_database_that_hangs_loses_no_requests(ask: Ask) -> None:
    """Of more than 100,000 that nobody could add up meanwhile, the oldest were forgotten, and no log said so."""
    decision = ask()
    entry = Entry(decision.statuses[0].bucket, 1, decision.at_us)
    for _ in range(3):
        book.note([entry] * 50_000)
    assert len(book.ledger.entries) < 20_000
    flush()
    assert used() == [(150_001, 0)]


def test_of_too_many_counters_the_oldest_are_lost_and_the_log_says_so(caplog: Any) -> None:
    own, bucket = book.Ledger(), Bucket("user:1", Rate.parse("9/day fixed_window"), durable=True)
    days = [(counter_name(bucket), date(2025, 1, 1) + timedelta(days=number)) for number in range(5)]
    january = 1_735_689_600 * 10**6
    for some in (range(60_000), range(60_000, 100_003)):
        own.entries.extend(Entry(bucket, 1, january + number * _DAY_US) for number in some)
        waiting = own.unwritten(days, UTC)
    assert (list(waiting), own.waits()) == (days[3:], True)
    assert own.written_until() == pytest.approx(time.time(), abs=60), "it has written nothing yet"
    assert "of more than 100000 counters, the oldest are lost" in caplog.text


def test_a_writer_whose_row_is_gone_loses_nothing(ask: Ask) -> None:
    """As it wrote nothing for a month, or in a database that was restored from a backup."""
    ask(3)
    flush()
    LedgerWriter.objects.update(written_at=timezone.now() - timedelta(days=36))
    ask(1)
    assert (flush(), forget_windows()) == (1, 0), "it has written again"
    LedgerWriter.objects.create(id=uuid4(), batches=7, written_at=timezone.now())
    with time_machine.travel(timezone.now() + timedelta(days=34)):
        assert forget_windows() == 0
    LedgerWriter.objects.exclude(batches=7).update(written_at=timezone.now() - timedelta(days=36))
    assert forget_windows() == 1
    for _ in range(2):
        ask(4)
        assert flush() == 1
    assert (used(), set(LedgerWriter.objects.values_list("batches", flat=True))) == ([(12, 0)], {7, 4})


def test_a_server_that_fails_keeps_no_other_counters_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hung master of a Cluster took 10 s in each flush, and the counters behind its own were never raised."""
    limiter, own, do = default_limiter(), book.Ledger(), Call.do
    buckets = [Bucket(f"user:{number}", Rate.parse("9/day fixed_window"), durable=True) for number in range(501)]
    at_us = limiter.charge(buckets[-1:], 1).at_us
    bounds = book.window_of(buckets[0], at_us, limiter.time_zone)
    due = {(counter_name(bucket), bounds.first_day): (6, 0, bounds.ends_us) for bucket in buckets}
    own.owe(due)
    failures = [StoreError("timeout", "hung")]

    def fail_once(call: Call, command: Any) -> Any:
        if failures:
            raise failures.pop()
        return do(call, command)

    monkeypatch.setattr(Call, "do", fail_once)
    with pytest.raises(StoreError):
        own.raise_store(limiter)
    assert (list(own.due), limiter.peek(buckets[-1:]).remaining) == (list(due)[:500], 3)
    assert (own.raise_store(limiter), own.due) == (0, {}), "the others have no counter"


def test_rows_are_written_in_one_order(ask: Ask) -> None:
    """Processes that add to the same rows in different orders would deadlock."""
    decision = ask()
    bucket, at_us = decision.statuses[0].bucket, decision.at_us
    others = [replace(bucket, subject=f"user:{name}") for name in "gacdfbe"]
    book.note([Entry(other, 1, at_us) for other in others])
    flush()
    for model in (QuotaWindow, QuotaDay):
        counters = list(model.objects.order_by("pk").values_list("counter", flat=True))
        assert (counters, len(counters)) == (sorted(counters), 8)


def test_what_waits_is_late_while_it_cannot_be_written(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    moved, own = [time.time()], book.ledger
    monkeypatch.setattr(book, "time", SimpleNamespace(time=lambda: moved[0], monotonic=time.monotonic))

    def later(seconds: int) -> int:
        moved[0] += seconds
        return round(moved[0] - own.written_until())

    def fail(*_: Any) -> int:
        raise DatabaseError("gone")

    assert later(7) == 0, "nothing waits"
    ask()
    with monkeypatch.context() as context:
        context.setattr(book, "add", fail)
        flush()
        assert later(60) == 60, "it has never been able to write"
    flush()
    assert later(7) == 0
    ask()
    assert later(7) == 7, "an idle process is not late when it counts again"
    flush()
    assert later(0) == 0


_POOL_PROCESS = """
import sys, threading, types
from django.dispatch import Signal

ends, written, first = Signal(), [], threading.Event()
sys.modules["celery"] = types.ModuleType("celery")
sys.modules["celery.signals"] = types.SimpleNamespace(worker_process_shutdown=ends)
import django
from django.conf import settings
django.setup()
settings.RATEQUOTA = {**settings.RATEQUOTA, "CHECKPOINT_SECONDS": 3600}
from django_ratequota import Bucket, Rate
from django_ratequota.ledger import book, rows
from django_ratequota.monitoring import collector
from django_ratequota.monitoring.workers import redis_worker
from django_ratequota.runtime import process

assert process.policies.current() is None  # as the first check does
redis_worker.keep()

def add(sums, *_):
    written.append([rows.total_of(parts).charged for parts in sums.values()])
    first.set()
    return {}, 0

collector.counting.last = lambda: written.append("statistics")
book.add, bucket = add, Bucket("user:1", Rate.parse("9/month"), durable=True)
for units in (3, 4):
    book.note([book.Entry(bucket, units, 1_763_702_400_000_000)])
    assert first.wait(30)
ends.send(sender=None)
print(sorted(map(str, written)))
"""


def test_a_process_of_celery_s_pool_writes_what_waits_when_it_ends() -> None:
    """It runs none of Python's exit functions. With max_tasks_per_child=1 no statistics were sent at all."""
    environment = {"DJANGO_SETTINGS_MODULE": "tests.project.settings", "DATABASE_URL": "sqlite://:memory:"}
    assert run_python(_POOL_PROCESS, **environment) == ["['[3]', '[4]', 'statistics']"]
