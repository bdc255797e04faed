"""Periodic work on threads, and the thread that sends what a process has recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_ratequota import check_request
from django_ratequota.engine.keys import workers_key
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Outage, RatePolicy
from django_ratequota.monitoring import background
from django_ratequota.monitoring.background import Background
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.health import reports
from django_ratequota.monitoring.outages import outages
from django_ratequota.monitoring.sending import sending
from django_ratequota.monitoring.timeline import timeline
from django_ratequota.runtime import default_limiter
from tests.faults import poll
from tests.project.views import request_from
from tests.support.projects import run_python
from tests.support.threads import on_threads

NAME = "ratequota-tests"


class Work:
    """Counts how often it was done; raises ``error`` if there is one, or what ``then`` does."""

    def __init__(self, settings: Any) -> None:
        self.error: Exception | None = None
        self.then: Callable[[], object] = lambda: None
        self.seconds = 0.01
        self.background = Background(NAME, lambda: self.seconds, self)
        self._settings, self._done = settings, threading.Semaphore(0)

    def __call__(self) -> None:
        try:
            self.then()
            if self.error is not None:
                raise self.error
        finally:
            self._done.release()

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._done.acquire(timeout=30), "it is not done"

    def is_done_again(self) -> bool:
        return self._done.acquire(timeout=0.1)

    def change_settings(self, **more: Any) -> None:
        self._settings.RATEQUOTA = {**self._settings.RATEQUOTA, **more}


def threads(name: str = NAME) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.fixture
def work(settings: Any) -> Iterator[Work]:
    work = Work(settings)
    yield work
    work.change_settings()  # with new settings, the thread goes on only when a request asks for it
    work.background.soon()
    for thread in threads():
        thread.join(timeout=30)
    assert threads() == []


def test_a_thread_works_periodically_until_the_settings_change(work: Work) -> None:
    work.background.keep()
    work.wait(3)
    [before] = threads()
    assert before.daemon, "it would keep the process from ending"
    work.change_settings(PREFIX="rqtest:two")
    work.background.keep()
    before.join(timeout=30)
    work.wait(2)
    [after] = threads()
    assert after is not before
    work.seconds = 0
    work.then = work.change_settings  # while it works: then it went on for a minute
    after.join(timeout=30)
    work.background.keep()
    assert threads() == []


def test_work_that_is_due_soon_does_not_wait(work: Work) -> None:
    work.seconds = 3600
    work.background.keep()
    work.wait()
    work.background.soon()
    work.wait()
    assert not work.is_done_again(), "it is due once"


def test_many_threads_start_one_background_thread(work: Work, monkeypatch: Any) -> None:
    names: list[str] = []

    class Counting(threading.Thread):
        def start(self) -> None:
            names.append(self.name)
            super().start()

    monkeypatch.setattr(threading, "Thread", Counting)
    on_threads(32, work.background.keep)
    work.wait()
    work.background.keep()
    assert names.count(NAME) == 1


def test_a_thread_that_cannot_be_started_is_tried_again(work: Work, monkeypatch: Any, caplog: Any) -> None:
    """Two requests failed, and nothing was sent afterwards."""
    clock, tried = SimpleNamespace(now=100.0), []

    class Refused(threading.Thread):
        def start(self) -> None:
            tried.append(clock.now)
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(background, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Refused)
        for clock.now in (100, 101, 159.9, 160, 161):
            work.background.keep()
    assert tried == [100, 160]
    text = f"{NAME} could not be started; trying again every minute: can't start new thread"
    assert [record.getMessage() for record in caplog.records] == [text]
    clock.now = 219.9
    work.background.keep()
    assert threads() == []
    clock.now = 220
    work.background.keep()
    work.wait(2)


def test_an_error_of_redis_is_logged_once_until_the_work_succeeds(work: Work, caplog: Any) -> None:
    """Reports and statistics were lost without a log entry: only breakers logged failures of Redis."""
    work.error = StoreError("wrongtype", "WRONGTYPE")
    work.background.keep()
    work.wait(4)
    [record] = caplog.records
    assert (record.levelname, record.message) == ("ERROR", f"{NAME} failed: WRONGTYPE")
    work.error = None
    work.wait(2)
    work.error = StoreError("wrongtype", "WRONGTYPE")
    work.wait(2)
    assert len(caplog.records) == 2


def test_other_errors_end_no_thread(work: Work, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(background, "close_old_connections", lambda: closed.append(threading.current_thread().name))
    work.error = StoreError("connection", "its breaker logs that")
    work.background.keep()
    work.wait(3)
    assert caplog.records == []
    work.error = ValueError("a defect")
    work.wait(3)
    assert "a defect" in caplog.text
    assert len(threads()) == 1
    assert closed.count(NAME) >= 5, "a connection to the database that broke is not used for ever"


# --- What is sent. ---


@pytest.fixture
def sent(redis_client: redis.Redis, fresh_policies: None, settings: Any) -> Iterator[Callable[..., None]]:
    """Sets how often a process sends; stops the thread at the end of the test, before Redis is emptied."""

    def send_every(seconds: float) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": seconds}

    yield send_every
    send_every(0)
    sending.soon()
    for thread in threads("ratequota-statistics"):
        thread.join(timeout=30)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("checkpointing")  # else no outage is written
def test_a_request_has_its_decision_and_a_report_sent(sent: Callable[..., None], redis_client: redis.Redis) -> None:
    sent(0)
    collector.clear()  # what other tests have recorded
    check_request(request_from())
    assert threads("ratequota-statistics") == []
    redis_client.set(f"{workers_key('rqtest')}", "no sorted set, so that reports fail")
    sent(0.01)
    check_request(request_from())
    poll(lambda: sum(slot.admitted for slot in timeline("hour").total) == 1, 30, "it is counted")
    outages.note("timeout", {1: "allow"})
    poll(Outage.objects.exists, 30, "an outage is written")
    redis_client.delete(workers_key("rqtest"))
    poll(reports, 30, "a report")


@pytest.mark.django_db(transaction=True)
def test_a_load_of_policies_is_reported_at_once(sent: Callable[..., None]) -> None:
    """Reports named no revision, or the one before an edit, until the next of them was due."""
    sent(20)
    for rates in ("5/hour", "6/hour"):
        RatePolicy.objects.update_or_create(counted_per="caller", defaults={"rates": rates})
        assert check_request(request_from()).limit == int(rates[0])
        revision = default_limiter().stored_revision()
        poll(lambda revision=revision: [one.revision for one in reports()] == [revision], 30, "it is reported")


FORKING = """
import os, signal, sys, threading

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.project.settings"
import django
from django.conf import settings

settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 20}
django.setup()
from django_ratequota.exceptions import StoreError
from django_ratequota.monitoring import health
from django_ratequota.monitoring.background import Background
from django_ratequota.monitoring.collector import collector

reported, held, over = threading.Event(), threading.Event(), threading.Event()

def report():
    health.report()
    reported.set()
    if not over.is_set():  # the parent's is at work when it forks
        held.set()
        over.wait()

background = Background("ratequota-tests", lambda: settings.RATEQUOTA["STATISTICS_SECONDS"], report)

def running():
    return [thread for thread in threading.enumerate() if thread.name == "ratequota-tests"]

def reports_by_now():
    background.keep()
    assert reported.wait(20)
    assert len(running()) == 1
    assert health.health().process in [one.process for one in health.reports()]

health.note_degraded("oom", StoreError("oom", "full"))
collector.pending.append("a record")
reports_by_now()
held.wait()
child = os.fork()
if not child:
    signal.alarm(40)  # its default action ends a process that hangs
    try:
        assert running() == []
        assert (health.health().degraded, len(collector.pending)) == ({}, 0), "the parent's"
        reported.clear()
        over.set()
        reports_by_now()
        assert len(health.reports()) == 2
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
_, status = os.waitpid(child, 0)
over.set()
assert len(collector.pending) == 1
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_forked_process_reports_for_itself(redis_client: redis.Redis) -> None:
    # Newer Pythons warn of any fork with threads, which this test needs.
    assert run_python(FORKING, warnings="ignore::DeprecationWarning") == []
