"""``quota_threshold``: at 80 % and at 100 %, once per limit, window and subject, from any process."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Decision, Limiter, Rate, check_request
from django_ratequota.models import RatePolicy
from django_ratequota.monitoring import alerts, workers
from django_ratequota.signals import quota_threshold
from tests.conftest import Clock
from tests.project.views import request_from
from tests.support.threads import by_hand


class Receiver(list[Any]):
    """(level, subject, used) of every signal, in order."""

    def __call__(self, sender: Any, level: int, status: Any, at: datetime, **_: Any) -> None:
        self.append((level, status.bucket.subject, status.used))
        self.thread, self.at = threading.current_thread(), at


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: Any, redis_client: redis.Redis, settings: Any) -> Iterator[None]:
    """Signals of all limits are sent when the test calls ``send``."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "NOTIFY_LIMITS": "all"}
    by_hand(monkeypatch, alerts.claiming, alerts.delivering)
    alerts.forget()
    yield
    alerts.forget()


@pytest.fixture
def received() -> Iterator[Receiver]:
    received = Receiver()
    quota_threshold.connect(received)
    yield received
    quota_threshold.disconnect(received)


def spend(limiter: Limiter, bucket: Bucket, times: int, cost: int = 1) -> None:
    for _ in range(times):
        alerts.observe(limiter.check([bucket], cost), cost)


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window_log", "sliding_window_counter", "gcra"])
def test_signals_are_sent_once_at_80_and_at_100_percent(limiter: Limiter, received: Receiver, algorithm: str) -> None:
    bucket = Bucket("user:1", Rate.parse(f"10/day {algorithm}"))
    for times, expected in ((7, []), (1, [(80, "user:1", 8)]), (10, [(80, "user:1", 8), (100, "user:1", 10)])):
        spend(limiter, bucket, times)
        alerts.send()
        assert received == expected


@pytest.mark.parametrize(
    ("costs", "sent"),
    [
        ((10,), [(100, 10, True, 10)]),
        ((8, 3), [(80, 8, True, 8), (100, 3, False, 8)]),
        ((6, 6), []),
        ((8, 11), [(80, 8, True, 8)]),
    ],
    ids=["both at once", "a refusal although units remain", "a refusal below 80 %", "a cost that never fits"],
)
def test_levels_of_a_cost(limiter: Limiter, costs: tuple[int, ...], sent: list[Any]) -> None:
    heard: list[Any] = []

    def hear(level: int, cost: int, status: Any, **_: Any) -> None:
        heard.append((level, cost, status.allowed, status.used))

    quota_threshold.connect(hear)
    for cost in costs:
        spend(limiter, Bucket("user:1", Rate.parse("10/day")), 1, cost)
    alerts.send()
    quota_threshold.disconnect(hear)
    assert heard == sent


def test_by_default_only_calendar_limits_send_signals(limiter: Limiter, received: Receiver, settings: Any) -> None:
    settings.RATEQUOTA = {key: value for key, value in settings.RATEQUOTA.items() if key != "NOTIFY_LIMITS"}
    for rate in ("1/day", "1/day fixed_window", "1/hour fixed_window", "1/week fixed_window", "1/month"):
        spend(limiter, Bucket(f"user:{rate}", Rate.parse(rate)), 1)
    alerts.send()
    assert [subject for _, subject, _ in received] == [
        "user:1/day fixed_window",
        "user:1/week fixed_window",
        "user:1/month",
    ]


def test_a_downgrade_sends_one_signal_and_an_edit_of_nothing_none(limiter: Limiter, received: Receiver) -> None:
    spend(limiter, Bucket("user:1", Rate.parse("1000/month")), 1, 821)
    for limit in (1000, 500, 500, 1000):
        spend(limiter, Bucket("user:1", Rate.parse(f"{limit}/month")), 1)
        alerts.send()
        alerts.forget()  # the next request is another process's
    assert [level for level, _, _ in received] == [80, 100]


def test_a_month_that_begins_on_another_day_sends_its_own_signal(limiter: Limiter, received: Receiver) -> None:
    for anchor in (1, 1, 2):
        spend(limiter, Bucket("user:1", Rate.parse("5/month"), anchor=anchor), 5)
        alerts.send()
    assert [level for level, _, _ in received] == [80, 100, 80, 100]


def test_signals_are_sent_for_each_subject_and_in_log_mode(limiter: Limiter, received: Receiver) -> None:
    for number, mode in ((1, "enforce"), (2, "log")):
        spend(limiter, Bucket(f"user:{number}", Rate.parse("5/day"), mode=mode), 4)
    alerts.send()
    assert received == [(80, "user:1", 4), (80, "user:2", 4)]


def test_the_next_window_sends_the_signals_again(
    limiter: Limiter, received: Receiver, clock: Clock, redis_client: redis.Redis
) -> None:
    bucket = Bucket("user:1", Rate.parse("5/min fixed_window"))
    clock.advance(20)
    for _ in range(2):
        spend(limiter, bucket, 5)
        alerts.send()
        clock.advance(60)
        # The keys expire by the clock of Redis, which the injected clock does not move.
        for key in redis_client.scan_iter("rqtest:{statistics}:alert:*"):
            assert 0 < redis_client.pttl(key) <= 40_000, "until the window ends"
            redis_client.delete(key)
    assert [level for level, _, _ in received] == [80, 100, 80, 100]


def test_a_client_at_its_limit_triggers_one_signal_per_period(
    limiter: Limiter, received: Receiver, clock: Clock, redis_client: redis.Redis
) -> None:
    """A token bucket has no window: its level swings around 80 % all the time."""
    bucket = Bucket("user:1", Rate.parse("60/min"))
    spend(limiter, bucket, 50)
    for _ in range(50):
        clock.advance(1)
        spend(limiter, bucket, 1)
    alerts.send()
    assert received == [(80, "user:1", 48)]
    [key] = redis_client.scan_iter("rqtest:{statistics}:alert:*")
    assert 50_000 < redis_client.pttl(key) <= 60_000


def test_a_level_below_one_that_was_sent_sends_no_signal(limiter: Limiter, received: Receiver, clock: Clock) -> None:
    bucket = Bucket("user:1", Rate.parse("10/min"))
    spend(limiter, bucket, 1, 10)
    alerts.send()
    clock.advance(12)
    spend(limiter, bucket, 1)
    alerts.send()
    assert received == [(100, "user:1", 10)]


def test_a_decision_without_redis_sends_no_signal(limiter: Limiter, received: Receiver) -> None:
    decision = limiter.check([Bucket("user:1", Rate.parse("1/day"))])
    alerts.observe(Decision(True, decision.statuses, decision.at_us, error="timeout"), 1)
    alerts.send()
    assert received == []


def test_another_process_does_not_send_the_signal_again(limiter: Limiter, received: Receiver, clock: Clock) -> None:
    bucket = Bucket("user:1", Rate.parse("10/day fixed_window"))
    spend(limiter, bucket, 8)
    alerts.send()
    spend(limiter, Bucket("user:2", Rate.parse("5/day")), 4)
    alerts.forget()  # another process, forked with what waits, which it does not send
    clock.advance(3600)
    spend(limiter, bucket, 1)
    alerts.send()
    assert received == [(80, "user:1", 8)]


def test_without_receivers_nothing_is_queued(limiter: Limiter) -> None:
    spend(limiter, Bucket("user:1", Rate.parse("2/day")), 3)
    received = Receiver()
    quota_threshold.connect(received)
    alerts.send()
    quota_threshold.disconnect(received)
    assert received == []


def test_memory_is_bounded(limiter: Limiter, received: Receiver, monkeypatch: Any, clock: Clock) -> None:
    for name, bound in {"_MAX_OF_LIMIT": 5, "_MAX_LIMITS": 3}.items():
        monkeypatch.setattr(alerts, name, bound)
    for number in range(30):
        spend(limiter, Bucket(f"user:{number}", Rate.parse("1/day")), 9)
        spend(limiter, Bucket("user:1", Rate.parse("1/day"), policy_id=number, scope=f"s{number}"), 1)
    for _ in range(3):
        alerts.send()
    assert Counter(subject for _, subject, _ in received) == {"user:0": 1, "user:1": 3}
    clock.advance(61)  # what was dropped is noticed again
    spend(limiter, Bucket("user:29", Rate.parse("1/day")), 1)
    alerts.send()
    assert received[-1] == (100, "user:29", 1)


def test_without_redis_the_signal_is_sent_anyway(limiter: Limiter, received: Receiver, settings: Any) -> None:
    spend(limiter, Bucket("user:1", Rate.parse("5/day")), 4)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    alerts.send()
    assert received == [(80, "user:1", 4)]


def test_a_failing_receiver_does_not_stop_others(limiter: Limiter, received: Receiver, caplog: Any) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("no mail today")

    quota_threshold.connect(fail)
    try:
        spend(limiter, Bucket("user:1", Rate.parse("1/day")), 1)
        alerts.send()
    finally:
        quota_threshold.disconnect(fail)
    assert len(received) == 1
    assert "no mail today" in caplog.text


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_a_request_does_not_wait_for_receivers(received: Receiver, monkeypatch: Any) -> None:
    monkeypatch.undo()
    RatePolicy.objects.create(rates="5/month")
    called = threading.Event()

    def receive(**_: Any) -> None:
        called.set()

    quota_threshold.connect(receive)
    try:
        for _ in range(4):
            check_request(request_from())
        assert called.wait(30)
    finally:
        quota_threshold.disconnect(receive)
    assert received == [(80, "ip:203.0.113.7", 4)]
    assert received.thread.name == "ratequota-receivers"
    assert abs((datetime.now(UTC) - received.at).total_seconds()) < 60


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_a_process_that_ends_sends_what_it_has_just_noticed(
    received: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first crossing was another process's, so no thread for receivers ran that could send the second."""
    monkeypatch.setattr(workers, "_EXIT_SECONDS", 30)  # however slow this machine is
    RatePolicy.objects.create(rates="5/month")
    for _ in range(4):
        check_request(request_from())
    assert received == []
    workers.end()
    assert received == [(80, "ip:203.0.113.7", 4)]
