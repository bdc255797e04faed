"""Processes that fork, in C and by ``multiprocessing``: run as ``python -m tests.world.forking WAY``.

The parent has been asked before it forks. A process whose input stays open lives on until its input ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import django

CHILDREN = 4
#: How often each process asks, and the limit that all share: five processes ask 7,200 times.
TIMES, ROOM = 1440, 5000
#: How often each process of ``multiprocessing`` asks.
FEW = 50
#: Seconds that all may take.
SECONDS = 40.0


def ask(caller: int, times: int, awaited: bool = False) -> None:
    """Ask for this caller, and note what it is told; no more once three were not decided."""
    import tests.world.site as site
    from tests.world.scene import Log

    log = Log(os.environ["WORLD_LOG"])

    async def ask_all() -> None:
        undecided = 0
        for _ in range(times):
            answer = await site.aask(caller) if awaited else site.ask(caller)
            log.note(answer)
            undecided += bool(answer.error)
            if undecided == 3:
                break

    if awaited:
        asyncio.run(ask_all())
    else:
        with suppress(StopIteration):
            ask_all().send(None)


def live_on() -> None:
    """Wait until the test closes the input."""
    sys.stdin.buffer.raw.read()


def fork_in_c(awaited: bool) -> None:
    """Fork as uWSGI does: Python is not told, so its at-fork functions do not run. The parent does not ask again."""
    from django_ratequota.monitoring import workers

    # No other thread may run: what it holds at the fork, such as the interpreter's lock, no child could release.
    workers.end()
    library = ctypes.PyDLL(None)
    children = []
    for caller in range(CHILDREN + 1):
        child = library.fork()
        if not child:
            status = 1
            try:
                work(caller, TIMES, awaited, live_on)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def work(caller: int, times: int, awaited: bool, wait: Callable[[], object]) -> None:
    """Ask, say so, wait, and ask once more."""
    ask(caller, times, awaited)
    os.write(1, b"asked\n")
    wait()
    work_once_more(caller)


def work_once_more(caller: int) -> None:
    """Show that the process still decides, in a log of its own."""
    import tests.world.site as site
    from tests.world.scene import Log

    site.ask_and_note(caller, Log(os.environ["WORLD_LOG"] + ".afterwards"))


def child(caller: int, go_on: Any) -> None:
    """A child of ``multiprocessing``, which lives on until the event, or returns at once."""
    django.setup()  # for a spawned one
    if go_on is None:
        ask(caller, FEW)
        os.write(1, b"asked\n")
    else:
        work(caller, FEW, False, partial(go_on.wait, SECONDS))


def fork_by(method: str, lives_on: bool) -> None:
    context = multiprocessing.get_context(method)
    go_on = context.Event() if lives_on else None
    children = [context.Process(target=child, args=[caller, go_on]) for caller in range(1, CHILDREN + 1)]
    for each in children:
        each.start()
    work(0, FEW, False, live_on)
    if go_on is not None:
        go_on.set()
    for each in children:
        each.join(SECONDS)
        assert each.exitcode == 0


def main(way: str, *options: str) -> None:
    django.setup()
    # Not awaited: asgiref's thread would not exist in a child, where its first hop would wait for good.
    for caller in range(CHILDREN + 1):
        ask(caller, 1)
    if way == "c":
        fork_in_c("awaited" in options)
    else:
        fork_by(way, "lives-on" in options)


if __name__ == "__main__":
    main(*sys.argv[1:])
