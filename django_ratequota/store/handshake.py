"""Makes connections: their class, TLS, and a login in one round trip.

redis-py's own handshake takes up to six (HELLO, AUTH, SELECT, CLIENT SETNAME, twice CLIENT SETINFO). Here redis-py
connects without credentials, by RESP2, which needs no HELLO; login, database and name are then sent together.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from collections.abc import Callable, Generator
from functools import cache, cached_property
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from ..exceptions import ConfigurationError
from ..utils.sansio import Twins, acall, adrive, call, drive
from .base import DeadlinePassed
from .connections import PatientConnection, PatientSSLConnection, PatientUnixConnection
from .pool import CONNECT_SECONDS

#: Connection options of the alias or client that are dropped. Retries, for one: a client that retried lost replies
#: counted one request eleven times. ``Server`` reads ``max_connections``; by a Sentinel's ``connection_pool`` its
#: connections find the master.
_IGNORED = frozenset(
    "connection_pool decode_responses encoding encoding_errors event_dispatcher health_check_interval "
    "maint_notifications_config maint_notifications_pool_handler max_connections "
    "oss_cluster_maint_notifications_handler parser_class protocol retry retry_on_error retry_on_timeout "
    "socket_connect_timeout socket_timeout".split()
)
#: Options that the login sends itself.
_LOGIN = ("db", "username", "password", "credential_provider", "client_name")

_TCP = (PatientConnection, redis.asyncio.Connection)
_TLS = (PatientSSLConnection, redis.asyncio.SSLConnection)
_UNIX = (PatientUnixConnection, redis.asyncio.UnixDomainSocketConnection)
#: redis-py's connection classes -> the class for threads, the class for tasks.
_CLASSES: dict[type, tuple[type, type]] = {
    redis.Connection: _TCP,
    redis.asyncio.Connection: _TCP,
    redis.sentinel.SentinelManagedConnection: _TCP,
    redis.asyncio.sentinel.SentinelManagedConnection: _TCP,
    redis.SSLConnection: _TLS,
    redis.asyncio.SSLConnection: _TLS,
    redis.sentinel.SentinelManagedSSLConnection: _TLS,
    redis.asyncio.sentinel.SentinelManagedSSLConnection: _TLS,
    redis.UnixDomainSocketConnection: _UNIX,
    redis.asyncio.UnixDomainSocketConnection: _UNIX,
}
_PING = ("PING",)


class Handshake:
    """Makes connections to one server."""

    def __init__(self, kind: type, kwargs: dict[str, Any]) -> None:
        """``kind`` is redis-py's connection class, ``kwargs`` its options.

        Raises ``ConfigurationError`` for classes other than redis-py's own for TCP, TLS and Unix sockets, and for
        options that these do not take.
        """
        try:
            self._class, self._async_class = _CLASSES[kind]
        except KeyError:
            raise ConfigurationError(
                f"connections of class {kind.__name__} are not supported; use redis-py's own"
            ) from None
        options = {key: value for key, value in kwargs.items() if key not in _IGNORED}
        try:
            model = self._class(**options)
        except (TypeError, ValueError, redis.RedisError) as error:
            raise ConfigurationError(f"no connection to Redis can be made as configured: {error}") from error
        # A connect function of the project's own logs in by itself.
        self._logs_in = not options.get("redis_connect_func")
        login = {key: options.pop(key, None) for key in _LOGIN} if self._logs_in else {}
        self._provider = login.get("credential_provider")
        if login.get("username") or login.get("password"):
            self._provider = redis.UsernamePasswordCredentialProvider(login["username"], login["password"])
        self._database, self._name = login.get("db"), login.get("client_name")
        self._options = {**options, "protocol": 2}
        # Tasks' connections take fewer options; those of TLS are passed as one context.
        taken = _parameters(self._async_class)
        self._async_options = {
            key: value for key, value in self._options.items() if key in taken and not key.startswith("ssl_")
        }
        self._model = model
        if isinstance(model, redis.SSLConnection) and model.cert_reqs == ssl.CERT_NONE:
            self._options["ssl_check_hostname"] = False  # there is no name to check; redis-py 6.0 raises

    def connect(self, seconds: float = CONNECT_SECONDS) -> Any:
        """Return a connection that is logged in; raises ``redis.RedisError``, or an ``OSError``.

        ``seconds`` is for each step: connecting to each of the server's addresses, TLS, login.
        """
        connection = _unnamed(self._class(**self._options, socket_timeout=seconds, socket_connect_timeout=seconds))
        try:
            drive(self._login(connection, _credentials(self._provider)), call)
        except BaseException as error:
            connection.disconnect()
            _raise_refused(error)
            raise
        return connection

    async def aconnect(self) -> Any:
        """``connect``, awaited."""
        connection = _unnamed(self._async_class(**self._async_options, socket_timeout=None))
        try:
            if isinstance(self._model, redis.SSLConnection):
                connection.ssl_context.context = self._context
            # Blocking, in a thread: this package's own threads need that method of the provider anyway.
            credentials = self._provider and await asyncio.to_thread(_credentials, self._provider)
            async with asyncio.timeout(CONNECT_SECONDS):
                await adrive(self._login(connection, credentials), acall)
        except BaseException as error:
            await connection.disconnect(nowait=True)
            _raise_refused(error)
            raise
        return connection

    def _login(self, connection: Any, credentials: tuple[str, ...] | None) -> Generator[Twins, Any, None]:
        commands = self._commands(credentials)
        yield _step(connection.connect)
        yield _step(connection.send_packed_command, connection.pack_commands(commands))
        for command in commands:
            try:
                yield _step(connection.read_response)
            except redis.exceptions.NoPermissionError:
                if command is not _PING:  # an ACL may refuse it, and that is a reply too
                    raise

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return _tls_context(self._model)

    def _commands(self, credentials: tuple[str, ...] | None) -> list[tuple[Any, ...]]:
        """Return the commands of the login; never none, so that the server has replied once."""
        if not self._logs_in:
            return [_PING]
        commands: list[tuple[Any, ...]] = []
        if credentials:
            commands.append(("AUTH", *credentials))
        if self._database:
            commands.append(("SELECT", self._database))
        if self._name:
            commands.append(("CLIENT", "SETNAME", self._name))
        return commands or [_PING]


def _step(method: Callable[..., Any], *args: Any) -> Twins:
    """Return a step that has the same name in both kinds of connections."""
    return Twins(method, method, args)


def _tls_context(options: Any) -> ssl.SSLContext:
    """Return the TLS options of a threads' connection as one context, which tasks' connections share.

    Raises ``ConfigurationError`` for options that only threads' connections support.
    """
    if options.ssl_validate_ocsp or options.ssl_validate_ocsp_stapled:
        raise ConfigurationError("redis-py validates OCSP for threads only; for asyncio, leave ssl_validate_ocsp out")
    context = ssl.create_default_context()
    context.check_hostname = options.check_hostname and options.cert_reqs != ssl.CERT_NONE
    context.verify_mode = options.cert_reqs
    for flag in getattr(options, "ssl_include_verify_flags", None) or ():
        context.verify_flags |= flag
    for flag in getattr(options, "ssl_exclude_verify_flags", None) or ():
        context.verify_flags &= ~flag
    if options.certfile or options.keyfile:
        context.load_cert_chain(options.certfile, options.keyfile, options.certificate_password)
    if options.ca_certs or options.ca_path or options.ca_data:
        context.load_verify_locations(options.ca_certs, options.ca_path, options.ca_data)
    if options.ssl_min_version is not None:
        context.minimum_version = options.ssl_min_version
    if options.ssl_ciphers:
        context.set_ciphers(options.ssl_ciphers)
    return context


def _unnamed(connection: Any) -> Any:
    """Return the connection without its library's name, which redis-py sends in two more round trips."""
    connection.lib_name = connection.lib_version = connection.driver_info = None
    return connection


def _raise_refused(error: BaseException) -> None:
    """Raise ``ConnectionError`` for an error reply without a prefix, and for a connect function's own error.

    Else it would count as a reply to one command, while it concerns every command. All timeouts are this package's
    own: no signal is handled in the thread that connects.
    """
    if isinstance(error, redis.TimeoutError | TimeoutError):
        raise DeadlinePassed(str(error) or "no connection in time") from error
    own = isinstance(error, Exception) and not isinstance(error, redis.RedisError | OSError)
    if own or type(error) is redis.ResponseError:
        raise redis.ConnectionError(str(error)) from error


def _credentials(provider: Any) -> tuple[str, ...] | None:
    """Return the provider's credentials; any error that it raises becomes a ``ConnectionError``."""
    try:
        return provider and provider.get_credentials()  # type: ignore[no-any-return]
    except Exception as error:
        raise redis.ConnectionError(f"no credentials: {error}") from error


@cache
def option_names() -> frozenset[str]:
    """Return the names of the options of all connection classes."""
    return frozenset(name for kind in _CLASSES for name in _parameters(kind))


def _parameters(cls: type) -> set[str]:
    """Return the names of the options of a connection class and its bases."""
    return {name for base in cls.__mro__ for name in inspect.signature(base).parameters}
