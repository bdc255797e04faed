"""Refunds and resets where the row and Redis differ, of periods that are over, and with a key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import connection

from django_ratequota import Bucket, Decision, check_caller, check_request
from django_ratequota.changes.writer import changed_by
from django_ratequota.engine.keys import counter_name
from django_ratequota.exceptions import StoreError
from django_ratequota.ledger import book
from django_ratequota.ledger.book import flush, window_of
from django_ratequota.models import PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from django_ratequota.operations import counters
from django_ratequota.operations.counters import Correction, give_back, peek, recorded_buckets
from django_ratequota.operations.past_windows import Invoices, by_day, given_back
from django_ratequota.runtime import default_limiter
from django_ratequota.store.base import Call
from django_ratequota.utils.sansio import drive
from tests.project.views import request_from
from tests.support.connections import close_connections
from tests.support.windows import counted, of_day

Ask = Callable[..., Decision]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "checkpointing")]

OCTOBER = date(2025, 10, 1)


@pytest.fixture
def ask(alice: User) -> Ask:
    """Makes a request of alice's, under ten thousand units a month."""
    RatePolicy.objects.create(rates="10000/month")
    return lambda cost=1: check_request(request_from(alice), cost=cost)


@pytest.fixture
def bucket(ask: Ask) -> Bucket:
    """Alice's counter, of which nothing is used."""
    return ask(0).statuses[0].bucket


def row() -> QuotaWindow:
    return QuotaWindow.objects.get()


def both(bucket: Bucket) -> tuple[int, int]:
    """What the row and Redis say is used."""
    status = peek([bucket])[bucket]
    return sum(QuotaWindow.objects.values_list("used", flat=True)), status.used + status.debt


def written(bucket: Bucket, charged: int, refunded: int = 0) -> None:
    """Write the row as if workers had flushed this much."""
    limiter = default_limiter()
    bounds = window_of(bucket, limiter.now_us, limiter.time_zone)
    starts_at, ends_at = (datetime.fromtimestamp(at / 10**6, UTC) for at in bounds[:2])
    fields: dict[str, Any] = {"counter": counter_name(bucket), "policy_id": bucket.policy_id}
    made = counted(subject=bucket.subject, starts_at=starts_at, ends_at=ends_at, used=charged, limit=10_000, **fields)
    QuotaWindow.objects.filter(pk=made.pk).update(refunded=refunded)


def stored(bucket: Bucket, charged: int, refunded: int = 0, bounds: Any = None) -> None:
    """Raise Redis to what workers have charged and refunded, also those that were killed before they flushed."""
    limiter = default_limiter()
    bounds = bounds or window_of(bucket, limiter.now_us, limiter.time_zone)
    totals = {(counter_name(bucket), bounds.first_day): (charged, refunded, bounds.ends_us)}
    drive(limiter.backend.raise_counters(totals), Call(limiter.store).do)


# --- The row and Redis differ. ---


@pytest.mark.parametrize(("units", "left"), [(4990, 120), (None, 0)])
def test_what_a_killed_worker_had_refunded_is_taken_from_the_bill(
    bucket: Bucket, units: int | None, left: int
) -> None:
    """Redis says 120 and the row 5,110: the refund was refused, and a reset left an invoice of 4,990."""
    written(bucket, 5110)
    stored(bucket, 5110, 4990)
    [made] = give_back([bucket], units)
    assert both(bucket) == (left, left)
    flush()
    assert both(bucket) == (left, left)
    assert (made.used_before, made.used_after, made.units) == (5110, left, 5110 - left)
    with pytest.raises(ValidationError, match=f"Refund at most {left} to all endpoints: 10000/month"):
        give_back([bucket], left + 1)


def test_a_reset_of_what_a_killed_worker_had_charged_leaves_no_negative_bill(ask: Ask, bucket: Bucket) -> None:
    """The worker was killed with 600 units that no row has. The invoice of the next 500 was -100."""
    stored(bucket, 600)
    give_back([bucket])
    assert both(bucket) == (0, 0)
    ask(500)
    flush()
    assert both(bucket) == (500, 500)


def test_a_row_below_zero_is_zero_after_a_correction(bucket: Bucket) -> None:
    written(bucket, 500, 600)
    stored(bucket, 1100, 600)
    give_back([bucket])
    assert both(bucket) == (0, 0)


@pytest.mark.parametrize("in_row", [(0, 0), (7, 0), (30, 10), (40, 30)])
@pytest.mark.parametrize("in_redis", [(0, 0), (20, 0), (40, 5), (40, 38)])
@pytest.mark.parametrize("units", [None, 1, 12])
def test_both_sides_stay_within_their_bounds(
    bucket: Bucket, in_row: tuple[int, int], in_redis: tuple[int, int], units: int | None
) -> None:
    written(bucket, *in_row)
    stored(bucket, *in_redis)
    charged, refunded = (max(pair) for pair in zip(in_row, in_redis, strict=True))
    u_row, u_redis = in_row[0] - in_row[1], charged - min(charged, refunded)
    most = max(u_row, u_redis)
    if units is not None and units > most:
        with pytest.raises(ValidationError):
            give_back([bucket], units)
        assert both(bucket)[0] == u_row
        return
    give_back([bucket], units)
    taken = most if units is None else units
    assert both(bucket) == (max(0, u_row - taken), u_redis - max(0, taken - max(0, u_row - u_redis)))
    assert min(both(bucket)) >= 0
    before = both(bucket)
    stored(bucket, row().charged, row().refunded)
    assert both(bucket) == before, "Redis is not below the row"


def test_a_reset_right_after_a_request_leaves_nothing(ask: Ask, bucket: Bucket) -> None:
    ask(7)
    give_back([bucket])
    flush()
    assert both(bucket) == (0, 0)


def test_what_other_workers_have_not_written_stays_bounded(ask: Ask, bucket: Bucket) -> None:
    ask(30)
    flush()
    ask(12)
    waiting = list(book.ledger.entries)
    book.ledger.clear()
    give_back([bucket])
    assert both(bucket) == (0, 0)
    book.ledger.entries.extend(waiting)
    flush()
    assert both(bucket) == (12, 12), "those units alone are billed"


@pytest.mark.parametrize("units", [None, 100, 130])
def test_what_a_running_check_holds_is_billed_when_it_ends(
    ask: Ask, bucket: Bucket, alice: User, units: int | None
) -> None:
    ask(120)
    with check_caller(user=alice, cost=1000) as decision:
        flush()
        assert both(bucket) == (120, 1120)
        give_back([bucket], units)
        flush()
        left = max(0, 120 - (units or 120))
        in_row, in_redis = both(bucket)
        assert in_row == left
        assert in_redis <= left + 1000, "what is held may be used by others until it ends"
        decision.settle(10)
    flush()
    assert both(bucket) == (left + 10, left + 10)


# --- Periods that are over. ---


@pytest.fixture
def october(bucket: Bucket) -> Bucket:
    """Alice's counter, which has used 300 units in October."""
    fields: dict[str, Any] = {"counter": counter_name(bucket), "policy_id": bucket.policy_id}
    starts_at, ends_at = datetime(2025, 10, 1, tzinfo=UTC), datetime(2025, 11, 1, tzinfo=UTC)
    made = counted(subject=bucket.subject, starts_at=starts_at, ends_at=ends_at, used=300, limit=10_000, **fields)
    of_day(made, date(2025, 10, 3), 300)
    return bucket


def test_a_month_that_is_over_is_corrected_in_the_database_alone(
    october: Bucket, ask: Ask, redis_client: redis.Redis
) -> None:
    ask(40)
    flush()
    keys = set(redis_client.keys())
    [made] = give_back([october], 30, "Ticket 4711", first_day=OCTOBER)
    assert made == Correction(
        subject=october.subject, title="all/month", first_day=OCTOBER, used_before=300, used_after=270
    )
    assert set(redis_client.keys()) == keys
    assert peek([october])[october].used == 40
    [month] = by_day(QuotaWindow.objects.all(), OCTOBER)
    assert month.total == (300, 30)
    [(change, window, units)] = given_back([month])
    assert (change.reason, window.first_day, units) == ("Ticket 4711", OCTOBER, 30)
    [line] = Invoices(month="2025-10").lines()
    assert (line.used, line.complete) == (270, True)
    assert line.changed_at > datetime.now(UTC) - timedelta(hours=1)
    with pytest.raises(ValidationError, match="Refund at most 270 to"):
        give_back([october], 271, first_day=OCTOBER)
    give_back([october], first_day=OCTOBER)
    assert [one.used for one in QuotaWindow.objects.order_by("first_day")] == [0, 40]
    with pytest.raises(ValidationError, match=r"No usage is recorded for a period that began on 2025-09-01\."):
        give_back([october], first_day=date(2025, 9, 1))


def test_a_month_that_redis_still_has_is_corrected_there_too(ask: Ask, bucket: Bucket) -> None:
    """For four days, in which late refunds arrive."""
    written(bucket, 300)
    limiter = default_limiter()
    bounds = window_of(bucket, limiter.now_us, limiter.time_zone)
    stored(bucket, 320, 5)
    QuotaWindow.objects.update(
        starts_at=datetime.now(UTC) - timedelta(days=32), ends_at=datetime.now(UTC) - timedelta(days=1)
    )
    give_back([bucket], 100, first_day=bounds.first_day)
    assert both(bucket) == (200, 215)
    give_back([bucket], first_day=bounds.first_day)
    assert both(bucket) == (0, 0)


def test_a_month_is_corrected_whose_policies_are_gone(october: Bucket, settings: Any) -> None:
    long = "organisation_number"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {long: "tests.project.views.tenant"}}
    for per in ("tenant", long):
        named = Bucket("tenant:acme", october.rate, counted_per=per, policy_id=4711, endpoint_id=4712, durable=True)
        starts_at, ends_at = datetime(2025, 10, 1, tzinfo=UTC), datetime(2025, 11, 1, tzinfo=UTC)
        fields: dict[str, Any] = {"counter": counter_name(named), "policy_id": 4711, "endpoint_id": 4712}
        counted(subject="tenant:acme", starts_at=starts_at, ends_at=ends_at, used=300, limit=10_000, **fields)
    RatePolicy.objects.all().delete()
    found = recorded_buckets(QuotaWindow.objects.order_by("pk"))
    assert [(one.title, one.counted_per) for one in found] == [
        ("all/month", ""),
        ("#4712/month per tenant", "tenant"),
        (f"#4712/month per {long}", long),
    ]
    give_back(found, 100, first_day=OCTOBER)
    assert set(QuotaWindow.objects.values_list("used", "limit")) == {(200, 10_000)}
    assert QuotaWindow.objects.count() == 3
    assert set(QuotaDay.objects.values_list("policy_id", flat=True)) == {october.policy_id, 4711}


def test_without_counts_in_the_database_nothing_past_can_be_corrected(october: Bucket, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CHECKPOINT_SECONDS": 0}
    with pytest.raises(ValidationError, match=r"Past usage can be corrected only while it is kept in the database\."):
        give_back([october], first_day=OCTOBER)
    assert QuotaWindow.objects.get(first_day=OCTOBER).used == 300


# --- A key. ---


def test_a_second_call_with_the_key_returns_the_first_result(ask: Ask, bucket: Bucket) -> None:
    ask(100)
    first = give_back([bucket], 30, "Ticket 4711", key="evt_1")
    assert [(one.used_before, one.used_after, one.repeated) for one in first] == [(100, 70, False)]
    ask(5)
    for units, reason in ((30, "Ticket 4711"), (None, ""), (9, "Another"), (10**6, "")):
        again = give_back([bucket], units, reason, key="evt_1")
        assert again == first
        assert again[0].repeated
    assert give_back([], key="evt_1") == first
    flush()
    assert both(bucket) == (75, 75)
    assert PolicyChange.objects.get(model="counter").key == "evt_1"
    give_back([bucket], 30, key="evt_2")
    give_back([bucket], 1)
    give_back([bucket], 1)
    assert both(bucket) == (43, 43)


@pytest.mark.parametrize("key", ["x" * 65, "a\nb", "\x00", "\ud800"])
def test_keys_that_no_database_has_are_refused(bucket: Bucket, key: str) -> None:
    with pytest.raises(ValidationError, match=r"A key has at most 64 printable characters\."):
        give_back([bucket], key=key)


def test_a_key_is_of_all_counters_of_its_call(ask: Ask, alice: User) -> None:
    """Also where a script makes many corrections as one change."""
    RatePolicy.objects.update(rates="10000/month, 50/hour")
    RatePolicy.objects.create(rates="6/hour", counted_per="ip")
    buckets = [status.bucket for status in ask(5).statuses]
    with changed_by(alice, "Outage"):
        give_back(buckets[:1], 1)
        first = give_back(buckets, 2, key="evt_1")
        give_back(buckets[:1], 1, key="evt_2")
    assert len({one.subject for one in first}) == 2
    assert len(first) == len(buckets)
    assert give_back(buckets[:1], 2, key="evt_1") == first
    flush()
    used = {one.bucket.title: one.used for one in peek(buckets).values()}
    assert used.pop("all/month") == 1
    assert set(used.values()) == {3}


def test_a_failure_leaves_the_key_to_the_next_attempt(
    ask: Ask, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(50)

    def fail(*_: Any, **__: Any) -> Any:
        raise StoreError("timeout", "gone")

    with monkeypatch.context() as patch:
        patch.setattr(counters.corrections, "refund", fail)
        with pytest.raises(StoreError):
            give_back([bucket], 20, key="evt_1")
    assert not PolicyChange.objects.filter(model="counter").exists()
    give_back([bucket], 20, key="evt_1")
    assert both(bucket) == (30, 30)


def test_the_loser_of_two_calls_at_once_reads_the_winners_result(
    ask: Ask, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(50)
    first, real, looked = give_back([bucket], 20, key="evt_1"), counters.made_with, list[str]()
    # Both looked before either had written.
    monkeypatch.setattr(counters, "made_with", lambda key: looked.append(key) or (real(key) if looked[1:] else ()))
    assert give_back([bucket], 25, key="evt_1") == first
    assert both(bucket) == (30, 30)
    assert len(looked) == 2


@pytest.mark.slow
def test_threads_with_one_key_refund_once(ask: Ask, bucket: Bucket) -> None:
    ask(50)
    flush()
    together = connection.vendor != "sqlite"  # one in memory has a lock for all, and waits for none
    barrier, found = threading.Barrier(4 if together else 1), list[Any]()

    def refund() -> None:
        try:
            barrier.wait()
            found.append(give_back([bucket], 10, key="evt_1"))
        finally:
            close_connections()

    threads = [threading.Thread(target=refund) for _ in range(4)]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found))) == (4, 1)
    assert [one[0].repeated for one in found].count(False) == 1
    flush()
    assert both(bucket) == (40, 40)
