"""An exception may be raised at any line of a check, as signals' handlers do; the process still decides after it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis

import django_ratequota
from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.store.base import ServerActivity
from django_ratequota.store.pool import Pool, Turn

PACKAGE = str(Path(django_ratequota.__file__).parent)
ENDLESS = Bucket("user:1", Rate.parse("1000000/day"))
#: The event loop calls it, and logs what a signal's handler raises there; the task looks again after its slice.
CALLBACK = "resolve"
#: A connection that an interrupted caller has lost is closed as garbage, of which its socket warns.
LOSES = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
#: Interruptions at each line; a pool has 64 connections, and 16 connects at a time.
TIMES = 6


class TimeLimit(Exception):
    """As ``SoftTimeLimitExceeded`` and ``JobTimeoutException`` are."""


class Interrupting:
    """Raises ``TimeLimit`` at the ``number``-th line of the package that a block runs in this thread."""

    def __init__(self, number: int) -> None:
        self._number, self._lines = number, 0
        #: Whether the block has as many lines.
        self.reached = False

    def __enter__(self) -> Interrupting:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(self._before)
        assert kind in ((TimeLimit,) if self.reached else (None,)), "it passes as it is"
        return self.reached

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_name == CALLBACK:
            return None
        # The end of a ``with`` is an event too. Python runs no signal's handler there: a lock could stay locked.
        if event == "line" and not getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            self._lines += 1
            if self._lines == self._number:
                self.reached = True
                raise TimeLimit
        return self._trace


@pytest.fixture
def limiter(redis_client: redis.Redis) -> Iterator[Limiter]:
    # A loop may miss a reply until the end of a slice, an eighth of it, if an interruption left it watching a socket.
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=4)
    yield limiter
    limiter.store.close()


@LOSES
@pytest.mark.parametrize("connects", [False, True], ids=["warm", "cold"])
def test_a_check_interrupted_at_each_line(limiter: Limiter, connects: bool) -> None:
    """14 of 164 lines left a connection counted that was gone; after 64 of them no check got one ever again.

    16 interruptions before the start of a connecting thread, and the process never connected again.
    """

    def ask() -> None:
        assert limiter.check([ENDLESS]).allowed

    number, more = 1, True
    while more:
        for _ in range(TIMES):
            ask()
            if connects:
                limiter.store.close()
            with Interrupting(number) as interrupting:
                ask()
            more = interrupting.reached
        number += 1
    assert number > 100
    for _ in range(40):
        ask()
    gc.collect()
    assert len(limiter.store.server.pool.open) == len(limiter.store.server.pool.idle)


@LOSES
def test_an_awaited_check_interrupted_at_each_line(limiter: Limiter) -> None:
    async def run() -> None:
        async def ask() -> None:
            assert (await limiter.acheck([ENDLESS])).allowed

        [server, number, more] = limiter.store.server, 1, True
        while more:
            for _ in range(TIMES):
                await ask()
                with Interrupting(number) as interrupting:
                    await ask()
                more = interrupting.reached
            number += 1
        assert number > 100
        for _ in range(40):
            await ask()
        gc.collect()
        assert len(server.pool.open) == len(server.pool.idle)

    asyncio.run(run())


class Opened:
    """A connection."""


def test_what_an_interrupted_caller_has_lost_is_not_counted() -> None:
    pool = Pool(Opened, ServerActivity(), limit=1)
    for _ in range(3):
        pool.queue.append(Turn(ServerActivity()))
        attempt = pool.begin_connect()
        assert attempt
        assert pool.begin_connect() is None
        del attempt  # its thread was never started
        attempt = pool.begin_connect()
        assert attempt
        pool.connected(Opened(), attempt)  # which its caller lost
