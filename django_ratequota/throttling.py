"""Django REST framework: one throttle class for all limits.

REST_FRAMEWORK = {"DEFAULT_THROTTLE_CLASSES": ["django_ratequota.throttling.QuotaThrottle"]}

@throttle_scope("search", cost=5)  # of a class, a method, an action, or a function view
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, update_wrapper
from inspect import signature
from types import FunctionType
from typing import Any, TypeVar

from asgiref.sync import async_to_sync, iscoroutinefunction
from rest_framework.exceptions import APIException, ErrorDetail, ParseError, Throttled
from rest_framework.throttling import BaseThrottle

from .enforcement.check_request import check_request
from .enforcement.costs import answer_of, check_declared, is_counted, units_of
from .engine.decision import Decision
from .headers import add_headers, retry_after_seconds
from .policies.requests import view_declarations as views
from .policies.requests.view_facts import ViewFacts, scope_name
from .responses import refusal_text, status_code

Declared = TypeVar("Declared", bound=Callable[..., Any])
#: The attribute of REST framework's request with the view, the decision of the view's first QuotaThrottle, and what
#: decorators declare.
_DECISION = "_ratequota_decision"
_NO_DECISION: tuple[Any, Decision | None, views.Declaration | None] = (None, None, None)
_declaration_on = lru_cache(maxsize=4096)(views.declaration_on)


class StoreUnavailable(APIException):
    """503: a policy denies while Redis is down. ``wait`` becomes Retry-After."""

    status_code = 503
    default_code = "temporary_reduced_capacity"

    def __init__(self, decision: Decision) -> None:
        super().__init__(refusal_text(decision))
        self.decision = decision
        self.wait = retry_after_seconds(decision)


class QuotaThrottle(BaseThrottle):
    """Enforces every policy that applies to the request, together and in one round trip.

    The view's ``throttle_scope`` names the endpoint. Its ``throttle_cost``, an int, ``(request, view) -> int`` or a
    method ``(self, request) -> int``, is the cost in units; without one, or where it fails, the endpoint's cost.
    ``@throttle_scope`` declares both for a class or for one of its methods. Several on one view make one check.
    """

    def __init__(self) -> None:
        self.decision: Decision | None = None

    def allow_request(self, request: Any, view: Any) -> bool:
        """Return whether the request is admitted. Raises ``StoreUnavailable`` where a policy denies without Redis.

        If the cost raised an exception that answers the client, raises it again after counting the request.
        """
        made, answer = vars(request), None
        of, decision, declared = made.get(_DECISION, _NO_DECISION)
        if of is not view or decision is None:
            declared = _declaration(request, view)
            scope = (declared and declared.scope) or getattr(view, "throttle_scope", None)
            try:
                cost = _cost(request, view, declared)
            except Exception as error:
                cost, answer = None, answer_of(error, _cost_name(request, view, declared), ParseError)
            decision = check_request(request, scope, cost)
            # REST framework calls all throttles of a view: the next of ours repeats the decision of the first.
            made[_DECISION] = view, decision, declared
            if declared and declared.checks:
                made[views.CHECKED_ATTRIBUTE] = declared, decision
        self.decision = decision
        headers = getattr(view, "headers", None)
        if headers is not None:
            # DRF adds these to the response, refused or not, and Retry-After itself, from wait().
            add_headers(headers, decision, request)
            headers.pop("Retry-After", None)
        if answer is not None and decision.allowed:
            raise answer
        if decision.allowed or (declared and not declared.block):
            return True
        if status_code(decision) == 503:
            raise StoreUnavailable(decision)
        if {type(throttle) for throttle in view.get_throttles()} == {QuotaThrottle}:
            self._throttled(request, view, decision)
        return False

    def wait(self) -> float | None:
        """Return the seconds until the same request would be admitted; None when waiting cannot help."""
        return self.decision.retry_after if self.decision else None

    def _throttled(self, request: Any, view: Any, decision: Decision) -> None:
        """Raise what the view raises for a refusal; REST framework's own text, which has seconds only, replaced."""
        wait = self.wait()
        try:
            view.throttled(request, wait)
        except Throttled as error:
            if error.detail == Throttled(wait).detail:
                error.detail = ErrorDetail(refusal_text(decision), error.default_code)
            raise


def throttle_scope(
    scope: str | None = None, cost: int | Callable[[Any, Any], int] | None = None
) -> Callable[[Declared], Declared]:
    """Declare the scope and cost of a view of REST framework, or of one of its methods, to its ``QuotaThrottle``.

    It decorates APIView classes, their handler methods, actions of ViewSets and function views, above or below
    ``@action``, ``@api_view`` and other decorators. ``cost`` is in units, an int or ``(request, view) -> int``. A
    method that declares only one of them has its class's ``throttle_scope`` or ``throttle_cost`` for the other. The
    decorator enforces nothing by itself. In the body of a class that sets ``throttle_scope``, that name is a text:
    write ``@quota_scope``, which is the same decorator.

    Raises ``InvalidCost``, and ``TypeError`` for what cannot be decorated, when decorating.
    """
    if callable(scope) or scope == "" or (scope is None and cost is None):
        raise TypeError(f"write @throttle_scope('search'), with the name of an endpoint, not {scope!r}")
    scope = scope_name(scope)
    cost = check_declared(cost, "request", "view")
    if iscoroutinefunction(cost):
        raise TypeError(f"REST framework's throttles are not async, so cost must not be: {cost!r}")
    declared = views.Declaration(scope, cost)

    def declare(target: Any) -> Any:
        cls = views.view_class(target)
        if cls is None:
            return _declare_function(target, declared)
        if not ViewFacts(target).is_rest:
            raise TypeError(
                f"@throttle_scope is for views of REST framework, which {cls.__name__} is not: write "
                "@method_decorator(ratequota(...), name='dispatch') of django_ratequota.decorators"
            )
        views.set_arguments(target, throttle_scope=scope, throttle_cost=cost, **{views.DECLARED_ATTRIBUTE: declared})
        return target

    return declare


quota_scope = throttle_scope


def _declare_function(function: Any, declared: views.Declaration) -> Any:
    """Return the function with the declaration: a copy, because other classes may inherit the same function."""
    views.refuse_operation(function, "throttle_scope")
    before = getattr(function, views.DECLARED_ATTRIBUTE, None)
    if isinstance(before, views.Declaration):
        declared = before._replace(**{name: value for name, value in declared._asdict().items() if value is not None})
    if isinstance(function, FunctionType):
        code, bound = function.__code__, function.__closure__
        copy = FunctionType(code, function.__globals__, argdefs=function.__defaults__, closure=bound)
        copy.__kwdefaults__ = function.__kwdefaults__
        function = update_wrapper(copy, function)
    setattr(function, views.DECLARED_ATTRIBUTE, declared)
    return function


def _declaration(request: Any, view: Any) -> views.Declaration | None:
    """Return what decorators declare for the method of the view that answers the request."""
    name = getattr(request, "_request", request).method.lower()
    handler = getattr(view, name, None) if name in view.http_method_names else None
    return _declaration_on(getattr(handler, "__func__", None))


def _cost(request: Any, view: Any, declared: views.Declaration | None) -> int | None:
    """Return the cost that the method or the view declares; None = the endpoint's own.

    A function is not called for a request that is not counted.
    """
    own = declared.cost if declared else None
    cost = getattr(view, "throttle_cost", None) if own is None else own
    if not callable(cost):
        return None if cost is None else units_of(cost)
    if not is_counted(request):
        return None
    if declared is None or own is None:
        return units_of(_computed(cost, request, view))
    if iscoroutinefunction(cost):
        cost = async_to_sync(cost)
    return units_of(cost(request) if declared.checks else cost(request, view))


def _cost_name(request: Any, view: Any, declared: views.Declaration | None) -> str:
    """Return the name under which a failed cost is logged: that of the decorated method, or of the class."""
    name = type(view).__name__
    if declared is None or declared.cost is None:
        return f"throttle_cost of {name}"
    return f"cost of {name}.{getattr(view, 'action', None) or request.method.lower()}"


def _computed(cost: Any, request: Any, view: Any) -> Any:
    """Call a function of (request, view), or a method of the view with both, or with the request alone."""
    function: Any = getattr(cost, "__func__", None)
    parameters = () if function is None else _parameters(function)
    if len(parameters) != 2:
        return cost(request, view)
    # A function of (request, view) set on a class looks like a method (self, request) but for its names.
    return cost(request) if parameters[0] in ("self", "cls") else function(request, view)


@lru_cache(maxsize=1024)
def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(signature(function).parameters)
