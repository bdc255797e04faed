"""Circuit breaker: a server that failed a few times in a row gets only one request a second, the probe.

A timeout counts as a failure only when the server replied to nothing else meanwhile.

Each process has one breaker for each server that it decides by (with Sentinel, one for the service). Probes do not
become rarer: one costs one request its timeout at most, and a server that is back should be used at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..exceptions import OutOfTime, StoreError, StoreLeftAlone
from ..utils import forks
from ..utils.log import logger

#: Called when a breaker opens or closes, with ``state`` (open | closed), ``server`` (host:port), ``reason`` (of the
#: failure that opened it) and ``seconds`` (how long it was open; 0 when it opens). Must not raise.
listeners: list[Callable[[str, str, str, float], object]] = []

#: Consecutive failures that open it.
FAILURES = 3
#: Seconds from a failure to the next probe.
PROBE_SECONDS = 1.0


class Breaker:
    """Closed while the server replies; open after ``FAILURES`` consecutive failures, until a probe succeeds."""

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        #: host:port, for logs.
        self.server = server
        self.open = False
        #: Reason of the last failure; "" after a success.
        self.reason = ""
        #: Consecutive failures.
        self.failures = 0
        self._clock = clock
        self._opened_at = self._tried_at = 0.0
        self._lock = forks.lock()

    @property
    def seconds(self) -> float:
        """How long it has been open."""
        return self._clock() - self._opened_at if self.open else 0.0

    def take_probe(self, surplus_at: float) -> None:
        """Go ahead as the probe, or raise ``StoreLeftAlone`` when none is due.

        ``surplus_at`` is when a connection was last established too late for its decision.
        """
        with self._lock:
            now = self._clock()
            if not self.open:
                return
            if now >= self._tried_at + PROBE_SECONDS or surplus_at > self._tried_at:
                # A lease: should this probe be cancelled, the next is due after as long.
                self._tried_at = now
                return
            reason = self.reason  # read under the lock: a probe that succeeds meanwhile clears it
        raise StoreLeftAlone(reason, f"{self.server} failed ({reason}) and is not used until a probe succeeds")

    def count(self, error: StoreError) -> None:
        """Count how a use ended: a reply of a healthy server is a success, and ``OutOfTime`` neither."""
        if error.answered:
            self.succeeded()
        elif not isinstance(error, OutOfTime):
            self._failed(error)

    def succeeded(self) -> None:
        """Close it: the server replied."""
        if not self.failures:
            return
        with self._lock:
            reason, seconds, closes = self.reason, self.seconds, self.open
            self.open, self.reason, self.failures = False, "", 0
        if closes:
            logger.warning("Redis at %s is available again, after %.1f s", self.server, seconds)
            self._notify("closed", reason, seconds)

    def _failed(self, error: StoreError) -> None:
        with self._lock:
            now = self._clock()
            self.failures += 1
            self._tried_at = now
            opens = not self.open and self.failures >= FAILURES
            self.reason = error.reason
            if opens:
                self.open, self._opened_at = True, now
        if opens:
            text = "Redis at %s is unavailable (%s), applying each policy's on_error: %s"
            logger.error(text, self.server, error.reason, error)
            self._notify("open", error.reason, 0.0)

    def _notify(self, state: str, reason: str, seconds: float) -> None:
        for listener in listeners:
            listener(state, self.server, reason, seconds)
