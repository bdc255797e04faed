"""From settings, a URL or a client to a store: which server, which credentials, which kind of deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster

from .attempts import MAX_CONNECTIONS
from .cluster import ClusterStore
from .exceptions import ConfigurationError
from .sentinel import SentinelStore
from .server import Server
from .store import FAILURES, Store

if TYPE_CHECKING:
    from .conf import Settings

Client = redis.Redis | redis.asyncio.Redis | redis.cluster.RedisCluster | redis.asyncio.cluster.RedisCluster

_SENTINEL_URL = "redis+sentinel://[user:password@]host:port[,host:port ...]/service[/db]"


def store_of(client: Client, timeout: float) -> Store:
    """The store that a client of redis-py reaches; its server and credentials are copied, it is never used."""
    if isinstance(client, redis.cluster.RedisCluster | redis.asyncio.cluster.RedisCluster):
        return _cluster_of(client, timeout)
    return _store_of_pool(client.connection_pool, timeout, FAILURES, MAX_CONNECTIONS)


def store_of_url(
    url: str, timeout: float, failures: int = FAILURES, cluster: bool = False, most: int = MAX_CONNECTIONS
) -> Store:
    """The server at a ``redis://``, ``rediss://`` or ``unix://`` URL, or what its sentinels name.

    ``cluster`` takes it as any node of a Redis Cluster; ``most`` bounds the connections to each server. Raises
    ``ConfigurationError``.
    """
    try:
        if url.partition("://")[0] in ("redis+sentinel", "rediss+sentinel"):
            if cluster:
                raise ConfigurationError("a Cluster is not watched by Sentinel; write the URL of any of its nodes")
            return _sentinels_at(url, timeout, failures, most)
        pool = redis.ConnectionPool.from_url(url)
    except ValueError as error:
        # Other errors quote what they cannot read, which may be the beginning of a password.
        text = "its host, port or database cannot be read; in a password, write / as %2F"
        if str(error).startswith(("Redis URL must", "write ")):
            text = str(error)
        raise ConfigurationError(f"REDIS_URL cannot be used: {text}") from None
    if not cluster:
        return _store_of_pool(pool, timeout, failures, most)
    kwargs = _kwargs_of(pool, most)
    if kwargs.get("path") or kwargs.get("db"):
        raise ConfigurationError("a Cluster has database 0 only, and no Unix socket; write redis://host:port")
    address = (kwargs.get("host", "localhost"), int(kwargs.get("port", 6379)))
    return ClusterStore([address], pool.connection_class, kwargs, timeout, failures)


def store_of_settings(settings: Settings) -> Store:
    """The store of RATEQUOTA: REDIS_URL, else the CACHES alias CACHE; raises ``ConfigurationError``."""
    timeout, failures = settings.timeout, settings.breaker_failures
    if settings.redis_url:
        return store_of_url(settings.redis_url, timeout, failures, settings.cluster, settings.max_connections)
    if settings.cluster:
        raise ConfigurationError(
            "django-redis knows no Cluster; with CLUSTER set RATEQUOTA['REDIS_URL'] to the URL of any node"
        )
    return _store_of_pool(_alias_pool(settings.cache), timeout, failures, settings.max_connections)


def _kwargs_of(pool: Any, most: int) -> dict[str, Any]:
    """What the pool makes connections with; a pool that holds fewer than ``most`` says how many."""
    return {**pool.connection_kwargs, "max_connections": min(most, pool.max_connections)}


def _store_of_pool(pool: Any, timeout: float, failures: int, most: int) -> Store:
    kwargs = _kwargs_of(pool, most)
    manager = getattr(pool, "sentinel_manager", None)
    if manager is None:
        return Store(Server(pool.connection_class, kwargs), timeout, failures)
    sentinels = [
        Server(sentinel.connection_pool.connection_class, _kwargs_of(sentinel.connection_pool, most))
        for sentinel in manager.sentinels
    ]
    return SentinelStore(sentinels, pool.service_name, pool.connection_class, kwargs, timeout, failures)


def _sentinels_at(url: str, timeout: float, failures: int, most: int) -> Store:
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
    bound = {"max_connections": most}
    sentinels = [Server(kind, {**_address(host), **watchers, **bound}) for host in hosts.split(",")]
    kwargs = {**login, **bound, "db": int(more[0]) if more else 0}
    return SentinelStore(sentinels, unquote(service), kind, kwargs, timeout, failures)


def _address(text: str) -> dict[str, Any]:
    parts = urlsplit(f"//{text}")
    return {"host": parts.hostname or "localhost", "port": parts.port or 26379}


def _cluster_of(client: Any, timeout: float) -> Store:
    nodes = client.nodes_manager.startup_nodes.values()
    kwargs = getattr(client, "connection_kwargs", None) or client.nodes_manager.connection_kwargs
    secure = kwargs.get("ssl") or kwargs.get("connection_class") in (redis.SSLConnection, redis.asyncio.SSLConnection)
    kind = redis.SSLConnection if secure else redis.Connection
    most = min(MAX_CONNECTIONS, kwargs.get("max_connections") or MAX_CONNECTIONS)
    kwargs = {key: value for key, value in kwargs.items() if key in _LOGIN or key.startswith("ssl_")}
    kwargs["max_connections"] = most
    addresses = [(node.host, int(node.port)) for node in nodes]
    return ClusterStore(addresses, kind, kwargs, timeout, remap=client.nodes_manager.address_remap)


_LOGIN = ("username", "password", "credential_provider", "protocol", "client_name")


def _alias_pool(alias: str) -> Any:
    from django.core.cache import caches
    from django_redis.cache import RedisCache

    try:
        cache = caches[alias]
    except Exception as error:  # whatever its backend raises, its settings are to blame
        raise ConfigurationError(f"CACHES has no alias {alias!r} that works: {error}") from error
    if not isinstance(cache, RedisCache):
        kind = type(cache)  # Django's own is called RedisCache as well
        raise ConfigurationError(
            f"CACHES[{alias!r}] is {kind.__module__}.{kind.__qualname__}, not django_redis.cache.RedisCache; "
            "set RATEQUOTA['CACHE'] to a django-redis alias, or RATEQUOTA['REDIS_URL']"
        )
    try:
        return cache.client.get_client(write=True).connection_pool
    except Exception as error:
        raise ConfigurationError(f"CACHES[{alias!r}] cannot be used: {error!r}") from error
