"""``@ratequota`` for plain Django views: sync, async, and class-based ones through ``method_decorator``.

Around a view of REST framework (``@api_view``, ``as_view()``) it leaves the check to a ``QuotaThrottle``, which knows
the user that the view authenticates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any, TypeVar, overload

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.module_loading import import_string

from .enforcement.check_request import acheck_request, check_request
from .enforcement.costs import Cost, check_declared, computed_cost
from .enforcement.settlement import asettle, settle
from .engine.decision import Decision
from .headers import add_headers
from .policies.requests import view_declarations as views
from .policies.requests.view_facts import ViewFacts, scope_name
from .responses import arefusal_response, refusal_response
from .utils.async_views import is_awaited
from .utils.sansio import Twins, acall, adrive, call, drive

View = TypeVar("View", bound=Callable[..., Any])


@overload
def ratequota(scope: View) -> View: ...
@overload
def ratequota(scope: str | None = None, cost: Cost = None, block: bool = True) -> Callable[[View], View]: ...


def ratequota(scope: Any = None, cost: Any = None, block: bool = True) -> Any:
    """Enforce the policies of ``scope``, and of endpoints that match the view's route, before the view runs.

    ``cost`` is in units, an int or ``(request) -> int``, None = the endpoint's own. Of an async view the function may
    be async, and must not block the event loop. If it fails, the endpoint's cost counts, see ``enforcement.costs``. A
    refused request gets 429 (503 while the store is down); with ``block=False`` the view runs anyway and can read
    ``request.ratequota`` (a ``Decision``).

    Around or below REST framework's ``@api_view``, the view's ``QuotaThrottle`` makes the check, once the view has
    authenticated the caller. Raises ``InvalidCost``, and ``TypeError`` for what cannot be decorated, when decorating.
    """
    if callable(scope):
        return ratequota()(scope)
    cost = check_declared(cost, "request")
    declared = views.Declaration(scope_name(scope), cost, checks=True, block=block)

    def decorate(view: Any) -> Any:
        if isinstance(view, type):
            raise TypeError(
                f"@ratequota decorates functions, not classes such as {view.__name__}: write "
                "@method_decorator(ratequota(...), name='dispatch'); for REST framework "
                "@throttle_scope(...) of django_ratequota.throttling"
            )
        views.refuse_operation(view, "ratequota")
        awaited = is_awaited(view)
        rest = ViewFacts(view).is_rest
        if iscoroutinefunction(cost) and (rest or not awaited):
            name = getattr(view, "__qualname__", repr(view))
            raise TypeError(f"cost is async and {name} is not: write a function without async, or an async view")
        if rest:
            return _left_to_throttle(view, declared)

        async def arun(request: Any, *args: Any, **kwargs: Any) -> Any:
            return await adrive(_run(view, declared, request, args, kwargs), acall)

        def run(request: Any, *args: Any, **kwargs: Any) -> Any:
            return drive(_run(view, declared, request, args, kwargs), call)

        wrapper: Any = functools.wraps(view)(arun if awaited else run)
        if awaited:
            markcoroutinefunction(wrapper)
        setattr(wrapper, views.WRAPPER_ATTRIBUTE, wrapper)
        setattr(wrapper, views.DECLARED_ATTRIBUTE, declared)
        return wrapper

    return decorate


def _run(view: Any, declared: views.Declaration, request: Any, args: Any, kwargs: Any) -> Generator[Twins, Any, Any]:
    """Check the request, run the view where it may, and settle by its outcome."""
    scope, units, answer = declared.scope, declared.cost, None
    plain = isinstance(request, HttpRequest)
    decision = None if plain else _made_by_throttle(request, view, declared)
    if decision is None:
        if callable(units):
            units, answer = yield from computed_cost(units, request, f"cost of @ratequota({scope!r})")
        decision = yield Twins(check_request, acheck_request, (request, scope, units))
    if declared.block and not decision.allowed:
        return (yield Twins(refusal_response, arefusal_response, (request, decision)))
    try:
        if answer is not None:
            raise answer  # noqa: TRY301 - settled like the view's own errors
        run = functools.partial(view, request, *args, **kwargs)
        response = yield Twins(run, run, ())
    except Exception as error:
        if plain:  # REST framework turns its exceptions into responses later
            yield Twins(settle, asettle, (request, error))
        raise
    if isinstance(response, HttpResponseBase):  # else an outer decorator makes one of it, or Django raises an error
        yield Twins(settle, asettle, (request, response))
        add_headers(response, getattr(request, "ratequota", decision), request)
    return response


def exempt(view: View) -> View:
    """Exempt a view from all limits: ENFORCE_ALL, throttles, blocks. Redis is not called, and nothing is counted.

    Decorates functions, sync and async; classes, with their subclasses; methods of classes and ViewSet actions. Of a
    function it returns a copy, so that ``path("free/", exempt(view))`` leaves other routes of ``view`` limited. In
    Django Ninja it goes below the operation's decorator. ``check_request`` in the view admits every request, too.
    """
    if isinstance(view, type):
        setattr(view, views.EXEMPT_ATTRIBUTE, True)
        return view
    if not callable(view):
        raise TypeError(f"@exempt decorates views, which are functions or classes, not {view!r}")
    views.refuse_operation(view, "exempt")
    wrapper: Any = functools.wraps(view)(lambda *args, **kwargs: view(*args, **kwargs))
    if is_awaited(view):
        markcoroutinefunction(wrapper)
    setattr(wrapper, views.EXEMPT_ATTRIBUTE, True)
    return wrapper  # type: ignore[no-any-return]


def _left_to_throttle(view: Any, declared: views.Declaration) -> Any:
    """Return the view of REST framework with a ``QuotaThrottle`` that enforces what the decorator declares."""
    facts = ViewFacts(view)  # read now, and not kept: other decorators may follow
    name, cost = facts.cls.__name__, declared.cost
    if not declared.block:
        raise TypeError(
            f"@ratequota(block=False) goes below @api_view, or as @method_decorator(...) on a method of {name}: "
            "around the view it runs before REST framework knows the caller"
        )
    throttles = list(facts.attribute("throttle_classes") or ())
    if facts.chooses_throttles:
        raise TypeError(
            f"{name} chooses its throttles in get_throttles: return QuotaThrottle() there, and declare scope and "
            "cost by @throttle_scope(...) of django_ratequota.throttling instead of @ratequota(...)"
        )
    if not facts.has_throttle:
        throttles.append(import_string("django_ratequota.throttling.QuotaThrottle"))

    def of_request(request: Any, view: Any) -> Any:
        return cost(request)

    units = of_request if callable(cost) else cost
    views.set_arguments(view, throttle_scope=declared.scope, throttle_cost=units, throttle_classes=throttles)
    return view


def _made_by_throttle(request: Any, view: Any, declared: views.Declaration) -> Decision | None:
    """Return the decision of the ``QuotaThrottle`` that has checked what this decorator declares; None without one.

    Raises ``TypeError`` where a method was decorated directly: its first argument is the instance.
    """
    if not hasattr(request, "META"):
        name = getattr(view, "__qualname__", repr(view))
        raise TypeError(
            f"@ratequota decorates functions of a request, and {name} was called with {type(request).__name__!r}; "
            "on a method write @method_decorator(ratequota(...))"
        )
    made: tuple[views.Declaration, Decision] | None = getattr(request, views.CHECKED_ATTRIBUTE, None)
    return made[1] if made is not None and made[0] is declared else None
