"""What a view does and declares: its handlers, scope, cost, throttles and exemption.

Handlers and the exemption are found once per view; what a decorator may add later, or a test replace, each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cached_property, lru_cache
from inspect import getclosurevars, unwrap
from typing import Any, Literal, NamedTuple

from django.utils.functional import Promise

from ...utils.problems import note_problem
from . import view_declarations as declared_by
from .view_declarations import Declaration, LateCheck, below_api_view, declaration_on, is_quota_throttle, least_cost

_FRAMEWORKS = ("django", "rest_framework")
#: What a view has for the method of a request, and so at which endpoints the request counts that do not name it.
#: ``own``: a handler of its own. It counts at endpoints without methods.
#: ``none``: no handler of its own. It counts as well where any method but GET is named.
#: ``preflight``: an ``options`` handler, as for the preflights of CORS. It counts at none of these.
Handling = Literal["own", "none", "preflight"]


class Exemption(NamedTuple):
    """What the code exempts a view from."""

    #: Methods of the requests that nothing limits; None = all methods.
    methods: frozenset[str] | None
    shows_usage: bool

    def covers(self, method: str) -> bool:
        """Return whether nothing limits the view's requests of this method."""
        return self.methods is None or method in self.methods


class ViewFacts:
    """A view is a function, one that ``as_view`` made, or a class; None = it is unknown, as if it were a function.

    Methods are in capitals; "" = what the view declares for methods that declare nothing of their own.
    """

    def __init__(self, view: Any) -> None:
        self.view, self.cls = view, declared_by.view_class(view)

    @property
    def limited(self) -> Mapping[str, LateCheck | None] | None:
        """Return the checks of one of Django Ninja's views under a ``QuotaThrottle``; None for another view."""
        limited: Mapping[str, LateCheck | None] | None = getattr(self.view, declared_by.LIMITED_ATTRIBUTE, None)
        return limited

    def attribute(self, name: str) -> Any:
        """Return the attribute of the view's instances: the argument of ``as_view``, else the class's attribute."""
        arguments = getattr(self.view, "initkwargs", None) or getattr(self.view, "view_initkwargs", None) or {}
        return arguments[name] if name in arguments else getattr(self.cls, name, None)

    @cached_property
    def handlers(self) -> Mapping[str, Any]:
        """Return the handlers of a class, or of Django Ninja's view: method -> the function that answers it.

        A function view has none. Below ``@api_view`` the handler is the decorated function.
        """
        if self.cls is None:
            return {method: one.view_func for one in _operations(self.view) for method in one.methods}
        names: Any = self.attribute("http_method_names") or ()
        actions: Mapping[str, str] = getattr(self.view, "actions", None) or {}  # of a ViewSet
        found = {name.upper(): getattr(self.cls, actions.get(name, name), None) for name in names}
        if "HEAD" in found:
            found["HEAD"] = found["HEAD"] or found.get("GET")
        return {method: below_api_view(handler) for method, handler in found.items() if handler is not None}

    @cached_property
    def exemption(self) -> Exemption | None:
        """Return what the code exempts the view from; None for most views."""
        if is_exempt(self.view) or is_exempt(self.cls):
            return Exemption(None, False)
        methods = frozenset(method for method, handler in self.handlers.items() if is_exempt(handler))
        return Exemption(methods, self.shows_usage) if methods or self.shows_usage else None

    @property
    def shows_usage(self) -> bool:
        """Whether it is the usage endpoint. By an attribute, because a project may not have DRF."""
        return getattr(self.cls, declared_by.USAGE_ATTRIBUTE, False) is True

    @property
    def is_rest(self) -> bool:
        """Whether it is one of REST framework's classes, which authenticate before they check throttles."""
        return hasattr(self.cls, "check_throttles")

    @property
    def has_throttle(self) -> bool:
        """Whether our throttle is among the view's ``throttle_classes``."""
        return any(map(is_quota_throttle, self.attribute("throttle_classes") or ()))

    @property
    def chooses_throttles(self) -> bool:
        """Whether the view's class overrides ``get_throttles``, and so chooses its throttles for each request."""
        method = getattr(self.cls, "get_throttles", None)
        return method is not None and getattr(method, "__module__", "") != "rest_framework.views"

    @cached_property
    def _own_methods(self) -> frozenset[str]:
        """Return the methods for which the view has a handler of its own.

        GET may share it, as in ``@api_view(["GET", "POST"])``. A function view answers all; GET, HEAD and OPTIONS are
        taken for its own.
        """
        handlers = {method: unwrap(handler) for method, handler in self.handlers.items() if method != "HEAD"}
        if not handlers:
            return frozenset(("GET", "HEAD", "OPTIONS"))
        shared = list(handlers.values())
        own = {method for method, handler in handlers.items() if method == "GET" or shared.count(handler) == 1}
        return frozenset(own | {"HEAD"} if "GET" in own else own)

    @property
    def _around(self) -> Declaration | None:
        """Return what ``@ratequota`` declares around the view or its class's ``dispatch``; None without it."""
        around = map(declaration_on, (self.view, getattr(self.cls, "dispatch", None)))
        return next((declared for declared in around if declared is not None and declared.checks), None)

    def handling(self, method: str, *, authenticated: bool | None = None) -> Handling:
        """Return what the view has for the method.

        ``authenticated``: whether REST framework's view has authenticated the caller by now; None = as when the
        view's own check runs.
        """
        if method not in self._own_methods:
            return "none"
        if method != "OPTIONS":
            return "own"
        if authenticated is None:
            authenticated = self.enforces_itself(method) and not self.is_decorated()
        return "preflight" if self._only_answers_preflights(authenticated) else "own"

    def _only_answers_preflights(self, authenticated: bool) -> bool:
        """Whether a request by OPTIONS reaches the ``options`` of a class, and nothing of the project before."""
        dispatch = getattr(self.cls, "dispatch", None)
        # A dispatch of its own may answer every method itself.
        if getattr(dispatch, "__module__", "").partition(".")[0] not in _FRAMEWORKS:
            return False
        # REST framework authenticates first, so that OPTIONS would try passwords for free.
        return authenticated or not (self.is_rest and self.attribute("authentication_classes"))

    def scope_and_cost(self, method: str = "") -> tuple[str | None, Any]:
        """Return what the view declares for the method, None = nothing; a cost is units, or a function.

        The throttle of Ninja's operation comes first, then ``@ratequota``, then the method, then the class.
        """
        if check := (self.limited or {}).get(method):
            return check
        scope, cost = self._of_method_or_class(self.declaration(method))
        if (around := self._around) is None:
            return scope, cost
        return around.scope or scope, cost if around.cost is None else around.cost

    def scope(self, method: str = "") -> str | None:
        """Return the scope that the view declares for the method; None if none."""
        return self.scope_and_cost(method)[0]

    def scopes(self) -> set[str]:
        """Return every scope that the view declares, for whatever method."""
        methods = ("", *self.handlers, *(self.limited or ()))
        return {scope for method in methods if (scope := self.scope(method))}

    def declaration(self, method: str) -> Declaration | None:
        """Return what decorators declare for the method in the view's class; None for other views."""
        return None if self.cls is None else declaration_on(self.handlers.get(method))

    def is_decorated(self, method: str = "") -> bool:
        """Whether ``@ratequota`` decorates the view, its class's ``dispatch``, or the class's code for the method."""
        declared = self._around or (self.declaration(method) if method else None)
        return declared is not None and declared.checks

    def enforces_itself(self, method: str = "") -> bool:
        """Whether the view checks its own requests by the method: it has ``@ratequota`` or our throttle."""
        return (self.limited or {}).get(method) is not None or self.has_throttle or self.is_decorated(method)

    def late_check(self, method: str) -> LateCheck | None:
        """Return the check of a view that may refuse a request before it; None for other views.

        REST framework and Ninja authenticate before they call throttles; other decorators may be around
        ``@ratequota``.
        """
        if self.limited is not None:
            return self.limited.get(method, LateCheck(None, 1))  # which Ninja answers 405
        if self.is_decorated():
            if getattr(self.view, declared_by.WRAPPER_ATTRIBUTE, self.view) is self.view or self.cls is not None:
                return None
            scope, cost = self.scope_and_cost()
            return LateCheck(scope, least_cost(cost))
        if not self.is_rest:
            return None
        declared = self.declaration(method)
        if not (self.has_throttle or (declared is not None and declared.checks) or self.chooses_throttles):
            return None
        scope, cost = self._of_method_or_class(declared)
        return LateCheck(scope, least_cost(cost))

    def _of_method_or_class(self, declared: Declaration | None) -> tuple[str | None, Any]:
        """Return scope and cost that a method declares; what it leaves out is the class's."""
        scope, cost = (None, None) if declared is None else declared[:2]
        scope = scope or self.attribute("throttle_scope")
        cost = self.attribute("throttle_cost") if cost is None else cost
        return (scope_name(scope) or None if isinstance(scope, str | Promise) else None), cost

    def throttles_itself(self, request: Any, args: Any, kwargs: Any) -> bool:
        """Whether our throttle is among those that the view's class chooses for the request."""
        try:
            throttles = _new_instance(self.view, request, args, kwargs).get_throttles()
            return any(is_quota_throttle(type(throttle)) for throttle in throttles)
        except Exception as error:
            # A client error, such as an invalid version or token, is reported by the view itself.
            if getattr(error, "status_code", 500) >= 500:
                of = f"get_throttles of {self.view}"
                note_problem(of, f"{of} failed; ENFORCE_ALL enforces the view", error)
            return False


_facts = lru_cache(maxsize=4096)(ViewFacts)


def facts_of(view: Any) -> ViewFacts:
    """Return the facts of a view, which are kept; a view that is not hashable is read each time."""
    try:
        return _facts(view)
    except TypeError:
        return ViewFacts(view)


def exemption_of_request(request: Any, http: Any) -> Exemption | None:
    """Return what the view is exempt from; ``http`` is Django's request, ``request`` that or REST framework's."""
    match = getattr(http, "resolver_match", None)
    if match is not None:
        return facts_of(getattr(match, "func", None)).exemption
    # Django has resolved nothing, as in tests of REST framework's views.
    view = (getattr(request, "parser_context", None) or {}).get("view")
    return None if view is None else exemption_of_instance(view)


def exemption_of_instance(view: Any) -> Exemption | None:
    """Return what the code exempts an instance of one of REST framework's classes from, for its present action."""
    action = getattr(view, "action", None)  # of a ViewSet
    if action and is_exempt(getattr(view, action, None)):
        return Exemption(None, False)
    return facts_of(type(view)).exemption


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


def is_exempt(one: Any) -> bool:
    """Whether ``@exempt`` decorates a view, a class or a method."""
    return getattr(one, declared_by.EXEMPT_ATTRIBUTE, False) is True


def _operations(view: Any) -> Any:
    """Return the operations of one of Django Ninja's views, which holds them in its closure; none for other views."""
    if getattr(view, "__module__", "") != "ninja.operation":
        return ()
    return getattr(getclosurevars(view).nonlocals.get("self"), "operations", ())


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
