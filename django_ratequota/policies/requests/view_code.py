"""Static analysis of views: which statuses their code can answer, and which functions it calls.

Nothing is run. A view names a status if its code, or the project's code that it calls, contains the number, or the
name of a response or exception with that status. Frameworks answer more than they name, so the statuses of a view
that names no failure are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from http import HTTPStatus
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404
from django.shortcuts import get_list_or_404, get_object_or_404

from .view_declarations import view_class

#: Statuses that any view may answer.
_ALWAYS = frozenset([*range(100, 400), *range(500, 600)])
#: Statuses that any view may answer, and that do not show how it fails: method not allowed, refused.
_ANY_VIEW = frozenset([405, 429])
#: Framework views with a complete list of their failures.
_KNOWN = {
    "django.contrib.auth.views.LoginView": frozenset[int](),
    "rest_framework.authtoken.views.ObtainAuthToken": frozenset([400, 415]),
}
#: Statuses that REST framework answers for its views.
_REST = frozenset([400, 401, 403, 404, 406, 415])
_RAISED = {Http404: 404, PermissionDenied: 403, BadRequest: 400, SuspiciousOperation: 400}
_CALLED = {get_object_or_404: 404, get_list_or_404: 404}
_STATUSES = frozenset(map(int, HTTPStatus))
FRAMEWORKS = frozenset({"asgiref", "django", "django_ratequota", "ninja", "rest_framework"})
#: Most functions that are analysed per view; a view with more is unknown.
MOST = 300
_EMPTY = CellType()


def never_answers(view: Any, statuses: frozenset[str]) -> bool:
    """Whether it is certain that the view answers none of the ``statuses``, such as ``401`` and ``5xx``."""
    bases = getattr(view_class(view), "__mro__", ())
    paths = [f"{base.__module__}.{base.__qualname__}" for base in bases]
    known = next((_KNOWN[path] for path in paths if path in _KNOWN), None)
    functions = project_functions([view])
    named = {status for function in functions for status in _named(function)} - _ANY_VIEW
    if len(functions) > MOST or (known is None and named <= _ALWAYS):
        return False
    if known is None:
        known = _REST if "rest_framework.views.APIView" in paths else frozenset()
    answered = {str(status) for status in _ALWAYS | named | known}
    classes = {f"{status[0]}xx" for status in answered}
    return statuses.isdisjoint(answered | classes | {str(status) for status in _ANY_VIEW})


def project_functions(views: list[Any], most: int = MOST) -> list[FunctionType]:
    """Return the project's functions that the views call or hold, decorators included; at most ``most`` + 1."""
    pending: list[Any] = []
    for view in views:
        bases = [base for base in getattr(view_class(view), "__mro__", ()) if not _of_framework(base)]
        pending += [view, *(operation.view_func for operation in operations_of(view))]
        pending += [member for base in bases for member in vars(base).values()]
    seen = set[Any]()
    found: list[FunctionType] = []
    while pending and len(found) <= most:
        one = pending.pop()
        if isinstance(one, staticmethod | classmethod | MethodType):
            one = one.__func__
        if type(one) not in (FunctionType, type) or one in seen:
            continue
        seen.add(one)
        if isinstance(one, FunctionType):
            pending += held_values(one)
        if _of_framework(one):
            continue
        if isinstance(one, FunctionType):
            found.append(one)
            pending += named_values(one)
        else:
            pending += vars(one).values()
    return found


def held_values(function: Any) -> list[Any]:
    """Return the values in a function's closure; none for other objects."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if cell != _EMPTY]


def operations_of(view: Any) -> list[Any]:
    """Return the operations of one of Django Ninja's views; none for other views."""
    if getattr(view, "__globals__", {}).get("__name__") != "ninja.operation":
        return []
    return [one for held in held_values(view) for one in getattr(held, "operations", ())]


def _named(function: FunctionType) -> Iterator[int]:
    """Yield the statuses that a function's own code names."""
    for code in codes_of(function):
        yield from (const for const in code.co_consts if type(const) is int and const in _STATUSES)
        for name in code.co_names:
            if found := re.match(r"HTTP_(\d{3})_", name):
                yield int(found[1])
            elif name in HTTPStatus.__members__:
                yield int(HTTPStatus[name])
    for value in named_values(function):
        if isinstance(value, type):
            yield from (status for kind, status in _RAISED.items() if issubclass(value, kind))
            if isinstance(status := getattr(value, "status_code", None), int):
                yield status
        elif isinstance(value, FunctionType) and value in _CALLED:
            yield _CALLED[value]


def codes_of(function: FunctionType | CodeType) -> Iterator[CodeType]:
    """Yield the code of the function, and of functions defined in it."""
    code = function if isinstance(function, CodeType) else function.__code__
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_of(const)


def named_values(function: FunctionType) -> list[Any]:
    """Return the functions, classes and modules that a function's code names, also as attributes of modules."""
    names = {name for code in codes_of(function) for name in code.co_names}
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    modules = [value for value in values if isinstance(value, ModuleType)]
    return values + [vars(module)[name] for module in modules for name in names if name in vars(module)]


def _of_framework(one: Any) -> bool:
    return str(one.__module__).partition(".")[0] in FRAMEWORKS
