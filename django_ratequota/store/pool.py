"""What the pools of threads and of tasks share: who waits in the queue, and when connections open and close."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from typing import Any

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


class Pool:
    """Connections to one server and the callers that wait for one, in order."""

    def __init__(self, activity: ServerActivity, limit: int) -> None:
        self._activity = activity
        #: The most connections, open or connecting.
        self.limit = limit
        self.reset()
        forks.after_fork(self.reset)

    def reset(self) -> None:
        """Start empty; also after a fork, as the parent process uses the connections."""
        self.open = 0
        #: When each connect under way began, and when the last one failed (monotonic seconds).
        self.connecting: list[float] = []
        self.failed_at = 0.0
        #: The longest idle first.
        self.idle: deque[Idle] = deque()
        #: Futures of the callers, of threads or of tasks, in order.
        self.queue: OrderedDict[Any, None] = OrderedDict()
        self._lock = threading.Lock()

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
        while self.queue and self.idle:
            waiter, _ = self.queue.popitem(last=False)
            if waiter.done():  # its task was cancelled
                continue
            try:
                waiter.set_result(self.idle.pop())
            except IndexError:  # another thread was faster
                self.queue[waiter] = None
                self.queue.move_to_end(waiter, last=False)

    def begin_connect(self) -> float | None:
        """Begin a connect for one of the waiting callers and return its time; None where none should begin."""
        waiting = len(self.queue)
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

    def connected(self, connection: Any, began_at: float) -> None:
        """Take in the connection of the connect that began then."""
        self.connecting.remove(began_at)
        self.failed_at = 0.0
        self.open += 1
        self._activity.connected(began_at, surplus=not self.queue)
        self.idle.append((connection, began_at))
        self._serve_queue()

    def connect_failed(self, error: Exception, began_at: float) -> None:
        """Let all callers fail where no other connection is left to wait for, open or under way."""
        self.connecting.remove(began_at)
        self.failed_at = time.monotonic()
        while self.queue and not self.open and not self.connecting:
            waiter, _ = self.queue.popitem(last=False)
            if not waiter.done():
                waiter.set_exception(error)
