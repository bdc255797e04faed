"""Redis access: connections of our own, without retries and with our own timeout, sync and async.

Logic that talks to Redis yields command tuples (see ``twin``); ``Store.execute`` and ``Store.aexecute`` carry
them out and turn whatever goes wrong into one ``StoreError``.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from .exceptions import ConfigurationError, StoreError
from .scripts import Script

if TYPE_CHECKING:
    from .conf import Settings

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
)
_CONNECTIONS: dict[type, tuple[type, type]] = {}
for _sync, _async in (
    (redis.Connection, redis.asyncio.Connection),
    (redis.SSLConnection, redis.asyncio.SSLConnection),
    (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection),
):
    _CONNECTIONS[_sync] = _CONNECTIONS[_async] = (_sync, _async)
#: One connection a thread or task that is asking right now: never a reason to fail.
_MAX_CONNECTIONS = 2**31
#: Error prefixes that servers send, as stable labels; anything else is "response".
_PREFIXES = frozenset(
    "BUSY CLUSTERDOWN CROSSSLOT LOADING MASTERDOWN MISCONF NOAUTH NOPERM NOREPLICAS NOSCRIPT OOM READONLY "
    "TRYAGAIN UNKILLABLE WRONGPASS WRONGTYPE".split()
)
_EXCEPTION_PREFIXES: dict[type[Exception], str] = {
    # redis-py takes the prefix off these; the more special first.
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


class Store:
    """One Redis server, reached through a connection pool of our own."""

    def __init__(self, pool: redis.ConnectionPool | redis.asyncio.ConnectionPool, timeout: float) -> None:
        """``pool`` says where the server is and how to log in; it is copied, never used. ``timeout`` in seconds.

        Raises ``ConfigurationError`` for connection classes other than redis-py's own TCP, TLS and Unix sockets.
        """
        try:
            sync_class, self._async_class = _CONNECTIONS[pool.connection_class]
        except KeyError:
            name = pool.connection_class.__name__
            raise ConfigurationError(f"connections of class {name} are not supported; use redis-py's own") from None
        self.timeout = timeout
        self._kwargs = {key: value for key, value in pool.connection_kwargs.items() if key not in _OURS}
        self._kwargs |= {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        self._client = redis.Redis(
            connection_pool=redis.ConnectionPool(
                connection_class=sync_class,
                max_connections=_MAX_CONNECTIONS,
                retry=Retry(NoBackoff(), 0),
                **self._kwargs,
            )
        )
        # An asyncio connection belongs to the loop it was made in; each running loop has a client of its own.
        self._async_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClient] = (
            weakref.WeakKeyDictionary()
        )

    @classmethod
    def from_url(cls, url: str, timeout: float) -> Store:
        """The server at a ``redis://``, ``rediss://`` or ``unix://`` URL; raises ``ConfigurationError``."""
        try:
            return cls(redis.ConnectionPool.from_url(url), timeout)
        except ValueError as error:
            raise ConfigurationError(f"REDIS_URL cannot be used: {error}") from error

    @classmethod
    def from_settings(cls, settings: Settings) -> Store:
        """The server of RATEQUOTA: REDIS_URL, else the CACHES alias CACHE; raises ``ConfigurationError``."""
        if settings.redis_url:
            return cls.from_url(settings.redis_url, settings.timeout)
        return cls(_alias_pool(settings.cache), settings.timeout)

    def execute(self, command: Command) -> Any:
        """Send one command and return its reply; raises ``StoreError``."""
        try:
            return self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise store_error(error) from error

    async def aexecute(self, command: Command) -> Any:
        """``execute``, awaited."""
        try:
            async with asyncio.timeout(self.timeout):
                client = await self._async_client()
                return await client.execute_command(*command)  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            raise store_error(error) from error

    async def _async_client(self) -> redis.asyncio.Redis:
        loop = asyncio.get_running_loop()
        known = self._async_clients.get(loop)
        if known is None:
            pool = redis.asyncio.ConnectionPool(
                connection_class=self._async_class,
                max_connections=_MAX_CONNECTIONS,
                retry=AsyncRetry(NoBackoff(), 0),
                **self._kwargs,
            )
            client = redis.asyncio.Redis.from_pool(pool)
            known = self._async_clients[loop] = _LoopClient(client, partial(self._async_clients.pop, loop, None))
            await anext(known.closer)
        return known.client

    def close(self) -> None:
        """Drop every idle connection of this process; the next command connects anew."""
        self._client.connection_pool.disconnect()


def run_script(script: Script, keys: Sequence[str], args: Sequence[object]) -> Generator[Command, Any, Any]:
    """Steps that run a script by its SHA1, loading it where the server does not know it (then nothing ran)."""
    evalsha = ("EVALSHA", script.sha, len(keys), *keys, *args)
    try:
        try:
            return (yield evalsha)
        except StoreError as error:
            if error.reason != "noscript":
                raise
        yield ("SCRIPT", "LOAD", script.source)
        return (yield evalsha)
    except StoreError as error:
        raise StoreError(error.reason, script.locate(str(error))) from error


def store_error(error: Exception) -> StoreError:
    """The ``StoreError`` for whatever redis-py raised, its reason told by class or by the server's prefix."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, redis.exceptions.TimeoutError | TimeoutError):
        return StoreError("timeout", message)
    for kind, reason in _EXCEPTION_PREFIXES.items():
        if isinstance(error, kind):
            return StoreError(reason, message)
    prefix = str(error).partition(" ")[0]
    if prefix in _PREFIXES:
        return StoreError(prefix.lower(), message)
    if isinstance(error, redis.exceptions.ConnectionError | OSError):
        return StoreError("connection", message)
    return StoreError("response", message)


def _alias_pool(alias: str) -> redis.ConnectionPool:
    from django.core.cache import caches
    from django_redis.cache import RedisCache

    try:
        cache = caches[alias]
    except Exception as error:  # whatever its backend raises, its settings are to blame
        raise ConfigurationError(f"CACHES has no alias {alias!r} that works: {error}") from error
    if not isinstance(cache, RedisCache):
        raise ConfigurationError(
            f"CACHES[{alias!r}] is {type(cache).__name__}, not django_redis.cache.RedisCache; "
            "set RATEQUOTA['CACHE'] to a django-redis alias, or RATEQUOTA['REDIS_URL']"
        )
    try:
        pool: redis.ConnectionPool = cache.client.get_client(write=True).connection_pool
    except Exception as error:
        raise ConfigurationError(f"CACHES[{alias!r}] cannot be used: {error}") from error
    return pool
