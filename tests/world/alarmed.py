"""A process whose alarm rings while a check waits for Redis: run as ``python -m tests.world.alarmed WAY WHAT``."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import django

from tests.faults.wire import Wire
from tests.support.failure import Failure

#: Seconds after which the alarm rings. The check waits for at most ``RATEQUOTA_TEST_TIMEOUT``.
SECONDS, TIMES = 0.2, 3
#: What the handler raises, by name.
RAISED = {"TimeoutError": TimeoutError, "Failure": Failure, "KeyboardInterrupt": KeyboardInterrupt}


def alarmed(ask: Callable[[int], Any], raised: type[BaseException]) -> str:
    """Ask with an alarm set; returns what came of it."""

    def ring(*_: Any) -> None:
        raise raised("the alarm")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        answer = ask(1)
    except BaseException as error:  # whatever came of it
        return f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return f"an answer: {answer}"


def main(way: str, what: str) -> None:
    from tests.support import server
    from tests.world import address_of
    from tests.world.scene import Log
    from tests.world.settings import RATEQUOTA

    with Wire(address_of(server.url())) as wire:
        RATEQUOTA["REDIS_URL"] = wire.url
        django.setup()
        from tests.world.site import aask, ask, ask_and_note

        log = Log(os.environ["WORLD_LOG"])

        def awaited(caller: int) -> Any:
            async def within() -> Any:
                if what == "asyncio.timeout":
                    async with asyncio.timeout(SECONDS):
                        return await aask(caller)
                return await aask(caller)

            return asyncio.run(within())

        for _ in range(5):
            ask_and_note(1, log)
        came = []
        for _ in range(TIMES):
            wire.freeze()
            if what == "asyncio.timeout":
                try:
                    came.append(f"an answer: {awaited(1)}")
                except TimeoutError:
                    came.append("TimeoutError: the alarm")
            else:
                came.append(alarmed(awaited if way == "awaited" else ask, RAISED[what]))
            wire.thaw()
        again = Log(os.environ["WORLD_LOG"] + ".afterwards")
        for _ in range(5):
            answer = asyncio.run(aask(1)) if way == "awaited" else ask(1)
            again.note(answer)
        print(json.dumps(came), flush=True)
        sys.stdin.buffer.raw.read()  # until the test has looked at the ledger


if __name__ == "__main__":
    main(*sys.argv[1:])
