"""What ``@ratequota`` and ``@throttle_scope`` declare on functions, and for the methods of a class."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

#: Set by both decorators on functions, by ``@throttle_scope`` also on views: the ``Declaration``.
DECLARED_ATTRIBUTE = "ratequota_declared"
#: Set on REST framework's request by a ``QuotaThrottle``: (declaration of ``@ratequota``, the decision about it).
CHECKED_ATTRIBUTE = "ratequota_checked"


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


def declaration_in_class(cls: Any, actions: Mapping[str, str] | None, method: str) -> Declaration | None:
    """Return what decorators declare for the class's method that answers requests by ``method``.

    ``actions`` of a ViewSet: method in lower case -> name of the class's method.
    """
    declared = declarations_in_class(cls)
    if not declared or (name := method.lower()) not in cls.http_method_names:
        return None
    handlers = actions or {}
    if name == "head" and not (name in handlers or hasattr(cls, name)):
        name = "get"
    return declared.get(handlers.get(name, name))


@lru_cache(maxsize=4096)
def declarations_in_class(cls: Any) -> Mapping[str, Declaration]:
    """Return what decorators declare for methods of a class: name -> declaration. Most classes have none."""
    found: dict[str, Declaration] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            # Only methods, because reading an attribute of a lazy object may run queries.
            declared = _declaration_on(value) if callable(value) and not isinstance(value, type) else None
            if declared is None:
                found.pop(name, None)  # overridden
            else:
                found[name] = declared
    return found


def below_api_view(handler: Any) -> Any:
    """Return the function below ``@api_view`` (adrf's too), whose handler copies no attributes of it; else itself."""
    code = getattr(handler, "__code__", None)
    if code is not None and code.co_name == "handler" and "func" in code.co_freevars:
        return handler.__closure__[code.co_freevars.index("func")].cell_contents
    return handler


def _declaration_on(function: Any) -> Declaration | None:
    declared = getattr(below_api_view(function), DECLARED_ATTRIBUTE, None)
    return declared if isinstance(declared, Declaration) else None


def set_arguments(view: Any, **arguments: Any) -> None:
    """Set attributes of a view's instances, as arguments of ``as_view`` do; those that are None stay as they are.

    Raises ``TypeError`` where the view has another scope already: all routes of a view share its attributes.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
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
