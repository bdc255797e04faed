"""The clock that decides in tests."""

from __future__ import annotations

import time
from datetime import UTC, datetime

_SECOND = 10**6


class Clock:
    """A clock that stands still until it is moved; ``Limiter(clock=...)`` takes it as well.

    With ``running=True`` it goes on with real time. Redis still lets keys go by real time: a test that stands in a
    debugger for longer than a limit's period finds that limit unused.
    """

    def __init__(self, at: datetime | None = None, *, running: bool = False) -> None:
        """``at`` (aware; None = now) is where it begins."""
        self._running = running
        self._offset_us = 0 if running else _now_us()
        if at is not None:
            self.move_to(at)

    def __call__(self) -> int:
        """µs since the Unix epoch."""
        return self._offset_us + (_now_us() if self._running else 0)

    def __repr__(self) -> str:
        return f"<Clock {self.now.isoformat()}>"

    @property
    def now(self) -> datetime:
        """What it shows, in UTC."""
        return datetime.fromtimestamp(self() / _SECOND, UTC)

    def advance(self, seconds: float) -> None:
        """Move on; by less than 0, back."""
        self._offset_us += round(seconds * _SECOND)

    def move_to(self, at: datetime) -> None:
        """Move to a time, which must be aware."""
        if at.tzinfo is None:
            raise ValueError(f"{at!r} says no time zone: write datetime(..., tzinfo=UTC)")
        self._offset_us += round(at.timestamp() * _SECOND) - self()


def _now_us() -> int:
    return time.time_ns() // 1000
