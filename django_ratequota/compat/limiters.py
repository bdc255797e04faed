"""The limiter of a drop-in: on the Redis of a CACHES alias or cache object, else on that of RATEQUOTA."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from typing import Any

from django.core.cache import caches
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.redis import RedisCache as DjangosRedisCache
from django.core.exceptions import ImproperlyConfigured
from django_redis.cache import RedisCache

from ..conf import settings
from ..engine.limiter import Limiter
from ..exceptions import ConfigurationError, StoreError
from ..runtime import OncePerSettings, default_limiter

Clock = Callable[[], int]

_limiters: OncePerSettings[dict[Hashable, Limiter]] = OncePerSettings(dict)
# A forked child needs its own connections.
os.register_at_fork(after_in_child=_limiters.forget)


def limiter_of(
    cache: Any = None, *, name: Hashable = None, setting: str = "", clock: Clock | None = None
) -> Limiter | None:
    """Return the limiter on the Redis of ``cache`` (default: RATEQUOTA's); None where nothing is limited.

    That is with a dummy cache, and with ENABLED = False.

    ``name`` is the key under which the limiter is kept: the alias, if any, because each thread has its own cache
    objects. ``clock`` returns µs, see ``Limiter``. Raises ``ImproperlyConfigured`` where the cache is not Redis;
    ``setting`` is what the message names as wrong.
    """
    if not settings.enabled:
        return None
    if cache is None:
        return _limiter_of_settings(clock)
    if isinstance(cache, DummyCache):
        return None
    limiters, key = _limiters(), (name or cache, clock)
    limiter = limiters.get(key)
    if limiter is None:
        limiter = limiters.setdefault(key, _limiter_of_cache(cache, setting, clock))
    return limiter


def _limiter_of_settings(clock: Clock | None) -> Limiter | None:
    if not settings.redis_url and isinstance(caches[settings.cache], DummyCache):
        return None
    try:
        if clock is None:
            return default_limiter()
        limiters = _limiters()
        return limiters.get(clock) or limiters.setdefault(clock, Limiter(clock=clock, deny_cache_seconds=0))
    except (ConfigurationError, StoreError) as error:
        raise ImproperlyConfigured(str(error)) from error


def _limiter_of_cache(cache: Any, setting: str, clock: Clock | None) -> Limiter:
    try:
        if isinstance(cache, RedisCache):
            client = cache.client.get_client(write=True)
        elif isinstance(cache, DjangosRedisCache):
            client = cache._cache.get_client(None, write=True)
        else:
            raise ImproperlyConfigured(
                f"{setting} names a {type(cache).__name__}, but requests are counted in Redis: name a cache of "
                "django_redis.cache.RedisCache, or a DummyCache to limit nothing"
            )
        return Limiter(
            client=client,
            clock=clock,
            prefix=settings.prefix,
            time_zone=settings.time_zone,
            timeout=settings.timeout,
            deny_cache_seconds=0 if clock else settings.deny_cache_seconds,
        )
    except (TypeError, NotImplementedError, ValueError) as error:  # a client of several servers, or an invalid URL
        raise ImproperlyConfigured(f"{setting} names a cache that is not one Redis: {error}") from error
