"""One Redis server, or the master of a service, on our own connections: no retries, a deadline, sync and async."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis

from ..exceptions import StoreError
from .base import Send, ServerActivity, Steps, Store, is_alarm
from .breaker import Breaker
from .commands import Command
from .handshake import Handshake
from .pool import MAX_CONNECTIONS, Pool
from .sentinel import Sentinels

#: Prefixes of error replies that become reasons, in lower case; other error replies have the reason "response".
_PREFIXES = frozenset(
    "ASK BUSY CLUSTERDOWN CROSSSLOT LOADING MASTERDOWN MISCONF MOVED NOAUTH NOPERM NOREPLICAS NOSCRIPT OOM "
    "READONLY TRYAGAIN UNKILLABLE WRONGPASS WRONGTYPE".split()
)
#: Error replies without a prefix when the user may not run a command that a script calls: Redis 7.0, then later ones.
_DENIED_IN_SCRIPT = ("The user executing the script can't run this command", "ACL failure in script")
#: The error reply to a client that is not logged in, when its command has more than ten arguments.
_UNAUTHENTICATED = "Protocol error: unauthenticated"
#: redis-py removes the prefix from these errors. Subclasses come before their base classes.
_REASONS: dict[type[Exception], str] = {
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

    #: What the client raises, and what a bug of it raises. Anything else, such as the time limit of a task, is raised
    #: by a signal's handler or by the event loop while a command waits, and is not caught.
    errors = (
        *(redis.RedisError, redis.exceptions.RedisClusterException, OSError),
        *(TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError),
    )

    def __init__(self, kind: type, kwargs: dict[str, Any], sentinels: Sentinels | None = None) -> None:
        """``kind`` is redis-py's connection class, ``kwargs`` its options; ``sentinels`` name the server's address.

        ``max_connections`` among the options bounds the connections of this process.
        Raises ``ConfigurationError`` for classes other than redis-py's own for TCP, TLS and Unix sockets.
        """
        self.host = str(kwargs.get("host", "localhost"))
        #: host:port, the path of the socket, or the service.
        self.name = str(kwargs.get("path") or f"{self.host}:{kwargs.get('port', 6379)}")
        self.activity, handshake = ServerActivity(), Handshake(kind, kwargs)
        connect: Callable[[float], Any] = handshake.connect
        if sentinels:
            self.name = f"{sentinels.service} (Sentinel)"
            connect = partial(sentinels.connect, handshake, self.activity)
        #: Whether it is reached through a network, without a password or a certificate.
        self.exposed = (sentinels or handshake).remote and not any(
            kwargs.get(key) for key in ("password", "credential_provider", "ssl_certfile")
        )
        self.breaker = Breaker(self.name)
        self.limit = int(kwargs.get("max_connections", MAX_CONNECTIONS))
        self.pool = Pool(connect, self.activity, self.limit)

    def failure(self, error: BaseException, idle_since: float) -> StoreError:
        """Return the ``StoreError`` for one of ``errors``, raised on a connection that was idle since then.

        Raises the ``TimeoutError`` of a signal's handler as it is; redis-py may have made one of its own of it.
        """
        raised = error.__context__ if isinstance(error, redis.exceptions.TimeoutError) else error
        if raised is not None and is_alarm(raised):
            raise raised
        if not isinstance(error, redis.exceptions.ResponseError):
            self.activity.distrust(idle_since)
        if isinstance(error, redis.exceptions.ReadOnlyError):
            # A demoted master keeps its connections open; new ones may lead to the new master.
            self.close()
        return StoreError(_reason(error), f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Reuse no connection that is open now; idle ones are closed at once."""
        self.activity.distrust(time.monotonic())
        self.pool.close()


class ServerStore(Store):
    """One Redis server, or the master of one service."""

    server: Server

    def __init__(self, server: Server, timeout: float) -> None:
        """``timeout`` (seconds) bounds all commands of a decision."""
        self.timeout, self.server = timeout, server
        self.breaker = server.breaker
        self.exposed = server.exposed

    def survey_steps(self, command: Command, only: str = "") -> Steps:
        """Ask the server."""
        return {self.server.name: (yield Send(self.server, command))}

    def close(self) -> None:
        """Close all idle connections of this process; the next command reconnects."""
        self.server.close()


def _reason(error: BaseException) -> str:
    """Return the reason of the ``StoreError`` for an error: by its class, or by the server's prefix.

    What is no reply of the server is "connection", a bug of the client too: the connection is dropped.
    """
    text = str(error)
    if isinstance(error, redis.exceptions.TimeoutError | TimeoutError):
        return "timeout"
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    if text.startswith(_DENIED_IN_SCRIPT):
        return "noperm"
    if text.startswith(_UNAUTHENTICATED):
        return "noauth"
    prefix = text.partition(" ")[0]
    if prefix in _PREFIXES:
        return prefix.lower()
    return "response" if isinstance(error, redis.exceptions.ResponseError) else "connection"
