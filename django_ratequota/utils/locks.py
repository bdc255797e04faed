"""A lock that is unlocked in a forked child, where the thread that held it does not exist."""

from __future__ import annotations

import os
import threading
import weakref


class ForkSafeLock:
    """``threading.Lock``, unlocked in every forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock; without ``blocking``, return False when it is locked."""
        return self._lock.acquire(blocking)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _unlock_all() -> None:
    for lock in _locks:
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock_all)
