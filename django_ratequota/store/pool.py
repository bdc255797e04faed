"""The pool of connections to one server, for the threads and the tasks of this process alike.

A separate thread makes connections, next to the decisions that need them. So a connection that misses its
decision's deadline serves the next one, and many callers at a cold start do not time each other out: they wait in a
queue and are served in order. A connection without its whole reply is closed, and so is an idle one.

A signal may interrupt a thread at any line. So nothing here is counted: what is open, and what is being opened, are
weak sets. A connection or an attempt that an interrupted caller has lost is garbage, and with that is out of them.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import redis

from ..utils import forks
from ..utils.sansio import adrive, drive
from .base import Awaited, Budget, ServerActivity, is_alarm
from .commands import Command
from .link import resolve

#: A connection, and since when it has been idle.
Idle = tuple[Any, float]
#: Connections of a process to one server, open or connecting.
MAX_CONNECTIONS = 64
#: Seconds after which an idle connection is closed, one with each command, and how many stay open.
IDLE_SECONDS, MIN_IDLE = 10.0, 4
#: Seconds that each step of connecting may take; more than a decision's timeout, as the connection serves the next
#: decision.
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


class Turn:
    """A caller's turn in the queue, a thread's or a task's."""

    #: What came: a connection and since when it has been idle, or the error of a connect.
    came: Idle | Exception | None = None

    def __init__(self, queued_for: ServerActivity) -> None:
        self.queued_for = queued_for
        self._wake: Callable[[], object] = bool

    def give(self, what: Idle | Exception) -> bool:
        """Hand it over; returns False where nobody would notice, because the task's loop has been closed."""
        self.came = what
        try:
            self._wake()
        except RuntimeError:
            self.came = None
        return self.came is not None

    def poll(self, milliseconds: float) -> object:
        """Wait at most that long, until it has come."""
        woken = threading.Semaphore(0)
        self._wake = woken.release
        return self.came or woken.acquire(timeout=milliseconds / 1000)

    async def apoll(self, milliseconds: float) -> object:
        """``poll``, awaited."""
        loop = asyncio.get_running_loop()
        woken, thread = loop.create_future(), threading.get_ident()

        def wake() -> None:
            if threading.get_ident() == thread and not loop.is_closed():
                resolve(woken)
            else:
                loop.call_soon_threadsafe(resolve, woken)

        self._wake = wake
        if self.came:
            return True
        timer = loop.call_later(milliseconds / 1000, resolve, woken)
        try:
            return await woken
        finally:
            timer.cancel()


class Pool:
    """Connections to one server and the callers that wait for one, in order."""

    def __init__(self, connect: Callable[[float], Any], activity: ServerActivity, limit: int) -> None:
        """``connect(seconds)`` makes a connection, or raises ``redis.RedisError`` or ``OSError``."""
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
        #: The callers that wait, in order.
        self.queue: deque[Turn] = deque()

    def send(self, command: Command, budget: Budget, asking: bool = False) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        return drive(self._send(command, budget, asking), budget.wait)

    async def asend(self, command: Command, budget: Budget, asking: bool = False) -> Any:
        """``send``, awaited."""
        return await adrive(self._send(command, budget, asking), budget.await_for)

    def _send(self, command: Command, budget: Budget, asking: bool) -> Generator[Awaited, object, Any]:
        connection, budget.idle_since = yield from self._take(budget)
        budget.left_at_send, sent_at = budget.left, time.monotonic()
        try:
            reply = yield from connection.exchange(command, asking)
        except GeneratorExit:
            # The collector found an abandoned task. It may run in a thread that holds the lock, so no lock is taken:
            # the connection is garbage as well.
            raise
        except BaseException:
            self._drop(connection)
            raise
        unused = self._put(connection, self._activity.replied(sent_at))
        if unused is not None:
            self._drop(unused)
        if isinstance(reply, redis.exceptions.ResponseError):
            raise reply
        return reply

    def _take(self, budget: Budget) -> Generator[Awaited, object, Idle]:
        """Return a connection that is ready to send, and since when it has been idle."""
        if forks.pid != os.getpid():
            forks.check()
        while True:
            try:
                connection, idle_since = self.idle.pop()
            except IndexError:
                connection, idle_since = yield from self._wait_in_queue(budget)
            try:
                if idle_since > self._activity.stale_since and not connection.is_stale():
                    return connection, idle_since
            except OSError as error:
                if is_alarm(error):
                    raise
            self._drop(connection)

    def _wait_in_queue(self, budget: Budget) -> Generator[Awaited, object, Idle]:
        """Wait for a connection, beginning connects meanwhile; raises the error of a connect."""
        turn = Turn(self._activity)
        try:
            with self._lock:
                self.queue.append(turn)  # before looking at idle ones, so that none that is returned goes unseen
                self._serve_queue()
            while turn.came is None:
                self._connect_if_needed(budget)
                yield turn
        except GeneratorExit:  # see ``_send``
            self._leave_queue(turn)
            raise
        except BaseException:
            with self._lock:
                self._leave_queue(turn)
                if isinstance(turn.came, tuple):  # it is for the next one
                    self.idle.append(turn.came)
                    self._serve_queue()
            raise
        if isinstance(turn.came, Exception):
            raise turn.came.with_traceback(None)
        budget.connected()
        return turn.came

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
            try:
                idle = self.idle.pop()
            except IndexError:
                return
            if not self._give(idle):
                self.idle.append(idle)

    def _give(self, what: Idle | Exception) -> bool:
        """Hand it to the first caller that waits; returns whether there was one. The lock must be held."""
        with suppress(IndexError):
            while not self.queue.popleft().give(what):
                pass
            return True
        return False

    def _leave_queue(self, turn: Turn) -> None:
        with suppress(ValueError):
            self.queue.remove(turn)

    def _connect_if_needed(self, budget: Budget | None = None) -> None:
        """Connect in a thread; where the process can start no more threads, or ends, here and within the budget."""
        with self._lock:
            attempt = self.begin_connect()
        if attempt is None:
            return
        try:
            threading.Thread(target=self._connect, args=(attempt,), name="ratequota-connect", daemon=True).start()
        except RuntimeError:
            if budget is not None:
                self._connect(attempt, max(budget.left, 0.001))
                budget.left -= time.monotonic() - attempt.began_at

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

    def _connect(self, attempt: Attempt | None, seconds: float = CONNECT_SECONDS) -> None:
        """Make a connection, and more while callers wait for them."""
        while attempt is not None:
            try:
                connection = self._make(seconds)
            except (redis.RedisError, OSError) as error:
                with self._lock:
                    self.connect_failed(error, attempt)
                return
            with self._lock:
                self.connected(connection, attempt)
                attempt = self.begin_connect()

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
            self._give(error)

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        self.open.discard(connection)
        self._connect_if_needed()

    def close(self) -> None:
        """Close all idle connections."""
        while True:
            try:
                connection, _ = self.idle.pop()
            except IndexError:
                return
            self._drop(connection)
