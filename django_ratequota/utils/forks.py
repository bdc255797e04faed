"""What a forked child must make anew: connections, locks, what waits to be sent, numbers that only one process has.

Python calls its at-fork functions only where Python forks. A server that forks in C, as uWSGI does, calls none. So
the few doors that each request or thread passes compare ``pid`` with the process id, and call ``check`` where they
differ: the limiter of the settings, a connection, a worker thread, the id of a slot, and the exit.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

Callback = TypeVar("Callback", bound=Callable[[], object])

#: The process for which this process's state was made: a door that finds another id calls ``check``.
pid = os.getpid()
#: Return what to call in a child, or None once the object of a method is gone; in the order of registration.
_callbacks: list[Callable[[], Callable[[], object] | None]] = []
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
#: Those that a fork takes first; and those it has taken, by thread, for each of its forks: a signal's may be within.
_quiet: weakref.WeakSet[threading.RLock] = weakref.WeakSet()
_taken: dict[int, list[list[threading.RLock]]] = {}
#: Most seconds that a fork waits for them.
QUIET_SECONDS = 1.0
#: Held by the thread that renews a child's state, for which its other threads wait; by process id, because a lock
#: that was held at the fork may never be released.
_renewing: dict[int, threading.RLock] = {}
#: The process whose state is being renewed; 0 = none.
_renewing_for = 0


class _Method(weakref.ref[Any]):
    """A method while its object lives; at an exit, ``WeakMethod`` prints an error for each object that still does."""

    __slots__ = ("_function",)
    _function: Callable[..., object]

    def __new__(cls, method: MethodType) -> _Method:
        made = super().__new__(cls, method.__self__, _callbacks.remove)
        made._function = method.__func__
        return made

    def __call__(self) -> MethodType | None:
        alive = super().__call__()
        return None if alive is None else MethodType(self._function, alive)


def after_fork(callback: Callback) -> Callback:
    """Call ``callback`` in each forked child before the child goes on; a method only while its object lives.

    It takes no lock, and must not pass a door itself.
    """
    if isinstance(callback, MethodType):
        _callbacks.append(_Method(callback))
    else:
        _callbacks.append(lambda: callback)
    return callback


class Renewed:
    """An object that ``clear`` makes anew: at first, in a forked child, and in tests."""

    def __init__(self) -> None:
        self.clear()
        after_fork(self.clear)

    def clear(self) -> None:
        """Begin with nothing; it takes no lock."""
        raise NotImplementedError


def lock() -> threading.Lock:
    """Return a lock that is unlocked in a forked child, where the thread that held it does not exist."""
    made = threading.Lock()
    _locks.add(made)
    return made


def quiet_lock() -> threading.RLock:
    """Return a lock for what should not be half done in a forked child: a fork waits for it, a second at most.

    A fork by the thread that holds it does not wait.

    A library in C has its own locks, which the thread that held them leaves locked in the child: SQLite's for all
    connections, OpenSSL's, those of the resolver of names. An exception may end the waiting fork's functions at any
    line, so whatever holds the lock else takes it with a timeout as well.
    """
    made = threading.RLock()
    _locks.add(made)
    _quiet.add(made)
    return made


def _take_quiet() -> None:
    taken: list[threading.RLock] = []
    until = time.monotonic() + QUIET_SECONDS
    _taken.setdefault(threading.get_ident(), []).append(taken)
    # What was taken before an exception is in the list already.
    taken.extend(held for held in list(_quiet) if held.acquire(timeout=max(until - time.monotonic(), 0.0)))


def _release_quiet() -> None:
    own = threading.get_ident()
    for held in _taken[own].pop():
        held.release()
    if not _taken[own]:
        del _taken[own]


def check() -> None:
    """Renew the state of this process if it was made for another one, once for all threads."""
    global pid, _renewing_for
    own = os.getpid()
    if own == pid:
        return
    with _renewing.setdefault(own, threading.RLock()):
        if own in (pid, _renewing_for):  # a finalizer may pass a door meanwhile
            return
        _renewing_for = own
        try:
            _taken.clear()
            for held in list(_locks):
                held._at_fork_reinit()
            for callback in [alive for reference in list(_callbacks) if (alive := reference())]:
                callback()
            pid = own  # last, so that after an exception the next door begins again
        finally:
            _renewing_for = 0


os.register_at_fork(before=_take_quiet, after_in_parent=_release_quiet, after_in_child=check)
