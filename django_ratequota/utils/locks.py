"""A lock that a fork leaves open: whoever held it at that moment is not in the child to release it."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """``threading.Lock``, free again in every forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; without ``blocking``, say False when it is taken."""
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    def locked(self) -> bool:
        """Whether somebody holds it."""
        return self._lock.locked()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _free() -> None:
    for lock in _locks:
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_free)
