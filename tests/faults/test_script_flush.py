"""A server that forgets the script while many ask: no unit is lost or won by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from django_ratequota import Limiter

from . import poll
from .asking import Way, one_of_each
from .servers import PATIENCE, Node

THREADS, LIMIT, ASKS = 4, 1500, 1600


@contextmanager
def flushing(node: Node, seconds: float) -> Iterator[list[None]]:
    """Flushes all scripts again and again, at this interval in seconds; collects an item each time."""
    flushes: list[None] = []
    enough = threading.Event()

    def flush() -> None:
        with node.client() as client:
            while not enough.wait(seconds):
                client.script_flush()
                flushes.append(None)

    thread = threading.Thread(target=flush)
    thread.start()
    try:
        yield flushes
    finally:
        enough.set()
        thread.join(PATIENCE)


@pytest.mark.parametrize("milliseconds", [10, 0])
def test_scripts_are_flushed_under_load(
    node: Node, limiters: Callable[..., Limiter], way: Way, milliseconds: int
) -> None:
    """A script may be flushed between loading it and running it by its hash."""
    limiter, buckets, allowed, enough = limiters(node, timeout=30), one_of_each(LIMIT), [], threading.Event()

    def work() -> None:
        with way() as ask:
            while not enough.is_set():
                allowed.append(ask(limiter, buckets).allowed)

    with flushing(node, milliseconds / 1000) as flushes, ThreadPoolExecutor(THREADS) as threads:
        working = [threads.submit(work) for _ in range(THREADS)]
        try:
            poll(lambda: len(flushes) >= 10 and len(allowed) >= ASKS, PATIENCE, f"10 flushes, {ASKS} asked")
        finally:
            enough.set()
        for one in working:
            one.result()
    assert allowed.count(True) == LIMIT
    assert {status.remaining for status in limiter.peek(buckets).statuses} == {0}
