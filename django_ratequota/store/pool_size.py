"""How many connections a pool opens, how many of them at a time, how long each may take, and when idle ones close."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

#: Connections to one server, open or connecting: of a process for its threads, and of each event loop.
MAX_CONNECTIONS = 64
#: Seconds after which an idle connection is closed, and how many stay open.
IDLE_SECONDS, MIN_IDLE = 10.0, 4
#: Seconds that connecting may take; more than a decision's timeout, as the connection serves the next decision.
CONNECT_SECONDS = 5.0
#: Connects at a time; as many as are open, where these are more. So a pool at most doubles at once.
_CONCURRENT_CONNECTS = 4
#: Seconds after which a connect no longer holds up others, and the most connects of that age.
_SLOW_SECONDS, _MAX_SLOW = 1.0, 16
#: Seconds between a failed connect and the next, while other connections are open.
RETRY_SECONDS = 0.05


class PoolSize:
    """The number of open connections, and the connects under way; together never more than ``limit``."""

    def __init__(self, limit: int = MAX_CONNECTIONS) -> None:
        self.limit = limit
        self.open = 0
        #: When each connect under way began (monotonic seconds).
        self.connecting: list[float] = []
        self.failed_at = 0.0

    def begin_connect(self, waiting: int) -> float | None:
        """Begin a connect for one of ``waiting`` callers and return its time; None where none should begin."""
        if not waiting or self.open + len(self.connecting) >= self.limit:
            return None
        now = time.monotonic()
        slow = sum(began_at < now - _SLOW_SECONDS for began_at in self.connecting)
        concurrent = max(_CONCURRENT_CONNECTS, self.open)
        if self.open and self.failed_at:  # the server may be full: the open connections have to serve all callers
            if now < self.failed_at + RETRY_SECONDS:
                return None
            concurrent = 1
        if slow == _MAX_SLOW or len(self.connecting) - slow >= min(waiting, concurrent):
            return None
        self.connecting.append(now)
        return now

    def connected(self, began_at: float) -> None:
        """Count the connect's connection as open."""
        self.connecting.remove(began_at)
        self.failed_at = 0.0
        self.open += 1

    def connect_failed(self, began_at: float) -> bool:
        """Note the failure; returns whether callers have no other connection to wait for, open or under way."""
        self.connecting.remove(began_at)
        self.failed_at = time.monotonic()
        return not self.open and not self.connecting

    def connect_cancelled(self, began_at: float) -> None:
        """Forget a connect that was not tried."""
        self.connecting.remove(began_at)


def pop_unused(idle: deque[tuple[Any, float]]) -> Iterator[Any]:
    """Take the connections out of ``idle`` that have been idle for ``IDLE_SECONDS``, but leave ``MIN_IDLE``.

    ``idle`` holds (connection, idle since), the longest idle first.
    """
    until = time.monotonic() - IDLE_SECONDS
    try:
        while len(idle) > MIN_IDLE and idle[0][1] < until:
            yield idle.popleft()[0]
    except IndexError:  # other threads were faster
        pass
