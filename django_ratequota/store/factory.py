"""Makes a store from a URL, a client or a pool: which server, which credentials, which kind of deployment."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster

from ..exceptions import ConfigurationError
from .base import Store
from .cluster import ClusterStore
from .handshake import Handshake, option_names
from .pool import MAX_CONNECTIONS
from .sentinel import Sentinels
from .server import Server, ServerStore

Client = redis.Redis | redis.asyncio.Redis | redis.cluster.RedisCluster | redis.asyncio.cluster.RedisCluster

_SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://", "rediss+sentinel://")
_SENTINEL_URL = "redis+sentinel://[user:password@]host:port[,host:port ...]/service[/db]"
#: What errors say of a URL that cannot be read, instead of quoting it: any part may belong to the password.
_UNREADABLE = (
    "its host, port or number of the database cannot be read; "
    "in a password write / as %2F, # as %23, ? as %3F, @ as %40 and % as %25"
)
#: Options after the ? of a URL besides those of connections: those of pools, and django-redis's for Sentinel.
_OPTIONS = frozenset({"max_connections", "timeout", "is_master"})


def store_from_client(client: Client, timeout: float) -> Store:
    """Return the store that redis-py's ``client`` reaches; only its server and credentials are used."""
    if isinstance(client, redis.cluster.RedisCluster | redis.asyncio.cluster.RedisCluster):
        return _cluster_from_client(client, timeout)
    return store_from_pool(client.connection_pool, timeout, MAX_CONNECTIONS)


def store_from_url(url: str, timeout: float, cluster: bool = False, max_connections: int = MAX_CONNECTIONS) -> Store:
    """Return the store at a ``redis://``, ``rediss://`` or ``unix://`` URL, or the master that its sentinels name.

    ``valkey`` in the scheme means ``redis``. ``cluster`` reads it as any node of a Redis Cluster;
    ``max_connections`` bounds the connections to each server.
    Raises ``ConfigurationError``.
    """
    url = re.sub("^valkey", "redis", url)  # as Valkey's clients and its providers write it
    if not url.startswith(_SCHEMES):
        raise ConfigurationError(
            f"REDIS_URL cannot be used: it must begin with {', '.join(_SCHEMES)}; or be memory://, written exactly so"
        )
    try:
        check_readable(url)
        if url.partition("://")[0] in ("redis+sentinel", "rediss+sentinel"):
            if cluster:
                raise ConfigurationError("Sentinel does not watch a Cluster; write the URL of any of its nodes")
            return _sentinels_from_url(url, timeout, max_connections)
        pool = redis.ConnectionPool.from_url(url)
    except ValueError as error:
        raise ConfigurationError(f"REDIS_URL cannot be used: {safe_message(error)}") from None
    if not cluster:
        return store_from_pool(pool, timeout, max_connections)
    kwargs = _pool_options(pool, max_connections)
    if kwargs.get("path") or kwargs.get("db"):
        raise ConfigurationError("a Cluster has database 0 only, and no Unix socket; write redis://host:port")
    address = (kwargs.get("host", "localhost"), int(kwargs.get("port", 6379)))
    return ClusterStore([address], pool.connection_class, kwargs, timeout)


def check_readable(url: str) -> None:
    """Raise ``ValueError`` for a URL of which redis-py would read only a part, and misread that.

    It read ``redis://user:12#34@host`` as port 12 of a host ``user``, and ``redis://host/abc`` as database 0.
    """
    if "://" not in url:
        raise ValueError("Redis URL must specify one of the following schemes (redis://, rediss://, unix://)")
    parts = urlsplit(url)
    options = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    unknown = {name for name in options - _OPTIONS - option_names() if not name.startswith("sentinel_")}
    readable = not parts.fragment and not unknown
    if parts.scheme in ("redis", "rediss"):
        readable = readable and not parts.path.strip("/").strip("0123456789")
    elif parts.scheme == "unix":
        readable = readable and (not parts.netloc or (parts.netloc.endswith("@") and "@" not in parts.path))
    elif parts.scheme.endswith("+sentinel"):
        readable = readable and "@" not in parts.path
    if not readable:
        raise ValueError(_UNREADABLE)


def safe_message(error: Exception) -> str:
    """Return the error's text, or ``_UNREADABLE`` where it may quote a part of the URL."""
    text = str(error)
    ours = text.startswith(("Redis URL must", f"write {_SENTINEL_URL}")) or text == _UNREADABLE
    return text if ours else _UNREADABLE


def _pool_options(pool: Any, max_connections: int) -> dict[str, Any]:
    """Return the pool's connection options; its own ``max_connections`` counts where that is smaller."""
    return {**pool.connection_kwargs, "max_connections": min(max_connections, pool.max_connections)}


def store_from_pool(pool: Any, timeout: float, max_connections: int) -> Store:
    kwargs = _pool_options(pool, max_connections)
    manager = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return ServerStore(Server(pool.connection_class, kwargs), timeout)
    sentinels = [
        Handshake(sentinel.connection_pool.connection_class, sentinel.connection_pool.connection_kwargs)
        for sentinel in manager.sentinels
    ]
    return ServerStore(Server(pool.connection_class, kwargs, Sentinels(sentinels, pool.service_name)), timeout)


def _sentinels_from_url(url: str, timeout: float, max_connections: int) -> Store:
    scheme, _, rest = url.partition("://")
    parts = urlsplit(f"//{rest}")
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, *more = parts.path.strip("/").split("/")
    options = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    known = {"sentinel_username", "sentinel_password"}
    if not service or not hosts or len(more) > 1 or not set(options) <= known:
        raise ValueError(f"write {_SENTINEL_URL}, and at most {' and '.join(sorted(known))} after a ?")
    username, _, password = credentials.partition(":")
    login = {"username": unquote(username) or None, "password": unquote(password) or None}
    watchers = {key.removeprefix("sentinel_"): value for key, value in options.items()}
    kind = redis.SSLConnection if scheme.startswith("rediss") else redis.Connection
    sentinels = [Handshake(kind, {**_address(host), **watchers}) for host in hosts.split(",")]
    kwargs = {**login, "max_connections": max_connections, "db": int(more[0]) if more else 0}
    return ServerStore(Server(kind, kwargs, Sentinels(sentinels, unquote(service))), timeout)


def _address(text: str) -> dict[str, Any]:
    parts = urlsplit(f"//{text}")
    return {"host": parts.hostname or "localhost", "port": parts.port or 26379}


def _cluster_from_client(client: Any, timeout: float) -> Store:
    nodes = client.nodes_manager.startup_nodes.values()
    kwargs = getattr(client, "connection_kwargs", None) or client.nodes_manager.connection_kwargs
    secure = kwargs.get("ssl") or kwargs.get("connection_class") in (redis.SSLConnection, redis.asyncio.SSLConnection)
    kind = redis.SSLConnection if secure else redis.Connection
    max_connections = min(MAX_CONNECTIONS, kwargs.get("max_connections") or MAX_CONNECTIONS)
    kwargs = {key: value for key, value in kwargs.items() if key in _LOGIN or key.startswith("ssl_")}
    kwargs["max_connections"] = max_connections
    addresses = [(node.host, int(node.port)) for node in nodes]
    return ClusterStore(addresses, kind, kwargs, timeout, remap=client.nodes_manager.address_remap)


_LOGIN = ("username", "password", "credential_provider", "protocol", "client_name")
