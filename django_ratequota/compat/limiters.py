"""The limiter of a drop-in: on the Redis of a CACHES alias or cache object, else on that of RATEQUOTA."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

from django.core.cache import caches
from django.core.cache.backends.dummy import DummyCache
from django.core.exceptions import ImproperlyConfigured

from ..conf import settings
from ..engine.limiter import Limiter
from ..engine.rates import Rate
from ..exceptions import ConfigurationError, InvalidRate, StoreError
from ..runtime import OncePerSettings, client_of_cache, default_limiter

Clock = Callable[[], int]

_limiters: OncePerSettings[dict[Hashable, Limiter]] = OncePerSettings(dict)


def limiter_of(
    cache: Any = None, *, name: Hashable = None, setting: str = "", clock: Clock | None = None
) -> Limiter | None:
    """Return the limiter on the Redis of ``cache`` (default: RATEQUOTA's); None where nothing is limited.

    That is with a dummy cache, and with ENABLED = False.

    ``name`` is the key under which the limiter is kept: the alias, if any, because each thread has its own cache
    objects. ``clock`` returns µs, see ``Limiter``. Raises ``ImproperlyConfigured`` where the cache is not Redis;
    ``setting`` is what the message names as wrong.
    """
    if not settings.enabled or isinstance(cache, DummyCache):
        return None
    if cache is None and not settings.redis_url and isinstance(caches[settings.cache], DummyCache):
        return None
    try:
        if cache is None and clock is None:
            return default_limiter()
        limiters, key = _limiters(), (name or cache, clock)
        return limiters.get(key) or limiters.setdefault(key, _make_limiter(cache, setting, clock))
    except (ConfigurationError, StoreError) as error:
        raise ImproperlyConfigured(str(error)) from error


@lru_cache(maxsize=512)
def counted_rate(limit: int, seconds: float, algorithm: str) -> Rate:
    """Return the rate of a drop-in's counter; raises ``ImproperlyConfigured``."""
    try:
        return Rate(limit=limit, period=seconds, algorithm=algorithm)
    except InvalidRate as error:
        raise ImproperlyConfigured(f"a rate cannot be counted: {error}") from error


def _make_limiter(cache: Any, setting: str, clock: Clock | None) -> Limiter:
    if cache is None:
        return Limiter(clock=clock, deny_cache_seconds=0)
    return Limiter(
        client=client_of_cache(cache, setting),
        clock=clock,
        prefix=settings.prefix,
        time_zone=settings.time_zone,
        timeout=settings.timeout,
        deny_cache_seconds=0 if clock else settings.deny_cache_seconds,
    )
