"""Run work on many threads at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

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
