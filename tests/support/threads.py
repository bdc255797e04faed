"""Work that many threads do at once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

Result = TypeVar("Result")


def on_threads(number: int, work: Callable[[], Result]) -> list[Result]:
    """What so many threads return that begin together, and are changed between as often as can be.

    Raises what the first of them raised.
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
