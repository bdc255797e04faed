"""Circuit breaker: a server that failed a few times in a row is left alone, and tried by one request a second.

Only what the server did counts: no timeout does during which it answered something else.

Each process has one for each server that it decides by (with Sentinel, one for the service). It does not back
off any further: a probe costs one request its timeout at most, and a server that is back should be used at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from django.dispatch import Signal

from ..exceptions import OutOfTime, StoreError, StoreLeftAlone
from ..utils.locks import ForkSafeLock

logger = logging.getLogger("django_ratequota")

#: Sent when a breaker opens or closes: ``state`` (open | closed), ``server`` (host:port), ``reason`` (of the
#: failure that opened it) and ``seconds`` (how long it was open; 0 when it opens).
store_state_changed = Signal()

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
        """``surplus_at`` says when a connection last came about too late for its decision, by ``clock`` (seconds)."""
        #: host:port, for logs.
        self.server = server
        self._surplus_at = surplus_at
        self.open = False
        #: Label of the last failure; "" while all is well.
        self.reason = ""
        self._clock = clock
        self._most = failures
        self._failures = 0
        self._opened_at = self._tried_at = 0.0
        self._lock = ForkSafeLock()

    @property
    def seconds(self) -> float:
        """How long it has been open."""
        return self._clock() - self._opened_at if self.open else 0.0

    @property
    def failing(self) -> bool:
        """Whether the last answer was a failure."""
        return self._failures > 0

    def passage(self, always: bool = False) -> Passage:
        """Wraps one use of the server and learns from how it ends; raises ``StoreLeftAlone`` while open.

        ``always`` lets what an operator asked for through.
        """
        return Passage(self, always)

    def take_probe(self) -> None:
        """Go ahead as the probe, or raise ``StoreLeftAlone`` as it is not time for one."""
        with self._lock:
            now = self._clock()
            if not self.open:
                return
            if now >= self._tried_at + PROBE_SECONDS or self._surplus_at() > self._tried_at:
                # A lease: should this probe be cancelled, the next may go after as long.
                self._tried_at = now
                return
            reason = self.reason  # a probe that succeeds meanwhile clears it
        raise StoreLeftAlone(reason, f"{self.server} failed ({reason}) and is left alone until it is probed")

    def succeeded(self) -> None:
        """Close it: the server gave an answer."""
        if not self._failures:
            return
        with self._lock:
            reason, seconds, closes = self.reason, self.seconds, self.open
            self.open, self.reason, self._failures = False, "", 0
        if closes:
            logger.warning("Redis at %s gives decisions again, after %.1f s", self.server, seconds)
            self._tell("closed", reason, seconds)

    def failed(self, error: StoreError) -> None:
        """Count a failure, and open it after enough of them."""
        with self._lock:
            now = self._clock()
            self._failures += 1
            self._tried_at = now
            opens = not self.open and self._failures >= self._most
            self.reason = error.reason
            if opens:
                self.open, self._opened_at = True, now
        if opens:
            text = "Redis at %s gives no decisions (%s), each policy's on_error decides: %s"
            logger.error(text, self.server, error.reason, error)
            self._tell("open", error.reason, 0.0)

    def _tell(self, state: str, reason: str, seconds: float) -> None:
        store_state_changed.send_robust(
            sender=Breaker, state=state, server=self.server, reason=reason, seconds=seconds
        )


class Passage:
    """One use of a server, as a context."""

    # A class of its own, as every decision goes through it: ``contextmanager`` costs three times as much.
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
