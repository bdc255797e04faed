"""How views handle the methods of requests, and so at which endpoints a request counts.

An endpoint's ``methods`` name what operators expect, such as POST for logins. A function view runs the same code for
any method, so a login by PUT, or by a method that the client makes up, counts like the POST.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from inspect import unwrap
from os import SEEK_END
from types import CodeType, FunctionType, MethodType
from typing import Any, Literal

from django.views import View

from .view_code import FRAMEWORKS, MOST, codes_of, held_values, operations_of, project_functions
from .view_declarations import class_attribute, enforces_itself, is_decorated, view_class

#: How a request's method counts at endpoints that do not name it.
#: ``free``: at none, because an ``options`` handler answers.
#: ``own``: at those for all methods, because the view has code for this method alone, or answers 405.
#: ``any``: also at those for other methods, because the view's code for these answers it.
#: ``every``: like ``any``, even if another endpoint names the method.
Handling = Literal["free", "own", "any", "every"]
#: Method in capitals -> handling; "" -> that of any other method.
#: ``authenticating``: ``any`` until REST framework's view has authenticated the caller, then ``free`` or ``own``. It
#: authenticates before it looks at the method, so passwords could be tried by a method that does nothing.
_Handlings = Mapping[str, Literal["free", "own", "any", "authenticating"]]

_READING = ("GET", "HEAD")
_NO_BODY = (None, "", "0")
_ANY: _Handlings = {"": "any"}
#: Methods of a class that run for every request, before or instead of the handler.
_RUN_ALWAYS = (
    *("__getattr__", "__getattribute__", "setup", "dispatch", "http_method_not_allowed"),
    *("initialize_request", "initial"),
)


def handling_of_request(request: Any, http: Any, method: str) -> Handling:
    """Return how a request's method counts. ``http`` is Django's request, ``request`` that or REST framework's."""
    if method in _READING:
        meta = http.META
        if meta.get("CONTENT_LENGTH") in _NO_BODY and "HTTP_TRANSFER_ENCODING" not in meta:
            scope = getattr(http, "scope", None)
            if scope is None or not _has_undeclared_body(http, scope):
                return "own"
    match = getattr(http, "resolver_match", None)
    if match is not None:
        handlings = handlings_of(getattr(match, "func", None))
    else:
        view = (getattr(request, "parser_context", None) or {}).get("view")
        handlings = _ANY if view is None else _handlings_of_class(type(view), getattr(view, "action_map", None), view)
    return _handling(handlings, method, request is not http)


def _has_undeclared_body(http: Any, scope: Mapping[str, Any]) -> bool:
    """Whether an ASGI request has a body without a header for it, as in HTTP/2 and 3. Django has read it."""
    if str(scope.get("http_version", "1.1")).startswith("1"):
        return False
    if hasattr(http, "_body"):
        return bool(http._body)
    stream = getattr(http, "_stream", None)
    if stream is None or stream.closed:
        return False
    at = stream.tell()
    size = stream.seek(0, SEEK_END)
    stream.seek(at)
    return bool(size)


def handling_of_view(view: Any, method: str) -> Handling:
    """Return how a method counts at the view; None = the view is unknown."""
    if method in _READING:
        return "own"
    return _handling(handlings_of(view), method, enforces_itself(view, method) and not is_decorated(view))


def _handling(handlings: _Handlings, method: str, authenticated: bool) -> Handling:
    if method in _READING:  # with a body, so the code for other methods may read it
        return "every" if handlings.get("GET", handlings[""]) == "any" else "own"
    handling = handlings.get(method) or handlings[""]
    if handling == "authenticating":
        handling = "any" if not authenticated else "free" if method == "OPTIONS" else "own"
    return handling


def takes_any_method(view: Any) -> bool:
    """Whether the view runs the same code for every method, judging by its code."""
    cls = view_class(view)
    answers = view if cls is None else getattr(cls, "dispatch", None)
    if handlings_of(view)[""] != "any" or (cls is not None and _of_framework(answers)):
        return False
    functions = project_functions([answers])
    names = {name for function in functions for code in codes_of(function) for name in code.co_names}
    return 0 < len(functions) <= MOST and names.isdisjoint(("method", "dispatch"))


def handlings_of(view: Any) -> _Handlings:
    """Return how each method counts at the view."""
    try:
        return _cached_handlings(view)
    except TypeError:  # the view is not hashable
        return _cached_handlings.__wrapped__(view)


@lru_cache(maxsize=4096)
def _cached_handlings(view: Any) -> _Handlings:
    cls = view_class(view)
    if isinstance(cls, type) and issubclass(cls, View):
        return _handlings_of_class(cls, getattr(view, "actions", None), view)
    operations = [(method, one.view_func) for one in operations_of(view) for method in one.methods]
    return {"": "own", **_handlings_of_handlers(dict(operations), ())} if operations else _ANY


def _handlings_of_class(cls: Any, actions: Mapping[str, str] | None, view: Any) -> _Handlings:
    """Return the handlings of a class; ``view`` is the function that ``as_view`` made, or an instance."""

    def attribute(name: str) -> Any:
        return getattr(view, name, None) if isinstance(view, cls) else class_attribute(view, name)

    names = [name for name in attribute("http_method_names") if name != "head"]
    found = {name: getattr(cls, (actions or {}).get(name, name), None) for name in names}
    handlings = _handlings_of_handlers({name: unwrap(handler) for name, handler in found.items() if handler}, names)
    run_always = [vars(base)[name] for base in cls.__mro__[:-1] for name in _RUN_ALWAYS if name in vars(base)]
    if not all(map(_of_framework, _held([view, *run_always], cls))):
        default = "any"
    else:
        default = "authenticating" if attribute("authentication_classes") else "own"
    if handlings.get("OPTIONS") == "own":
        handlings["OPTIONS"] = "free" if default == "own" else default
    return {"": default, **handlings}


def _handlings_of_handlers(handlers: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return ``own`` for methods with code of their own, ``any`` if they share a handler or only call another."""
    shared = list(handlers.values())
    return {
        name.upper(): "any" if shared.count(handler) > 1 or _only_calls(handler, names) else "own"
        for name, handler in handlers.items()
    }


def _only_calls(handler: Any, names: Iterable[str]) -> bool:
    """Whether the handler only calls another of ``names``, as ``ProcessFormView.put`` does, or ``super().post``."""
    code: CodeType | None = getattr(handler, "__code__", None)
    if code is None:
        return False
    called = [name for name in code.co_names if name != "super"]
    return len(called) == 1 and called[0] in names and called[0] != code.co_name


def _held(functions: list[Any], cls: type) -> Iterator[Any]:
    """Yield the functions, and the callables that they wrap or hold, except ``cls`` and its instances."""
    pending, seen = list(functions), set[int]()
    while pending:
        one = pending.pop()
        if isinstance(one, MethodType | partial):
            pending.append(one.__func__ if isinstance(one, MethodType) else one.func)
        elif isinstance(one, list | tuple):
            pending += one
        elif callable(one) and one is not cls and not isinstance(one, cls) and id(one) not in seen:
            seen.add(id(one))
            yield one
            pending += held_values(one)


def _of_framework(one: Any) -> bool:
    """Whether a framework defines the function, or the object's class; ``functools.wraps`` does not hide it."""
    if isinstance(one, FunctionType):
        module = one.__globals__.get("__name__")
    else:
        module = (one if isinstance(one, type) else type(one)).__module__
    return str(module).partition(".")[0] in FRAMEWORKS
