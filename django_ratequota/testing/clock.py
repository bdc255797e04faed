"""The clock by which limits count in tests."""

from __future__ import annotations

import time
from datetime import UTC, datetime

_SECOND = 10**6


class Clock:
    """A clock that stands still until the test moves it; also for ``Limiter(clock=...)``.

    Keys in Redis always expire by real time: after a stop in a debugger
    that is longer than a limit's period, that limit is unused.
    """

    def __init__(self, at: datetime | None = None) -> None:
        """``at`` is the time it shows (aware; None = now)."""
        self._now_us = time.time_ns() // 1000
        if at is not None:
            self.move_to(at)

    def __call__(self) -> int:
        """Return µs since the Unix epoch."""
        return self._now_us

    def __repr__(self) -> str:
        return f"<Clock {self.now.isoformat()}>"

    @property
    def now(self) -> datetime:
        """The time it shows, in UTC."""
        return datetime.fromtimestamp(self._now_us / _SECOND, UTC)

    def advance(self, seconds: float) -> None:
        """Move forward, or back where ``seconds`` is negative."""
        self._now_us += round(seconds * _SECOND)

    def move_to(self, at: datetime) -> None:
        """Move to ``at``; raises ``ValueError`` unless it is aware."""
        if at.tzinfo is None:
            raise ValueError(f"{at!r} has no time zone: write datetime(..., tzinfo=UTC)")
        self._now_us = round(at.timestamp() * _SECOND)
