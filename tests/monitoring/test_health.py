"""The health of a process, its reports to Redis, and the thread that sends them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Rate, check_request
from django_ratequota.engine import protocol
from django_ratequota.engine.keys import workers_key
from django_ratequota.exceptions import ConfigurationError, StoreError
from django_ratequota.metrics import METRICS
from django_ratequota.models import RatePolicy
from django_ratequota.monitoring import background, checkpoints, health
from django_ratequota.monitoring.health import (
    REPORT_TTL,
    Health,
    keep_reporting,
    note_degraded,
    report,
    reports,
    request_checkpoint,
)
from django_ratequota.runtime import default_limiter
from django_ratequota.utils import problems
from django_ratequota.utils.histogram import BOUNDS
from tests.engine.test_scripts import broken_script
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.threads import on_threads

#: A port without a listener, and a timeout long enough for the refused connection.
CLOSED = {"PREFIX": "rqtest", "REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 5}
LIST = workers_key("rqtest")
THREAD = "ratequota-report"


@pytest.fixture(autouse=True)
def new_process(monkeypatch: Any, settings: Any) -> None:
    """No degraded decision, nothing logged, and a limiter that has made no decision."""
    monkeypatch.setattr(health, "_degraded", Counter())
    monkeypatch.setattr(problems, "_problems", {})
    settings.RATEQUOTA = dict(settings.RATEQUOTA)


def set_process_name(monkeypatch: Any, name: str) -> None:
    monkeypatch.setattr(health, "_process", lambda: name)


def decide(times: int = 1) -> None:
    for _ in range(times):
        try:
            default_limiter().check([Bucket("user:1", Rate.parse("1000/min"))])
        except StoreError as error:
            note_degraded(error.reason, error)


# --- Contents. ---


@pytest.mark.usefixtures("fresh_policies")
def test_a_new_process_has_an_empty_health() -> None:
    mine = health.health()
    assert mine.process == health._process()
    assert mine.at == pytest.approx(time.time(), abs=60)
    assert (mine.revision, mine.policies_age, mine.degraded, mine.down, mine.decisions) == (0, 0.0, {}, {}, 0)
    assert mine.latency_quantile(0.99) is None


def test_a_process_is_named_by_host_and_number(monkeypatch: Any) -> None:
    monkeypatch.setattr(health.socket, "gethostname", lambda: "büro {7}:a" + "x" * 90)
    host, _, number = health._process().rpartition(":")
    assert host == "b-ro--7--a" + "x" * 54
    assert number == str(health.os.getpid())


@pytest.mark.usefixtures("redis_client")
def test_decisions_are_timed() -> None:
    decide(5)
    mine = health.health()
    assert mine.decisions == sum(default_limiter().latency.counts) == 5
    median, slowest = mine.latency_quantile(0.5), mine.latency_quantile(1)
    assert median is not None
    assert slowest is not None
    assert 0 < median <= slowest < 5


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_health_has_the_revision_and_the_age_of_the_policies() -> None:
    RatePolicy.objects.create(rates="5/min")
    check_request(request_from())
    mine = health.health()
    assert mine.revision == default_limiter().stored_revision() > 0
    assert 0 <= mine.policies_age < 60


@pytest.mark.parametrize(
    "raw",
    [{"CACHE": "local"}, {"CACHE": "nowhere"}, {"REDIS_URL": "http://127.0.0.1/"}],
)
def test_without_a_usable_setting_health_still_works(settings: Any, raw: dict[str, Any]) -> None:
    settings.RATEQUOTA = raw
    decide(2)
    mine = health.health()
    assert (mine.degraded, mine.down, mine.decisions) == ({"configuration": 2}, {}, 0)
    assert len(mine.latency) == len(BOUNDS) + 1
    for raising in (report, reports):
        with pytest.raises(StoreError) as caught:
            raising()
        assert isinstance(caught.value.__cause__, ConfigurationError)


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
    """Sets the monotonic clock of ``problems``."""
    clock = SimpleNamespace(now=100.0)

    def monotonic() -> float:
        # Without the lock, two threads would both log.
        assert problems._lock.locked()
        return clock.now

    monkeypatch.setattr(problems, "time", SimpleNamespace(monotonic=monotonic))

    def move(now: float) -> None:
        clock.now = now

    return move


@pytest.mark.parametrize("reason", ["configuration", "wrongtype", "noscript", "response", "clock", "database"])
def test_errors_that_open_no_breaker_are_logged_once_a_minute(
    at: Callable[[float], None], caplog: Any, reason: str
) -> None:
    seen = []
    for now in (100, 100, 159.9, 160, 161, 219.9, 220, 10_000):
        at(now)
        note_degraded(reason, StoreError(reason, "the reason"))
        seen.append(len(caplog.records))
    assert seen == [1, 1, 1, 2, 2, 2, 3, 4]
    text = f"no decision by Redis ({reason}), on_error decides: the reason"
    if reason == "database":
        text = "no policies from the database, on_error decides: the reason"
    assert {(record.levelname, record.message) for record in caplog.records} == {("ERROR", text)}
    assert health.health().degraded == {reason: 8}


def test_errors_that_open_no_breaker_are_in_health_for_a_minute(at: Callable[[float], None]) -> None:
    note_degraded("wrongtype", StoreError("wrongtype", "the reason"))
    at(130)
    note_degraded("response", StoreError("response", "first"))
    note_degraded("response", StoreError("response", "x" * 10_000))
    note_degraded("timeout", StoreError("timeout", "shown by its breaker"))
    assert health.health().errors == {"wrongtype": "the reason", "response": "x" * 300}
    at(160)
    assert list(health.health().errors) == ["response"]
    at(190)
    assert health.health().errors == {}
    assert health.health().degraded == {"wrongtype": 1, "response": 2, "timeout": 1}


def test_an_error_of_the_script_is_logged_reported_and_shown(
    db: Any, fresh_policies: Any, admin_client: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything looked healthy: a closed breaker, a server that is up, and each request admitted."""
    RatePolicy.objects.create(rates="1/hour sliding_window_log", counted_per="everyone")
    monkeypatch.setattr(protocol, "DECIDE", broken_script())
    monkeypatch.setattr(protocol, "prepare", protocol.CheckCommand)
    assert [check_request(request_from()).error for _ in range(5)] == ["response"] * 5
    [message] = health.health().errors.values()
    assert "sliding_window_log.lua:" in message
    [record] = caplog.records
    assert message in record.getMessage()
    report()
    status = run("status")
    assert "; breaker closed in 1; errors in 1\n" in status
    assert f"error in the last minute: response: {message}\n" in status
    page = admin_client.get("/admin/django_ratequota/ratepolicy/usage/").content.decode()
    assert "on_error decided requests on 1 worker (response): ResponseError: " in page
    assert "closed; errors: response" in page
    [degraded] = [metric for metric in METRICS if metric.name == "degraded_decisions"]
    assert (("response",), 5) in degraded.read()
    # The breaker stays closed, so other limits are still enforced.
    assert not health.health().down


def test_each_reason_is_logged_once_a_minute(at: Callable[[float], None], caplog: Any) -> None:
    for reason in ("wrongtype", "response", "wrongtype", "response"):
        note_degraded(reason, StoreError(reason, "the reason"))
    assert len(caplog.records) == 2
    at(160)
    note_degraded("response", StoreError("response", "the reason"))
    assert len(caplog.records) == 3
    assert health.health().degraded == {"wrongtype": 2, "response": 3}


@pytest.mark.parametrize("reason", ["timeout", "connection", "oom", "readonly"])
def test_failures_logged_by_the_breaker_are_only_counted(caplog: Any, reason: str) -> None:
    note_degraded(reason, StoreError(reason, "the reason"))
    assert caplog.records == []
    assert health.health().degraded == {reason: 1}


def test_threads_lose_no_count(caplog: Any) -> None:
    def note() -> None:
        for _ in range(200):
            note_degraded("response", StoreError("response", "the reason"))

    on_threads(16, note)
    assert health.health().degraded == {"response": 16 * 200}
    assert len(caplog.records) == 1


# --- Reports. ---


def test_without_reports_the_list_is_empty(redis_client: redis.Redis) -> None:
    assert reports() == []


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
    assert (found.decisions, found.latency_quantile(0.5)) == (3, BOUNDS[1])
    stored = json.loads(redis_client.get(workers_key("rqtest", "web-1:7")))
    assert stored == asdict(mine)
    assert list(stored) == [field.name for field in fields(Health)]


def test_two_processes_report_side_by_side(redis_client: redis.Redis, monkeypatch: Any, settings: Any) -> None:
    decide(3)
    set_process_name(monkeypatch, "web-2:8")
    assert [report(), report()] == [1, 1]
    settings.RATEQUOTA = dict(settings.RATEQUOTA)
    decide(1)
    set_process_name(monkeypatch, "web-1:7")
    assert report() == 2
    assert [(one.process, one.decisions) for one in reports()] == [("web-1:7", 1), ("web-2:8", 3)]
    # A process that reports again replaces its last report.
    decide(1)
    report()
    assert [(one.process, one.decisions) for one in reports()] == [("web-1:7", 2), ("web-2:8", 3)]


def test_a_process_that_stopped_reporting_is_removed(redis_client: redis.Redis, monkeypatch: Any) -> None:
    set_process_name(monkeypatch, "web-1:7")
    report()
    set_process_name(monkeypatch, "web-2:8")
    report()
    now = redis_client.time()[0]
    redis_client.zadd(LIST, {"web-1:7": now - REPORT_TTL - 1})
    redis_client.delete(workers_key("rqtest", "web-1:7"))
    assert [one.process for one in reports()] == ["web-2:8"]
    assert report() == 1
    assert redis_client.zrange(LIST, 0, -1) == [b"web-2:8"]
    # A process is removed only after REPORT_TTL.
    redis_client.zadd(LIST, {"web-1:7": now - REPORT_TTL + 30})
    assert report() == 2


def test_reports_expire(redis_client: redis.Redis, monkeypatch: Any) -> None:
    set_process_name(monkeypatch, "web-1:7")
    report()
    for key in (LIST, workers_key("rqtest", "web-1:7")):
        assert 0 < redis_client.ttl(key) <= REPORT_TTL
        redis_client.expire(key, 5)
    report()
    for key in (LIST, workers_key("rqtest", "web-1:7")):
        assert 5 < redis_client.ttl(key) <= REPORT_TTL
    assert sorted(redis_client.scan_iter("rqtest:*")) == [b"rqtest:{workers}", b"rqtest:{workers}:web-1:7"]


def test_a_report_is_not_counted_as_a_decision(redis_client: redis.Redis) -> None:
    report()
    assert health.health().decisions == 0


# --- Checkpoints that are asked for. ---


def test_a_process_that_is_asked_writes_a_checkpoint_and_reports_that(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bool] = []

    def flush_all() -> bool:
        written.append(True)
        return len(written) > 1  # the first time the database is down

    monkeypatch.setattr(checkpoints, "flush_all", flush_all)
    health._clear()
    report()
    assert reports()[0].checkpoint == len(written) == 0
    number = request_checkpoint(60)
    report()
    assert reports()[0].checkpoint == 0, "it is not written, and tried again"
    report()
    assert reports()[0].checkpoint == number
    report()
    assert len(written) == 2, "once"
    assert request_checkpoint(60) > number
    report()
    assert len(written) == 3
    health._clear()


def test_a_request_is_newer_than_any_that_was_carried_out(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a Redis that took over may be behind."""
    ahead = int(time.time() * 10**6) + 3600 * 10**6
    monkeypatch.setattr(health, "_carried_out", ahead)
    report()
    assert request_checkpoint(60) == ahead + 1


def test_a_process_that_ends_takes_its_report_back(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    report()
    monkeypatch.setattr(checkpoints, "flush_at_exit", lambda: False)
    health._leave()
    assert len(reports()) == 1, "its counts are not written: ratequota checkpoint names it"
    monkeypatch.setattr(checkpoints, "flush_at_exit", lambda: True)
    health._leave()
    assert reports() == []


def test_a_process_without_reports_asks_redis_nothing_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    health._clear()
    monkeypatch.setattr(health, "default_limiter", lambda: pytest.fail("a limiter was made"))
    health._leave()


# --- The thread. ---


class RecordedReport:
    """The real ``report``; counts how often it ended."""

    def __init__(self) -> None:
        self._report = health.report
        self._ended = threading.Semaphore(0)
        # Other tests may have left threads of other settings, which end when they wake up.
        self._others = set(threading.enumerate())
        self.errors: list[BaseException] = []

    def __call__(self) -> int:
        try:
            return self._report()
        except StoreError as error:
            self.errors.append(error)
            raise
        finally:
            self._ended.release()

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._ended.acquire(timeout=30), "no report"

    def threads(self) -> list[threading.Thread]:
        """Return the running threads that were started for reports since the test began."""
        return [one for one in threading.enumerate() if one.name == THREAD and one not in self._others]


@pytest.fixture
def recorded(redis_client: redis.Redis, monkeypatch: Any, settings: Any) -> Iterator[RecordedReport]:
    """Stops the reporting threads at the end of the test, before Redis is emptied."""
    recorded = RecordedReport()
    monkeypatch.setattr(health, "report", recorded)
    monkeypatch.setattr(health._reporting, "_generation", -1)
    yield recorded
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 0}
    health._reporting.soon()
    for thread in recorded.threads():
        thread.join(timeout=30)
        assert not thread.is_alive()


def report_often(settings: Any, **more: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 0.002, **more}


def test_a_thread_reports_periodically(recorded: RecordedReport, settings: Any, redis_client: redis.Redis) -> None:
    report_often(settings)
    keep_reporting()
    recorded.wait(3)
    [thread] = recorded.threads()
    assert thread.daemon, "it would keep the process from ending"
    assert [one.process for one in reports()] == [health._process()]


def test_the_thread_ends_when_the_settings_change(recorded: RecordedReport, settings: Any) -> None:
    report_often(settings)
    keep_reporting()
    recorded.wait()
    [thread] = recorded.threads()
    report_often(settings, STATISTICS_SECONDS=0)
    thread.join(timeout=30)
    assert recorded.threads() == []
    keep_reporting()
    assert recorded.threads() == []


def test_the_thread_ends_if_reports_are_switched_off_during_a_report(
    recorded: RecordedReport, settings: Any, monkeypatch: Any
) -> None:
    """The thread went on for a minute if reports were switched off during one."""

    def switch_off() -> int:
        report_often(settings, STATISTICS_SECONDS=0)
        return recorded()

    monkeypatch.setattr(health, "report", switch_off)
    report_often(settings)
    keep_reporting()
    recorded.wait()
    for thread in recorded.threads():
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_new_settings_start_another_thread(
    recorded: RecordedReport, settings: Any, redis_client: redis.Redis
) -> None:
    report_often(settings)
    keep_reporting()
    recorded.wait()
    [before] = recorded.threads()
    report_often(settings, PREFIX="rqtest:two")
    keep_reporting()
    before.join(timeout=30)
    recorded.wait(2)
    [after] = recorded.threads()
    assert after is not before
    assert redis_client.exists(workers_key("rqtest:two")) == 1


class Gate:
    """A lock that is taken after all threads ask for it: each has seen that no thread was started yet."""

    def __init__(self, number: int) -> None:
        self._all_here = threading.Barrier(number)
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._all_here.wait(timeout=30)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_many_threads_start_one_background_thread(recorded: RecordedReport, settings: Any, monkeypatch: Any) -> None:
    names: list[str] = []

    class Counting(threading.Thread):
        def start(self) -> None:
            names.append(self.name)
            super().start()

    monkeypatch.setattr(threading, "Thread", Counting)
    monkeypatch.setattr(health._reporting, "_lock", Gate(32))
    report_often(settings)
    on_threads(32, keep_reporting)
    recorded.wait()
    keep_reporting()
    assert names.count(THREAD) == 1


def test_requests_work_while_the_thread_cannot_be_started(
    recorded: RecordedReport, settings: Any, db: Any, fresh_policies: Any, monkeypatch: Any, caplog: Any
) -> None:
    """Two requests failed, and no report or statistics were sent afterwards."""
    clock = SimpleNamespace(now=100.0)
    tried: list[str] = []

    class Refused(threading.Thread):
        def start(self) -> None:
            if self.name != "ratequota-connect":  # without it the request connects itself
                tried.append(self.name)
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=time.sleep))
    report_often(settings, STATISTICS_SECONDS=20)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Refused)
        for clock.now in (100, 101, 159.9, 160, 161):
            assert not check_request(request_from()).degraded
    # Each is tried once a minute, and logged once.
    assert sorted(tried) == ["ratequota-report"] * 2 + ["ratequota-statistics"] * 2
    messages = sorted(record.getMessage() for record in caplog.records)
    assert messages == [
        f"{name} could not be started; trying again every 60 s: can't start new thread"
        for name in ("ratequota-report", "ratequota-statistics")
    ]
    clock.now = 219.9
    check_request(request_from())
    assert recorded.threads() == []
    clock.now = 220
    check_request(request_from())
    recorded.wait(2)
    assert len(recorded.threads()) == 1


@pytest.mark.parametrize("seconds", [0, 0.0])
def test_no_thread_is_started_if_reports_are_off(recorded: RecordedReport, settings: Any, seconds: float) -> None:
    report_often(settings, STATISTICS_SECONDS=seconds)
    keep_reporting()
    assert recorded.threads() == []


def test_a_request_starts_the_thread(recorded: RecordedReport, settings: Any, db: Any, fresh_policies: Any) -> None:
    report_often(settings)
    check_request(request_from())
    recorded.wait()
    assert len(recorded.threads()) == 1


def test_a_load_of_policies_is_reported_at_once(
    recorded: RecordedReport, settings: Any, transactional_db: Any, fresh_policies: Any, monkeypatch: Any
) -> None:
    """Reports named no revision, or the one before an edit, for seconds after the request that loaded it."""
    report_often(settings)
    monkeypatch.setattr(health._reporting, "_seconds", lambda: 3600)
    keep_reporting()
    recorded.wait()
    assert [one.revision for one in reports()] == [0]
    for rates in ("5/hour", "6/hour"):
        RatePolicy.objects.update_or_create(counted_per="caller", defaults={"rates": rates})
        assert check_request(request_from()).limit == int(rates[0])
        while reports()[0].revision != default_limiter().stored_revision():
            recorded.wait()


def test_an_error_of_redis_is_logged_once_until_it_works_again(
    recorded: RecordedReport, settings: Any, redis_client: redis.Redis, caplog: Any
) -> None:
    """Reports and statistics were lost without a log entry: only breakers logged failures of Redis."""
    redis_client.set(LIST, "no sorted set")
    report_often(settings)
    keep_reporting()
    recorded.wait(4)
    assert {getattr(error, "reason", "") for error in recorded.errors} == {"wrongtype"}
    [record] = caplog.records
    assert (record.levelname, record.message[:42]) == ("ERROR", "ratequota-report failed: ResponseError: WR")
    redis_client.delete(LIST)
    while not redis_client.exists(LIST):
        recorded.wait()
    assert len(caplog.records) == 1
    redis_client.set(LIST, "no sorted set")
    while len(caplog.records) == 1:
        recorded.wait()


def test_with_redis_down_background_work_continues(recorded: RecordedReport, settings: Any, caplog: Any) -> None:
    settings.RATEQUOTA = CLOSED
    report_often(settings)
    keep_reporting()
    recorded.wait(8)
    assert len(recorded.threads()) == 1
    assert {getattr(error, "reason", "") for error in recorded.errors} == {"connection"}
    # Logged by the breaker, once.
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "Redis at 127.0.0.1:1 gives no decisions (connection)"
    ]


@pytest.mark.parametrize("unusable", [{"CACHE": "local"}, {"REDIS_URL": "http://127.0.0.1/"}])
def test_without_a_usable_setting_background_work_continues(
    recorded: RecordedReport, settings: Any, caplog: Any, unusable: Any
) -> None:
    report_often(settings, **unusable)
    keep_reporting()
    recorded.wait(3)
    assert len(recorded.threads()) == 1
    assert caplog.records == []


FORKING = """
import os, signal, sys, threading

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.project.settings"
import django
from django.conf import settings

settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 20}
django.setup()
from django_ratequota.monitoring import health
from django_ratequota.exceptions import StoreError

plain, reported = health.report, threading.Event()

def report():
    found = plain()
    reported.set()
    return found

health.report = report

def running():
    return [thread for thread in threading.enumerate() if thread.name == "ratequota-report"]

def reports_by_now():
    health.keep_reporting()
    assert reported.wait(20)
    assert len(running()) == 1
    assert health._process() in [one.process for one in health.reports()]

health.note_degraded("oom", StoreError("oom", "full"))
reports_by_now()
held, over = threading.Event(), threading.Event()

def hold():
    with health._lock, health._reporting._due._cond:
        held.set()
        over.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(40)  # its default action ends a process that hangs
    try:
        assert running() == []
        assert health.health().degraded == {}, "the parent's"
        reported.clear()
        reports_by_now()
        assert len(health.reports()) == 2
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(child, 0)
over.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_forked_process_reports_for_itself(redis_client: redis.Redis) -> None:
    # Newer Pythons warn of any fork with threads, which this test needs.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=90, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_reports_of_another_version_are_ignored(settings: Any, redis_client: redis.Redis) -> None:
    """During a deployment, processes of two versions report."""
    report()
    for name, text in {"a": "{}", "b": "no json", "c": '{"process": "c", "more": 1}', "d": "7"}.items():
        redis_client.zadd(workers_key("rqtest"), {name: time.time()})
        redis_client.set(workers_key("rqtest", name), text)
    (mine,) = reports()
    older = {**asdict(mine), "process": "e", "latency": [1, 2, 3]}
    redis_client.zadd(workers_key("rqtest"), {"e": time.time()})
    redis_client.set(workers_key("rqtest", "e"), json.dumps(older))
    assert reports() == [mine]
