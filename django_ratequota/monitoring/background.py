"""Periodic work beside a process's requests: daemon threads, started by the first request."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from os import getpid

from django.db import close_old_connections

from ..conf import settings
from ..exceptions import StoreError
from ..utils import forks

logger = logging.getLogger("django_ratequota")

#: Seconds until a thread that could not be started is tried again.
_RETRY_SECONDS = 60.0


class Background:
    """Calls ``work`` periodically on a thread of this process, by the settings in force."""

    def __init__(self, name: str, seconds: Callable[[], float], work: Callable[[], object]) -> None:
        """``seconds()`` returns the pause between two calls; 0 = never call. ``work`` may raise ``StoreError``."""
        self._name, self._seconds, self._work = name, seconds, work
        #: The generation of the settings that the thread was started by; -1 = no thread.
        self._generation = -1
        #: When to try to start a thread again (monotonic seconds); 0 = the last try succeeded.
        self._retry_at = 0.0
        #: Reason of the last failure of the work; "" after a success.
        self._failing = ""
        #: Set = the next call is due now.
        self._due = threading.Event()
        self._thread: threading.Thread | None = None
        #: Whether the next call is the last one.
        self._ending = False
        self._lock = forks.lock()
        _all.add(self)

    def keep(self) -> None:
        """Start the thread unless it runs; never raises, and tries a failed start again a minute later."""
        if forks.pid != getpid():
            forks.check()
        if self._generation == settings.generation or time.monotonic() < self._retry_at:
            return
        with self._lock:
            generation = settings.generation
            if self._generation == generation or time.monotonic() < self._retry_at:
                return
            seconds = self._seconds()
            self._generation = generation
            if seconds:
                self._start(generation, seconds)

    def soon(self) -> None:
        """End the pause before the next call, if the thread runs."""
        self._due.set()

    def end(self, seconds: float) -> None:
        """Work once more if the thread runs, and wait for that, at most so long."""
        thread, ended, self._ending = self._thread, self._ending, True
        if thread is not None and not ended and self._generation == settings.generation:
            self._due.set()
            thread.join(seconds)

    def _start(self, generation: int, seconds: float) -> None:
        try:
            self._thread = threading.Thread(
                target=self._run, args=[generation, seconds], name=self._name, daemon=True
            )
            self._thread.start()
            self._retry_at = 0.0
        except RuntimeError as error:  # the system or the container has no thread left
            if not self._retry_at:
                logger.error("%s could not be started; trying again every minute: %s", self._name, error)
            self._generation, self._retry_at = -1, time.monotonic() + _RETRY_SECONDS

    def _run(self, generation: int, seconds: float) -> None:
        ended = False
        while self._generation == generation == settings.generation and not ended:
            self._due.clear()
            ended = self._ending
            try:
                try:
                    self._work()
                finally:
                    close_old_connections()  # as after a request
                self._failing = ""
            except StoreError as error:
                # Breakers do not log error replies: log each reason once until the work succeeds.
                logs = error.answered and error.reason != self._failing
                logger.log(logging.ERROR if logs else logging.DEBUG, "%s failed: %s", self._name, error)
                self._failing = error.reason
            except Exception:
                # Log and go on: an exception would end the thread, and nobody would notice.
                logger.exception("%s failed", self._name)
            if not ended:
                self._due.wait(seconds)


_all: weakref.WeakSet[Background] = weakref.WeakSet()


def _restart() -> None:
    # A forked child has no threads but the one that forked.
    for background in _all:
        background._generation, background._retry_at = -1, 0.0
        background._due = threading.Event()  # another thread may have held the parent's lock


forks.after_fork(_restart)
