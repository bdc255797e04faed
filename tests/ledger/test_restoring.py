"""What Redis has lost is restored from the ledger, before a request is counted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.db import DatabaseError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_ratequota import Decision, check_request
from django_ratequota.exceptions import StoreError
from django_ratequota.ledger import book, restoring
from django_ratequota.ledger.book import flush
from django_ratequota.models import QuotaWindow, RatePolicy
from django_ratequota.monitoring.workers import redis_worker
from django_ratequota.operations.caller_limits import caller_limits
from django_ratequota.operations.counters import give_back, peek
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.runtime import default_limiter
from django_ratequota.store.base import Call
from django_ratequota.utils.problems import recent
from tests.project.views import request_from

Ask = Callable[..., Decision]
Lose = Callable[[], None]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]


@pytest.fixture
def ask(alice: User) -> Ask:
    """Makes a request of alice's, under ten units a month, or what the test says."""
    RatePolicy.objects.create(rates="10/month")
    return lambda cost=1: check_request(request_from(alice), cost=cost)


@pytest.fixture
def lose(redis_client: redis.Redis) -> Lose:
    """Writes the ledger, and loses what Redis has counted."""
    return lambda: flush() and redis_client.flushall()


def used() -> list[int]:
    return sorted(QuotaWindow.objects.values_list("used", flat=True))


def test_what_redis_lost_is_back_before_the_next_request_is_counted(ask: Ask, redis_client: redis.Redis) -> None:
    RatePolicy.objects.update(rates="100/month, 100000/day")
    ask(90)
    flush()
    ask(5)  # not written yet
    redis_client.flushall()
    refused = ask(6)
    assert (refused.allowed, [status.remaining for status in refused.statuses]) == (False, [5, 100_000])
    assert [status.remaining for status in ask(5).statuses] == [0, 99_995]
    assert not ask().allowed
    flush()
    assert used() == [100]


def test_what_redis_lost_is_raised_by_no_older_row(ask: Ask, redis_client: redis.Redis) -> None:
    """A process that had to wait for Redis made the counter by its own last row, and no request restored it."""
    late = book.Ledger()
    bucket, entries = ask(4).statuses[0].bucket, book.ledger.entries
    late.entries, book.ledger.entries = entries, late.entries
    late.write(default_limiter().time_zone)
    ask(3)
    flush()
    redis_client.flushall()
    late.raise_store(default_limiter())
    assert redis_client.keys("rqtest:{*") == []
    assert ask().remaining == 2
    assert peek([bucket])[bucket].used == 8


def test_a_refused_first_request_forgets_nothing(ask: Ask, lose: Lose) -> None:
    everyone = RatePolicy.objects.create(rates="1/month", counted_per="everyone")
    ask()
    lose()
    assert not ask().allowed
    everyone.delete()
    assert ask().remaining == 8


def test_a_request_reads_nothing_itself_and_each_counter_once(
    ask: Ask, lose: Lose, monkeypatch: pytest.MonkeyPatch
) -> None:
    RatePolicy.objects.update(rates="10/month, 9/week fixed_window, 8/day fixed_window")
    RatePolicy.objects.create(rates="100/month", counted_per="everyone")
    read: list[int] = []
    real = restoring.rows_of
    monkeypatch.setattr(restoring, "rows_of", lambda windows: read.append(len(windows)) or real(windows))
    ask()
    lose()
    with CaptureQueriesContext(connection) as queries:
        assert [status.remaining for status in ask().statuses] == [8, 7, 6, 98]
        ask()
    assert not any("quotawindow" in query["sql"] for query in queries)
    assert read == [4, 4], "before the first request, and after the loss"


def test_without_the_database_requests_go_on(ask: Ask, lose: Lose, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(6)
    lose()

    def fail(*_: Any) -> Any:
        raise DatabaseError("gone")

    with monkeypatch.context() as context:
        context.setattr(restoring, "rows_of", fail)
        assert ask().remaining == 9
    flush()
    assert book.ledger.raised == 6
    assert ask().remaining == 2, "the next flush raises what was counted on without"


def test_a_database_that_does_not_answer_delays_a_request_by_its_timeout(
    ask: Ask, settings: Any, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings.RATEQUOTA
    settings.RATEQUOTA = {**before, "TIMEOUT": 0.05}
    locked, real = threading.Event(), restoring.rows_of
    monkeypatch.setattr(restoring, "rows_of", lambda windows: locked.wait(20) and real(windows))
    began_at = time.monotonic()
    assert ask().remaining == 9
    assert time.monotonic() - began_at < 5
    assert recent()["restoring"].endswith(": too slow")
    locked.set()
    settings.RATEQUOTA = {**before, "TIMEOUT": 30}
    redis_client.flushall()
    assert ask().remaining == 8, "the next request is answered again"


# --- What operators do and see. ---


@pytest.mark.parametrize(("units", "left"), [(None, 0), (3, 4)])
@pytest.mark.parametrize("noticed", [True, False], ids=["before a loss", "after a loss that nobody has noticed"])
def test_what_operators_give_back_is_not_lost_again(
    ask: Ask, lose: Lose, redis_client: redis.Redis, units: int | None, left: int, noticed: bool
) -> None:
    bucket = ask(7).statuses[0].bucket
    flush() if noticed else lose()
    give_back([bucket], units, reason="A mistake of ours")
    assert used() == [left], "written at once"
    if noticed:
        redis_client.flushall()
    assert ask().remaining == 10 - left - 1


def test_redis_gets_a_reset_that_it_missed_by_the_next_flush(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full counter is charged no more, so no batch of its own raised it: it stayed full until the month's end."""

    def fail(*_: Any) -> None:
        raise StoreError("connection", "gone")

    bucket, kept = ask(10).statuses[0].bucket, list[None]()
    flush()
    monkeypatch.setattr(redis_worker, "keep", lambda: kept.append(None))
    with monkeypatch.context() as patch:
        with transaction.atomic():
            give_back([bucket], reason="A mistake of ours")
            assert kept, "there is a next one, also where nothing has been counted"
            patch.setattr(Call, "do", fail)
        with pytest.raises(StoreError):
            flush()
    assert peek([bucket])[bucket].used == 10
    flush()
    assert (used(), peek([bucket])[bucket].used) == ([0], 0)


def test_a_reset_ends_the_refusals_that_a_worker_repeats(ask: Ask, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "DENY_CACHE_SECONDS": 60}
    bucket = ask(10).statuses[0].bucket
    assert not ask().allowed
    give_back([bucket])
    assert ask().allowed


def test_two_resets_at_once_give_back_once(ask: Ask) -> None:
    """The second had read the counter before the first was carried out: the row became -10."""
    bucket = ask(10).statuses[0].bucket
    flush()
    with transaction.atomic():
        give_back([bucket])
        assert peek([bucket])[bucket].used == 10
        give_back([bucket])
    flush()
    assert (used(), peek([bucket])[bucket].used) == ([0], 0)


def test_without_redis_nothing_is_given_back_in_the_database(ask: Ask, settings: Any) -> None:
    """The row had refunds without the charges, and was below zero."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "memory://"}
    give_back([ask(7).statuses[0].bucket])
    assert (ask().remaining, flush(), used()) == (9, 0, [])


def test_pages_and_clients_see_what_will_be_restored(ask: Ask, lose: Lose, alice: User) -> None:
    bucket = ask(7).statuses[0].bucket
    lose()
    caller = DescribedCaller(user_id=str(alice.pk), address=None)
    [(_, status)] = caller_limits(caller).limits
    assert status is not None
    assert status.remaining == 3
    assert peek([bucket])[bucket].remaining == 3
    assert explain_caller(caller, scope=None).decision.remaining == 3


def test_regions_that_share_the_database_share_calendar_windows(ask: Ask, settings: Any) -> None:
    here = settings.RATEQUOTA
    there = {**here, "PREFIX": "rqtest:there"}  # as good as a server of its own
    left = []
    for region in (here, there, here, here):
        settings.RATEQUOTA = region
        left.append(ask().remaining)
        flush()
    # The other region's unit is known with the first write after it.
    assert left == [9, 8, 8, 6]
    assert used() == [4]


def test_rows_that_are_written_while_a_request_waits_are_restored(
    ask: Ask, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process had noted was added up after the rows were read, when it was in a batch: it was in neither."""
    ask(3)
    flush()
    ask(4)  # not written yet
    redis_client.flushall()
    real = restoring._wait
    monkeypatch.setattr(restoring, "_wait", lambda rows: (real(rows), book.write())[0])
    assert ask().remaining == 2


def test_an_alarm_that_rings_while_a_request_waits_reaches_it(
    alice: User, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for a database that is too slow, and the request was counted from 0."""
    RatePolicy.objects.create(rates="10/month")
    check_request(request_from(alice))
    book.flush()
    redis_client.flushall()
    over = threading.Event()
    monkeypatch.setattr(restoring, "rows_of", lambda _windows: over.wait(30) and {})

    def ring(*_: object) -> None:
        raise TimeoutError("the task's time is over")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(TimeoutError, match="the task's time is over"):
            check_request(request_from(alice))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        over.set()
