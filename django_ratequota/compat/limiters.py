"""Which Redis a drop-in counts in: that of a CACHES alias or cache object, else the one of RATEQUOTA."""

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

_made: OncePerSettings[dict[Hashable, Limiter]] = OncePerSettings(dict)
# A child has connections of its own.
os.register_at_fork(after_in_child=_made.forget)


def limiter_of(
    cache: Any = None, *, name: Hashable = None, setting: str = "", clock: Clock | None = None
) -> Limiter | None:
    """The limiter that counts where ``cache`` is; None for a dummy cache, where nothing is counted.

    Without ``cache`` it is RATEQUOTA's. ``name`` is what one limiter is kept for: an alias where there is one, as
    each thread has cache objects of its own. ``clock`` returns µs, see ``Limiter``. Raises ``ImproperlyConfigured``
    where there is no Redis; ``setting`` says in the message what to change.
    """
    if cache is None:
        return _limiter_of_settings(clock)
    if isinstance(cache, DummyCache):
        return None
    made, key = _made(), (name or cache, clock)
    limiter = made.get(key)
    if limiter is None:
        limiter = made.setdefault(key, _limiter_of_cache(cache, setting, clock))
    return limiter


def _limiter_of_settings(clock: Clock | None) -> Limiter | None:
    if not settings.redis_url and isinstance(caches[settings.cache], DummyCache):
        return None
    try:
        if clock is None:
            return default_limiter()
        made = _made()
        return made.get(clock) or made.setdefault(clock, Limiter(clock=clock, deny_cache_seconds=0))
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
                f"{setting} names a {type(cache).__name__}, and requests are counted in Redis: name a cache of "
                "django_redis.cache.RedisCache, or a DummyCache where nothing shall be limited"
            )
        return Limiter(
            client=client,
            clock=clock,
            prefix=settings.prefix,
            time_zone=settings.time_zone,
            timeout=settings.timeout,
            deny_cache_seconds=0 if clock else settings.deny_cache_seconds,
        )
    except (TypeError, NotImplementedError, ValueError) as error:  # a client of several servers, a URL that is none
        raise ImproperlyConfigured(f"{setting} names a cache that is not one Redis: {error}") from error
