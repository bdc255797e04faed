"""A time limit that a signal's handler raises while a check waits, as Celery's does, is no failure of Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from django_ratequota import Limiter

from . import poll
from .asking import ENDLESS
from .servers import Node
from .wire import Wire


class TimeLimit(Exception):
    """As ``SoftTimeLimitExceeded`` and ``JobTimeoutException`` are."""


class Alarm(BaseException):
    """As gevent's ``Timeout`` is."""


#: The last two as signals' handlers raise them; ``TimeoutError`` is an ``OSError``, and what a socket raises.
RAISED = [TimeLimit("too long"), Alarm("too long"), TimeoutError("too long"), TimeoutError()]
#: Commands whose replies this package reads itself, and those that redis-py parses.
COMMANDS: dict[str, Callable[[Limiter], Any]] = {
    "check": lambda limiter: limiter.check([ENDLESS]),
    "PING": lambda limiter: limiter.store.execute(("PING",)),
}


@contextmanager
def alarm(error: BaseException, waits: Callable[[], object]) -> Iterator[None]:
    """Raise ``error`` in this thread as soon as it waits."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise error

    def send() -> None:
        poll(waits, 30, "a command was sent")
        os.kill(os.getpid(), signal.SIGUSR1)

    before, thread = signal.signal(signal.SIGUSR1, handle), threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join(30)
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("error", RAISED, ids=repr)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_time_limit_reaches_the_task(
    node: Node, limiters: Callable[..., Limiter], command: str, error: BaseException
) -> None:
    """It was taken for a failure of Redis: no task heard of its limit, and three of them opened the breaker."""
    ask = COMMANDS[command]
    with Wire(node) as wire:
        limiter = limiters(wire, timeout=60)
        [breaker] = limiter.store.breakers
        for _ in range(3):
            ask(limiter)
            wire.hold()
            with pytest.raises(type(error)) as caught, alarm(error, lambda: wire.asked):
                ask(limiter)
            assert caught.value is error
            assert (breaker.failures, breaker.open) == (0, False)
            wire.thaw()
        ask(limiter)


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_a_time_limit_reaches_the_task_while_a_connection_is_made(
    node: Node, limiters: Callable[..., Limiter], error: BaseException
) -> None:
    with Wire(node) as wire:
        limiter = limiters(wire, timeout=60)
        [breaker] = limiter.store.breakers
        for _ in range(3):
            limiter.store.close()
            wire.freeze()
            with pytest.raises(type(error)) as caught, alarm(error, lambda: wire.pipes):
                limiter.check([ENDLESS])
            assert caught.value is error
            assert (breaker.failures, breaker.open) == (0, False)
            wire.thaw()
            limiter.check([ENDLESS])


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_a_time_limit_in_an_event_loop(node: Node, limiters: Callable[..., Limiter], error: BaseException) -> None:
    with Wire(node) as wire:
        limiter = limiters(wire, timeout=60)
        [breaker] = limiter.store.breakers
        for _ in range(3):
            asyncio.run(limiter.acheck([ENDLESS]))
            wire.hold()
            with pytest.raises(type(error)) as caught, alarm(error, lambda: wire.asked):
                asyncio.run(limiter.acheck([ENDLESS]))
            assert caught.value is error
            assert (breaker.failures, breaker.open) == (0, False)
            wire.thaw()
        asyncio.run(limiter.acheck([ENDLESS]))


def test_a_task_s_own_time_limit(node: Node, limiters: Callable[..., Limiter]) -> None:
    """A cancellation stays one: asyncio makes a ``TimeoutError`` of it for whoever set the limit."""
    with Wire(node) as wire:
        limiter = limiters(wire, timeout=60)
        [breaker] = limiter.store.breakers

        async def limited() -> None:
            async with asyncio.timeout(0.05):
                await limiter.acheck([ENDLESS])

        for _ in range(3):
            wire.hold()
            with pytest.raises(TimeoutError):
                asyncio.run(limited())
            assert (breaker.failures, breaker.open) == (0, False)
            wire.thaw()
            asyncio.run(limiter.acheck([ENDLESS]))
