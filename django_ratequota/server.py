"""One Redis server: connections of our own to it, without retries and within a time, sync and async.

Whatever goes wrong is one ``StoreError``, its reason told by class or by the prefix that the server sent.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple

import redis

from .connections import KINDS, Connections, LoopConnections
from .exceptions import ConfigurationError, StoreError
from .scripts import Command, Run

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
#: Error prefixes that servers send, as stable labels; anything else is "response".
_PREFIXES = frozenset(
    "ASK BUSY CLUSTERDOWN CROSSSLOT LOADING MASTERDOWN MISCONF MOVED NOAUTH NOPERM NOREPLICAS NOSCRIPT OOM "
    "READONLY TRYAGAIN UNKILLABLE WRONGPASS WRONGTYPE".split()
)
#: What servers say without a prefix when the user may not run what a script calls: Redis 7.0, and later ones.
_DENIED_IN_SCRIPT = ("The user executing the script can't run this command", "ACL failure in script")
#: What a server may say to who is not logged in: it reads no command of more than ten words.
_UNKNOWN = "Protocol error: unauthenticated"
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


class Server:
    """One server and this process's connections to it."""

    def __init__(self, kind: type, kwargs: dict[str, Any]) -> None:
        """``kind`` is redis-py's class of connections, ``kwargs`` what they are made with.

        Raises ``ConfigurationError`` for classes other than redis-py's own TCP, TLS and Unix sockets.
        """
        try:
            sync_class, self._async_class = KINDS[kind]
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
        self._connections = Connections(sync_class, self._kwargs)
        try:
            sync_class(**self._kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"no connection to Redis can be made as configured: {error}") from error
        # An asyncio connection belongs to the loop it was made in; each running loop has its own.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnections] = (
            weakref.WeakKeyDictionary()
        )

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
        try:
            return self._connections.send(command, seconds, asking)
        except Exception as error:  # whatever redis-py raises, a request must not fail by it
            if isinstance(error, redis.exceptions.ReadOnlyError):
                # Demoted with the connections kept: new ones may lead to the new master.
                self.close()
            raise store_error(error, command) from error

    async def asend(self, command: Command, seconds: float, asking: bool = False) -> Any:
        """``send``, awaited."""
        try:
            async with asyncio.timeout(seconds):
                connections = await self._of_this_loop()
                return await connections.send(command, asking)
        except Exception as error:  # whatever redis-py raises, a request must not fail by it
            if isinstance(error, redis.exceptions.ReadOnlyError):
                await connections.close()
            raise store_error(error, command) from error

    async def _of_this_loop(self) -> LoopConnections:
        loop = asyncio.get_running_loop()
        known = self._loops.get(loop)
        if known is None:
            forget = partial(self._loops.pop, loop, None)
            known = self._loops[loop] = LoopConnections(self._async_class, self._kwargs, forget)
            await anext(known.closer)
        return known

    def close(self) -> None:
        """Drop every idle connection of this process's threads; the next command connects anew."""
        self._connections.close()

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
    if str(error).startswith(_UNKNOWN):
        return StoreError("noauth", message)
    prefix = str(error).partition(" ")[0]
    if prefix in _PREFIXES:
        return StoreError(prefix.lower(), message)
    if isinstance(error, redis.exceptions.ConnectionError | OSError):
        return StoreError("connection", message)
    return StoreError("response", message)
