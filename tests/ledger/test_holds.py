"""Units of checks that have not ended: held, and nobody's bill until then."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
import redis
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.db import OperationalError, connection
from django.db.models.functions import Now
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncRequestFactory, RequestFactory

from django_ratequota import Decision, acheck_caller, acheck_request, check_caller, check_request, peek_caller
from django_ratequota.ledger import batches, book, writers
from django_ratequota.ledger.book import flush
from django_ratequota.ledger.writers import SILENT
from django_ratequota.middleware import RateQuotaMiddleware
from django_ratequota.models import Endpoint, LedgerWriter, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.operations.held_data import forget
from django_ratequota.operations.invoice_lines import lines_of
from django_ratequota.runtime import default_limiter
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]

Row = tuple[int, int, int]


@pytest.fixture
def policy() -> RatePolicy:
    return RatePolicy.objects.create(rates="20000/month")


@pytest.fixture
def reserve(alice: User, policy: RatePolicy) -> Callable[[], Decision]:
    """Makes a request of alice's that reserves 1000 units and runs on; the decision has it as an attribute."""
    requests: list[Any] = []

    def reserve(cost: int = 1000) -> Decision:
        requests.append(request_from(alice))
        return check_request(requests[-1], cost=cost)

    reserve.requests = requests  # type: ignore[attr-defined]
    return reserve


def row() -> Row:
    """Return what the only window has charged, refunded and held."""
    (found,) = QuotaWindow.objects.values_list("charged", "refunded", "held")
    return found


def counter(client: redis.Redis) -> tuple[int, int]:
    """Return what the only durable counter in Redis has charged and refunded."""
    (key,) = client.keys("rqtest:{*fw*")
    charged, refunded = struct.unpack(">dd", client.get(key) or b"")  # type: ignore[arg-type]
    return charged, refunded


def kill() -> None:
    """Replace this process's ledger by that of a new one."""
    book.ledger.clear()


def wait_ten_minutes() -> None:
    LedgerWriter.objects.update(written_at=Now() - timedelta(minutes=11))


def drop() -> None:
    book.drop()
    book.raise_store()


# --- From the check to its end. ---


def test_a_request_that_runs_is_held_and_then_charged_and_refunded_at_once(
    reserve: Any, redis_client: redis.Redis
) -> None:
    decision = reserve()
    flush()
    assert (row(), counter(redis_client)) == ((0, 0, 1000), (1000, 0))
    decision.settle(10)
    flush()
    assert (row(), counter(redis_client)) == ((1000, 990, 0), (1000, 990))
    decision.refund(4)
    flush()
    assert (row(), counter(redis_client)) == ((1000, 994, 0), (1000, 994))


@pytest.mark.parametrize("end", ["close", "same units", "charge", "garbage"])
def test_what_ends_a_check(reserve: Any, end: str) -> None:
    decision = reserve()
    flush()
    assert row() == (0, 0, 1000)
    if end == "close":
        reserve.requests.pop().close()
    elif end == "same units":
        decision.settle(1000)
    elif end == "charge":
        decision.charge(5)
    else:
        reserve.requests.clear()
        gc.collect()
    flush()
    assert row() == (1005 if end == "charge" else 1000, 0, 0)


def test_a_request_that_ends_within_a_second_is_never_held(reserve: Any) -> None:
    reserve().settle(10)
    reserve()
    reserve.requests[-1].close()
    flush()
    assert row() == (2000, 990, 0)


def test_checks_without_a_request(alice: User, policy: RatePolicy) -> None:
    decision = check_caller(user=alice, cost=1000)
    flush()
    assert row() == (1000, 0, 0), "final at once"
    decision.settle(10)
    with check_caller(user=alice, cost=1000) as held:
        flush()
        assert row() == (1000, 990, 1000)
        held.settle(1)
        flush()
        assert row() == (2000, 1989, 0)
    with pytest.raises(ValueError, match="half"), check_caller(user=alice, cost=1000):
        raise ValueError("half of the work")
    flush()
    assert row() == (3000, 1989, 0)


def test_checks_without_a_request_awaited(alice: User, policy: RatePolicy) -> None:
    async def check() -> None:
        async with await acheck_caller(user=alice, cost=1000) as decision:
            await sync_to_async(flush)()
            assert await sync_to_async(row)() == (0, 0, 1000)
            await decision.asettle(30)

    async_to_sync(check)()
    flush()
    assert row() == (1000, 970, 0)


def test_units_refunded_by_the_status_end_with_it(alice: User, policy: RatePolicy, search: Endpoint) -> None:
    Endpoint.objects.update(charged_statuses="2xx")
    RatePolicy.objects.update(endpoint=search)
    found = []

    def view(request: Any) -> HttpResponse:
        request.user = alice
        check_request(request, "search", 50)
        flush()
        found.append(row())
        return HttpResponse(status=500)

    RateQuotaMiddleware(view)(RequestFactory().get("/"))
    flush()
    assert (found, row()) == ([(0, 0, 50)], (50, 50, 0))


@pytest.mark.parametrize("streaming", [False, True])
def test_the_middleware_notices_the_end(alice: User, policy: RatePolicy, streaming: bool) -> None:
    found = []

    def parts() -> Iterator[bytes]:
        flush()
        found.append(row())
        yield b"part"

    def view(request: Any) -> Any:
        request.user = alice
        check_request(request, cost=7)
        return StreamingHttpResponse(parts()) if streaming else HttpResponse()

    request = RequestFactory().get("/")
    response = RateQuotaMiddleware(view)(request)
    if streaming:
        assert list(response) == [b"part"]
    flush()
    assert (found, row()) == ([(0, 0, 7)] * streaming, (7, 0, 0))
    response.close()


def test_an_awaited_stream_is_held_to_its_end(alice: User, policy: RatePolicy) -> None:
    async def parts() -> Any:
        yield b"part"
        await asyncio.sleep(0)  # a turn of the loop, as between two parts

    async def view(request: Any) -> Any:
        request.user = alice
        await acheck_request(request, cost=7)
        return StreamingHttpResponse(parts())

    async def stream() -> None:
        response = await RateQuotaMiddleware(view)(AsyncRequestFactory().get("/"))
        await sync_to_async(flush)()
        assert await sync_to_async(row)() == (0, 0, 7)
        assert [part async for part in response] == [b"part"]

    async_to_sync(stream)()
    flush()
    assert row() == (7, 0, 0)


def test_an_error_of_the_view_ends_the_request(alice: User, policy: RatePolicy) -> None:
    def view(request: Any) -> Any:
        request.user = alice
        check_request(request, cost=7)
        raise ValueError("broken")

    request = RequestFactory().get("/")
    with pytest.raises(ValueError, match="broken"):
        RateQuotaMiddleware(view)(request)
    flush()
    assert row() == (7, 0, 0)


# --- Killed workers. ---


def test_nobody_is_billed_for_the_reservations_of_a_killed_worker(reserve: Any, redis_client: redis.Redis) -> None:
    """Ten streams of 1000 units were half a month of a plan, for good."""
    for _ in range(10):
        reserve()
    flush()
    kill()
    drop()
    assert (row(), counter(redis_client)) == ((0, 0, 10_000), (10_000, 0)), "it may live"
    wait_ten_minutes()
    drop()
    assert (row(), counter(redis_client)) == ((10_000, 10_000, 0), (10_000, 10_000))
    drop()
    assert row() == (10_000, 10_000, 0)
    assert not QuotaWindow.objects.exclude(used=0).exists()
    assert list(QuotaDay.objects.values_list("charged", "refunded")) == [(10_000, 10_000)]


def test_a_worker_that_is_silent_and_lives_is_billed_once(reserve: Any, redis_client: redis.Redis) -> None:
    decision, other = reserve(), reserve(500)
    flush()
    wait_ten_minutes()
    drop()  # by another worker
    assert row() == (1500, 1500, 0)
    decision.settle(10)
    flush()
    assert row() == (2500, 2490, 500), "it begins without open units"
    assert counter(redis_client) == (3000, 2490)
    other.settle(2)
    flush()
    assert row() == (3000, 2988, 0)
    assert counter(redis_client) == (3000, 2988)


def test_a_worker_with_open_checks_writes_once_a_minute(reserve: Any) -> None:
    reserve(400)
    reserve(600)
    assert [flush(), flush()] == [1, 0], "what has not changed is not written again"
    wait_ten_minutes()
    flush()
    drop()
    assert row() == (1000, 1000, 0), "it has written nothing for a minute"
    book.ledger._renewed_at -= 61
    flush()
    flush()
    assert row() == (1000, 1000, 1000)
    wait_ten_minutes()
    book.ledger._renewed_at -= 61
    changed = QuotaWindow.objects.get().written_at
    flush()
    drop()
    assert row() == (1000, 1000, 1000)
    assert QuotaWindow.objects.get().written_at == changed, "the bill is the same"


def test_of_two_workers_one_drops_a_third(reserve: Any) -> None:
    reserve()
    flush()
    wait_ten_minutes()
    (writer,) = writers.silent()
    assert isinstance(writer, UUID)
    assert list(writers.take(writer).values()) == [1000]
    assert writers.take(writer) == {}


def test_units_that_are_held_are_restored(reserve: Any, redis_client: redis.Redis) -> None:
    """Without them all open reservations could be made again."""
    reserve(8000)
    flush()
    book.ledger.clear()  # another worker's
    reserve(6000)
    flush()
    reserve(1000)
    redis_client.flushall()
    assert not reserve(6000).allowed
    assert counter(redis_client) == (15_000, 0)
    assert reserve(5000).allowed


def test_a_batch_that_fails_changes_the_level_once(reserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add = book.add

    def fail(*args: Any) -> Any:
        add(*args)
        raise OperationalError("the reply to COMMIT is lost")

    decision = reserve()
    for settle in (lambda: None, partial(decision.settle, 10)):
        settle()
        with monkeypatch.context() as patch:
            patch.setattr(book, "add", fail)
            flush()
        flush()
    assert row() == (1000, 990, 0)


def test_forgetting_a_customer_whose_stream_runs(reserve: Any, alice: User) -> None:
    """The name came back with -990."""
    decision = reserve()
    flush()
    forget(f"user:{alice.pk}")
    assert row() == (0, 0, 0)
    decision.settle(10)
    flush()
    assert sorted(QuotaWindow.objects.values_list("charged", "refunded", "held")) == [(0, 0, 0), (1000, 990, 0)]


# --- Interruptions and failures. ---


class Stop(Exception):
    """What a signal handler raises."""


def test_the_row_has_the_limit_in_force(alice: User) -> None:
    RatePolicy.objects.create(rates="1000/month")
    request = request_from(alice)
    decision = check_request(request, cost=100)
    flush()
    RatePolicy.objects.update(rates="10000/month")
    check_request(request_from(alice), cost=4000)
    flush()
    assert QuotaWindow.objects.get().limit == 10_000
    decision.settle(50)
    flush()
    assert QuotaWindow.objects.get().limit == 10_000


class Interrupted(dict[Any, Any]):
    """A dict that a signal interrupts right after units were added to it."""

    def __ior__(self, other: Any) -> Any:
        super().__ior__(other)
        if other:
            raise Stop
        return self


def during_a_batch(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Flush, and do ``work`` on a request's thread once while the database has the batch; then flush again."""
    real, done = batches.add, []

    def add(*args: Any) -> Any:
        found = real(*args)
        if not done:
            done.append(True)
            work()
        return found

    monkeypatch.setattr(book, "add", add)
    for _ in range(3):
        flush()


def add_up() -> None:
    """As a request does that finds many entries."""
    book.ledger.add_up(default_limiter().time_zone)


def test_an_interrupted_addition_is_not_counted_twice(reserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        reserve().settle(500)
        book.ledger._sums = Interrupted(book.ledger._sums)
        with suppress(Stop):
            add_up()
        book.ledger._sums = dict(book.ledger._sums)

    reserve().settle(1000)
    during_a_batch(monkeypatch, interrupt)
    assert row() == (2000, 500, 0)


def test_an_interruption_leaves_no_units_held(reserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decision = reserve()
    flush()

    def interrupt() -> None:
        decision.settle(10)
        with monkeypatch.context() as patch, suppress(Stop):
            patch.setattr(book.ledger, "_sum_up", stop)
            add_up()

    def stop() -> None:
        raise Stop

    reserve().settle(7)
    during_a_batch(monkeypatch, interrupt)
    assert row() == (2000, 1983, 0)


def test_what_has_ended_is_not_written_yet(reserve: Any) -> None:
    reserve()
    flush()
    assert not book.ledger.waits()
    reserve.requests.pop().close()
    assert book.ledger.waits()


def test_a_forgotten_window_is_no_longer_held(reserve: Any, alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve()
    flush()
    assert row() == (0, 0, 1000)
    monkeypatch.setattr(book, "_MOST", 1)
    reserve.requests.pop().close()
    # The database does not answer; the window is among the oldest ones.
    bob = User.objects.create(username="bob")
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> Any:
            raise OperationalError("gone")

        patch.setattr(book, "add", fail)
        book.ledger.add_up(default_limiter().time_zone)
        check_request(request_from(bob), cost=1).settle(1)
        book.ledger.add_up(default_limiter().time_zone)
    flush()
    flush()
    assert QuotaWindow.objects.get(subject=f"user:{alice.pk}").held == 0


def test_a_failure_does_not_forget_what_others_were_refunded(
    reserve: Any, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        reserve()
        flush()
        kill()
    wait_ten_minutes()
    real, calls = batches.rows.add_once, []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OperationalError("gone")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(batches.rows, "add_once", fail)
        with pytest.raises(OperationalError):
            book.drop()
    book.raise_store()
    [status] = peek_caller(user=alice).statuses
    assert status.used == 1000, "one of two was refunded, in the row and in Redis"


def test_last_day_is_not_that_of_a_dropped_writer(reserve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve().settle(1000)
    reserve()
    flush()
    kill()
    wait_ten_minutes()
    today = book.local_day
    monkeypatch.setattr(book, "local_day", lambda at_us, zone: today(at_us, zone) + timedelta(days=40))
    drop()
    [[line]] = lines_of([[QuotaWindow.objects.get()]])
    assert line.used == 1000
    assert line.last_day == today(default_limiter().now_us, UTC)


def test_a_check_in_a_streamed_body_ends_with_it(alice: User, policy: RatePolicy) -> None:
    request = request_from(alice)  # requests with a user are cycles, so they live on until the garbage collection

    def body() -> Any:
        check_request(request, cost=1000)
        yield b"1"

    response = RateQuotaMiddleware(lambda _request: StreamingHttpResponse(body()))(request)
    response._resource_closers.append(request.close)
    assert b"".join(response) == b"1"
    response.close()
    flush()
    assert row() == (1000, 0, 0)


def test_other_time_zone_of_the_session(reserve: Any) -> None:
    if connection.vendor != "mysql":
        pytest.skip("MariaDB alone has a clock in the time zone of the session")
    with connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+01:00'")
        reserve()
        flush()
        cursor.execute("SET time_zone = '+02:00'")  # as at the begin of summer time
    drop()
    assert row() == (0, 0, 1000)


def test_a_busy_worker_that_was_dropped_holds_again(reserve: Any) -> None:
    reserve()
    flush()
    wait_ten_minutes()
    drop()
    book.ledger._renewed_at -= 61
    for _ in range(3):
        reserve().settle(1)
        flush()
    assert row() == (4000, 3997, 1000)


@pytest.mark.parametrize("seconds", [300, 3600])
def test_no_setting_leaves_a_writer_silent(settings: Any, seconds: int) -> None:
    """At 601 seconds, each worker dropped its own open requests."""
    settings.RATEQUOTA = settings.RATEQUOTA | {"CHECKPOINT_SECONDS": seconds}
    assert book.writing.seconds() * 2 <= SILENT.total_seconds()
