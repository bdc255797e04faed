"""Run work on many threads at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import pytest

from django_ratequota.monitoring.workers import Job, Worker

Result = TypeVar("Result")


def on_threads(number: int, work: Callable[[], Result]) -> list[Result]:
    """Run ``work`` on ``number`` threads that begin together and switch as often as possible; return the results.

    Raises the first exception of a thread.
    """
    start = Barrier(number)

    def run(_: int) -> Result:
        start.wait(timeout=60)
        return work()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(number) as threads:
            return list(threads.map(run, range(number)))
    finally:
        sys.setswitchinterval(interval)


def by_hand(patch: pytest.MonkeyPatch, *jobs: Job) -> None:
    """No thread does these jobs; the test may."""
    for job in jobs:
        patch.setattr(job, "seconds", lambda: 0)


def stop(worker: Worker) -> None:
    """End the worker's thread, and have the next request start another."""
    worker.tell()
    assert worker.wait(30)
    worker.clear()


def leave(worker: Worker) -> None:
    """End the worker's thread after the job that it is at, and wait for that."""
    thread, woken = worker._thread, worker._woken
    worker.clear()  # the thread sees that it is no longer the worker's
    woken.set()
    if thread is not None:
        thread.join(30)
