"""What the pools of threads and of tasks share: who waits in the queue, and when connections open and close.

A signal may interrupt a thread at any line. So nothing here is counted: what is open, and what is being opened, are
weak sets. A connection or an attempt that an interrupted caller has lost is garbage, and with that is out of them.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from ..utils import forks
from .base import ServerActivity

#: A connection, and since when it has been idle.
Idle = tuple[Any, float]
#: Connections to one server, open or connecting: of a process for its threads, and of each event loop.
MAX_CONNECTIONS = 64
#: Seconds after which an idle connection is closed, one with each command, and how many stay open.
IDLE_SECONDS, MIN_IDLE = 10.0, 4
#: Seconds that connecting may take; more than a decision's timeout, as the connection serves the next decision.
CONNECT_SECONDS = 5.0
#: Connects at a time; as many as are open, where these are more. So a pool at most doubles at once.
_CONCURRENT_CONNECTS = 4
#: Seconds after which a connect no longer holds up others, and the most connects of that age.
_SLOW_SECONDS, _MAX_SLOW = 1.0, 16
#: Seconds between a failed connect and the next, while other connections are open.
RETRY_SECONDS = 0.05


class Attempt:
    """A connect that is under way for as long as whoever connects holds it."""

    def __init__(self, began_at: float) -> None:
        #: Monotonic seconds.
        self.began_at = began_at


class Pool:
    """Connections to one server and the callers that wait for one, in order."""

    def __init__(self, connect: Callable[..., Any], activity: ServerActivity, limit: int) -> None:
        """``connect`` makes a connection, or raises ``redis.RedisError`` or ``OSError``."""
        self._make, self._activity = connect, activity
        #: The most connections, open or connecting.
        self.limit = limit
        self._lock = forks.lock()
        self.reset()
        forks.after_fork(self.reset)

    def reset(self) -> None:
        """Start empty; also after a fork, as the parent process uses the connections."""
        self.open: WeakSet[Any] = WeakSet()
        self.connecting: WeakSet[Attempt] = WeakSet()
        #: When the last connect failed (monotonic seconds).
        self.failed_at = 0.0
        #: The longest idle first.
        self.idle: deque[Idle] = deque()
        #: Futures of the callers, of threads or of tasks, in order.
        self.queue: OrderedDict[Any, None] = OrderedDict()

    def _put(self, connection: Any, now: float) -> Any:
        """Take a connection back; returns one that has been idle for too long, for the caller to close, or None."""
        self.idle.append((connection, now))
        if self.queue:
            with self._lock:
                self._serve_queue()
        try:
            if len(self.idle) > MIN_IDLE and self.idle[0][1] < now - IDLE_SECONDS:
                return self.idle.popleft()[0]
        except IndexError:  # other threads were faster
            pass
        return None

    def _serve_queue(self) -> None:
        """Hand idle connections to the waiting callers; the lock must be held."""
        while self.queue:
            waiter = next(iter(self.queue))
            if not waiter.done():  # else its task was cancelled
                try:
                    waiter.set_result(self.idle.pop())
                except IndexError:
                    return
            self.queue.pop(waiter, None)

    def _leave_queue(self, waiter: Any) -> None:
        """Forget a caller that gave up; what came meanwhile is for the next one. The lock must be held."""
        self.queue.pop(waiter, None)
        if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
            self.idle.append(waiter.result())
            self._serve_queue()

    def begin_connect(self) -> Attempt | None:
        """Begin a connect for one of the waiting callers; None where none should begin."""
        waiting = len(self.queue)
        if not waiting or len(self.open) + len(self.connecting) >= self.limit:
            return None
        now = time.monotonic()
        slow = sum(attempt.began_at < now - _SLOW_SECONDS for attempt in self.connecting)
        concurrent = max(_CONCURRENT_CONNECTS, len(self.open))
        if self.open and self.failed_at:  # the server may be full: the open connections have to serve all callers
            if now < self.failed_at + RETRY_SECONDS:
                return None
            concurrent = 1
        if slow >= _MAX_SLOW or len(self.connecting) - slow >= min(waiting, concurrent):
            return None
        attempt = Attempt(now)
        self.connecting.add(attempt)
        return attempt

    def connected(self, connection: Any, attempt: Attempt) -> None:
        """Take in the connection of the attempt."""
        self.connecting.discard(attempt)
        self.failed_at = 0.0
        self.open.add(connection)
        self._activity.connected(attempt.began_at, surplus=not self.queue)
        self.idle.append((connection, attempt.began_at))
        self._serve_queue()

    def connect_failed(self, error: Exception, attempt: Attempt) -> None:
        """Let all callers fail where no other connection is left to wait for, open or under way."""
        self.connecting.discard(attempt)
        self.failed_at = time.monotonic()
        while self.queue and not self.open and not self.connecting:
            waiter, _ = self.queue.popitem(last=False)
            if not waiter.done():
                waiter.set_exception(error)
