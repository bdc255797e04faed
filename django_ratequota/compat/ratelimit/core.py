"""Count requests as django-ratelimit does: every attempt in a fixed window, refused ones too.

A counter is named by the group, the rate, the methods, and the value of the key. Windows are those of
``fixed_window``: a rate per day counts the calendar day of RATEQUOTA["TIME_ZONE"], all others begin at multiples of
their period, by the server's clock.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Generator
from math import ceil
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ...conf import settings
from ...engine.calendar_windows import window_end_us
from ...engine.keys import short
from ...engine.limiter import Limiter
from ...engine.rates import MAX_UNITS
from ...engine.types import Bucket
from ...exceptions import StoreError
from ...monitoring.health import note_degraded
from ...utils.sansio import Twins, acall, adrive, call, drive
from ..limiters import counted_rate, limiter_of
from .key_values import get_ip as _get_ip
from .key_values import value_of

# django-ratelimit's tests import the first two, and other projects may.
__all__ = ["_get_ip", "_split_rate", "aget_usage", "ais_ratelimited", "get_usage", "is_ratelimited"]

Usage = dict[str, Any]

#: Values of ``method``: every method, and those that change something.
ALL = (None,)
UNSAFE = ["DELETE", "PATCH", "POST", "PUT"]

_RATE = re.compile(r"([0-9]+)/([0-9]*)(s|m|h|d|secs?|seconds?|mins?|minutes?|hrs?|hours?|days?)?", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def is_ratelimited(request: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether the request is beyond its rate; the arguments are those of ``get_usage``."""
    return _is_beyond(get_usage(request, *args, **kwargs))


async def ais_ratelimited(request: Any, *args: Any, **kwargs: Any) -> bool:
    """``is_ratelimited``, awaited."""
    return _is_beyond(await aget_usage(request, *args, **kwargs))


def get_usage(request: Any, *args: Any, **kwargs: Any) -> Usage | None:
    """``count``, ``limit``, ``should_limit`` and ``time_left`` (s) of the request; None where nothing limits it.

    The arguments: ``group`` names what is counted together (else ``fn``, the view, does); ``key`` whom a counter
    belongs to: ``ip``, ``user``, ``user_or_ip``, ``get:NAME``, ``post:NAME``, ``header:NAME``, or
    ``(group, request) -> str`` or its dotted path; ``rate`` is text such as ``5/m`` or ``100/15m``,
    (requests, seconds), None, or a function of the same kind that returns one; ``method`` is a method or several.
    ``increment`` counts this request. Raises ``ImproperlyConfigured``.
    """
    return drive(_usage_steps(request, *args, **kwargs), call)


async def aget_usage(request: Any, *args: Any, **kwargs: Any) -> Usage | None:
    """``get_usage``, awaited; ``key`` and ``rate`` run in a thread."""
    return await adrive(_usage_steps(request, *args, **kwargs), acall)


def _usage_steps(
    request: Any,
    group: str | None = None,
    fn: Callable[..., Any] | None = None,
    key: Any = None,
    rate: Any = None,
    method: Any = ALL,
    increment: bool = False,
) -> Generator[Twins, Any, Usage | None]:
    # In a thread where it is awaited: key and rate may be functions that read the session or the database.
    query = yield Twins(_make_query, sync_to_async(_make_query), (request, group, fn, key, rate, method))
    if query is None or query.limiter is None:
        return query and _uncounted(query, increment)
    limiter, buckets = query.limiter, (query.bucket,)
    try:
        if increment:
            decision = yield Twins(limiter.charge, limiter.acharge, (buckets,))
        else:
            decision = yield Twins(limiter.peek, limiter.apeek, (buckets, 0))
    except StoreError as error:
        return _unanswered(query, increment, error)
    status = decision.statuses[0]
    left_us = status.reset_after_us
    if not left_us:
        left_us = window_end_us(status.bucket.rate, decision.at_us, settings.time_zone) - decision.at_us
    return _usage_dict(status.used, query.limit, ceil(left_us / 10**6))


_functions: list[Any] = [is_ratelimited, ais_ratelimited, get_usage, aget_usage]
for _function in _functions:
    _function.ALL, _function.UNSAFE = ALL, UNSAFE


class _Query(NamedTuple):
    bucket: Bucket
    limit: int
    #: None where nothing is counted.
    limiter: Limiter | None


def _make_query(request: Any, group: str | None, fn: Any, key: Any, rate: Any, method: Any) -> _Query | None:
    """Return the counter of the request; None where nothing limits it. Raises ``ImproperlyConfigured``."""
    if group is None and fn is None:
        raise ImproperlyConfigured("pass group='login', or fn=the view: requests of one group are counted together")
    methods = None if method == ALL else _upper(method)
    if not getattr(django_settings, "RATELIMIT_ENABLE", True):
        return None
    if methods is not None and request.method not in methods:
        return None
    group = _name_of(fn) if group is None else group
    if isinstance(rate, str) and "." in rate:
        rate = import_string(rate)
    if callable(rate):
        rate = rate(group, request)
    if rate is None:
        return None
    limit, seconds = _split_rate(rate)
    prefix = getattr(django_settings, "RATELIMIT_CACHE_PREFIX", "rl:")
    named = [prefix, group, limit, seconds, value_of(key, group, request), methods]
    # A limit out of reach, because attempts beyond the real one count too.
    rate = counted_rate(MAX_UNITS, seconds, "fixed_window")
    alias = getattr(django_settings, "RATELIMIT_USE_CACHE", None)
    cache = None if alias is None else caches[alias]
    limiter = limiter_of(cache, name=alias, setting="RATELIMIT_USE_CACHE")
    return _Query(Bucket(f"ratelimit:{short(json.dumps(named))}", rate), limit, limiter)


def _split_rate(rate: Any) -> tuple[int, float]:
    """Return requests and seconds of ``5/m``, ``100/15m``, ``100/10`` (seconds), or a tuple of both."""
    if isinstance(rate, tuple):
        limit, seconds = rate
    else:
        found = _RATE.fullmatch(rate)
        if found is None:
            raise ImproperlyConfigured(f"a rate must be text such as 5/m, 100/15m or 1000/d, not {rate!r:.60}")
        limit, seconds = int(found[1]), int(found[2] or 1) * _SECONDS[(found[3] or "s")[0]]
    if seconds <= 0:
        raise ImproperlyConfigured(f"the period of a rate must be above 0, not {rate!r:.60}")
    return limit, seconds


def _name_of(fn: Any) -> str:
    """Return the dotted name of a view, with the class of a method."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    holder = getattr(fn, "__self__", None)
    own = [type(holder).__name__] if holder is not None else []
    return ".".join([fn.__module__, *own, getattr(fn, "__qualname__", type(fn).__qualname__)])


def _upper(method: Any) -> list[str]:
    """Return the methods; raises ``ImproperlyConfigured`` for what would match none, or be used up by one request."""
    methods = [method] if isinstance(method, str) else method
    if isinstance(methods, list | tuple | set | frozenset) and all(isinstance(name, str) for name in methods):
        return sorted(name.upper() for name in methods)
    raise ImproperlyConfigured(f"method is 'POST', a list such as UNSAFE, or ALL, not {method!r:.60}")


def _uncounted(query: _Query, increment: bool) -> Usage:
    """Return the usage with a dummy cache, as if this request were the only one."""
    return _usage_dict(int(increment), query.limit, ceil(query.bucket.rate.period_us / 10**6))


def _unanswered(query: _Query, increment: bool, error: StoreError) -> Usage | None:
    """Return the usage without Redis: refused if the request counts and not RATELIMIT_FAIL_OPEN; else none."""
    note_degraded(error.reason, error)
    if not increment:
        return _uncounted(query, increment)
    if getattr(django_settings, "RATELIMIT_FAIL_OPEN", False):
        return None
    return {"count": 0, "limit": 0, "should_limit": True, "time_left": -1}


def _usage_dict(count: int, limit: int, seconds: int) -> Usage:
    return {"count": count, "limit": limit, "should_limit": count > limit, "time_left": seconds}


def _is_beyond(usage: Usage | None) -> bool:
    return bool(usage and usage["should_limit"])
