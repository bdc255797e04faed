"""The threads that work beside requests: their jobs, neither of them in the other's way, and the end of a process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Limiter, Rate, check_request
from django_ratequota.engine.keys import workers_key
from django_ratequota.exceptions import StoreError
from django_ratequota.ledger import book
from django_ratequota.ledger.book import Entry
from django_ratequota.models import Outage, QuotaWindow, RatePolicy
from django_ratequota.monitoring import alerts, workers
from django_ratequota.monitoring.collector import collector, counting
from django_ratequota.monitoring.health import report, reports
from django_ratequota.monitoring.outages import outages
from django_ratequota.monitoring.timeline import timeline
from django_ratequota.monitoring.workers import Job, Worker, database_worker, end, receivers_worker, redis_worker
from django_ratequota.runtime import default_limiter
from django_ratequota.utils import problems
from tests.faults import poll
from tests.project.views import request_from
from tests.support import server
from tests.support.projects import SETTINGS, run_python
from tests.support.threads import on_threads, stop

NAME = "ratequota-tests"


class Work:
    """A job that counts how often it was done; it raises ``error`` if there is one, or what ``then`` does."""

    def __init__(self, worker: Worker, name: str, seconds: float) -> None:
        self.error: Exception | None = None
        self.then: Callable[[], object] = lambda: None
        self.seconds, self._done = seconds, threading.Semaphore(0)
        self.job: Job = worker.add(name, lambda: self.seconds, self, last=None)

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


def threads(name: str = NAME) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.fixture
def worker() -> Iterator[Worker]:
    problems.forget()
    worker = Worker("tests", "first", "second")
    yield worker
    stop(worker)
    assert threads() == []


@pytest.fixture
def work(worker: Worker) -> Work:
    return Work(worker, "first", 0.01)


# --- A worker. ---


def test_a_job_is_done_periodically_by_the_settings_in_force(worker: Worker, work: Work) -> None:
    worker.keep()
    work.wait(3)
    [thread] = threads()
    assert thread.daemon, "it would keep the process from ending"
    work.seconds = 0
    work.job.soon()
    while work.is_done_again():
        pass  # what was begun before
    work.seconds = inf
    work.job.soon()
    work.wait()
    assert not work.is_done_again(), "it is done when that is asked for"
    work.seconds = 0.01
    work.wait(3)  # within a second
    assert threads() == [thread]


def test_the_first_job_that_is_due_goes_first(worker: Worker) -> None:
    done: list[str] = []
    second, first = Work(worker, "second", inf), Work(worker, "first", inf)
    first.then = lambda: done.append("first")

    def ask_again() -> None:
        done.append("second")
        if len(done) < 4:
            second.job.soon()
            first.job.soon()

    second.then = ask_again
    worker.keep()
    second.wait(2)
    assert done == ["first", "second"] * 2


def test_many_threads_start_one_thread(worker: Worker, work: Work, monkeypatch: Any) -> None:
    names: list[str] = []

    class Counting(threading.Thread):
        def start(self) -> None:
            names.append(self.name)
            super().start()

    monkeypatch.setattr(threading, "Thread", Counting)
    on_threads(32, worker.keep)
    work.wait()
    worker.keep()
    assert names.count(NAME) == 1


def test_a_thread_that_cannot_be_started_is_tried_again(
    worker: Worker, work: Work, monkeypatch: Any, caplog: Any
) -> None:
    """Two requests failed, and nothing was sent afterwards."""
    clock, tried = SimpleNamespace(now=100.0), []

    class Refused(threading.Thread):
        def start(self) -> None:
            tried.append(clock.now)
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Refused)
        for clock.now in (100, 101, 159.9, 160, 161):
            worker.keep()
    assert tried == [100, 160]
    text = f"{NAME} could not be started; trying again every minute: can't start new thread"
    assert [record.getMessage() for record in caplog.records] == [text]
    clock.now = 219.9
    worker.keep()
    assert threads() == []
    clock.now = 220
    worker.keep()
    work.wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_is_started_again(worker: Worker, work: Work) -> None:
    """A receiver that raised ``SystemExit`` ended the ledger's thread, and no request started another."""
    work.then = sys.exit
    worker.keep()
    work.wait()
    poll(lambda: not worker.pid, 30, "the thread has ended")
    work.then = lambda: None
    worker.keep()
    work.wait(2)


def test_a_start_that_is_interrupted_leaves_no_second_thread(worker: Worker, work: Work, monkeypatch: Any) -> None:
    """By a task's time limit, while the thread began."""

    class Interrupted(threading.Thread):
        def start(self) -> None:
            super().start()
            raise TimeoutError("soft time limit")

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Interrupted)
        with pytest.raises(TimeoutError):
            worker.keep()
    worker.keep()
    work.wait(2)
    poll(lambda: len(threads()) == 1, 30, "one is left")


def test_an_error_of_redis_is_logged_once_a_minute(worker: Worker, work: Work, caplog: Any) -> None:
    """Reports and statistics were lost without a log entry: only breakers logged failures of Redis."""
    work.error = StoreError("wrongtype", "WRONGTYPE")
    worker.keep()
    work.wait(4)
    [record] = caplog.records
    assert (record.levelname, record.message) == ("ERROR", "the job first failed: WRONGTYPE")
    assert problems.recent() == {"first": record.message}, "the reports show it"


def test_other_errors_end_no_thread(worker: Worker, work: Work, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(workers, "close_old_connections", lambda: closed.append(threading.current_thread().name))
    work.error = StoreError("connection", "its breaker logs that")
    worker.keep()
    work.wait(3)
    assert caplog.records == []
    work.error = ValueError("a defect")
    work.wait(3)
    assert "a defect" in caplog.text
    assert len(threads()) == 1
    assert closed.count(NAME) >= 5, "a connection to the database that broke is not used for ever"


# --- The two workers. ---


@pytest.fixture
def sent(redis_client: redis.Redis, fresh_policies: None, settings: Any) -> Iterator[Callable[..., None]]:
    """Sets how often a process sends; stops the threads at the end of the test, before Redis is emptied."""

    def send_every(seconds: float) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": seconds}

    yield send_every
    send_every(0)
    stop(database_worker)
    stop(redis_worker)  # it waits for the other, to take its report back


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("checkpointing")  # else no outage is written
def test_a_request_has_its_decision_and_a_report_sent(sent: Callable[..., None], redis_client: redis.Redis) -> None:
    collector.clear()  # what other tests have recorded
    outages.clear()
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


class Hung:
    """Both workers as they write, of which one may hang until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self.over = monkeypatch, threading.Event()
        self._hanging: dict[str, threading.Event] = {}

    def database(self) -> None:
        self._hang(book.writing, database_worker)

    def redis(self) -> None:
        self._hang(counting, redis_worker)

    def receivers(self) -> None:
        self._hang(alerts.delivering, receivers_worker)

    def _hang(self, job: Job, worker: Worker) -> None:
        hangs = threading.Event()
        self._patch.setattr(job, "work", lambda: hangs.set() or self.over.wait(60))
        self._patch.setattr(job, "seconds", lambda: 0.01)
        worker.keep()
        job.soon()
        assert hangs.wait(30)


@pytest.fixture
def hung(checkpointing: None, fresh_policies: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hung]:
    hung = Hung(monkeypatch)
    yield hung
    hung.over.set()
    for worker in (database_worker, redis_worker, receivers_worker):
        stop(worker)


@pytest.mark.django_db(transaction=True)
def test_a_database_that_hangs_delays_no_renewal_of_a_slot(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    renew, renewed = Limiter.renew_slots, threading.Event()

    def note(*arguments: Any) -> int:
        count = renew(*arguments)
        renewed.set()
        return count

    monkeypatch.setattr(Limiter, "renew_slots", note)
    RatePolicy.objects.create(rates="5 concurrent")
    request = request_from()
    assert check_request(request).allowed
    hung.database()
    renewed.clear()
    assert renewed.wait(30)
    request.close()


def note_units(units: int) -> None:
    now_us = default_limiter().now_us
    book.note([Entry(Bucket("user:1", Rate.parse("1000/month"), durable=True), units, now_us)])


def written() -> list[int]:
    return list(QuotaWindow.objects.values_list("charged", flat=True))


@pytest.mark.django_db(transaction=True)
def test_a_redis_that_hangs_delays_no_row(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    hung.redis()
    monkeypatch.setattr(book.writing, "seconds", lambda: 0.01)
    note_units(3)
    poll(lambda: written() == [3], 30, "the row")
    assert book.ledger.due, "Redis is raised once it answers"


@pytest.mark.django_db(transaction=True)
def test_a_receiver_that_hangs_delays_no_row(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receivers ran on the thread that writes rows: a slow one lost all of them at a clean exit."""
    hung.receivers()
    monkeypatch.setattr(book.writing, "seconds", lambda: 0.01)
    note_units(3)
    poll(lambda: written() == [3], 30, "the row")


# --- The end. ---


@pytest.mark.django_db(transaction=True)
def test_a_process_that_ends_does_each_job_once_more(hung: Hung, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_EXIT_SECONDS", 30)  # however slow this machine is
    report()
    database_worker.keep()
    redis_worker.keep()
    note_units(3)
    end()
    assert (written(), reports()) == ([3], []), "its row is there, and its report gone"
    assert database_worker.wait(0)
    assert redis_worker.wait(0)
    end()  # as an exit function, after Celery's signal


@pytest.mark.django_db(transaction=True)
def test_a_process_that_ends_waits_two_seconds_in_all(hung: Hung) -> None:
    """Each of six exit functions had a time of its own: while both hung, up to 16 s.

    A child of ``multiprocessing`` ends in one call for each thread that it had started, each of which waited.
    """
    report()
    note_units(3)
    hung.database()
    hung.redis()
    began_at = time.monotonic()
    for _ in range(2):
        end()
    assert 2 <= time.monotonic() - began_at < 4
    assert (written(), len(reports())) == ([], 1), "ratequota checkpoint names it"


FORKING = """
import ctypes, os, signal, sys, threading

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.project.settings"
import django

django.setup()
from django_ratequota.exceptions import StoreError
from django_ratequota.monitoring import health
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.workers import Worker

reported, held, over = threading.Event(), threading.Event(), threading.Event()

def report():
    health.report()
    reported.set()
    if not over.is_set():  # the parent's is at work when it forks
        held.set()
        over.wait()

worker = Worker("tests", "report")
worker.add("report", lambda: 20, report, last=None)

def reports_by_now():
    worker.keep()
    assert reported.wait(20)
    assert health.health().process in [one.process for one in health.reports()]

health.note_degraded("oom", StoreError("oom", "full"))
collector.pending.append("a record")
reports_by_now()
held.wait()
child = FORK()
if not child:
    signal.alarm(40)  # its default action ends a process that hangs
    try:
        reported, over = threading.Event(), threading.Event()
        over.set()
        reports_by_now()
        assert (health.health().degraded, len(collector.pending)) == ({}, 0), "the parent's"
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
@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
def test_a_forked_process_reports_for_itself(redis_client: redis.Redis, fork: str) -> None:
    # Newer Pythons warn of any fork with threads, which this test needs.
    assert run_python(FORKING.replace("FORK", fork), warnings="ignore::DeprecationWarning") == []


#: A project whose rows are written at the end, or when ``book.flush`` is called.
ROWS = """
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "rows", "OPTIONS": {"timeout": 30}}}
INSTALLED_APPS += ["django_ratequota"]
RATEQUOTA = {"PREFIX": "rqtest", "STATISTICS_SECONDS": 20, "CHECKPOINT_SECONDS": 3600}
import os
RATEQUOTA["REDIS_URL"] = os.environ["SERVER"]
"""
#: What its processes use; SPENDING is imported by those that multiprocessing starts.
SPENDING = """
import ctypes, multiprocessing, os, time
import django
django.setup()
from django.core.management import call_command
from django_ratequota import Bucket, Rate, warm
from django_ratequota.models import QuotaWindow
from django_ratequota.ledger import book

unit = book.Entry(Bucket("user:1", Rate.parse("1000/month"), durable=True), 1, time.time_ns() // 1000)

def spend(units):
    for _ in range(units):
        book.note([unit])

def charged():
    return sum(QuotaWindow.objects.values_list("charged", flat=True))
"""
#: Python is told nothing of this fork, as with uWSGI.
C_FORKS = """
from spending import *
call_command("migrate", verbosity=0)
warm()
django.db.connections.close_all()
children = []
for _ in range(2):
    child = ctypes.PyDLL(None).fork()
    if not child:
        try:
            spend(20)
            book.flush()
            os._exit(0)
        finally:
            os._exit(1)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
print(charged())
"""
MULTIPROCESSING = """
from spending import *

if __name__ == "__main__":
    call_command("migrate", verbosity=0)
    for method in ("fork", "spawn", "forkserver"):
        django.db.connections.close_all()  # SQLite's are not to be open at a fork
        context = multiprocessing.get_context(method)
        child = context.Process(target=spend, args=[20])
        child.start()
        child.join()
        assert child.exitcode == 0
        pool = context.Pool(2)
        pool.map(spend, [10, 10], chunksize=1)
        pool.close()
        pool.join()
        print(charged())
"""
#: Python calls exit functions in reverse order, so ours is called first.
EXIT_HANDLER = """
import atexit
atexit.register(lambda: print(charged()))
atexit.register(lambda: spend(3))
from spending import *
call_command("migrate", verbosity=0)
spend(4)
"""


def run_rows(folder: Path, script: str) -> list[str]:
    (folder / "settings.py").write_text(SETTINGS + ROWS)
    (folder / "spending.py").write_text(SPENDING)
    (folder / "script.py").write_text(script)
    code = "import runpy; runpy.run_path('script.py', run_name='__main__')"
    environment = {"DJANGO_SETTINGS_MODULE": "settings", "SERVER": server.url()}
    # Newer Pythons warn of any fork with threads.
    return run_python(code, folder=folder, warnings="ignore::DeprecationWarning", **environment)


@pytest.mark.slow
def test_workers_that_are_forked_in_c_write_rows_of_their_own(tmp_path: Path, redis_client: redis.Redis) -> None:
    """The second worker's first batch was taken for a repetition of the first one's, and first units were lost."""
    assert run_rows(tmp_path, C_FORKS) == ["40"]


@pytest.mark.slow
def test_children_of_multiprocessing_write_what_is_left(tmp_path: Path, redis_client: redis.Redis) -> None:
    """They end without Python's exit functions."""
    assert run_rows(tmp_path, MULTIPROCESSING) == ["40", "80", "120"]


@pytest.mark.slow
def test_an_exit_handler_of_the_project_writes_its_own_rows(tmp_path: Path, redis_client: redis.Redis) -> None:
    """Its charges were lost where it had been registered before the first check."""
    assert run_rows(tmp_path, EXIT_HANDLER) == ["7"]
