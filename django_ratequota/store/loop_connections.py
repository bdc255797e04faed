"""The connection pool of one event loop's tasks to one server: ``connections``, awaited."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import Context
from os import getpid
from types import TracebackType
from typing import Any

import redis
import redis.asyncio

from ..utils import forks
from .base import LATE, NOTHING, Budget, DeadlinePassed, ServerActivity, is_alarm
from .commands import Command, ScriptCall
from .connections import pack
from .pool import RETRY_SECONDS, Attempt, Idle, Pool

#: redis-py 8 renamed ``can_read_destructive``.
_CAN_READ = hasattr(redis.asyncio.Connection, "can_read")
#: After so long a loop that did not run meanwhile may not have noticed yet that the server has closed a connection.
_NOTICED_SECONDS = 0.1


class LoopConnections(Pool):
    """The connections of one event loop's tasks; closed when the loop shuts its asynchronous generators down."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        activity: ServerActivity,
        on_close: Callable[[], object],
        limit: int,
    ) -> None:
        """``connect`` makes a connection; ``on_close`` is called when the loop ends."""
        super().__init__(connect, activity, limit)
        self._on_close = on_close
        self._tasks: set[asyncio.Task[None]] = set()
        #: To be started in the loop; its ``aclose``, which the loop calls at its end, closes all connections.
        self.closer = self._close_with_loop()

    async def send(self, command: Command, budget: Budget, asking: bool = False) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        async with BudgetTimeout(budget):
            connection, budget.idle_since = await self._take(budget)
            budget.left_at_send, sent_at = budget.left, time.monotonic()
            try:
                reply = await self._exchange(connection, command, asking)
            except BaseException:
                await self._drop(connection)
                raise
            unused = self._put(connection, self._activity.replied(sent_at))
            if unused is not None:
                await self._drop(unused)
        if isinstance(reply, redis.exceptions.ResponseError):
            raise reply
        return reply

    async def _exchange(self, connection: Any, command: Command, asking: bool) -> Any:
        """Send the command and return its reply, be it an error."""
        try:
            if asking:  # holds for the one command that follows
                await connection.send_packed_command(connection.pack_command("ASKING"))
                await connection.read_response()
            await connection.send_packed_command(pack(connection, command), check_health=False)
            return await connection.read_response()
        except redis.exceptions.ResponseError as error:
            if isinstance(error, redis.exceptions.NoScriptError) and isinstance(command, ScriptCall):
                return await self._exchange(connection, command.text, asking)  # nothing ran
            return error

    async def _take(self, budget: Budget) -> Idle:
        if forks.pid != getpid():
            forks.check()
        while True:
            connection, idle_since = self.idle.pop() if self.idle else await self._wait_for_one(budget)
            usable = False
            try:
                if idle_since < time.monotonic() - _NOTICED_SECONDS:
                    for _ in range(2):  # in the first the loop sees what has arrived, before the second it reads that
                        await asyncio.sleep(0)
                usable = idle_since > self._activity.stale_since and not (
                    await (connection.can_read() if _CAN_READ else connection.can_read_destructive())
                    or connection._reader._buffer  # which redis-py looks at since version 8
                )
            except (redis.exceptions.RedisError, OSError) as error:
                if is_alarm(error):
                    raise
            finally:  # the caller may be cancelled here
                if not usable:
                    await self._drop(connection)
            if usable:
                return connection, idle_since

    async def _wait_for_one(self, budget: Budget) -> Idle:
        waiter: asyncio.Future[Idle] = asyncio.get_running_loop().create_future()
        budget.queued_for = self._activity
        try:
            self.queue[waiter] = None
            self._connect_if_needed()
            taken = await waiter
        except asyncio.CancelledError:
            self._leave_queue(waiter)
            raise
        finally:
            self.queue.pop(waiter, None)
            budget.queued_for = None
        budget.connected()
        return taken

    def _connect_if_needed(self) -> None:
        attempt = self.begin_connect()
        if attempt is not None:
            # In a context of its own: the connection would keep that of this request, and all that it refers to.
            task = asyncio.create_task(self._connect(attempt), context=Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, attempt: Attempt) -> None:
        try:
            connection = await self._make()
        except (redis.RedisError, OSError) as error:
            self.connect_failed(error, attempt)
            if self.queue:  # the open connections serve them, and perhaps another one
                await asyncio.sleep(RETRY_SECONDS)
                self._connect_if_needed()
            return
        self.connected(connection, attempt)
        # A successor, and one more: the pool may double.
        self._connect_if_needed()
        self._connect_if_needed()

    async def _drop(self, connection: Any) -> None:
        await connection.disconnect(nowait=True)
        self.open.discard(connection)
        self._connect_if_needed()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._on_close()
            for task in self._tasks:
                task.cancel()
            while self.idle:
                connection, _ = self.idle.pop()
                await connection.disconnect()


class BudgetTimeout:
    """Cancel the block and raise ``DeadlinePassed`` once the budget is used up.

    The event loop calls it once per slice. A late call counts half: the loop was busy, and may not have read a reply
    that is there. Hence no block waits longer than twice the budget, a stalled loop and the queue aside.
    """

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
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if not self._timeout.expired():
                raise
            raise DeadlinePassed("no reply in time") from error

    def _begin(self) -> None:
        self._begun = time.monotonic()
        self._wake = self._loop.call_later(self._budget.slice, self._look)

    def _look(self) -> None:
        budget = self._budget
        late = time.monotonic() - self._begun > LATE * budget.slice
        budget.count(budget.slice, self._begun, late=late, queued_for=budget.queued_for)
        if budget.left < NOTHING:
            self._begun = time.monotonic()
            self._timeout.reschedule(self._loop.time())  # once: it cannot be moved after that
        else:
            self._begin()
