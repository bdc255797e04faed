"""Asks for one user without pause, on threads or in an event loop; runs in worker processes, see ``worker``."""

from __future__ import annotations

import asyncio
import threading
import time

from django.contrib.auth.models import User
from django.db import connection

from django_ratequota import Decision, acheck_request, check_request
from django_ratequota.ledger import book
from tests.faults import poll
from tests.project.views import request_from

#: (admitted, error, Redis' time, revision) of each decision.
_found: list[tuple[bool, str, int, int]] = []
_enough = threading.Event()
_threads: list[threading.Thread] = []


def start(name: str, at_once: int, *, awaited: bool) -> None:
    """Begin to ask for this user."""
    user = User.objects.get(username=name)
    if awaited:
        _threads.append(threading.Thread(target=_in_a_loop, args=[user, at_once]))
    else:
        _threads.extend(threading.Thread(target=_on_a_thread, args=[user]) for _ in range(at_once))
    for thread in _threads:
        thread.start()


def go_on(times: int = 20) -> bool:
    """Wait until this many more decisions are made."""
    target = len(_found) + times
    poll(lambda: len(_found) >= target, 60, f"{times} more decisions")
    return True


def wait_until_refused() -> None:
    """Wait until Redis refuses."""
    poll(lambda: _found[-1][:2] == (False, ""), 120, "the limit refuses")


def admitted() -> int:
    """Return how many of the decisions so far admitted."""
    return sum(entry[0] for entry in _found)


def stop() -> list[tuple[bool, str, int, int]]:
    """Return all decisions."""
    _enough.set()
    for thread in _threads:
        thread.join()
    return _found


def flush_all() -> bool:
    """Write what this process has noted, also while another thread does; returns whether it is written."""
    began_at = time.time()
    book.flush()
    return book.ledger.written_until() >= began_at


def _note(decision: Decision) -> None:
    _found.append((decision.allowed, decision.error, decision.at_us, decision.revision))


def _on_a_thread(user: User) -> None:
    while not _enough.is_set():
        _note(check_request(request_from(user)))
    connection.close()


def _in_a_loop(user: User, at_once: int) -> None:
    async def ask() -> None:
        while not _enough.is_set():
            _note(await acheck_request(request_from(user)))

    async def ask_all() -> None:
        await asyncio.gather(*(ask() for _ in range(at_once)))

    asyncio.run(ask_all())
