"""Durable counts: checkpoints in the database, and what is restored from them after Redis has lost its data."""

from __future__ import annotations

import csv
import io
import json
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import time_machine
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.db import DatabaseError, OperationalError, connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django_ratequota.monitoring.checkpoints import flush
from django_ratequota.monitoring.seeds import Seeds, seeds

from django_ratequota import Bucket, Decision, check_request
from django_ratequota.conf import settings as own_settings
from django_ratequota.enforcement import decide
from django_ratequota.engine.keys import birth_key, bucket_key
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, QuotaWindow, RatePolicy
from django_ratequota.monitoring import checkpoint_rows, checkpoints
from django_ratequota.monitoring import seeds as seeds_module
from django_ratequota.monitoring.background import Background
from django_ratequota.monitoring.rollup import forget_windows
from django_ratequota.operations.caller_limits import caller_limits
from django_ratequota.operations.counters import grant, peek, reset
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.runtime import default_limiter, process
from django_ratequota.utils.locks import ForkSafeLock
from django_ratequota.utils.sansio import drive
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.connections import close_connection

Ask = Callable[..., Decision]
Later = Callable[[float], None]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "redis_client")]


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checkpoints are written when a test says so."""
    for module in (checkpoints, seeds_module):
        monkeypatch.setattr(module, "in_test_run", lambda: False)
    monkeypatch.setattr(Background, "keep", lambda _: None)
    checkpoints.forget()
    seeds.forget()
    yield
    checkpoints.forget()
    seeds.forget()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Moves the process's clock."""
    moved = [0.0]
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: moved[0]))
    return lambda seconds: moved.__setitem__(0, moved[0] + seconds)


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
    assert (row.used, row.limit, row.rate, row.at_us) == (7, 100, "100/month", decisions[-1].at_us)
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
    checkpoints.forget()
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


def test_processes_never_lower_each_other_s_figure(ask: Ask) -> None:
    ask()
    older = dict(checkpoints._dirty)
    ask()
    ask()
    flush()
    checkpoints._dirty.update(older)
    assert (flush(), used()) == (0, [3])


def test_a_refund_by_another_process_is_no_loss(ask: Ask) -> None:
    """Its figure is written after ours, which is newer and lower than the row."""
    decision = ask(5)
    flush()
    decision.refund(2)
    others = dict(checkpoints._dirty)
    checkpoints.forget()
    ask()  # 4
    before = default_limiter().stored_revision()
    flush()
    assert used() == [5], "not lowered yet"
    for key, figure in others.items():
        checkpoints._keep(key, figure)
    flush()
    assert (used(), default_limiter().stored_revision()) == ([4], before)


def test_while_the_database_is_down_figures_wait(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask()

    def fail(*_: Any) -> int:
        raise DatabaseError("gone")

    with monkeypatch.context() as context:
        context.setattr(checkpoints, "write", fail)
        assert flush() == 0
    ask()
    flush()
    assert used() == [2]


@pytest.mark.parametrize(("error", "tries"), [(OperationalError, 3), (DatabaseError, 10)])
def test_while_the_database_does_not_answer_few_statements_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], tries: int
) -> None:
    """Each of 200 batches waited for a timeout, and so did the end of the process."""
    RatePolicy.objects.create(rates="10/month")
    for user in User.objects.bulk_create(User(username=f"u{n}") for n in range(10)):
        check_request(request_from(user))
    monkeypatch.setattr(checkpoints, "_BATCH", 1)
    tried = []

    def fail(*arguments: Any) -> int:
        tried.append(arguments)
        raise error("timeout expired")

    with monkeypatch.context() as context:
        context.setattr(checkpoints, "write", fail)
        assert (flush(), len(tried)) == (0, tries)
    assert flush() == 10


def test_a_refund_is_written_once_although_the_rest_of_its_batch_fails(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures without a row are inserted after the others are written; only these are tried again."""
    ask(6)
    late = ask()
    lose()
    late.refund(1)
    check_request(request_from(User.objects.create(username="bob")))

    def fail(*_: Any) -> None:
        raise DatabaseError("gone")

    with monkeypatch.context() as context:
        context.setattr(checkpoint_rows, "_row", fail)
        flush()
    assert used() == [6]
    flush()
    assert sorted(used()) == [1, 6]


def test_the_age_of_the_checkpoint_grows_while_figures_cannot_be_written(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, later: Later
) -> None:
    assert checkpoints.age() is None
    ask()
    assert checkpoints.age() is None, "nothing was written yet, and nothing should have been"
    flush()
    assert checkpoints.age() == 0
    later(7)
    assert checkpoints.age() == 0, "nothing waits"
    ask()
    assert checkpoints.age() == 7

    def fail(*_: Any) -> int:
        raise DatabaseError("gone")

    with monkeypatch.context() as context:
        context.setattr(checkpoints, "write", fail)
        later(60)
        assert not checkpoints.flush_all()
    assert checkpoints.age() == 67
    assert checkpoints.flush_all()
    assert checkpoints.age() == 0


def test_the_last_checkpoint_waits_for_the_one_that_is_being_written(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ended meanwhile lost it: its threads end in the middle of the transaction."""
    ask()
    write, begun, go_on = checkpoints.write, threading.Event(), threading.Event()

    class Lock(ForkSafeLock):
        def __enter__(self) -> None:
            if begun.is_set():
                go_on.set()  # somebody waits
            super().__enter__()

    def slowly(*args: Any) -> int:
        begun.set()
        assert go_on.wait(60)
        return write(*args)

    def in_a_thread() -> None:
        flush()
        close_connection()

    monkeypatch.setattr(checkpoints, "write", slowly)
    monkeypatch.setattr(checkpoints, "_write_lock", Lock())
    thread = threading.Thread(target=in_a_thread)
    thread.start()
    assert begun.wait(60)
    try:
        assert checkpoints.flush_at_exit()
        assert used() == [1]
    finally:
        go_on.set()
        thread.join()


def test_many_counters_take_few_statements(django_assert_max_num_queries: Any) -> None:
    RatePolicy.objects.create(rates="10/month")
    users = User.objects.bulk_create(User(username=f"u{n}") for n in range(40))
    for user in users:
        check_request(request_from(user))
    with django_assert_max_num_queries(14):
        assert flush() == 40
    for user in users:
        check_request(request_from(user))
    with django_assert_max_num_queries(6):
        assert flush() == 40


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


def test_what_is_lost_is_what_was_admitted_since_the_checkpoint(ask: Ask) -> None:
    ask(4)
    flush()
    ask(3)
    flush_redis()
    assert ask().remaining == 5


def test_processes_that_restore_at_once_neither_double_nor_lose(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(4)
    lose()
    assert ask().remaining == 5
    monkeypatch.setattr(decide, "seeds", Seeds())  # another process
    assert ask().remaining == 4


def test_a_refused_first_request_does_not_forget_the_checkpoint(ask: Ask) -> None:
    everyone = RatePolicy.objects.create(rates="1/month", counted_per="everyone")
    ask()
    lose()
    assert not ask().allowed
    everyone.delete()
    assert ask().remaining == 8


def test_in_the_steady_state_nothing_is_read(ask: Ask, django_assert_num_queries: Any) -> None:
    ask()
    lose()
    ask()
    with django_assert_num_queries(0):
        for _ in range(3):
            ask()


def test_windows_that_began_after_the_data_are_never_read(
    ask: Ask, redis_client: redis.Redis, django_assert_num_queries: Any
) -> None:
    ask()
    limiter = default_limiter()
    limiter.born_us = 1
    bob = User.objects.create(username="bob")
    check_request(request_from(bob))  # reads his entry
    redis_client.delete(*redis_client.keys("rqtest:{user*"))
    with django_assert_num_queries(0):
        assert check_request(request_from(bob)).remaining == 9


def test_all_buckets_of_a_request_are_read_by_one_query(ask: Ask) -> None:
    RatePolicy.objects.update(rates="10/month, 9/week fixed_window, 8/day fixed_window")
    RatePolicy.objects.create(rates="100/month", counted_per="everyone")
    ask()
    lose()
    with CaptureQueriesContext(connection) as queries:
        assert [status.remaining for status in ask().statuses] == [8, 7, 6, 98]
    assert sum("quotawindow" in query["sql"] for query in queries) == 1


def test_without_the_database_requests_go_on(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(6)
    lose()

    def fail(*_: Any) -> Any:
        raise DatabaseError("gone")

    with monkeypatch.context() as context:
        context.setattr(seeds_module, "_read", fail)
        assert ask().remaining == 9
    assert ask().remaining == 3, "once it is back, the rest is restored"


def go_back_in_time(ask: Ask, client: redis.Redis, kept: int, lost: int) -> None:
    """As after a restart from a snapshot: neither the revision nor the counter is missing."""
    key = bucket_key("rqtest", ask(kept).statuses[0].bucket)
    earlier = client.get(key)
    ask(lost)
    flush()
    client.set(key, earlier or b"", keepttl=True)


def test_a_redis_that_went_back_in_time_is_noticed(ask: Ask, redis_client: redis.Redis, later: Later) -> None:
    go_back_in_time(ask, redis_client, 2, 5)
    assert ask().remaining == 7
    before = default_limiter().stored_revision()
    flush()
    later(9)
    ask()
    flush()
    assert default_limiter().stored_revision() == before, "it may be another process's refund"
    later(1)
    ask()
    flush()
    assert default_limiter().stored_revision() > before
    assert used() == [7]
    assert ask().remaining == 2


def test_a_loss_is_not_taken_for_the_refunds_of_settled_reservations(
    ask: Ask, redis_client: redis.Redis, later: Later
) -> None:
    """Together they are more than what was lost, but each of them gave back what was charged after the loss."""
    RatePolicy.objects.update(rates="10000/month")
    go_back_in_time(ask, redis_client, 500, 1500)
    for _ in range(4):
        ask(400).refund(390)
    ask(400)
    flush()
    assert used() == [2000]
    later(10)
    flush()
    assert ask(10).remaining == 7990


def test_refunds_of_many_requests_are_no_loss(ask: Ask, later: Later) -> None:
    """Another process may have written the row when all of them were charged."""
    RatePolicy.objects.update(rates="10000/month")
    decisions = [ask(400) for _ in range(4)]
    flush()
    for decision in decisions:
        decision.refund(390)
        ask(10)
    before = default_limiter().stored_revision()
    flush()
    later(10)
    flush()
    assert (used(), default_limiter().stored_revision()) == ([80], before)


def test_the_setting_has_a_default() -> None:
    assert own_settings.checkpoint_seconds == 10.0


def test_a_birth_that_was_evicted_is_written_again_by_the_first_process_that_looks(
    ask: Ask, redis_client: redis.Redis, django_assert_num_queries: Any
) -> None:
    """Without it each process read each counter once, also in windows that began long after."""
    RatePolicy.objects.update(rates="10/day fixed_window")
    ask()
    flush()
    redis_client.delete(birth_key("rqtest"))
    limiter = default_limiter()
    limiter.born_us = 0
    limiter.stored_revision()
    assert 0 < limiter.born_us == int(redis_client.get(birth_key("rqtest")) or 0)


# --- What operators do. ---


@pytest.mark.parametrize(("give_back", "left"), [(reset, 0), (lambda buckets, why: grant(buckets, 3, why), 4)])
def test_what_operators_give_back_is_not_lost_again(ask: Ask, give_back: Callable[..., object], left: int) -> None:
    bucket = ask(7).statuses[0].bucket
    flush()
    give_back([bucket], "A mistake of ours")
    assert (flush(), used()) == (0, [left]), "written at once"
    flush_redis()
    assert ask().remaining == 10 - left - 1


def in_another_process(monkeypatch: pytest.MonkeyPatch, own: Seeds) -> None:
    monkeypatch.setattr(decide, "seeds", own)


@pytest.mark.parametrize("others", [False, True], ids=["this process", "another process"])
def test_a_reset_ends_the_refusals_by_what_was_restored(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, others: bool
) -> None:
    RatePolicy.objects.update(rates="3/month")
    bucket = ask(3).statuses[0].bucket
    lose()
    refusing = Seeds() if others else seeds
    in_another_process(monkeypatch, refusing)
    assert not ask().allowed
    in_another_process(monkeypatch, seeds)
    reset([bucket], "A mistake of ours")
    in_another_process(monkeypatch, refusing)
    assert (used(), ask().remaining) == ([0], 2)


def test_a_process_that_first_sees_a_counter_after_its_reset_restores_nothing(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = ask(8).statuses[0].bucket
    lose()
    ask()
    reset([bucket], "A mistake of ours")
    in_another_process(monkeypatch, Seeds())
    assert ask().remaining == 9


def test_a_reset_makes_no_process_read_again_where_nothing_was_lost(ask: Ask) -> None:
    bucket = ask().statuses[0].bucket
    default_limiter().store.execute(("SET", birth_key("rqtest"), 1))
    default_limiter().born_us = 1
    before = default_limiter().stored_revision()
    reset([bucket], "A mistake of ours")
    assert default_limiter().stored_revision() == before


def test_a_refund_after_a_loss_lowers_the_checkpoint_by_no_more_than_it_gave_back(ask: Ask) -> None:
    ask(6)
    late = ask()
    lose()
    late.refund(1)
    flush()
    assert used() == [7], "another process's refund may not be written yet"
    flush()
    assert used() == [6]
    seeds.forget()
    assert ask().remaining == 3


def test_units_can_be_given_back_after_a_loss_that_nobody_has_noticed(ask: Ask) -> None:
    bucket = ask(7).statuses[0].bucket
    lose()
    grant([bucket], 3, "A mistake of ours")
    assert (used(), ask().remaining) == ([4], 5)


def test_a_refund_after_a_loss_is_not_undone_by_another_process(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that it reads may be older than the refund, but what it says is in Redis."""
    RatePolicy.objects.update(rates="100/month")
    ask(10)
    lose()
    decision = ask(30)
    flush()
    QuotaWindow.objects.update(at_us=F("at_us") + 2 * 10**6)  # as if it were not just after the loss
    decision.refund(20)
    in_another_process(monkeypatch, Seeds())
    assert ask().remaining == 79


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


def test_a_reset_of_another_counter_undoes_no_refund_of_another_process(ask: Ask) -> None:
    RatePolicy.objects.update(rates="100/month")
    decision = ask(40)
    flush()
    decision.refund(30)
    checkpoints.forget()  # another process has it, and has not written it yet
    bob = check_request(request_from(User.objects.create(username="bob"))).statuses[0].bucket
    reset([bob], "A mistake of ours")
    assert ask().remaining == 89


def test_units_given_back_stay_although_another_process_refunds(ask: Ask) -> None:
    RatePolicy.objects.update(rates="100/month")
    decision = ask(40)
    flush()
    decision.refund(30)
    checkpoints.forget()
    grant([decision.statuses[0].bucket], 5, "A mistake of ours")
    assert ask().remaining == 94


def of(own: Seeds, bucket: Bucket) -> Generator[Callable[[], Any], Any, tuple[int, ...]]:
    return own.of(default_limiter(), (bucket,))


def test_a_thread_that_read_for_older_data_spoils_nothing_for_the_newer(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    RatePolicy.objects.update(rates="100/month")
    bucket = ask(40).statuses[0].bucket
    flush()
    limiter, own = default_limiter(), Seeds()
    slow = of(own, bucket)
    next(slow)
    limiter.born_us = limiter.now_us
    quick = of(own, bucket)
    read = next(quick)
    with pytest.raises(StopIteration):
        slow.send({})
    with pytest.raises(StopIteration) as ended:
        quick.send(read())
    assert ended.value.value == (40,)
    assert drive(of(own, bucket), lambda read: read()) == (40,)


@pytest.mark.parametrize(("of_older_data", "sent"), [(True, 40), (False, 39)])
def test_only_a_decision_that_carried_the_seed_ends_it(ask: Ask, of_older_data: bool, sent: int) -> None:
    RatePolicy.objects.update(rates="100/month")
    decision = ask(40)
    bucket = decision.statuses[0].bucket
    flush()
    limiter, own = default_limiter(), Seeds()
    limiter.born_us = limiter.now_us if of_older_data else decision.at_us - 1
    for _ in range(2):
        assert drive(of(own, bucket), lambda read: read()) == (40,)
        own.sent(limiter, decision, (bucket,), (sent,))
    if not of_older_data:
        own.sent(limiter, decision, (bucket,), (40,))
        assert drive(of(own, bucket), lambda read: read()) == ()


def test_a_subject_that_no_database_takes_spoils_no_other_figure(ask: Ask) -> None:
    ask(4)
    [(key, figure)] = checkpoints._dirty.items()
    bucket = replace(key[0], subject="api_key:\ud800\0")
    checkpoints._keep((bucket, key[1]), replace(figure, status=replace(figure.status, bucket=bucket)))
    assert (flush(), used()) == (2, [4, 4])
    assert QuotaWindow.objects.filter(subject="api_key:\\ud800\\0").exists()


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
    starts_at = datetime(2026, month, day, tzinfo=UTC)
    return QuotaWindow.objects.create(
        counter=f"{{{subject}}}:0:{rate}",
        starts_at=starts_at,
        ends_at=starts_at + timedelta(days=1 if "day" in rate else 30),
        period="day" if "day" in rate else "month",
        subject=subject,
        policy_id=7,
        rate=rate,
        used=used,
        limit=100,
        percent=used,
        at_us=1,
    )


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


def test_a_redis_that_fails_after_a_reset_fails_no_request(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ATOMIC_REQUESTS the checkpoint is written once the view has returned."""

    def fail(_buckets: Any) -> None:
        raise StoreError("connection", "gone")

    bucket = ask().statuses[0].bucket
    monkeypatch.setattr(checkpoints, "write_now", fail)
    with transaction.atomic():
        reset([bucket], "A mistake of ours")


def test_without_figures_no_limiter_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command writes a last checkpoint, also in projects without Redis."""
    monkeypatch.setattr(checkpoints, "default_limiter", lambda: pytest.fail("a limiter was made"))
    assert flush() == 0
