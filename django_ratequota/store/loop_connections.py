"""This process's connections to one server, for the tasks of one event loop: ``connections``, awaited."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import redis

from .budget import Budget, BudgetTimeout
from .commands import Command, ScriptCall
from .handshake import Handshake
from .pool import IDLE_SECONDS, KEPT, MAX_CONNECTIONS, PAUSE_SECONDS, Attempts, Liveness, packed, unused

#: As redis-py calls it since 8.
_CAN_READ = hasattr(redis.asyncio.Connection, "can_read")


class LoopConnections:
    """Those of one event loop's tasks; closed and forgotten when it shuts its asynchronous generators down."""

    def __init__(
        self,
        handshake: Handshake,
        liveness: Liveness,
        forget: Callable[[], object],
        most: int = MAX_CONNECTIONS,
    ) -> None:
        """``forget`` is called at the end."""
        self._handshake, self._liveness, self._forget = handshake, liveness, forget
        self._idle: deque[tuple[Any, float]] = deque()
        self._attempts = Attempts(most)
        #: Callers in line for a connection, in order.
        self._line: OrderedDict[asyncio.Future[tuple[Any, float]], None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        #: Closes unused connections later; None while there are few.
        self._closing: asyncio.TimerHandle | None = None
        #: To be begun in the loop; closing it, as the loop does at its end, closes all connections.
        self.closer = self._close_with_loop()

    async def send(self, command: Command, budget: Budget, asking: bool) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        since = 0.0
        try:
            async with BudgetTimeout(budget):
                connection, since = await self._take(budget)
                budget.at_hand, asked = budget.left, time.monotonic()
                try:
                    try:
                        reply = await self._exchange(connection, command, asking)
                    except redis.exceptions.NoScriptError:
                        if not isinstance(command, ScriptCall):
                            raise
                        reply = await self._exchange(connection, command.text, asking)  # nothing ran
                except redis.exceptions.ResponseError:
                    self._give_back(connection, asked)
                    raise
                except BaseException:
                    await self._drop(connection)
                    raise
                self._give_back(connection, asked)
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
        await connection.send_packed_command(packed(connection, command), check_health=False)
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
        self._line[future] = None
        self._make()
        budget.answers = self._liveness
        try:
            found = await future
        except asyncio.CancelledError:
            self._line.pop(future, None)
            if not future.cancelled() and future.exception() is None:
                self._put(*future.result())
            raise
        else:
            budget.connected()
            return found
        finally:
            budget.answers = None

    def _make(self) -> None:
        begun = self._attempts.begin(len(self._line))
        if begun is not None:
            self._start(self._attempt(begun))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attempt(self, begun: float) -> None:
        attempts = self._attempts
        try:
            connection = await self._handshake.aconnect()
        except BaseException as error:
            hopeless = attempts.failed(begun)
            if not isinstance(error, Exception):
                raise
            while hopeless and self._line:
                future, _ = self._line.popitem(last=False)
                if not future.done():
                    future.set_exception(error)
            if self._line:  # served by those that are open, and perhaps by another
                await asyncio.sleep(PAUSE_SECONDS)
                self._make()
            return
        attempts.succeeded(begun)
        self._liveness.connected(begun, spare=not self._line)
        self._put(connection, begun)
        self._close_later()
        # One in its place, and one more: their number may double.
        self._make()
        self._make()

    def _give_back(self, connection: Any, asked: float) -> None:
        self._put(connection, self._liveness.answered(asked))

    def _put(self, connection: Any, since: float) -> None:
        while self._line:
            future, _ = self._line.popitem(last=False)
            if not future.done():
                future.set_result((connection, since))
                return
        self._idle.append((connection, since))

    async def _drop(self, connection: Any) -> None:
        try:
            await connection.disconnect(nowait=True)
        finally:
            self._attempts.open -= 1
            self._make()

    def _close_later(self) -> None:
        if self._closing is None and self._attempts.open > KEPT:
            later = asyncio.get_running_loop().call_later
            self._closing = later(IDLE_SECONDS, lambda: self._start(self._close_unused()))

    async def _close_unused(self) -> None:
        self._closing = None
        for connection in unused(self._idle):
            await self._drop(connection)
        self._close_later()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._forget()
            if self._closing is not None:
                self._closing.cancel()
            for task in self._tasks:
                task.cancel()
            while self._idle:
                connection, _ = self._idle.pop()
                await connection.disconnect()
