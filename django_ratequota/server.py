"""One Redis server: connections of our own to it, without retries and within a time, sync and async.

Whatever goes wrong is one ``StoreError``, its reason told by class or by the prefix that the server sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
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
        self._polling = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def settimeout(self, seconds: float | None) -> None:
        # redis-py asks with 0 whether anything has come; any other wait is the deadline's to decide.
        self._polling = seconds == 0
        self._sock.settimeout(seconds)

    def _wait(self) -> None:
        if not self._polling:
            self._sock.settimeout(_left())

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
        def _connect(self) -> Any:
            self.socket_connect_timeout = self.socket_timeout = _left()
            return _TimedSocket(super()._connect())

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
        try:
            if asking:
                with self._client.pipeline(transaction=False) as both:
                    both.execute_command("ASKING")  # type: ignore[no-untyped-call]
                    both.execute_command(*command)  # type: ignore[no-untyped-call]
                    return both.execute()[-1]
            return self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever redis-py raises, a request must not fail by it
            if isinstance(error, redis.exceptions.ReadOnlyError):
                # Demoted with the connections kept: new ones may lead to the new master.
                self.close()
            raise store_error(error) from error

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
                return await client.execute_command(*command)  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever redis-py raises, a request must not fail by it
            if isinstance(error, redis.exceptions.ReadOnlyError):
                await client.connection_pool.disconnect(inuse_connections=False)
            raise store_error(error) from error

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
        self._client.connection_pool.disconnect(inuse_connections=False)

    def retire(self) -> None:
        """Close what is idle for good, in the loops that are running too: nobody sends here any more."""
        self.close()
        for loop, known in list(self._loops.items()):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(known.closer.aclose(), loop)


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


def store_error(error: Exception) -> StoreError:
    """The ``StoreError`` for whatever redis-py raised, its reason told by class or by the server's prefix."""
    message = f"{type(error).__name__}: {error}"
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
