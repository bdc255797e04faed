"""Two threads beside a process's requests: one waits for Redis, the other for the database, so neither delays both.

Each carries out jobs, which other modules add. A request keeps the threads running and waits for nothing. A process
that ends has them do each job once more. Where a project has receivers of signals, a third thread runs these.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from os import getpid
from typing import Any

from django.db import close_old_connections

from .. import monitoring
from ..conf import settings
from ..exceptions import StoreError
from ..utils import forks
from ..utils.problems import note_problem

#: Seconds until a thread that could not be started is tried again.
_RETRY_SECONDS = 60.0
#: Most seconds between two looks at the jobs, as their intervals may change.
_LOOK_SECONDS = 1.0
#: How long a process that ends waits for both threads (seconds).
_EXIT_SECONDS = 2.0

Work = Callable[[], object]


@dataclass(eq=False)
class Job:
    """What a worker does at an interval."""

    name: str
    #: Returns the pause after it, by the settings in force; 0 = it is not done now, inf = only ``soon``.
    seconds: Callable[[], float]
    work: Work
    #: Done in its place when the process ends; None = nothing.
    last: Work | None
    wake: Work
    #: Whether it is due before its pause is over, as at first; and when it was done (monotonic seconds).
    asked: bool = True
    done_at: float = 0.0
    #: What it is to be done with, where it is done only ``soon``.
    given: deque[Any] = field(default_factory=deque)

    def soon(self, *given: object) -> None:
        """Have it done before its pause is over, if the thread runs."""
        self.given.extend(given)
        self.asked = True
        self.wake()

    def due_in(self) -> float:
        """Return the seconds until it is due, 0 or less if it is."""
        seconds = self.seconds()
        if not seconds:
            return inf
        return 0.0 if self.asked else self.done_at + seconds - time.monotonic()

    def do(self, work: Work) -> None:
        """Do ``work``; its errors are logged once a minute, as they would end the thread, and nobody would notice."""
        self.asked = False
        try:
            work()
        except StoreError as error:
            if error.answered:  # breakers log the others
                note_problem(self.name, f"the job {self.name} failed: {error}")
        except Exception as error:
            note_problem(self.name, f"the job {self.name} failed", error)
        self.done_at = time.monotonic()
        close_old_connections()  # as after a request


class Worker(forks.Renewed):
    """A daemon thread of this process: it does the first of the jobs that are due, and looks again."""

    def __init__(self, name: str, *order: str) -> None:
        """``order`` are the names of its jobs."""
        self._name, self._order = f"ratequota-{name}", order
        self._jobs: list[Job] = []
        self._lock = forks.lock()
        #: Held while a job is done.
        self._working = forks.quiet_lock()
        super().__init__()

    def clear(self) -> None:
        """Begin as in a process that just started; a thread that runs ends after its job."""
        self._thread: threading.Thread | None = None
        #: The process that it runs in; 0 = none does.
        self.pid = 0
        #: When to try to start a thread again (monotonic seconds); 0 = no try has failed.
        self._retry_at = 0.0
        #: Whether the process ends: the thread does its last jobs.
        self.ending = False
        self._woken = threading.Event()
        for job in self._jobs:
            job.asked, job.given = True, deque()

    def add(self, name: str, seconds: Callable[[], float], work: Work, *, last: Work | None = None) -> Job:
        """Add a job in its place; the arguments are those of ``Job``. ``work`` may raise ``StoreError``."""
        job = Job(name, seconds, work, last, self.wake)
        self._jobs = sorted([*self._jobs, job], key=lambda job: self._order.index(job.name))
        return job

    def keep(self) -> None:
        """Start the thread unless it runs; never raises, and tries a failed start again a minute later.

        Requests compare ``pid`` themselves, which is no call.
        """
        if self.pid != getpid():
            forks.check()
            if time.monotonic() >= self._retry_at:
                self._start()

    def wake(self) -> None:
        """Have the thread look at its jobs now."""
        self._woken.set()

    def tell(self) -> None:
        """Have the thread do each job once more, and end."""
        self.ending = True
        self.wake()

    def wait(self, seconds: float = inf) -> bool:
        """Wait for the thread after ``tell``, at most so long; returns whether it has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(max(seconds, 0.0) if seconds < inf else None)
        return thread is None or not thread.is_alive()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system or the container has no thread left
                note_problem(self._name, f"{self._name} could not be started; trying again every minute: {error}")
                self._retry_at = time.monotonic() + _RETRY_SECONDS
                return
            self._thread, self.pid = thread, getpid()
        # A child of multiprocessing ends without Python's exit functions.
        util = sys.modules.get("multiprocessing.util")
        if util is not None and util.process.parent_process() is not None:
            util.Finalize(None, end, exitpriority=-100)

    def _run(self) -> None:
        own = threading.current_thread()
        with self._lock:  # an interrupted start leaves a thread that is not the worker's
            pass
        try:
            while self._thread is own and not self.ending:
                self._woken.clear()
                due = [job for job in self._jobs if job.due_in() <= 0]
                if due:
                    self._do(due[0], due[0].work)
                elif not self.ending:
                    self._woken.wait(min([_LOOK_SECONDS, *(job.due_in() for job in self._jobs)]))
            for job in self._jobs if self._thread is own else ():
                if job.last is not None:
                    self._do(job, job.last)
        finally:  # whatever ended it: the next request starts another
            if self._thread is own and not self.ending:
                self._thread, self.pid = None, 0

    def _do(self, job: Job, work: Work) -> None:
        acquired = self._working.acquire(timeout=forks.QUIET_SECONDS)
        try:
            job.do(work)
        finally:
            if acquired:
                self._working.release()


#: Waits for Redis. Slots come first, because their leases end.
redis_worker = Worker("redis", "slots", "raise", "alerts", "statistics", "report")
#: Waits for the database. Requests wait for what is restored.
database_worker = Worker("database", "restore", "ledger", "drop", "outages")
#: Runs the project's receivers of signals, which may wait for anything; it starts when a signal is due.
receivers_worker = Worker("receivers", "receivers")


def is_kept(limiter: Any) -> bool:
    """Whether counts are kept in the database: those of Redis are, if the setting says so."""
    return bool(settings.checkpoint_seconds) and not limiter.store.absent and monitoring.writes_rows


def end(**_: object) -> None:
    """Have the threads do each job once more, and wait for them, two seconds at most; called again, do nothing."""
    if forks.pid != getpid():
        forks.check()
    until = time.monotonic() + _EXIT_SECONDS
    told = [worker for worker in (database_worker, redis_worker, receivers_worker) if not worker.ending]
    # In turn: what is written is to be raised in Redis, and to be told to receivers.
    for worker in told:
        worker.tell()
        worker.wait((until - time.monotonic()) / 2)
    for worker in told:
        worker.wait(until - time.monotonic())


atexit.register(end)
