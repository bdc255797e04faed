"""``@ratelimit`` for sync and async views, and through ``method_decorator`` for the methods of classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from asgiref.sync import markcoroutinefunction
from django.conf import settings
from django.utils.module_loading import import_string

from ...utils.async_views import is_awaited
from .core import ALL, UNSAFE, ais_ratelimited, is_ratelimited
from .exceptions import Ratelimited

__all__ = ["ratelimit"]


def ratelimit(
    group: Any = None, key: Any = None, rate: Any = None, method: Any = ALL, block: bool = True
) -> Callable[[Any], Any]:
    """Count the requests to a view, and refuse those beyond ``rate`` by raising ``Ratelimited``.

    With ``block=False`` the view runs all the same, and decides by ``request.limited``. The arguments are those of
    ``core.get_usage``; ``group`` is the view's dotted name where it is None.
    """

    def decorate(view: Any) -> Any:
        arguments = {"group": group, "fn": view, "key": key, "rate": rate, "method": method, "increment": True}

        async def arun(request: Any, *args: Any, **kwargs: Any) -> Any:
            _note(request, await ais_ratelimited(request, **arguments), block)
            response = view(request, *args, **kwargs)
            return await response if inspect.isawaitable(response) else response

        def run(request: Any, *args: Any, **kwargs: Any) -> Any:
            _note(request, is_ratelimited(request, **arguments), block)
            return view(request, *args, **kwargs)

        awaited = is_awaited(view)
        wrapper = functools.wraps(view)(arun if awaited else run)
        return markcoroutinefunction(wrapper) if awaited else wrapper

    return decorate


ratelimit.ALL = ALL  # type: ignore[attr-defined]
ratelimit.UNSAFE = UNSAFE  # type: ignore[attr-defined]


def _note(request: Any, limited: bool, block: bool) -> None:
    # Of stacked decorators, one that admits must not undo another's refusal.
    request.limited = limited or getattr(request, "limited", False)
    if limited and block:
        error: Any = getattr(settings, "RATELIMIT_EXCEPTION_CLASS", Ratelimited)
        raise import_string(error)() if isinstance(error, str) else error()
