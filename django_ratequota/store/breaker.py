"""Circuit breaker: a server that failed a few times in a row gets only one request a second, the probe.

A timeout counts as a failure only when the server replied to nothing else meanwhile.

Each process has one breaker for each server that it decides by (with Sentinel, one for the service). Probes do not
become rarer: one costs one request its timeout at most, and a server that is back should be used at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..exceptions import OutOfTime, StoreError, StoreLeftAlone
from ..utils.locks import ForkSafeLock

logger = logging.getLogger("django_ratequota")

#: Called when a breaker opens or closes, with ``state`` (open | closed), ``server`` (host:port), ``reason`` (of the
#: failure that opened it) and ``seconds`` (how long it was open; 0 when it opens). Must not raise.
listeners: list[Callable[[str, str, str, float], object]] = []

#: Seconds from a failure to the next probe.
PROBE_SECONDS = 1.0


class Breaker:
    """Closed while the server decides; open after ``failures`` consecutive failures, until a probe succeeds."""

    def __init__(
        self,
        server: str,
        failures: int,
        clock: Callable[[], float] = time.monotonic,
        surplus_at: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``surplus_at`` returns when a connection was last established too late for its decision, by ``clock``."""
        #: host:port, for logs.
        self.server = server
        self._surplus_at = surplus_at
        self.open = False
        #: Reason of the last failure; "" after a success.
        self.reason = ""
        self._clock = clock
        self._max_failures = failures
        self._failures = 0
        self._opened_at = self._tried_at = 0.0
        self._lock = ForkSafeLock()

    @property
    def seconds(self) -> float:
        """How long it has been open."""
        return self._clock() - self._opened_at if self.open else 0.0

    @property
    def failing(self) -> bool:
        """Whether the last use of the server failed."""
        return self._failures > 0

    def guard(self, always: bool = False) -> _Guard:
        """Return a context for one use of the server, which counts its outcome; raises ``StoreLeftAlone`` while open.

        With ``always`` an open breaker lets the use through.
        """
        return _Guard(self, always)

    def take_probe(self) -> None:
        """Go ahead as the probe, or raise ``StoreLeftAlone`` when none is due."""
        with self._lock:
            now = self._clock()
            if not self.open:
                return
            if now >= self._tried_at + PROBE_SECONDS or self._surplus_at() > self._tried_at:
                # A lease: should this probe be cancelled, the next is due after as long.
                self._tried_at = now
                return
            reason = self.reason  # read under the lock: a probe that succeeds meanwhile clears it
        raise StoreLeftAlone(reason, f"{self.server} failed ({reason}) and is not used until a probe succeeds")

    def succeeded(self) -> None:
        """Close it: the server replied."""
        if not self._failures:
            return
        with self._lock:
            reason, seconds, closes = self.reason, self.seconds, self.open
            self.open, self.reason, self._failures = False, "", 0
        if closes:
            logger.warning("Redis at %s gives decisions again, after %.1f s", self.server, seconds)
            self._notify("closed", reason, seconds)

    def failed(self, error: StoreError) -> None:
        """Count a failure, and open it after ``failures`` of them."""
        with self._lock:
            now = self._clock()
            self._failures += 1
            self._tried_at = now
            opens = not self.open and self._failures >= self._max_failures
            self.reason = error.reason
            if opens:
                self.open, self._opened_at = True, now
        if opens:
            text = "Redis at %s gives no decisions (%s), each policy's on_error decides: %s"
            logger.error(text, self.server, error.reason, error)
            self._notify("open", error.reason, 0.0)

    def _notify(self, state: str, reason: str, seconds: float) -> None:
        for listener in listeners:
            listener(state, self.server, reason, seconds)


class _Guard:
    """One use of a server, as a context."""

    # A class of its own, as every decision enters it: ``contextmanager`` costs three times as much.
    __slots__ = ("_always", "_breaker")

    def __init__(self, breaker: Breaker, always: bool) -> None:
        self._breaker = breaker
        self._always = always

    def __enter__(self) -> None:
        if self._breaker.open and not self._always:
            self._breaker.take_probe()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._breaker.succeeded()
        elif isinstance(error, StoreError) and not isinstance(error, OutOfTime):
            if error.answered:
                self._breaker.succeeded()
            else:
                self._breaker.failed(error)
