"""The time that one decision may wait for the server.

Time in which this process kept itself from reading a reply is not the server's: a thread that waits for the
interpreter, an event loop that a callback stalls. So a wait goes in slices. A slice that the operating system timed
as silent counts whole; of a wait that ended early, no more than one slice counts, however late this process noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

#: Slices per decision.
_SLICES = 8
#: Seconds of the shortest slice, which is also the last look before a timeout.
_SHORTEST = 0.001
_NOTHING = 1e-9
#: A slice that took as many times its length tells that this process was busy.
_LATE = 1.5
#: How many times its seconds a decision may stand in line for a connection while the server answers others.
_IN_LINE = 10
#: The part of its seconds for which an answer tells that the server goes on; this process may be late to read the
#: next one.
_RECENT = 0.5


class Answers(Protocol):
    """Tells when a server last answered (monotonic seconds; 0 = never)."""

    answered_at: float

    @property
    def alive_at(self) -> float:
        """When it answered anything, a login too; ``answered_at`` counts commands only."""


class Budget:
    """Seconds that a decision may still wait for the server."""

    __slots__ = ("_excused", "_in_line", "_most", "_queued", "answers", "at_hand", "left", "slice")

    def __init__(self, seconds: float) -> None:
        self.left = self._most = seconds
        self.slice = max(seconds / _SLICES, _SHORTEST)
        #: While a task waits for a connection: tells when the server last answered others.
        self.answers: Answers | None = None
        #: What was left when the present command had a connection; None before.
        self.at_hand: float | None = None
        #: Seconds counted in line since the last connection, and seconds not counted at all: slices that were late,
        #: and those in line while the server answered others.
        self._in_line = self._excused = self._queued = 0.0

    def part(self, share: float) -> Budget:
        """Return a budget of ``share`` of what is left."""
        return Budget(self.left * share)

    @property
    def used_up(self) -> bool:
        """Whether nothing is left, but for what slices leave over that are no round numbers."""
        return self.left < _NOTHING

    @property
    def spent(self) -> float:
        """Seconds used so far."""
        return self._most - self.left

    def connected(self) -> None:
        """Give back what the wait in line took: the command begins only now.

        Connecting takes several round trips. A command that was left the rest timed out, its connection was dropped,
        and so on for ever. Everything together still takes twice the time at most, the line behind others aside.
        """
        back = max(min(self._in_line, self._most - self._excused), 0.0)
        self.left += back
        self._excused += back
        self._in_line = 0.0

    def count(self, seconds: float, since: float, *, late: bool, answers: Answers | None = None) -> None:
        """Count a slice of ``seconds`` that began at ``since``; half of it where it ended ``late``.

        ``answers`` is set in line for a connection. A login of the server makes it half as well. While it answers
        others' commands, the caller waits for these, not for the server: then nothing counts, nor what was counted
        in line before, for up to ten times the whole.
        """
        recently = since - self._most * _RECENT
        if answers is not None and answers.answered_at >= recently and self._queued < _IN_LINE * self._most:
            self._queued += seconds + self._in_line
            self.left += self._in_line
            self._in_line = 0.0
            return
        excused = late or (answers is not None and answers.alive_at >= since)
        counted = seconds * (0.5 if excused else 1.0)
        self.left -= counted
        self._excused += seconds - counted
        if answers is not None:
            self._in_line += counted

    def wait(self, ready: Callable[[float], object]) -> None:
        """Call ``ready(seconds)``, which waits at most that long, until it returns something true.

        Raises ``TimeoutError`` once the server has had its time, after a last look.
        """
        while True:
            last, seconds = self.used_up, max(min(self.slice, self.left), _SHORTEST)
            begun = time.monotonic()
            if ready(seconds):
                self.left -= min(time.monotonic() - begun, seconds)
                # A reply that trickles in: its last pieces may take as long again.
                if self.left < -self._most:
                    break
                return
            if last:
                break
            self.left -= seconds
        raise TimeoutError("no answer in time")

    def wait_in_line(self, ready: Callable[[float], object], answers: Answers) -> None:
        """Wait one slice for a connection; raises ``TimeoutError`` where nothing is left.

        One that ended late counts half: the thread that makes the connection waits for the interpreter as well.
        """
        if self.used_up:
            raise TimeoutError("no connection in time")
        begun = time.monotonic()
        ready(self.slice)
        took = time.monotonic() - begun
        self.count(min(took, self.slice), begun, late=took > _LATE * self.slice, answers=answers)


class BudgetTimeout:
    """Cancel the block and raise ``TimeoutError`` once the budget is used up.

    The event loop wakes it once per slice. A late wake-up counts half: the loop was busy elsewhere, and a reply may
    be there that it has not read yet. Hence no block waits longer than twice the budget, a stalled loop and the line
    behind others aside.
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
        budget.count(budget.slice, self._begun, late=late, answers=budget.answers)
        if budget.used_up:
            self._begun = time.monotonic()
            self._timeout.reschedule(self._loop.time())  # once: it cannot be moved any more after that
        else:
            self._begin()
