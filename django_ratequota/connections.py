"""This process's connections to one server: for threads, and for the tasks of each event loop.

Connections are made beside the decisions that need them, by a thread or task of their own, a few at a time. So one
that misses its decision's deadline serves the next, and many cold callers do not time each other out. A connection
whose reply did not arrive whole is dropped.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import redis

from .budget import Budget, BudgetTimeout
from .handshake import CONNECT_SECONDS, Handshake, spend
from .scripts import Command, Run

#: Connections that are made at a time; as many as are open, where these are more. So their number doubles at most.
_AT_ONCE = 4
#: Attempts that take longer (seconds) no longer hold up others; so many of these at most.
_SLOW_SECONDS, _MOST_SLOW = 1.0, 16
#: Seconds between a failed attempt and the next, where other connections are open.
_PAUSE_SECONDS = 0.05


class Liveness:
    """What this process knows of one server, in monotonic seconds."""

    __slots__ = ("answered_at", "connected_at", "lost_at", "spare_at")

    def __init__(self) -> None:
        #: When the server last answered a command; 0 = never.
        self.answered_at = 0.0
        #: When a connection last came about, and when one did that nobody waited for any more. A server that hangs,
        #: or a proxy before it, may still answer a login.
        self.connected_at = self.spare_at = 0.0
        #: Connections idle since then, or longer, are not used again: one as old turned out to be dead.
        self.lost_at = 0.0

    @property
    def alive_at(self) -> float:
        """When the server last answered anything, a login too."""
        return max(self.answered_at, self.connected_at)

    def connected(self, *, spare: bool) -> None:
        """Note that a connection came about; ``spare`` = nobody waits for it any more."""
        self.connected_at = time.monotonic()
        if spare:
            self.spare_at = self.connected_at

    def lost(self, since: float) -> None:
        """Distrust each connection that has been idle since ``since`` or longer."""
        self.lost_at = max(self.lost_at, since)


class _Attempts:
    """How many connections of a pool are open, and which are being made."""

    def __init__(self) -> None:
        self.open = 0
        #: How many attempts have failed, and the error of the last one.
        self.failures = 0
        self.error: Exception | None = None
        self._begun: list[float] = []
        self._failed_at = 0.0

    def begin(self, waiting: int) -> float | None:
        """When an attempt begins that is wanted for one of ``waiting`` callers; None where none should."""
        now = time.monotonic()
        slow = sum(begun < now - _SLOW_SECONDS for begun in self._begun)
        if slow == _MOST_SLOW or len(self._begun) - slow >= min(waiting, max(_AT_ONCE, self.open)):
            return None
        if self.open and now < self._failed_at + _PAUSE_SECONDS:
            return None
        self._begun.append(now)
        return now

    def succeeded(self, begun: float) -> None:
        self._begun.remove(begun)
        self._failed_at = 0.0
        self.open += 1

    def failed(self, begun: float, error: Exception) -> None:
        self._begun.remove(begun)
        self._failed_at = time.monotonic()
        self.failures += 1
        self.error = error


class Connections:
    """Those of this process's threads."""

    def __init__(self, handshake: Handshake, liveness: Liveness) -> None:
        self._handshake, self._liveness = handshake, liveness
        self.leave()
        _all.add(self)

    def leave(self) -> None:
        """Forget everything, which another process uses."""
        #: (connection, since when it is idle), the longest idle first.
        self._idle: deque[tuple[Any, float]] = deque()
        self._attempts = _Attempts()
        self._waiting = 0
        self._changed = threading.Condition(threading.Lock())

    def send(self, command: Command, budget: Budget, asking: bool) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        connection, since = self._take(budget)
        budget.at_hand = budget.left
        spend(budget)
        try:
            try:
                reply = self._exchange(connection, command, asking)
            except redis.exceptions.NoScriptError:
                if not isinstance(command, Run):
                    raise
                reply = self._exchange(connection, command.text, asking)  # nothing ran
        except redis.exceptions.ResponseError:
            self._give_back(connection)
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self._liveness.lost(since)
            self._drop(connection)
            raise
        self._give_back(connection)
        return reply

    def _exchange(self, connection: Any, command: Command, asking: bool) -> Any:
        if asking:  # holds for the one command that follows
            connection.send_packed_command(connection.pack_command("ASKING"))
            connection.read_response()
        connection.send_packed_command(_packed(connection, command), check_health=False)
        return connection.read_response()

    def _take(self, budget: Budget) -> tuple[Any, float]:
        """A connection that is ready to send, and since when it has been idle."""
        while True:
            try:
                connection, since = self._idle.pop()
            except IndexError:
                self._await_one(budget)
                continue
            usable = False
            try:
                usable = since > self._liveness.lost_at and not connection.is_stale()
            except (redis.exceptions.RedisError, OSError):
                pass
            finally:
                if not usable:
                    self._drop(connection)
            if usable:
                return connection, since

    def _await_one(self, budget: Budget) -> None:
        """Wait until a connection is idle, and see to it that enough are made; raises why none could be."""
        attempts, failures = self._attempts, self._attempts.failures
        with self._changed:
            self._waiting += 1
        try:
            while not self._idle:
                if attempts.failures != failures and not attempts.open and attempts.error is not None:
                    raise attempts.error.with_traceback(None)
                self._make(budget)
                with self._changed:
                    if not self._idle:
                        budget.wait_in_line(self._changed.wait, self._liveness)
            budget.connected()
        finally:
            with self._changed:
                self._waiting -= 1

    def _make(self, budget: Budget) -> None:
        with self._changed:
            begun = self._begin()
        if begun is None:
            return
        try:
            threading.Thread(target=self._attempt, args=(begun,), name="ratequota-connect", daemon=True).start()
        except RuntimeError:  # the process has no more threads, or ends
            self._attempt(begun, max(budget.left, 0.001))
            budget.left -= time.monotonic() - begun

    def _attempt(self, begun: float | None, seconds: float = CONNECT_SECONDS) -> None:
        """Make a connection, and go on while callers wait for more."""
        changed, attempts = self._changed, self._attempts
        while begun is not None:
            try:
                connection = self._handshake.connect(seconds)
            except BaseException as error:
                with changed:
                    attempts.failed(begun, error if isinstance(error, Exception) else RuntimeError(repr(error)))
                    changed.notify_all()
                return
            with changed:
                attempts.succeeded(begun)
                self._liveness.connected(spare=self._waiting <= len(self._idle))
                self._idle.append((connection, begun))
                changed.notify()
                begun = self._begin()

    def _begin(self) -> float | None:
        # Who waits may not have woken up yet to take what is idle.
        return self._attempts.begin(self._waiting - len(self._idle))

    def _give_back(self, connection: Any) -> None:
        now = time.monotonic()
        self._liveness.answered_at = now
        self._idle.append((connection, now))
        if self._waiting:
            with self._changed:
                self._changed.notify()

    def _drop(self, connection: Any) -> None:
        with self._changed:
            self._attempts.open -= 1
        connection.disconnect()

    def close(self) -> None:
        """Drop what is idle."""
        while True:
            try:
                connection, _ = self._idle.pop()
            except IndexError:
                return
            self._drop(connection)


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for connections in _all:
        connections.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


#: As redis-py calls it since 8.
_CAN_READ = hasattr(redis.asyncio.Connection, "can_read")


class LoopConnections:
    """Those of one event loop's tasks; closed and forgotten when it shuts its asynchronous generators down."""

    def __init__(self, handshake: Handshake, liveness: Liveness, forget: Callable[[], object]) -> None:
        """``forget`` is called at the end."""
        self._handshake, self._liveness, self._forget = handshake, liveness, forget
        self._idle: deque[tuple[Any, float]] = deque()
        self._attempts = _Attempts()
        #: Callers that wait for a connection, in order.
        self._waiting: deque[asyncio.Future[tuple[Any, float]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        #: To be begun in the loop; closing it, as the loop does at its end, closes all connections.
        self.closer = self._close_with_loop()

    async def send(self, command: Command, budget: Budget, asking: bool) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        since = 0.0
        try:
            async with BudgetTimeout(budget):
                connection, since = await self._take(budget)
                budget.at_hand = budget.left
                try:
                    try:
                        reply = await self._exchange(connection, command, asking)
                    except redis.exceptions.NoScriptError:
                        if not isinstance(command, Run):
                            raise
                        reply = await self._exchange(connection, command.text, asking)  # nothing ran
                except redis.exceptions.ResponseError:
                    self._give_back(connection)
                    raise
                except BaseException:
                    await self._drop(connection)
                    raise
                self._give_back(connection)
                return reply
        except redis.exceptions.ResponseError:
            raise
        except Exception:
            self._liveness.lost(since)
            raise

    async def _exchange(self, connection: Any, command: Command, asking: bool) -> Any:
        if asking:  # holds for the one command that follows
            await connection.send_packed_command(connection.pack_command("ASKING"))
            await connection.read_response()
        await connection.send_packed_command(_packed(connection, command), check_health=False)
        return await connection.read_response()

    async def _take(self, budget: Budget) -> tuple[Any, float]:
        while True:
            connection, since = self._idle.pop() if self._idle else await self._await_one(budget)
            usable = False
            try:
                usable = since > self._liveness.lost_at and not (
                    await (connection.can_read() if _CAN_READ else connection.can_read_destructive())
                )
            except (redis.exceptions.RedisError, OSError):
                pass
            finally:  # the caller may be cancelled here
                if not usable:
                    await self._drop(connection)
            if usable:
                return connection, since

    async def _await_one(self, budget: Budget) -> tuple[Any, float]:
        future: asyncio.Future[tuple[Any, float]] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._make()
        budget.answers = self._liveness
        try:
            found = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._put(*future.result())
            raise
        else:
            budget.connected()
            return found
        finally:
            budget.answers = None

    def _make(self) -> None:
        begun = self._attempts.begin(sum(not future.done() for future in self._waiting))
        if begun is not None:
            task = asyncio.create_task(self._attempt(begun))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _attempt(self, begun: float) -> None:
        attempts = self._attempts
        try:
            connection = await self._handshake.aconnect()
        except BaseException as error:
            attempts.failed(begun, error if isinstance(error, Exception) else RuntimeError(repr(error)))
            while self._waiting and not attempts.open and isinstance(error, Exception):
                future = self._waiting.popleft()
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        attempts.succeeded(begun)
        self._liveness.connected(spare=all(future.done() for future in self._waiting))
        self._put(connection, begun)
        # One in its place, and one more: their number may double.
        self._make()
        self._make()

    def _give_back(self, connection: Any) -> None:
        now = time.monotonic()
        self._liveness.answered_at = now
        self._put(connection, now)

    def _put(self, connection: Any, since: float) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result((connection, since))
                return
        self._idle.append((connection, since))

    async def _drop(self, connection: Any) -> None:
        self._attempts.open -= 1
        self._make()  # who waits may have waited for this one only
        await connection.disconnect(nowait=True)

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._forget()
            for task in self._tasks:
                task.cancel()
            while self._idle:
                connection, _ = self._idle.pop()
                await connection.disconnect()


def _packed(connection: Any, command: Command) -> Any:
    """The command as it goes over the wire; a script's is worked out once."""
    if not isinstance(command, Run):
        return connection.pack_command(*command)
    command.packed = command.packed or connection.pack_command(*command)
    return command.packed
