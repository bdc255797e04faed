"""Redis at a distance: connecting takes several round trips, a decision one, and the timeout has room for a few."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import redis

from django_ratequota import Limiter
from tests.support.properties import thorough_after

from . import Address
from .asking import ENDLESS, Way, awaiting, failure, plainly
from .servers import Node
from .wire import Wire

WARM_SECONDS, COUNTED = 1.0, 40


def counted(way: Way, limiter: Limiter) -> int:
    """How many of the counted decisions were made."""
    made, begun, number = 0, time.monotonic(), 0
    with way() as ask:
        while number < COUNTED:
            number += time.monotonic() >= begun + WARM_SECONDS
            made += failure(ask, limiter, [ENDLESS]) == "" and number > 0
    return made


@pytest.mark.parametrize("round_trip", thorough_after(1, [0.025, 0.010, 0.040]))
def test_decisions_are_made_from_the_second_second_on(
    nodes: Callable[..., Node], terminator: Wire, node: Node, trusted: str, round_trip: float
) -> None:
    """At 25 ms no connection was ever completed: each was dropped half-way, and the next request began again."""
    secure = {"ssl": True, "ssl_ca_certs": trusted, "password": "secret", "db": 1}
    ways: dict[str, tuple[Address, dict[str, object]]] = {
        "plain": (nodes(), {}),
        "password": (node, {"password": "secret", "db": 1, "client_name": "far"}),
        "TLS": (terminator, secure),
    }
    with ExitStack() as stack, ThreadPoolExecutor(2 * len(ways)) as threads:
        running = {}
        for name, (where, options) in ways.items():
            for way in (plainly, awaiting):
                wire = stack.enter_context(Wire(where, round_trip))
                client = stack.enter_context(
                    redis.Redis(host=wire.host, port=wire.port, **options)  # type: ignore[arg-type]
                )
                limiter = Limiter(client=client, prefix="rqtest", timeout=0.1)
                stack.callback(limiter.store.close)
                running[name, way.__name__] = threads.submit(counted, way, limiter)
        made = {name: future.result() for name, future in running.items()}
    print(f"\n{round_trip * 1000:.0f} ms: of {COUNTED} {made}")
    assert min(made.values()) >= 0.9 * COUNTED, made  # a busy machine may miss a few


@pytest.mark.parametrize("way", thorough_after(1, [plainly, awaiting]))
def test_one_caller_alone(node: Node, limiters: Callable[..., Limiter], way: Way) -> None:
    """Connecting took two round trips and left no time for a third: the first command dropped each connection."""
    with Wire(node, 0.045) as wire:
        # None was decided. Connecting has 10 ms to spare, which a busy machine takes now and then.
        assert counted(way, limiters(wire, timeout=0.1)) >= 0.75 * COUNTED
