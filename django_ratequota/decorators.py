"""``@ratequota`` for plain Django views: sync, async, and class-based ones through ``method_decorator``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, overload

from asgiref.sync import markcoroutinefunction

from .enforcement.check import acheck_request, check_request
from .enforcement.settlement import asettle, settle
from .engine.types import check_cost
from .headers import add_headers
from .policies.exemptions import EXEMPT_ATTRIBUTE
from .policies.requests.view_declarations import SCOPE_ATTRIBUTE, WRAPPER_ATTRIBUTE
from .responses import arefusal_response, refusal_response
from .utils.async_views import is_awaited

View = TypeVar("View", bound=Callable[..., Any])


@overload
def ratequota(scope: View) -> View: ...
@overload
def ratequota(scope: str | None = None, cost: int | None = None, block: bool = True) -> Callable[[View], View]: ...


def ratequota(scope: Any = None, cost: int | None = None, block: bool = True) -> Any:
    """Enforce the policies of ``scope``, and of endpoints that match the view's route, before the view runs.

    ``cost`` is in units, None = the endpoint's own. A refused request gets 429 (503 while the store is down);
    with ``block=False`` the view runs anyway and can read ``request.ratequota`` (a ``Decision``). Raises
    ``InvalidCost`` when decorating.
    """
    if callable(scope):
        return ratequota()(scope)
    if scope is not None and not isinstance(scope, str):
        raise TypeError(f"scope must be the name of an endpoint, such as 'search', not {scope!r}")
    if cost is not None:
        cost = check_cost(cost)

    def decorate(view: Any) -> Any:
        async def arun(request: Any, *args: Any, **kwargs: Any) -> Any:
            _check_is_request(request, view)
            decision = await acheck_request(request, scope, cost)
            if block and not decision.allowed:
                return await arefusal_response(request, decision)
            try:
                response = view(request, *args, **kwargs)
                if inspect.isawaitable(response):
                    response = await response
            except Exception as error:
                await asettle(request, error)
                raise
            await asettle(request, response)
            if response is not None:  # Django raises a better error for such a view
                add_headers(response, getattr(request, "ratequota", decision), request)
            return response

        def run(request: Any, *args: Any, **kwargs: Any) -> Any:
            _check_is_request(request, view)
            decision = check_request(request, scope, cost)
            if block and not decision.allowed:
                return refusal_response(request, decision)
            try:
                response = view(request, *args, **kwargs)
            except Exception as error:
                settle(request, error)
                raise
            settle(request, response)
            if response is not None:  # Django raises a better error for such a view
                add_headers(response, getattr(request, "ratequota", decision), request)
            return response

        awaited = is_awaited(view)
        wrapper: Any = functools.wraps(view)(arun if awaited else run)
        if awaited:
            markcoroutinefunction(wrapper)
        setattr(wrapper, SCOPE_ATTRIBUTE, scope or "")
        setattr(wrapper, WRAPPER_ATTRIBUTE, (wrapper, cost))
        return wrapper

    return decorate


def exempt(view: View) -> View:
    """Exempt a view from all limits: ENFORCE_ALL, throttles, blocks. Redis is not called, and nothing is counted.

    Decorates functions, sync and async; classes, with their subclasses; methods of classes and ViewSet actions. Of a
    function it returns a copy, so that ``path("free/", exempt(view))`` leaves other routes of ``view`` limited. In
    Django Ninja it goes below the operation's decorator. ``check_request`` in the view admits every request, too.
    """
    if isinstance(view, type):
        setattr(view, EXEMPT_ATTRIBUTE, True)
        return view
    if not callable(view):
        raise TypeError(f"@exempt decorates views, which are functions or classes, not {view!r}")
    wrapper: Any = functools.wraps(view)(lambda *args, **kwargs: view(*args, **kwargs))
    if is_awaited(view):
        markcoroutinefunction(wrapper)
    setattr(wrapper, EXEMPT_ATTRIBUTE, True)
    return wrapper  # type: ignore[no-any-return]


def _check_is_request(request: Any, view: Any) -> None:
    """Raise ``TypeError`` where a method was decorated directly: its first argument is the instance."""
    if not hasattr(request, "META"):
        name = getattr(view, "__qualname__", repr(view))
        raise TypeError(
            f"@ratequota decorates functions of a request, and {name} was called with {type(request).__name__!r}; "
            "on a method write @method_decorator(ratequota(...))"
        )
