"""Makes connections as redis-py does, of which it takes the login, TLS and the choice of the database."""

from __future__ import annotations

import inspect
import ssl
from contextlib import suppress
from functools import cache
from ipaddress import ip_address
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from ..exceptions import ConfigurationError
from .base import DeadlinePassed
from .link import LinkedConnection, LinkedSSLConnection, LinkedUnixConnection

#: Connection options of the alias or client that are dropped. Retries, for one: a client that retried lost replies
#: counted one request eleven times. ``Server`` reads ``max_connections``; by a Sentinel's ``connection_pool`` its
#: connections find the master.
_IGNORED = frozenset(
    "connection_pool decode_responses encoding encoding_errors event_dispatcher health_check_interval "
    "maint_notifications_config maint_notifications_pool_handler max_connections "
    "oss_cluster_maint_notifications_handler parser_class protocol retry retry_on_error retry_on_timeout "
    "socket_connect_timeout socket_timeout".split()
)
#: Options by which redis-py sends something to a server when it connects.
_LOGIN = ("db", "username", "password", "credential_provider", "client_name")
#: redis-py's connection classes -> ours.
_CLASSES: dict[type, Any] = {
    redis.Connection: LinkedConnection,
    redis.asyncio.Connection: LinkedConnection,
    redis.sentinel.SentinelManagedConnection: LinkedConnection,
    redis.asyncio.sentinel.SentinelManagedConnection: LinkedConnection,
    redis.SSLConnection: LinkedSSLConnection,
    redis.asyncio.SSLConnection: LinkedSSLConnection,
    redis.sentinel.SentinelManagedSSLConnection: LinkedSSLConnection,
    redis.asyncio.sentinel.SentinelManagedSSLConnection: LinkedSSLConnection,
    redis.UnixDomainSocketConnection: LinkedUnixConnection,
    redis.asyncio.UnixDomainSocketConnection: LinkedUnixConnection,
}


class Handshake:
    """Makes connections to one server."""

    def __init__(self, kind: type, kwargs: dict[str, Any]) -> None:
        """``kind`` is redis-py's connection class, ``kwargs`` its options.

        Raises ``ConfigurationError`` for classes other than redis-py's own for TCP, TLS and Unix sockets, and for
        options that these do not take.
        """
        if kind not in _CLASSES:
            raise ConfigurationError(f"connections of class {kind.__name__} are not supported; use redis-py's own")
        self._class = _CLASSES[kind]
        # By RESP2, because RESP3 takes one more round trip.
        options = {**{key: value for key, value in kwargs.items() if key not in _IGNORED}, "protocol": 2}
        try:
            model = self._class(**options)
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(f"no connection to Redis can be made as configured: {error}") from error
        if isinstance(model, redis.SSLConnection) and model.cert_reqs == ssl.CERT_NONE:
            options["ssl_check_hostname"] = False  # there is no name to check; redis-py 6.0 raises
        self._options = options
        #: Whether redis-py may have connected before the server has replied once.
        self._unheard = bool(options.get("redis_connect_func")) or not any(options.get(name) for name in _LOGIN)

    @property
    def remote(self) -> bool:
        """Whether the server is reached through a network: neither by a Unix socket nor by the loopback."""
        host = self._options.get("host", "localhost")
        if "path" in self._options or host == "localhost":
            return False
        try:
            return not ip_address(host).is_loopback
        except ValueError:  # a name
            return True

    def connect(self, seconds: float, *address: Any) -> Any:
        """Return a connection that is logged in; raises ``redis.RedisError`` or ``OSError``.

        ``seconds`` is for each step: connecting to each of the server's addresses, TLS, each command of the login.
        ``address`` is a host and its port; without it, those of the options.
        """
        connection = self._log_in(seconds, **dict(zip(("host", "port"), address, strict=False)))
        connection.link.setblocking(False)
        return connection

    def ask(self, seconds: float, *command: Any) -> Any:
        """Send one command on a new connection and return the reply; raises as ``connect`` does."""
        connection = self._log_in(seconds)
        try:
            connection.send_command(*command)
            return connection.read_response()
        finally:
            connection.disconnect()

    def _log_in(self, seconds: float, **address: Any) -> Any:
        options = {**self._options, **address, "socket_timeout": seconds, "socket_connect_timeout": seconds}
        connection = self._class(**options)
        connection.lib_name = connection.lib_version = connection.driver_info = None  # two more round trips
        try:
            connection.connect()
            if self._unheard:
                connection.send_command("PING")
                with suppress(redis.exceptions.NoPermissionError):  # is a reply too
                    connection.read_response()
        except BaseException as error:
            connection.disconnect()
            _raise_refused(error)
            raise
        return connection


def _raise_refused(error: BaseException) -> None:
    """Raise ``ConnectionError`` for an error reply without a prefix, and for an error of the project's own functions.

    Else it would count as a reply to one command, while it concerns every command. These functions are a credential
    provider's and a connect function. All timeouts are this package's own: no signal is handled in the thread that
    connects.
    """
    if isinstance(error, redis.TimeoutError | TimeoutError):
        raise DeadlinePassed(str(error) or "no connection in time") from error
    own = isinstance(error, Exception) and not isinstance(error, redis.RedisError | OSError)
    if own or type(error) is redis.ResponseError:
        raise redis.ConnectionError(str(error)) from error


@cache
def option_names() -> frozenset[str]:
    """Return the names of the options of all connection classes."""
    kinds = {base for kind in _CLASSES.values() for base in kind.__mro__}
    return frozenset(name for kind in kinds for name in inspect.signature(kind).parameters)
