"""The objects that check and record in this process, made by the settings in force.

``process`` is the one seam: tests put other objects in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from os import getpid
from typing import Any, Generic, TypeVar

from django.apps import apps
from django.dispatch import Signal

from .conf import Settings, settings
from .engine import limiter
from .engine.decision import Decision
from .engine.limiter import Limiter
from .engine.memory import LocalLimiter, Unlimited, process_memory
from .engine.protocol import ScriptBackend
from .exceptions import ConfigurationError, StoreError
from .store import breaker
from .store.base import AbsentStore, Store
from .utils import forks
from .utils.signals import send_robustly

#: Sent when a breaker opens or closes: ``state`` (open | closed), ``server`` (host:port), ``reason`` (of the
#: failure that opened it) and ``seconds`` (how long it was open; 0 when it opens).
store_state_changed = Signal()

T = TypeVar("T")


class OncePerSettings(Generic[T]):
    """Makes one object from the settings, however many threads ask at once, and another when they change."""

    def __init__(
        self,
        make: Callable[[], T],
        otherwise: Callable[[ConfigurationError], T] | None = None,
        end: Callable[[T], object] = lambda _: None,
    ) -> None:
        """``otherwise`` makes what is returned until ``make`` stops raising ``ConfigurationError``.

        ``end`` is called with an object that another one has replaced.
        """
        self._make, self._otherwise, self._end = make, otherwise, end
        self._lock = forks.lock()
        self._made: tuple[int, T] | None = None
        # A forked child needs connections, a breaker and a histogram of its own.
        forks.after_fork(self.forget)

    def __call__(self) -> T:
        """Return the object; raises what making it raises."""
        if forks.pid != getpid():
            forks.check()
        made = self._made
        if made is not None and made[0] == settings.generation:
            return made[1]
        with self._lock:
            before = made = self._made
            if made is None or made[0] != settings.generation:
                try:
                    made = self._made = (settings.generation, self._make())
                except ConfigurationError as error:
                    if self._otherwise is None:
                        raise
                    return self._otherwise(error)  # not kept: what a cache's own code failed for may pass
                if before is not None:
                    self._end(before[1])
            return made[1]

    def forget(self) -> None:
        """Make another object the next time."""
        self._made = None


class NoRedis(Limiter):
    """Fails every decision, because the settings name no Redis."""

    def __init__(self, error: ConfigurationError) -> None:
        self.by_settings, self.problem = True, str(error)
        self.open(AbsentStore("configuration", self.problem, intended=False), prefix="rq")


def _local_limiter() -> LocalLimiter:
    try:
        return LocalLimiter(settings.local_share, settings.time_zone)
    except ConfigurationError:  # the reason why there is no other limiter
        return LocalLimiter(settings.local_share, UTC)


class Process:
    """The objects that every request goes through, as attributes: reaching one costs no call.

    ``policies``, ``record``, ``observe`` and ``ledger`` belong to layers above this one: the app's config sets them
    on first use.
    """

    #: The current policies: a ``PolicyCache``.
    policies: Any
    #: Records a decision for statistics and returns the id of a refusal.
    record: Callable[..., str]
    #: What this process is still to write to the database: a ``Ledger``.
    ledger: Any
    #: Looks for buckets that a decision about so many units left nearly used up.
    observe: Callable[[Decision, int], None]

    def __init__(self) -> None:
        #: Returns the limiter by the settings in force; it fails every decision where these name no Redis.
        self.limiter: OncePerSettings[Limiter] = OncePerSettings(Limiter, NoRedis, lambda old: old.store.close())
        #: Returns the limiter that decides under ``on_error = local`` while Redis does not answer.
        self.local_limiter = OncePerSettings(_local_limiter)

    def __getattr__(self, name: str) -> Any:
        if name not in ("policies", "record", "observe", "ledger"):
            raise AttributeError(name)
        config: Any = apps.get_app_config("django_ratequota")
        config.fill(self)
        return vars(self)[name]


#: This process's own.
process = Process()


def default_limiter() -> Limiter:
    """Return this process's limiter by the settings; raises ``StoreError`` where these name no Redis."""
    limiter = process.limiter()
    if isinstance(limiter, NoRedis):
        raise StoreError("configuration", limiter.problem)
    return limiter


def store_from_settings(settings: Settings) -> Store:
    """Return the store at REDIS_URL, else at the CACHES alias CACHE; raises ``ConfigurationError``."""
    from .store.factory import store_from_pool, store_from_url  # they import redis-py, which takes 0.1 s

    timeout, most = settings.timeout, settings.max_connections
    if settings.in_memory:
        return AbsentStore("memory", "RATEQUOTA['REDIS_URL'] is memory://, so each worker counts on its own")
    if settings.redis_url:
        return store_from_url(settings.redis_url, timeout, settings.cluster, most)
    if settings.cluster:
        raise ConfigurationError(
            "django-redis does not support a Cluster; with CLUSTER set RATEQUOTA['REDIS_URL'] to the URL of any node"
        )
    return store_from_pool(_alias_pool(settings.cache), timeout, most)


def _alias_pool(alias: str) -> Any:
    """Return the connection pool of a Redis alias in CACHES; raises ``ConfigurationError``."""
    from django.core.cache import caches

    if "://" in alias:
        raise ConfigurationError("CACHE is the name of an alias in CACHES; a URL belongs to RATEQUOTA['REDIS_URL']")
    try:
        cache: Any = caches[alias]
    except Exception as error:  # whatever its backend raises, its settings are to blame
        raise ConfigurationError(f"CACHES has no alias {alias!r} that works: {_safe_text(error)}") from None
    name = f"CACHES[{alias!r}]"
    client = client_of_cache(cache, name)
    if not hasattr(client, "connection_pool"):
        kind = type(client).__name__
        raise ConfigurationError(f"{name} cannot be used: its {kind} has no connection pool; set REDIS_URL")
    return client.connection_pool


def client_of_cache(cache: Any, name: str) -> Any:
    """Return redis-py's client of a cache; raises ``ConfigurationError``, which calls the cache ``name``."""
    from django.core.cache.backends.redis import RedisCache as DjangosRedisCache
    from django_redis.cache import RedisCache

    from .store.factory import check_readable, safe_message

    djangos = isinstance(cache, DjangosRedisCache)
    if not djangos and not isinstance(cache, RedisCache):
        kind = f"{type(cache).__module__}.{type(cache).__qualname__}"
        raise ConfigurationError(f"{name} is {kind}, not django_redis.cache.RedisCache or Django's own RedisCache")
    try:
        urls: Any = getattr(cache, "_servers" if djangos else "_server", None) or ()  # with commas between, or a list
        for url in urls.split(",") if isinstance(urls, str) else urls:
            if isinstance(url, str):
                check_readable(url)
        return (cache._cache if djangos else cache.client).get_client(write=True)
    except ValueError as error:
        raise ConfigurationError(f"{name} cannot be used: LOCATION: {safe_message(error)}") from None
    except Exception as error:
        raise ConfigurationError(f"{name} cannot be used: {_safe_text(error)}") from None


def _safe_text(error: Exception) -> str:
    """Return the text of an error of Django's or an import; others may quote a LOCATION, with its password."""
    from django.core.cache import InvalidCacheBackendError
    from django.core.exceptions import ImproperlyConfigured

    known = isinstance(error, InvalidCacheBackendError | ImproperlyConfigured | ImportError)
    return str(error) if known else type(error).__name__


def limiter_options() -> dict[str, Any]:
    """Return the arguments of ``Limiter.open`` by the settings in force; raises ``ConfigurationError``."""
    return {
        "store": store_from_settings(settings),
        "backend": process_memory if settings.in_memory else ScriptBackend,
        "prefix": settings.prefix,
        "time_zone": settings.time_zone,
        "deny_cache_seconds": 0.0 if settings.in_memory else settings.deny_cache_seconds,
    }


def _limiter_defaults() -> dict[str, Any]:
    if settings.enabled:
        return limiter_options()
    store = AbsentStore("disabled", "RATEQUOTA['ENABLED'] is False, so limits are not enforced")
    return {"store": store, "backend": lambda _s, _p, zone, clock: Unlimited(zone, clock), "prefix": settings.prefix}


def _send_store_state(state: str, server: str, reason: str, seconds: float) -> None:
    send_robustly(
        store_state_changed, sender=breaker.Breaker, state=state, server=server, reason=reason, seconds=seconds
    )


# The engine and the store know no Django: here they get what they need of it.
limiter.defaults = _limiter_defaults
breaker.listeners.append(_send_store_state)
