"""What decorators and attributes declare for a view, and how they are set; ``view_facts`` reads them."""

from __future__ import annotations

from inspect import getclosurevars
from typing import Any, NamedTuple

from ...engine.types import check_cost
from ...exceptions import InvalidCost

#: Set by both decorators on functions, by ``@throttle_scope`` also on views: the ``Declaration``.
DECLARED_ATTRIBUTE = "ratequota_declared"
#: Set on REST framework's request by a ``QuotaThrottle``: (declaration of ``@ratequota``, the decision about it).
CHECKED_ATTRIBUTE = "ratequota_checked"
#: Set by ``@exempt`` on views, on classes, and on methods of classes.
EXEMPT_ATTRIBUTE = "ratequota_exempt"
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


def view_class(view: Any) -> Any:
    """Return the class whose ``as_view`` made the view; None for function views."""
    return view if isinstance(view, type) else getattr(view, "cls", None) or getattr(view, "view_class", None)


def below_api_view(handler: Any) -> Any:
    """Return the function below ``@api_view``, whose handler copies no attributes of it; else the handler itself."""
    if getattr(handler, "__qualname__", "") == _API_VIEW_HANDLER:
        return getclosurevars(handler).nonlocals.get("func", handler)
    return handler


def declaration_on(function: Any) -> Declaration | None:
    """Return what decorators declare for a function, or for the method of an instance."""
    declared = getattr(below_api_view(function), DECLARED_ATTRIBUTE, None)
    return declared if isinstance(declared, Declaration) else None


def least_cost(cost: Any) -> int | None:
    """Return the least units that a request consumes with this declared ``cost``; None = the endpoint's cost."""
    if isinstance(cost, property) or callable(cost):
        return 1
    try:
        return None if cost is None else check_cost(cost)
    except InvalidCost:
        return None  # as the throttle does


def is_quota_throttle(throttle: Any) -> bool:
    """Whether the class is a ``QuotaThrottle``. By name, because a project may not have DRF."""
    return any(
        base.__module__ == "django_ratequota.throttling" and base.__name__ == "QuotaThrottle"
        for base in getattr(throttle, "__mro__", ())
    )


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
