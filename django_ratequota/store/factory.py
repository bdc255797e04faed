"""From settings, a URL or a client to a store: which server, which credentials, which kind of deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster

from ..exceptions import ConfigurationError
from .base import FAILURES, Store
from .cluster import ClusterStore
from .handshake import option_names
from .pool_size import MAX_CONNECTIONS
from .sentinel import SentinelStore
from .server import Server

if TYPE_CHECKING:
    from ..conf import Settings

Client = redis.Redis | redis.asyncio.Redis | redis.cluster.RedisCluster | redis.asyncio.cluster.RedisCluster

_SENTINEL_URL = "redis+sentinel://[user:password@]host:port[,host:port ...]/service[/db]"
#: No error quotes a URL that cannot be read: any part of it may be a part of the password.
_UNREADABLE = (
    "its host, port or number of the database cannot be read; "
    "in a password write / as %2F, # as %23, ? as %3F, @ as %40 and % as %25"
)
#: Options after the ? of a URL besides those of connections: of pools, and of django-redis for Sentinel.
_OPTIONS = frozenset({"max_connections", "timeout", "is_master"})


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
        _check_readable(url)
        if url.partition("://")[0] in ("redis+sentinel", "rediss+sentinel"):
            if cluster:
                raise ConfigurationError("a Cluster is not watched by Sentinel; write the URL of any of its nodes")
            return _sentinels_at(url, timeout, failures, most)
        pool = redis.ConnectionPool.from_url(url)
    except ValueError as error:
        raise ConfigurationError(f"REDIS_URL cannot be used: {_safe(error)}") from None
    if not cluster:
        return _store_of_pool(pool, timeout, failures, most)
    kwargs = _kwargs_of(pool, most)
    if kwargs.get("path") or kwargs.get("db"):
        raise ConfigurationError("a Cluster has database 0 only, and no Unix socket; write redis://host:port")
    address = (kwargs.get("host", "localhost"), int(kwargs.get("port", 6379)))
    return ClusterStore([address], pool.connection_class, kwargs, timeout, failures)


def _check_readable(url: str) -> None:
    """Raise ``ValueError`` for a URL that redis-py would read in part only, and take the rest for something else.

    ``redis://user:12#34@host`` once was port 12 of a host ``user``, and ``redis://host/abc`` database 0.
    """
    if "://" not in url:
        raise ValueError("Redis URL must specify one of the following schemes (redis://, rediss://, unix://)")
    parts = urlsplit(url)
    readable = not parts.fragment and _options_are_known(parts.query)
    if parts.scheme in ("redis", "rediss"):
        readable = readable and not parts.path.strip("/").strip("0123456789")
    elif parts.scheme == "unix":
        readable = readable and (not parts.netloc or (parts.netloc.endswith("@") and "@" not in parts.path))
    elif parts.scheme.endswith("+sentinel"):
        readable = readable and "@" not in parts.path
    if not readable:
        raise ValueError(_UNREADABLE)


def _options_are_known(query: str) -> bool:
    known = _OPTIONS | option_names()
    pairs = parse_qsl(query, keep_blank_values=True)
    return all(name in known or name.startswith("sentinel_") for name, _ in pairs)


def _safe(error: Exception) -> str:
    """Return the error's text, or ``_UNREADABLE`` where it may quote a part of the URL."""
    text = str(error)
    ours = text.startswith(("Redis URL must", f"write {_SENTINEL_URL}")) or text == _UNREADABLE
    return text if ours else _UNREADABLE


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
    from django.core.cache import InvalidCacheBackendError, caches
    from django.core.exceptions import ImproperlyConfigured
    from django_redis.cache import RedisCache

    # Other errors may quote a LOCATION, with its password.
    known = (InvalidCacheBackendError, ImproperlyConfigured, ImportError)
    if "://" in alias:
        raise ConfigurationError("CACHE is the name of an alias in CACHES; a URL belongs to RATEQUOTA['REDIS_URL']")
    try:
        cache = caches[alias]
    except Exception as error:  # whatever its backend raises, its settings are to blame
        text = str(error) if isinstance(error, known) else type(error).__name__
        raise ConfigurationError(f"CACHES has no alias {alias!r} that works: {text}") from None
    if not isinstance(cache, RedisCache):
        kind = type(cache)  # Django's own is called RedisCache as well
        raise ConfigurationError(
            f"CACHES[{alias!r}] is {kind.__module__}.{kind.__qualname__}, not django_redis.cache.RedisCache; "
            "set RATEQUOTA['CACHE'] to a django-redis alias, or RATEQUOTA['REDIS_URL']"
        )
    try:
        for url in _locations(cache):
            _check_readable(url)
        return cache.client.get_client(write=True).connection_pool
    except ValueError as error:
        raise ConfigurationError(f"CACHES[{alias!r}] cannot be used: LOCATION: {_safe(error)}") from None
    except Exception as error:
        text = str(error) if isinstance(error, known) else type(error).__name__
        raise ConfigurationError(f"CACHES[{alias!r}] cannot be used: {text}") from None


def _locations(cache: Any) -> list[str]:
    """The URLs of an alias, as django-redis takes them apart: with commas between, or as a list."""
    urls = getattr(cache, "_server", None) or ()
    return urls.split(",") if isinstance(urls, str) else [url for url in urls if isinstance(url, str)]
