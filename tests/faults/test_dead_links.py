"""Links that died quietly: a load balancer forgets connections that were idle for long, silently or with a reset."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.exceptions import StoreError

from . import poll
from .servers import Node
from .wire import Wire

BUCKET = Bucket("user:1", Rate.parse("1000000/day"))
#: Seconds within which limits are enforced again, from the first request on.
WITHIN = 2.0
#: Callers at a time once the links were found dead: the relay shares this process, and its interpreter.
LATER_CALLERS = 4
#: Seconds without an undecided request after which there are no more: the breaker probes once a second.
QUIET = 1.1

Make = Callable[..., Limiter]


def decided(limiter: Limiter) -> bool:
    try:
        limiter.check([BUCKET])
    except StoreError:
        return False
    return True


async def adecided(limiter: Limiter) -> bool:
    try:
        await limiter.acheck([BUCKET])
    except StoreError:
        return False
    return True


@pytest.mark.parametrize("reset", [False, True], ids=["silent", "reset"])
@pytest.mark.parametrize(("links", "at_once"), [(1, False), (12, False), (64, False), (64, True)])
@pytest.mark.parametrize("way", ["plain", "awaited"])
def test_limits_are_enforced_again(
    node: Node, limiters: Make, way: str, at_once: bool, links: int, reset: bool
) -> None:
    """Of 12 silent links, one was found dead with each probe of the breaker, one a second."""
    with Wire(node) as wire:
        limiter = limiters(wire)
        story = awaited_story if way == "awaited" else plain_story
        late = story(wire, limiter, links, links if at_once else 1, reset)
    print(f"\nundecided until {late:.2f} s")
    assert late < WITHIN


def fill(wire: Wire, links: int) -> None:
    """Wait until ``links`` requests are under way, each on a connection of its own; then let the replies pass."""
    poll(lambda: wire.asked >= links, 30, f"{links} requests at once")
    wire.release()


def plain_story(wire: Wire, limiter: Limiter, links: int, callers: int, reset: bool) -> float:
    """Seconds until the last undecided request of the time in which all should be decided again."""
    limiter.store.timeout = 30
    wire.hold()
    with ThreadPoolExecutor(links) as threads:
        opened = [threads.submit(decided, limiter) for _ in range(links)]
        fill(wire, links)
        assert all(one.result() for one in opened)
    limiter.store.timeout = 0.1
    wire.forget(reset=reset)
    begun, late = time.monotonic(), 0.0
    with ThreadPoolExecutor(callers) as threads:
        while time.monotonic() < begun + min(late + QUIET, WITHIN + 0.5):
            if not all(threads.map(decided, [limiter] * callers)):
                late = time.monotonic() - begun
            callers = min(callers, LATER_CALLERS)
    return late


def awaited_story(wire: Wire, limiter: Limiter, links: int, callers: int, reset: bool) -> float:
    """``plain_story``, awaited."""

    async def story() -> float:
        limiter.store.timeout = 30
        wire.hold()
        opened = [asyncio.create_task(adecided(limiter)) for _ in range(links)]
        await asyncio.to_thread(fill, wire, links)
        assert all(await asyncio.gather(*opened))
        limiter.store.timeout = 0.1
        wire.forget(reset=reset)
        begun, late, at_once = time.monotonic(), 0.0, callers
        while time.monotonic() < begun + min(late + QUIET, WITHIN + 0.5):
            if not all(await asyncio.gather(*(adecided(limiter) for _ in range(at_once)))):
                late = time.monotonic() - begun
            at_once = min(at_once, LATER_CALLERS)
        return late

    return asyncio.run(story())
