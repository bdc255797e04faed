"""A server that forgets the script while many ask: no unit is lost or won by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from django_ratequota import Limiter
from django_ratequota.engine.rates import ALGORITHMS

from . import poll
from .asking import Load, one_of_each
from .servers import PATIENCE, Node

Make = Callable[..., Limiter]

#: Callers at once: threads, or tasks of one event loop.
CALLERS = 4
WAYS = pytest.mark.parametrize("way", [{"threads": CALLERS}, {"tasks": CALLERS}], ids=["plain", "awaited"])


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


@WAYS
@pytest.mark.parametrize("milliseconds", [10, 0])
def test_scripts_are_flushed_under_load(node: Node, limiters: Make, way: dict[str, int], milliseconds: int) -> None:
    """A script may be flushed between loading it and running it by its hash."""
    limit, asks = 1500, 1600
    load = Load(limiters(node, timeout=30), one_of_each(limit), **way)
    with flushing(node, milliseconds / 1000) as flushes, load.going_on():
        poll(lambda: len(flushes) >= 10 and len(load.asked) >= asks, PATIENCE, f"10 flushes, {asks} asked")
    took = max(asked.ended for asked in load.asked) - min(asked.begun for asked in load.asked)
    print(f"\n{len(flushes)} flushes in {took:.2f} s, {len(load.asked)} asked, {load.admitted} admitted")
    assert load.errors == set()
    assert load.admitted == limit
    statuses = limiters(node).peek(one_of_each(limit)).statuses
    assert [status.remaining for status in statuses] == [0] * len(ALGORITHMS)
