"""The health of a process, its reports to Redis, and the thread that sends them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Rate, check_request
from django_ratequota.engine import protocol
from django_ratequota.engine.keys import workers_key
from django_ratequota.exceptions import StoreError
from django_ratequota.ledger import book
from django_ratequota.models import RatePolicy
from django_ratequota.monitoring import health
from django_ratequota.monitoring.health import (
    REPORT_TTL,
    Health,
    note_degraded,
    report,
    reports,
    wait_until_written,
)
from django_ratequota.monitoring.workers import database_worker
from django_ratequota.runtime import default_limiter
from django_ratequota.utils import problems
from django_ratequota.utils.histogram import BOUNDS, quantile
from tests.engine.test_scripts import broken_script
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.threads import on_threads

#: A port without a listener, and a timeout long enough for the refused connection.
CLOSED = {"PREFIX": "rqtest", "REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 5}
LIST = workers_key("rqtest")


@pytest.fixture(autouse=True)
def new_process(settings: Any) -> None:
    """No degraded decision, nothing logged, and a limiter that has made no decision."""
    health.forget()
    settings.RATEQUOTA = dict(settings.RATEQUOTA)


#: This process's names on two hosts.
FIRST, SECOND = (f"{host}:{os.getpid()}" for host in ("web-1", "web-2"))


def set_process_name(monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name.partition(":")[0])


def decide(times: int = 1) -> None:
    for _ in range(times):
        try:
            default_limiter().check([Bucket("user:1", Rate.parse("1000/min"))])
        except StoreError as error:
            note_degraded(error.reason, error)


# --- Contents. ---


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_health_begins_empty_and_has_the_revision_and_the_times_of_decisions() -> None:
    mine = health.health()
    assert mine.process == f"{socket.gethostname()}:{os.getpid()}"
    assert mine.at == pytest.approx(time.time(), abs=60)
    assert (mine.revision, mine.policies_age, mine.degraded, mine.down, mine.decisions) == (0, 0.0, {}, {}, 0)
    RatePolicy.objects.create(rates="5/min")
    for _ in range(5):
        check_request(request_from())
    mine = health.health()
    assert mine.revision == default_limiter().stored_revision() > 0
    assert 0 <= mine.policies_age < 60
    assert mine.decisions == sum(default_limiter().latency.counts) == 5
    median, slowest = quantile(mine.latency, 0.5), quantile(mine.latency, 1)
    assert 0 < (median or 0) <= (slowest or 0) < 5


def test_a_process_is_named_by_host_and_number(monkeypatch: Any) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "büro {7}:a" + "x" * 90)
    host, _, number = health.health().process.rpartition(":")
    assert host == "b-ro--7--a" + "x" * 54
    assert number == str(os.getpid())


@pytest.mark.parametrize("raw", [{"CACHE": "local"}, {"CACHE": "nowhere"}, {"REDIS_URL": "http://127.0.0.1/"}])
def test_without_a_usable_setting_health_still_works(settings: Any, raw: dict[str, Any]) -> None:
    settings.RATEQUOTA = raw
    decide(2)
    mine = health.health()
    assert (mine.degraded, mine.down, mine.decisions) == ({"configuration": 2}, {}, 0)
    assert len(mine.latency) == len(BOUNDS) + 1
    for raising in (report, reports):
        with pytest.raises(StoreError) as caught:
            raising()
        assert caught.value.reason == "configuration"


def test_with_redis_down_health_names_server_and_reason(settings: Any) -> None:
    settings.RATEQUOTA = CLOSED
    decide(2)
    assert (health.health().down, health.health().degraded) == ({}, {"connection": 2})
    decide(3)
    mine = health.health()
    assert (mine.down, mine.degraded) == ({"127.0.0.1:1": "connection"}, {"connection": 5})
    # Requests that the open breaker answered did not wait for Redis, and are not timed.
    assert mine.decisions == 3
    for raising in (report, reports):
        with pytest.raises(StoreError):
            raising()


# --- Degraded decisions. ---


@pytest.fixture
def at(monkeypatch: Any) -> Callable[[float], None]:
    clock = SimpleNamespace(now=100.0)

    monkeypatch.setattr(problems, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return lambda now: setattr(clock, "now", now)


def test_errors_that_open_no_breaker_are_logged_once_a_minute(at: Callable[[float], None], caplog: Any) -> None:
    seen = []
    for now in (100, 100, 159.9, 160, 161, 219.9, 220, 10_000):
        at(now)
        for reason in ("wrongtype", "database"):
            note_degraded(reason, StoreError(reason, "the reason"))
        seen.append(len(caplog.records))
    assert seen == [2, 2, 2, 4, 4, 4, 6, 8]
    assert {(record.levelname, record.message) for record in caplog.records} == {
        ("ERROR", "no decision by Redis (wrongtype), applying on_error: the reason"),
        ("ERROR", "no policies from the database, applying on_error: the reason"),
    }
    assert health.health().degraded == {"wrongtype": 8, "database": 8}


def test_errors_that_open_no_breaker_are_in_health_for_a_minute(at: Callable[[float], None], caplog: Any) -> None:
    note_degraded("wrongtype", StoreError("wrongtype", "the reason"))
    at(130)
    note_degraded("response", StoreError("response", "first"))
    note_degraded("response", StoreError("response", "x" * 10_000))
    assert len(caplog.records) == 2
    for reason in ("timeout", "connection", "oom", "readonly"):
        note_degraded(reason, StoreError(reason, "logged and shown by its breaker"))
    assert len(caplog.records) == 2
    assert health.health().errors == {"wrongtype": "the reason", "response": "x" * 300}
    at(160)
    assert list(health.health().errors) == ["response"]
    at(190)
    assert health.health().errors == {}
    counted = {"wrongtype": 1, "response": 2, "timeout": 1, "connection": 1, "oom": 1, "readonly": 1}
    assert health.health().degraded == counted


def test_an_error_of_the_script_is_logged_and_shown(
    db: Any, fresh_policies: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything looked healthy: a closed breaker, a server that is up, and each request admitted."""
    RatePolicy.objects.create(rates="1/hour sliding_window_log", counted_per="everyone")
    monkeypatch.setattr(protocol, "DECIDE", broken_script())
    monkeypatch.setattr(protocol, "prepare", protocol.CheckCommand)
    assert [check_request(request_from()).error for _ in range(5)] == ["response"] * 5
    mine = health.health()
    [message] = mine.errors.values()
    assert "user_script:" in message
    [record] = caplog.records
    assert message in record.getMessage()
    report()
    assert f"error in the last minute: response: {message}\n" in run("status")
    assert (mine.degraded, mine.down) == ({"response": 5}, {}), "other limits are still enforced"


def test_threads_lose_no_count(caplog: Any) -> None:
    def note() -> None:
        for _ in range(200):
            note_degraded("response", StoreError("response", "the reason"))

    on_threads(16, note)
    assert health.health().degraded == {"response": 16 * 200}
    assert len(caplog.records) == 1


# --- Reports. ---


def test_a_report_is_read_back_unchanged(redis_client: redis.Redis, monkeypatch: Any) -> None:
    mine = Health(
        process="web-1:7",
        at=1763702400.25,
        revision=2**40,
        policies_age=0.5,
        degraded={"timeout": 3, "wrongtype": 1},
        down={"redis.example:6379": "timeout", "größe (Sentinel)": "noauth"},
        latency=[0, 2, *[0] * (len(BOUNDS) - 2), 1],
    )
    monkeypatch.setattr(health, "health", lambda: mine)
    assert report() == 1
    assert reports() == [mine]
    [found] = reports()
    assert (found.decisions, quantile(found.latency, 0.5)) == (3, BOUNDS[1])
    stored = json.loads(redis_client.get(workers_key("rqtest", "web-1:7")))
    assert stored == asdict(mine)
    assert list(stored) == [field.name for field in fields(Health)]


def test_processes_report_side_by_side_until_they_stop(
    redis_client: redis.Redis, monkeypatch: Any, settings: Any
) -> None:
    assert reports() == []
    decide(3)
    set_process_name(monkeypatch, SECOND)
    assert [report(), report()] == [1, 1]
    assert health.health().decisions == 3, "a report is no decision"
    settings.RATEQUOTA = dict(settings.RATEQUOTA)
    set_process_name(monkeypatch, FIRST)
    for decisions in (1, 2):
        decide(1)
        assert report() == 2
        assert [(one.process, one.decisions) for one in reports()] == [(FIRST, decisions), (SECOND, 3)]
    # A process is removed only after REPORT_TTL.
    now = redis_client.time()[0]
    redis_client.zadd(LIST, {SECOND: now - REPORT_TTL + 30})
    assert report() == 2
    redis_client.zadd(LIST, {SECOND: now - REPORT_TTL - 1})
    redis_client.delete(workers_key("rqtest", SECOND))
    assert [one.process for one in reports()] == [FIRST]
    assert report() == 1
    assert redis_client.zrange(LIST, 0, -1) == [FIRST.encode()]


def test_reports_expire(redis_client: redis.Redis, monkeypatch: Any) -> None:
    set_process_name(monkeypatch, FIRST)
    for _ in range(2):
        report()
        for key in (LIST, workers_key("rqtest", FIRST)):
            assert 5 < redis_client.ttl(key) <= REPORT_TTL
            redis_client.expire(key, 5)
    assert sorted(redis_client.scan_iter("rqtest:*")) == [b"rqtest:{workers}", f"rqtest:{{workers}}:{FIRST}".encode()]


def test_it_waits_until_every_process_has_written_what_it_had(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_process_name(monkeypatch, FIRST)
    monkeypatch.setattr(book.ledger, "written_until", lambda: next(until))
    asked = time.time()
    until = iter([asked - 1, asked + 60])
    report()
    assert [list(map(len, wait_until_written(0)))] == [[1, 1]]
    report()
    assert [list(map(len, wait_until_written(0)))] == [[1, 0]]


def test_a_process_that_ends_takes_its_report_back(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    report()
    for is_written, left in ((False, 1), (True, 0)):  # ratequota checkpoint names those that could not write
        monkeypatch.setattr(database_worker, "wait", lambda is_written=is_written: is_written)
        health.leave()
        assert len(reports()) == left


def test_a_process_without_reports_asks_redis_nothing_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "default_limiter", lambda: pytest.fail("a limiter was made"))
    health.leave()


def test_reports_of_another_version_are_ignored(settings: Any, redis_client: redis.Redis) -> None:
    report()
    for name, text in {"a": "{}", "b": "no json", "c": '{"process": "c", "more": 1}', "d": "7"}.items():
        redis_client.zadd(workers_key("rqtest"), {name: time.time()})
        redis_client.set(workers_key("rqtest", name), text)
    (mine,) = reports()
    older = {**asdict(mine), "process": "e", "latency": [1, 2, 3]}
    redis_client.zadd(workers_key("rqtest"), {"e": time.time()})
    redis_client.set(workers_key("rqtest", "e"), json.dumps(older))
    assert reports() == [mine]
