"""Connections to one server, sync and async: without retries, and taken at a tenth of what redis-py's pools cost.

The pools make connections, once; what is idle waits here. A connection whose reply did not arrive whole is dropped.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from .scripts import Command, Run

#: One connection a thread or task that is asking right now: never a reason to fail.
_MAX_CONNECTIONS = 2**31

#: When the command that this thread is sending must be answered (monotonic, seconds).
_sending = threading.local()


def _left() -> float:
    left: float = _sending.deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


class _TimedSocket:
    """A socket that waits until the thread's deadline, through however many pieces.

    redis-py's timeouts count from each single step: a slow server took six of them on a new connection.
    """

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        #: The timeout it has, in whole milliseconds, as the system counts them; 0 = redis-py asks what has come.
        self._ms = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def settimeout(self, seconds: float | None) -> None:
        # Any other wait than none at all is the deadline's to decide.
        self._ms = 0 if seconds == 0 else -1
        self._sock.settimeout(seconds)

    def _wait(self) -> None:
        if self._ms:
            ms = int(_left() * 1000) + 1
            if ms != self._ms:
                self._ms = ms
                self._sock.settimeout(ms / 1000)

    def recv(self, *args: Any) -> Any:
        self._wait()
        return self._sock.recv(*args)

    def recv_into(self, *args: Any) -> Any:
        self._wait()
        return self._sock.recv_into(*args)

    def sendall(self, *args: Any) -> Any:
        self._wait()
        return self._sock.sendall(*args)


def _timed(plain: type) -> type:
    class Timed(plain):  # type: ignore[misc]
        _poll: Any = None

        def _connect(self) -> Any:
            self.socket_connect_timeout = self.socket_timeout = _left()
            sock = super()._connect()
            if hasattr(select, "poll") and not issubclass(plain, redis.SSLConnection):
                self._poll = select.poll()
                self._poll.register(sock, select.POLLIN)
            return _TimedSocket(sock)

        def can_read(self, timeout: float = 0) -> bool:
            # One call to the system instead of three. (TLS may have sent what is no reply.)
            return bool(self._poll.poll(timeout * 1000) if self._poll else super().can_read(timeout))

    Timed.__name__ = plain.__name__
    return Timed


#: Any of redis-py's classes of connections -> ours for threads, and for tasks.
KINDS: dict[type, tuple[type, type]] = {}
for _sync, _async, _managed in (
    (
        redis.Connection,
        redis.asyncio.Connection,
        (redis.sentinel.SentinelManagedConnection, redis.asyncio.sentinel.SentinelManagedConnection),
    ),
    (
        redis.SSLConnection,
        redis.asyncio.SSLConnection,
        (redis.sentinel.SentinelManagedSSLConnection, redis.asyncio.sentinel.SentinelManagedSSLConnection),
    ),
    (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection, ()),
):
    for _kind in (_sync, _async, *_managed):
        KINDS[_kind] = (_timed(_sync), _async)


class Connections:
    """Those of this process's threads."""

    def __init__(self, kind: type, kwargs: dict[str, Any]) -> None:
        """``kind`` is the first of a pair in ``KINDS``, ``kwargs`` what connections are made with."""
        self._client = redis.Redis(
            connection_pool=redis.ConnectionPool(
                connection_class=kind, max_connections=_MAX_CONNECTIONS, retry=Retry(NoBackoff(), 0), **kwargs
            )
        )
        self._idle: deque[Any] = deque()
        _all.add(self)

    def send(self, command: Command, seconds: float, asking: bool) -> Any:
        """Send one command once and return its reply within ``seconds``; raises what redis-py raises."""
        _sending.deadline = time.monotonic() + seconds
        connection = self._take()
        whole = False
        try:
            try:
                reply = self._exchange(connection, command, asking)
            except redis.exceptions.NoScriptError:
                if not isinstance(command, Run):
                    raise
                reply = self._exchange(connection, command.text, asking)  # nothing ran
            whole = True
        except redis.exceptions.ResponseError:
            whole = True
            raise
        finally:
            if whole:
                self._idle.append(connection)
            else:
                self._drop(connection)
        return reply

    def _exchange(self, connection: Any, command: Command, asking: bool) -> Any:
        if asking:  # holds for the one command that follows
            connection.send_packed_command(connection.pack_command("ASKING"))
            connection.read_response()
        if isinstance(command, Run):
            command.packed = command.packed or connection.pack_command(*command)
            connection.send_packed_command(command.packed, check_health=False)
            return connection.read_response()
        connection.send_packed_command(connection.pack_command(*command))
        # Makes of some replies what redis-py's users know, a dict of HGETALL's say.
        return self._client.parse_response(connection, command[0])  # type: ignore[no-untyped-call]

    def _take(self) -> Any:
        """A connection that is ready to send: idle, or new."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._client.connection_pool.get_connection()
            ready = False
            try:
                ready = not connection.can_read()
            except (redis.exceptions.RedisError, OSError):
                pass
            finally:
                if not ready:  # the server has closed it, or said what nobody asked for
                    self._drop(connection)
            if ready:
                return connection

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        self._client.connection_pool.release(connection)

    def close(self) -> None:
        """Drop what is idle."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            self._drop(connection)

    def leave(self) -> None:
        """Forget what is idle, which another process uses."""
        self._idle.clear()


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for connections in _all:
        connections.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


#: As redis-py calls it since 8.
_CAN_READ = hasattr(redis.asyncio.Connection, "can_read")


class LoopConnections:
    """Those of one event loop's tasks; closed and forgotten when it shuts its asynchronous generators down."""

    def __init__(self, kind: type, kwargs: dict[str, Any], forget: Callable[[], object]) -> None:
        """``kind`` is the second of a pair in ``KINDS``; ``forget`` is called at the end."""
        self._client = redis.asyncio.Redis.from_pool(
            redis.asyncio.ConnectionPool(
                connection_class=kind,
                max_connections=_MAX_CONNECTIONS,
                retry=AsyncRetry(NoBackoff(), 0),
                # What a task waits for ends with its deadline; these are for connections that nobody waits for.
                socket_timeout=None,
                **kwargs,
            )
        )
        self._idle: deque[Any] = deque()
        self._forget = forget
        #: To be begun in the loop; closing it, as the loop does at its end, closes all connections.
        self.closer = self._close_with_loop()

    async def send(self, command: Command, asking: bool) -> Any:
        """Send one command once and return its reply; raises what redis-py raises."""
        connection = await self._take()
        whole = False
        try:
            try:
                reply = await self._exchange(connection, command, asking)
            except redis.exceptions.NoScriptError:
                if not isinstance(command, Run):
                    raise
                reply = await self._exchange(connection, command.text, asking)  # nothing ran
            whole = True
        except redis.exceptions.ResponseError:
            whole = True
            raise
        finally:
            if whole:
                self._idle.append(connection)
            else:
                await self._drop(connection)
        return reply

    async def _exchange(self, connection: Any, command: Command, asking: bool) -> Any:
        if asking:  # holds for the one command that follows
            await connection.send_packed_command(connection.pack_command("ASKING"))
            await connection.read_response()
        if isinstance(command, Run):
            command.packed = command.packed or connection.pack_command(*command)
            await connection.send_packed_command(command.packed, check_health=False)
            return await connection.read_response()
        await connection.send_packed_command(connection.pack_command(*command))
        return await self._client.parse_response(connection, command[0])

    async def _take(self) -> Any:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return await self._client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
            ready = False
            try:
                ready = not await (connection.can_read() if _CAN_READ else connection.can_read_destructive())
            except (redis.exceptions.RedisError, OSError):
                pass
            finally:  # whoever asks may be cancelled here
                if not ready:
                    await self._drop(connection)
            if ready:
                return connection

    async def _drop(self, connection: Any) -> None:
        await connection.disconnect(nowait=True)
        await self._client.connection_pool.release(connection)

    async def close(self) -> None:
        """Drop what is idle."""
        while self._idle:
            await self._drop(self._idle.pop())

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._forget()
            self._idle.clear()
            await self._client.aclose()
