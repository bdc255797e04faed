"""What a view declares: its handlers, its scope, its cost, its throttles, and who checks its requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache, wraps
from inspect import getclosurevars
from typing import Any, NamedTuple, TypeVar

from django.utils.functional import Promise

from ...engine.types import check_cost
from ...exceptions import InvalidCost
from ...utils.problems import note_problem

T = TypeVar("T")

#: Set by both decorators on functions, by ``@throttle_scope`` also on views: the ``Declaration``.
DECLARED_ATTRIBUTE = "ratequota_declared"
#: Set on REST framework's request by a ``QuotaThrottle``: (declaration of ``@ratequota``, the decision about it).
CHECKED_ATTRIBUTE = "ratequota_checked"
#: Set on the class of the usage endpoint.
USAGE_ATTRIBUTE = "ratequota_shows_usage"
#: Set by ``@ratequota`` on its wrappers: the wrapper. Other decorators copy it to theirs.
WRAPPER_ATTRIBUTE = "ratequota_wrapper"
#: Set on Django Ninja's views with a ``QuotaThrottle``: method -> the operation's ``LateCheck``, None = no throttle.
LIMITED_ATTRIBUTE = "ratequota_limited"
#: The name of the functions that REST framework's ``@api_view`` (adrf's too) sets as handlers.
_API_VIEW_HANDLER = "api_view.<locals>.decorator.<locals>.handler"


class Declaration(NamedTuple):
    """What a decorator declares for a view, or for one method of a class."""

    #: None = the class's ``throttle_scope``.
    scope: str | None
    #: Units, or a function; None = the class's ``throttle_cost``, else the endpoint's cost.
    cost: Any
    #: Whether the decorator checks the requests itself, as ``@ratequota`` does.
    checks: bool = False
    #: Whether a refused request is answered without running the view.
    block: bool = True


class LateCheck(NamedTuple):
    """The check of a view that may refuse the request before it, as by authentication."""

    #: None = the view names none.
    scope: str | None
    #: Units; None = the endpoint's cost. The least possible if the cost depends on the request.
    cost: int | None


def scope_name(scope: Any) -> str | None:
    """Return a scope as plain text, also of a member of a ``StrEnum`` or of a lazy text; None = no scope.

    Raises ``TypeError`` with what to write, because another type is equal to no endpoint's name.
    """
    if scope is None or type(scope) is str:
        return scope
    if isinstance(scope, str):
        return str.__str__(scope)
    if isinstance(scope, Promise):
        return str(scope)
    value = f"; write {scope}.value, or make it a StrEnum" if isinstance(scope, Enum) else ""
    raise TypeError(f"a scope is the name of an endpoint, such as 'search', not {scope!r:.100}{value}")


def once_per_view(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Decorate a function of a view so that its results are kept; a view that is not hashable is read each time."""
    cached = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def of_view(view: Any) -> T:
        try:
            return cached(view)
        except TypeError:
            return function(view)

    return of_view


def view_class(view: Any) -> Any:
    """Return the class whose ``as_view`` made the view; None for function views."""
    return view if isinstance(view, type) else getattr(view, "cls", None) or getattr(view, "view_class", None)


def class_attribute(view: Any, name: str) -> Any:
    """Return the attribute of the view's instances: the argument of ``as_view``, else the class's attribute."""
    arguments = getattr(view, "initkwargs", None) or getattr(view, "view_initkwargs", None) or {}
    return arguments[name] if name in arguments else getattr(view_class(view), name, None)


@once_per_view
def handlers_of(view: Any) -> Mapping[str, Any]:
    """Return the handlers of a class, or of Django Ninja's view: method in capitals -> the function that answers it.

    A function view has none. Below ``@api_view`` the handler is the decorated function.
    """
    cls = view_class(view)
    if cls is None:
        return {method: operation.view_func for operation in _operations(view) for method in operation.methods}
    names: Any = class_attribute(view, "http_method_names") or ()
    actions: Mapping[str, str] = getattr(view, "actions", None) or {}  # of a ViewSet
    found = {name.upper(): getattr(cls, actions.get(name, name), None) for name in names}
    if "HEAD" in found:
        found["HEAD"] = found["HEAD"] or found.get("GET")
    return {method: below_api_view(handler) for method, handler in found.items() if handler is not None}


def _operations(view: Any) -> Any:
    """Return the operations of one of Django Ninja's views, which holds them in its closure; none for other views."""
    if getattr(view, "__module__", "") != "ninja.operation":
        return ()
    return getattr(getclosurevars(view).nonlocals.get("self"), "operations", ())


def below_api_view(handler: Any) -> Any:
    """Return the function below ``@api_view``, whose handler copies no attributes of it; else the handler itself."""
    if getattr(handler, "__qualname__", "") == _API_VIEW_HANDLER:
        return getclosurevars(handler).nonlocals.get("func", handler)
    return handler


def method_declaration(view: Any, method: str) -> Declaration | None:
    """Return what decorators declare for the method in a view's class; None for other views."""
    return None if view_class(view) is None else declaration_on(handlers_of(view).get(method))


def declaration_on(function: Any) -> Declaration | None:
    """Return what decorators declare for a function, or for the method of an instance."""
    declared = getattr(below_api_view(function), DECLARED_ATTRIBUTE, None)
    return declared if isinstance(declared, Declaration) else None


def shows_usage(view: Any) -> bool:
    """Whether the view is the usage endpoint. By an attribute, because a project may not have DRF."""
    return getattr(view_class(view), USAGE_ATTRIBUTE, False) is True


def scope_of(view: Any, method: str = "") -> str | None:
    """Return the scope that a view declares for a method, by decorator or as ``throttle_scope``; None if none.

    Without a method, the scope of methods that declare none of their own.
    """
    return _scope_and_cost(view, method)[0]


def cost_of(view: Any, method: str = "") -> Any:
    """Return the units, or the function, that a view declares as the cost of a method; None = the endpoint's cost."""
    return _scope_and_cost(view, method)[1]


def _scope_and_cost(view: Any, method: str) -> tuple[str | None, Any]:
    """Return what the throttle of an operation of Ninja declares, else decorators and attributes of the view."""
    if check := _ninja_check(view, method):
        return check
    scope, cost = _of_method_or_class(view, method_declaration(view, method))
    around = _declared_around(view)
    return (scope, cost) if around is None else (around.scope or scope, cost if around.cost is None else around.cost)


def _ninja_check(view: Any, method: str) -> LateCheck | None:
    """Return the check of Django Ninja's operation for the method; None without a throttle, and for other views."""
    limited: Mapping[str, LateCheck | None] = getattr(view, LIMITED_ATTRIBUTE, {})
    return limited.get(method)


def _declared_around(view: Any) -> Declaration | None:
    """Return what ``@ratequota`` declares around the view, or around its class's ``dispatch``; None without it."""
    around = map(declaration_on, (view, getattr(view_class(view), "dispatch", None)))
    return next((declared for declared in around if declared is not None and declared.checks), None)


def _of_method_or_class(view: Any, declared: Declaration | None) -> tuple[str | None, Any]:
    """Return scope and cost that a method declares; what it leaves out is the class's."""
    scope, cost = (None, None) if declared is None else declared[:2]
    scope = scope or class_attribute(view, "throttle_scope")
    cost = class_attribute(view, "throttle_cost") if cost is None else cost
    return (scope_name(scope) or None if isinstance(scope, str | Promise) else None), cost


def scopes_of(view: Any) -> set[str]:
    """Return every scope that a view declares, for whatever method."""
    return {
        scope
        for method in ("", *handlers_of(view), *getattr(view, LIMITED_ATTRIBUTE, ()))
        if (scope := scope_of(view, method))
    }


def enforces_itself(view: Any, method: str = "") -> bool:
    """Whether the view checks its own requests by the method: it has ``@ratequota`` or our throttle."""
    return _ninja_check(view, method) is not None or has_throttle(view) or is_decorated(view, method)


def is_decorated(view: Any, method: str = "") -> bool:
    """Whether ``@ratequota`` decorates the view, its class's ``dispatch``, or the class's code for the method."""
    declared = _declared_around(view) or (method_declaration(view, method) if method else None)
    return declared is not None and declared.checks


def has_throttle(view: Any) -> bool:
    """Whether our throttle is among the view's ``throttle_classes``."""
    return any(is_quota_throttle(throttle) for throttle in class_attribute(view, "throttle_classes") or ())


def late_check(view: Any, method: str) -> LateCheck | None:
    """Return the check of a view that may refuse a request before it; None for other views.

    REST framework and Ninja authenticate before they call throttles; other decorators may be around ``@ratequota``.
    """
    limited: dict[str, LateCheck | None] | None = getattr(view, LIMITED_ATTRIBUTE, None)
    if limited is not None:
        return limited.get(method, LateCheck(None, 1))  # which Ninja answers 405
    if is_decorated(view):
        if getattr(view, WRAPPER_ATTRIBUTE, view) is view or view_class(view) is not None:
            return None
        scope, cost = _scope_and_cost(view, "")
        return LateCheck(scope, least_cost(cost))
    if not is_rest(view):
        return None
    declared = method_declaration(view, method)
    if not (has_throttle(view) or (declared is not None and declared.checks) or chooses_throttles(view)):
        return None
    scope, cost = _of_method_or_class(view, declared)
    return LateCheck(scope, least_cost(cost))


def least_cost(cost: Any) -> int | None:
    """Return the least units that a request consumes with this declared ``cost``; None = the endpoint's cost."""
    if isinstance(cost, property) or callable(cost):
        return 1
    try:
        return None if cost is None else check_cost(cost)
    except InvalidCost:
        return None  # as the throttle does


def chooses_throttles(view: Any) -> bool:
    """Whether the view's class overrides ``get_throttles``, and so chooses its throttles for each request."""
    method = getattr(view_class(view), "get_throttles", None)
    return method is not None and getattr(method, "__module__", "") != "rest_framework.views"


def throttles_itself(view: Any, request: Any, args: Any, kwargs: Any) -> bool:
    """Whether our throttle is among those that the view's class chooses for the request."""
    try:
        return any(
            is_quota_throttle(type(throttle))
            for throttle in _new_instance(view, request, args, kwargs).get_throttles()
        )
    except Exception as error:
        # A client error, such as an invalid version or token, is reported by the view itself.
        if getattr(error, "status_code", 500) >= 500:
            of = f"get_throttles of {view}"
            note_problem(of, f"{of} failed; ENFORCE_ALL enforces the view", error)
        return False


def _new_instance(view: Any, request: Any, args: Any, kwargs: Any) -> Any:
    """Return another instance of the view, in the state in which REST framework calls ``get_throttles``."""
    instance = view.cls(**(getattr(view, "initkwargs", None) or {}))
    actions = getattr(view, "actions", None) or {}
    instance.action_map = {"head": actions.get("get"), **actions}
    instance.setup(request, *args, **kwargs)
    rest_request = instance.request = instance.initialize_request(request, *args, **kwargs)
    load = rest_request._load_stream

    def load_and_keep() -> None:
        # Keep the body, because ``request.data`` would leave none for the view. Of forms Django keeps the fields.
        if request.content_type != "multipart/form-data":
            _ = request.body
        load()

    rest_request._load_stream = load_and_keep
    instance.headers = instance.default_response_headers
    instance.format_kwarg = instance.get_format_suffix(**kwargs)
    rest_request.accepted_renderer, rest_request.accepted_media_type = instance.perform_content_negotiation(
        rest_request
    )
    rest_request.version, rest_request.versioning_scheme = instance.determine_version(rest_request, *args, **kwargs)
    return instance


def is_quota_throttle(throttle: Any) -> bool:
    """Whether the class is a ``QuotaThrottle``. By name, because a project may not have DRF."""
    return any(
        base.__module__ == "django_ratequota.throttling" and base.__name__ == "QuotaThrottle"
        for base in getattr(throttle, "__mro__", ())
    )


def limits_itself(view: Any) -> bool:
    """Whether this package limits the view, also by a drop-in for another package."""
    if str(getattr(view, "__module__", "")).startswith("django_ratequota."):
        return False  # the usage endpoint, which is no view of the project
    throttles = class_attribute(view, "throttle_classes") or ()
    bases = [base for throttle in throttles for base in getattr(throttle, "__mro__", ())]
    ours = any(base.__module__.startswith("django_ratequota.") for base in bases)
    return ours or hasattr(view, LIMITED_ATTRIBUTE) or enforces_itself(view)


def is_rest(view: Any) -> bool:
    """Whether the view is one of REST framework's classes, which authenticate before they check throttles."""
    return hasattr(view_class(view), "check_throttles")


def set_arguments(view: Any, **arguments: Any) -> None:
    """Set attributes of a class, or of a view's instances, as ``as_view`` does; those that are None stay as they are.

    Raises ``TypeError`` where the view has another scope already: all routes of a view share its attributes.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if isinstance(view, type):
        for name, value in given.items():
            setattr(view, name, staticmethod(value) if callable(value) else value)
    for initkwargs in (getattr(view, "initkwargs", None), getattr(view, "view_initkwargs", None)):
        if initkwargs is not None:
            before = initkwargs.get("throttle_scope")
            if before is not None and before != given.get("throttle_scope", before):
                raise TypeError(
                    f"this view declares the scope {before!r} already, for all its routes: to declare "
                    f"{given['throttle_scope']!r} for another route, write View.as_view() there once more"
                )
            initkwargs.update(given)


def refuse_operation(function: Any, decorator: str) -> None:
    """Raise ``TypeError`` for a function that is an operation of Django Ninja: Ninja never calls a copy of it."""
    if hasattr(function, "_ninja_operation"):
        raise TypeError(f"write @{decorator} below the operation's decorator, such as @api.get(...)")
