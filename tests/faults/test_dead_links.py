"""Links that died quietly: a load balancer forgets connections that were idle for long, silently or with a reset."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from django_ratequota import Limiter
from tests.support.properties import thorough_after

from . import poll
from .asking import aoutcome, outcome
from .servers import Node
from .wire import Wire

#: Seconds of a deadline that only a dead link misses.
LONG = 30

Make = Callable[..., Limiter]


@pytest.mark.parametrize("reset", [False, True], ids=["silent", "reset"])
@pytest.mark.parametrize(("links", "at_once"), thorough_after(1, [(12, False), (1, False), (64, False), (64, True)]))
@pytest.mark.parametrize("way", ["plain", "awaited"])
def test_limits_are_enforced_again(
    node: Node, limiters: Make, way: str, at_once: bool, links: int, reset: bool
) -> None:
    """Of 12 silent links, one was found dead with each probe of the breaker, one a second."""
    with Wire(node) as wire:
        limiter = limiters(wire)
        story = awaited_story if way == "awaited" else plain_story
        callers = links if at_once else 1
        story(wire, limiter, links, callers, reset)
        assert 1 <= wire.unheard <= callers, "a request was sent on a link as old as those that were found dead"


def fill(wire: Wire, links: int) -> None:
    """Wait until ``links`` requests are under way, each on a connection of its own; then let the replies pass."""
    poll(lambda: wire.asked >= links, LONG, f"{links} requests at once")
    wire.thaw()


def plain_story(wire: Wire, limiter: Limiter, links: int, callers: int, reset: bool) -> None:
    """Find the links dead by as many callers at once; after the breaker's probe, all requests are decided."""
    limiter.store.timeout = LONG
    wire.hold()
    with ThreadPoolExecutor(links) as threads:
        opened = [threads.submit(outcome, limiter) for _ in range(links)]
        fill(wire, links)
        assert {one.result() for one in opened} == {"decided"}
        wire.forget(reset=reset)
        limiter.store.timeout = 0.1
        list(threads.map(outcome, [limiter] * callers))
        poll(lambda: outcome(limiter) == "decided", LONG, "the breaker's probe")
        limiter.store.timeout = LONG
        assert set(threads.map(outcome, [limiter] * links)) == {"decided"}


def awaited_story(wire: Wire, limiter: Limiter, links: int, callers: int, reset: bool) -> None:
    """``plain_story``, awaited."""

    async def story() -> None:
        limiter.store.timeout = LONG
        wire.hold()
        opened = [asyncio.create_task(aoutcome(limiter)) for _ in range(links)]
        await asyncio.to_thread(fill, wire, links)
        assert set(await asyncio.gather(*opened)) == {"decided"}
        wire.forget(reset=reset)
        limiter.store.timeout = 0.1
        await asyncio.gather(*(aoutcome(limiter) for _ in range(callers)))
        async with asyncio.timeout(LONG):
            while await aoutcome(limiter) != "decided":  # noqa: ASYNC110 - the breaker probes once a second
                await asyncio.sleep(0.01)
        limiter.store.timeout = LONG
        assert set(await asyncio.gather(*(aoutcome(limiter) for _ in range(links)))) == {"decided"}

    asyncio.run(story())
