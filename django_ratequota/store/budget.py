"""The time that one decision may wait for the server.

Time in which this process could not read a reply is not the server's: a thread waited for the interpreter, or a
callback stalled the event loop. So a wait is divided into slices. A slice that the operating system timed as silent
counts whole. A wait that ended early counts as one slice at most, however late this process noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from .activity import ServerActivity

#: Slices per decision.
_SLICES = 8
#: Seconds of the shortest slice, which is also the last look before a timeout.
_SHORTEST = 0.001
#: Slices of uneven length leave this many seconds over.
_NOTHING = 1e-9
#: A slice that took this many times its length was late: this process was busy.
_LATE = 1.5
#: A decision may wait in the queue for a connection this many times its seconds, while the server replies to others.
_MAX_QUEUED = 10
#: The server counts as active for this share of the seconds after a reply; this process may read the next one late.
_RECENT = 0.5


class Budget:
    """Seconds that a decision may still wait for the server."""

    __slots__ = ("_excused", "_in_queue", "_queued", "_total", "left", "left_at_send", "queued_for", "slice")

    def __init__(self, seconds: float) -> None:
        self.left = self._total = seconds
        self.slice = max(seconds / _SLICES, _SHORTEST)
        #: The server's activity while a task waits in the queue for a connection, else None.
        self.queued_for: ServerActivity | None = None
        #: What was left when the present command had a connection; None before.
        self.left_at_send: float | None = None
        #: Seconds counted in the queue since the last connection; seconds not counted, as slices were late; seconds
        #: not counted in the queue, as the server replied to others.
        self._in_queue = self._excused = self._queued = 0.0

    def part(self, share: float) -> Budget:
        """Return a budget of ``share`` of what is left."""
        return Budget(self.left * share)

    @property
    def used_up(self) -> bool:
        """Whether nothing is left, rounding errors aside."""
        return self.left < _NOTHING

    @property
    def spent(self) -> float:
        """Seconds used so far."""
        return self._total - self.left

    def connected(self) -> None:
        """Give back the time in the queue: the command begins only now.

        Connecting takes several round trips. A command that had only the rest of the time timed out, its connection
        was dropped, and so did the next one. Even so a decision takes twice its time at most, the queue behind other
        callers aside.
        """
        back = max(min(self._in_queue, self._total - self._excused), 0.0)
        self.left += back
        self._excused += back
        self._in_queue = 0.0

    def count(self, seconds: float, since: float, *, late: bool, queued_for: ServerActivity | None = None) -> None:
        """Count a slice of ``seconds`` that began at ``since``; half of it where it ended ``late``.

        ``queued_for`` is set in the queue for a connection. There half of it counts as well when the server accepted
        a login meanwhile. While the server replies to other commands, the caller waits for these, not for the
        server: then nothing counts, nor does the time before in the queue, for up to ten times the total.
        """
        recently = since - self._total * _RECENT
        if queued_for is not None and queued_for.replied_at >= recently and self._queued < _MAX_QUEUED * self._total:
            self._queued += seconds + self._in_queue
            self.left += self._in_queue
            self._in_queue = 0.0
            return
        excused = late or (queued_for is not None and queued_for.last_sign_at >= since)
        counted = seconds * (0.5 if excused else 1.0)
        self.left -= counted
        self._excused += seconds - counted
        if queued_for is not None:
            self._in_queue += counted

    def wait(self, ready: Callable[[float], object]) -> None:
        """Call ``ready(seconds)``, which waits at most that long, until it returns something true.

        Raises ``TimeoutError`` once the time is used up, after a last look.
        """
        while True:
            last, seconds = self.used_up, max(min(self.slice, self.left), _SHORTEST)
            begun = time.monotonic()
            if ready(seconds):
                self.left -= min(time.monotonic() - begun, seconds)
                # Because a reply may arrive in pieces, these may take as long again.
                if self.left < -self._total:
                    break
                return
            if last:
                break
            self.left -= seconds
        raise TimeoutError("no reply in time")

    def wait_in_queue(self, ready: Callable[[float], object], queued_for: ServerActivity) -> None:
        """Wait one slice for a connection; raises ``TimeoutError`` where nothing is left.

        A late slice counts half: the thread that connects waits for the interpreter as well.
        """
        if self.used_up:
            raise TimeoutError("no connection in time")
        begun = time.monotonic()
        ready(self.slice)
        took = time.monotonic() - begun
        self.count(min(took, self.slice), begun, late=took > _LATE * self.slice, queued_for=queued_for)


class BudgetTimeout:
    """Cancel the block and raise ``TimeoutError`` once the budget is used up.

    The event loop calls it once per slice. A late call counts half: the loop was busy, and may not have read a reply
    that is there. Hence no block waits longer than twice the budget, a stalled loop and the queue aside.
    """

    __slots__ = ("_begun", "_budget", "_loop", "_timeout", "_wake")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    async def __aenter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        await self._timeout.__aenter__()
        self._begin()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wake.cancel()
        self._budget.left -= min(time.monotonic() - self._begun, self._budget.slice)
        await self._timeout.__aexit__(kind, error, trace)

    def _begin(self) -> None:
        self._begun = time.monotonic()
        self._wake = self._loop.call_later(self._budget.slice, self._look)

    def _look(self) -> None:
        budget = self._budget
        late = time.monotonic() - self._begun > _LATE * budget.slice
        budget.count(budget.slice, self._begun, late=late, queued_for=budget.queued_for)
        if budget.used_up:
            self._begun = time.monotonic()
            self._timeout.reschedule(self._loop.time())  # once: it cannot be moved after that
        else:
            self._begin()
