"""One Redis server: connections of our own to it, without retries and within a time, sync and async.

Whatever goes wrong is one ``StoreError``, its reason told by class or by the prefix that the server sent.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from .exceptions import ConfigurationError, StoreError
from .scripts import Run

Command = tuple[Any, ...]


#: What an alias or a client may say about its connections that a decision must not inherit: one logical hit
#: was counted eleven times by a client that retried lost replies.
_OURS = (
    "retry",
    "retry_on_timeout",
    "retry_on_error",
    "socket_timeout",
    "socket_connect_timeout",
    "health_check_interval",
    "parser_class",
    "decode_responses",
    "encoding",
    "encoding_errors",
    "event_dispatcher",
    "maint_notifications_config",
    "maint_notifications_pool_handler",
    "connection_pool",  # of a Sentinel, by which its connections find the master
)
#: One connection a thread or task that is asking right now: never a reason to fail.
_MAX_CONNECTIONS = 2**31
#: Error prefixes that servers send, as stable labels; anything else is "response".
_PREFIXES = frozenset(
    "ASK BUSY CLUSTERDOWN CROSSSLOT LOADING MASTERDOWN MISCONF MOVED NOAUTH NOPERM NOREPLICAS NOSCRIPT OOM "
    "READONLY TRYAGAIN UNKILLABLE WRONGPASS WRONGTYPE".split()
)
#: What servers say without a prefix when the user may not run what a script calls: Redis 7.0, and later ones.
_DENIED_IN_SCRIPT = ("The user executing the script can't run this command", "ACL failure in script")
_EXCEPTION_PREFIXES: dict[type[Exception], str] = {
    # redis-py takes the prefix off these; the more special first.
    redis.exceptions.MovedError: "moved",
    redis.exceptions.AskError: "ask",
    redis.exceptions.MasterDownError: "masterdown",
    redis.exceptions.ClusterDownError: "clusterdown",
    redis.exceptions.TryAgainError: "tryagain",
    redis.exceptions.ClusterCrossSlotError: "crossslot",
    redis.exceptions.BusyLoadingError: "loading",
    redis.exceptions.ReadOnlyError: "readonly",
    redis.exceptions.NoScriptError: "noscript",
    redis.exceptions.NoPermissionError: "noperm",
    redis.exceptions.AuthenticationError: "noauth",
    redis.exceptions.OutOfMemoryError: "oom",
}

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


_CONNECTIONS: dict[type, tuple[type, type]] = {}
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
        _CONNECTIONS[_kind] = (_timed(_sync), _async)


class _LoopClient:
    """The client of one event loop, closed and forgotten when the loop shuts its asynchronous generators down."""

    def __init__(self, client: redis.asyncio.Redis, forget: Callable[[], object]) -> None:
        self.client = client
        self._forget = forget
        self.closer = self._close_with_loop()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._forget()
            await self.client.aclose()


class Server:
    """One server and this process's connections to it."""

    def __init__(self, kind: type, kwargs: dict[str, Any]) -> None:
        """``kind`` is redis-py's class of connections, ``kwargs`` what they are made with.

        Raises ``ConfigurationError`` for classes other than redis-py's own TCP, TLS and Unix sockets.
        """
        try:
            sync_class, self._async_class = _CONNECTIONS[kind]
        except KeyError:
            raise ConfigurationError(
                f"connections of class {kind.__name__} are not supported; use redis-py's own"
            ) from None
        self._kwargs = {key: value for key, value in kwargs.items() if key not in _OURS}
        self.host = str(kwargs.get("host", "localhost"))
        #: host:port, or the path of the socket.
        self.name = str(kwargs.get("path") or f"{self.host}:{kwargs.get('port', 6379)}")
        #: Whether it asks for nothing that proves who we are.
        self.trusting = not any(kwargs.get(key) for key in ("password", "credential_provider", "ssl_certfile"))
        self._client = redis.Redis(
            connection_pool=redis.ConnectionPool(
                connection_class=sync_class,
                max_connections=_MAX_CONNECTIONS,
                retry=Retry(NoBackoff(), 0),
                **self._kwargs,
            )
        )
        # The pool makes connections; what is idle waits here, where taking it costs a third of the pool's time.
        self._idle: deque[Any] = deque()
        _servers.add(self)
        try:
            sync_class(**self._kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"no connection to Redis can be made as configured: {error}") from error
        # An asyncio connection belongs to the loop it was made in; each running loop has a client of its own.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClient] = weakref.WeakKeyDictionary()

    @property
    def remote(self) -> bool:
        """Whether it is reached by a network: neither a Unix socket nor this machine's loopback."""
        if "path" in self._kwargs or self.host == "localhost":
            return False
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:  # a name
            return True

    def send(self, command: Command, seconds: float, asking: bool = False) -> Any:
        """Send one command once and return its reply within ``seconds``, connecting included.

        ``asking`` sends ASKING before it (Cluster). Raises ``StoreError``.
        """
        _sending.deadline = time.monotonic() + seconds
        connection = None
        # Whether the connection is at the end of a reply.
        clean = False
        try:
            connection = self._take()
            if asking:
                connection.send_packed_command(connection.pack_command("ASKING"))
                connection.read_response()
            try:
                if isinstance(command, Run):
                    packed = command.packed = command.packed or connection.pack_command(*command)
                    connection.send_packed_command(packed, check_health=False)
                    reply = connection.read_response()
                else:
                    reply = self._ask(connection, command)
            except redis.exceptions.NoScriptError:
                # Nothing ran.
                reply = self._ask(connection, command.text)  # type: ignore[attr-defined]
            clean = True
        except Exception as error:  # whatever redis-py raises, a request must not fail by it
            # An error that the server sent is a whole reply; after any other, the rest of one may follow.
            clean = isinstance(error, redis.exceptions.ResponseError)
            if isinstance(error, redis.exceptions.ReadOnlyError):
                # Demoted with the connections kept: new ones may lead to the new master.
                clean = False
                self.close()
            raise store_error(error, command) from error
        finally:
            if clean and connection is not None:
                self._idle.append(connection)
            elif connection is not None:
                self._drop(connection)
        return reply

    def _ask(self, connection: Any, command: Command) -> Any:
        connection.send_packed_command(connection.pack_command(*command))
        # Reads some replies into what redis-py's users know, a dict for HGETALL say.
        return self._client.parse_response(connection, command[0])  # type: ignore[no-untyped-call]

    def _take(self) -> Any:
        """A connection that is ready to send: idle, or new."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._client.connection_pool.get_connection()
            try:
                if not connection.can_read():
                    return connection
            except (redis.exceptions.RedisError, OSError):
                pass
            self._drop(connection)  # the server has closed it, or said what nobody asked for

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        self._client.connection_pool.release(connection)

    async def asend(self, command: Command, seconds: float, asking: bool = False) -> Any:
        """``send``, awaited."""
        try:
            async with asyncio.timeout(seconds):
                client = await self._loop_client()
                if asking:
                    async with client.pipeline(transaction=False) as both:
                        both.execute_command("ASKING")
                        both.execute_command(*command)
                        return (await both.execute())[-1]
                try:
                    return await client.execute_command(*command)  # type: ignore[no-untyped-call]
                except redis.exceptions.NoScriptError:
                    return await client.execute_command(*command.text)  # type: ignore[attr-defined, no-untyped-call]
        except Exception as error:  # whatever redis-py raises, a request must not fail by it
            if isinstance(error, redis.exceptions.ReadOnlyError):
                await client.connection_pool.disconnect(inuse_connections=False)
            raise store_error(error, command) from error

    async def _loop_client(self) -> redis.asyncio.Redis:
        loop = asyncio.get_running_loop()
        known = self._loops.get(loop)
        if known is None:
            pool = redis.asyncio.ConnectionPool(
                connection_class=self._async_class,
                max_connections=_MAX_CONNECTIONS,
                retry=AsyncRetry(NoBackoff(), 0),
                # What a task waits for ends with its deadline; these are for connections that nobody waits for.
                socket_timeout=None,
                **self._kwargs,
            )
            client = redis.asyncio.Redis.from_pool(pool)
            known = self._loops[loop] = _LoopClient(client, partial(self._loops.pop, loop, None))
            await anext(known.closer)
        return known.client

    def close(self) -> None:
        """Drop every idle connection of this process's threads; the next command connects anew."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                break
            self._drop(connection)

    def retire(self) -> None:
        """Close what is idle for good, in the loops that are running too: nobody sends here any more."""
        self.close()
        for loop, known in list(self._loops.items()):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(known.closer.aclose(), loop)


#: A child's first command connects anew: its parent goes on using the connections that it has.
_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _leave_connections() -> None:
    for server in _servers:
        server._idle.clear()


os.register_at_fork(after_in_child=_leave_connections)


class Send(NamedTuple):
    """One command on its way to one server; what a store's steps yield."""

    server: Server
    command: Command
    #: The part of what is left of the decision's time that this may take.
    share: float = 1.0
    asking: bool = False


class Pause(NamedTuple):
    """A wait of so many seconds before the next step."""

    seconds: float


def store_error(error: Exception, command: Command = ()) -> StoreError:
    """The ``StoreError`` for whatever redis-py raised, its reason told by class or by the server's prefix.

    An error in a script is told by file and line.
    """
    message = f"{type(error).__name__}: {error}"
    if isinstance(command, Run):
        message = command.script.locate(message)
    if isinstance(error, redis.exceptions.TimeoutError | TimeoutError):
        return StoreError("timeout", message)
    for kind, reason in _EXCEPTION_PREFIXES.items():
        if isinstance(error, kind):
            return StoreError(reason, message)
    if str(error).startswith(_DENIED_IN_SCRIPT):
        return StoreError("noperm", message)
    prefix = str(error).partition(" ")[0]
    if prefix in _PREFIXES:
        return StoreError(prefix.lower(), message)
    if isinstance(error, redis.exceptions.ConnectionError | OSError):
        return StoreError("connection", message)
    return StoreError("response", message)
