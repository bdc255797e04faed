"""Servers that forget the script, or everything, while many ask: no unit is lost or won by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from django_ratequota import Limiter
from django_ratequota.engine.rates import ALGORITHMS
from tests.support.properties import thorough_after

from . import poll
from .asking import Load, one_of_each, slow
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


@WAYS
@pytest.mark.parametrize("durable", thorough_after(1, [False, True]), ids=["forgets", "remembers"])
def test_the_server_dies_and_comes_back_under_load(
    nodes: Callable[..., Node], limiters: Make, way: dict[str, int], durable: bool
) -> None:
    """Lost units are admitted again, exactly; persisted ones are not."""
    limit = 1500
    node = nodes(*(["appendonly yes", "appendfsync always"] if durable else []))
    load = Load(limiters(node, timeout=5), [slow("token_bucket", limit)], **way)
    with load.going_on():
        poll(lambda: load.admitted >= 100, PATIENCE, "a hundred are admitted")
        dying = time.monotonic()
        node.kill()
        dead_us = time.time_ns() // 1000
        poll(lambda: load.asked[-1].error, PATIENCE, "the load meets the outage")
        node.start()
        begun = time.monotonic()
        back = poll(
            lambda: load.asked[-1].begun > begun and not load.asked[-1].error, PATIENCE, "decisions come again"
        )
        healed = time.monotonic()
        poll(lambda: load.asked[-1].is_refused, PATIENCE, "the limit is reached")
    before = sum(asked.allowed for asked in load.asked if asked.at_us <= dead_us)
    after = load.admitted - before
    errors = [asked for asked in load.asked if asked.error]
    print(
        f"\nadmitted {before} before, {after} after, {load.admitted} in all of {limit}; {len(errors)} of "
        f"{len(load.asked)} failed: {load.errors}; decisions again after {back:.2f} s"
    )
    assert errors
    assert load.errors <= {"connection", "timeout", "loading"}
    assert min(asked.ended for asked in errors) >= dying
    assert max(asked.begun for asked in errors) <= healed
    if durable:
        # Each admission was persisted before its reply; at most the replies in flight were lost.
        assert limit - CALLERS <= load.admitted <= limit
    else:
        # It lost what it had admitted until it died, and nothing else.
        assert after == limit
        assert load.admitted == limit + before
