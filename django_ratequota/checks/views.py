"""System checks of the views: whether anything enforces policies, and whether endpoints count what views return."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from types import FunctionType
from typing import Any

from django.conf import settings as django_settings
from django.core import checks
from django.utils import timezone

from .. import conf
from ..policies.exemptions import exemption_of
from ..policies.facts import endpoint_facts
from ..policies.requests.declarations import DECLARED_ATTRIBUTE
from ..policies.requests.methods import takes_any_method
from ..policies.requests.routes import known_views
from ..policies.requests.view_code import codes_of, named_values, never_answers, operations_of, project_functions
from ..policies.requests.view_declarations import (
    chooses_throttles,
    class_attribute,
    has_throttle,
    is_decorated,
    is_quota_throttle,
    is_rest,
    late_check,
    limits_itself,
    method_declaration,
    methods_of,
    scopes_of,
    shows_usage,
    view_class,
)
from .database import Messages, of_policies

#: Modules whose functions and classes limit requests, drop-ins included.
_LIMITING = re.compile(r"django_ratequota\.(compat|decorators|enforcement|engine\.limiter|ninja|throttling)\b")
#: Modules that are not the project's own.
_FOREIGN = ("django.", "django_ratequota.")
#: Attributes of REST framework's own throttle classes, which a ``QuotaThrottle`` does not read.
_NOT_READ = ("scope", "rate", "THROTTLE_RATES", "get_cache_key", "parse_rate")
#: Most functions that are read. In a project with more, one that limits may be among the rest: so no warning.
_MAX_FUNCTIONS = 10_000
#: Most views that a message names.
_MAX_SHOWN = 5


@checks.register
def check_enforced(**_: Any) -> Messages:
    """W010: no view, no middleware and no project code that these call asks for a decision."""
    if conf.settings.enforce_all:
        return []
    try:
        views = [view for _, name, view in known_views() if not name.startswith("admin:")]
    except Exception:  # Django's own check reports what is wrong with the URLconf
        return []
    modules = {str(getattr(view, "__module__", "")) for view in views}
    modules |= {path.rpartition(".")[0] for path in django_settings.MIDDLEWARE}
    others = {name for name in modules if name and not name.startswith(_FOREIGN)}
    if any(map(limits_itself, views)) or any(map(_module_limits, others)) or (not others and _limits_by_default()):
        return []
    functions = project_functions([*views, *_middleware_code()], _MAX_FUNCTIONS)
    if len(functions) > _MAX_FUNCTIONS or any(map(_uses_limiter, functions)):
        return []
    text = "Nothing enforces policies: no view has a throttle or decorator of django-ratequota; ENFORCE_ALL is off."
    hint = "Add QuotaThrottle to DEFAULT_THROTTLE_CLASSES or to a view, @ratequota to a view, or set ENFORCE_ALL."
    if _limits_by_default():
        hint = (
            "DEFAULT_THROTTLE_CLASSES has QuotaThrottle, but no view of REST framework uses it. "
            "Add @ratequota to a view, or set ENFORCE_ALL."
        )
    return [checks.Warning(text, hint=hint, id="django_ratequota.W010")]


@checks.register
def check_unchecked(**_: Any) -> Messages:
    """W015: with ENFORCE_ALL, views with a throttle may refuse requests before the throttle counts them."""
    if not conf.settings.enforce_all or conf.settings.count_unchecked:
        return []
    try:
        late = [route for route, _name, view in known_views() if _may_refuse_before_its_check(view)]
    except Exception:  # Django's own check reports what is wrong with the URLconf
        return []
    text = f"Failed authentication is not counted at views that enforce policies themselves ({_shortened(late)})."
    hint = "Set RATEQUOTA['COUNT_UNCHECKED'] = True, and add a policy counted per ip for these views."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W015")] if late else []


@checks.register
def check_declared(**_: Any) -> Messages:
    """W022: a view declares a scope or a cost by ``@throttle_scope``, and has no throttle that enforces it."""
    try:
        idle = [route for route, _name, view in known_views() if _declares_in_vain(view)]
    except Exception:  # Django's own check reports what is wrong with the URLconf
        return []
    text = f"Nothing enforces what @throttle_scope declares for these views: {_shortened(idle)}."
    hint = (
        "Add QuotaThrottle to DEFAULT_THROTTLE_CLASSES or to their throttle_classes. "
        "On a view that is not REST framework's, write @ratequota(...)."
    )
    return [checks.Warning(text, hint=hint, id="django_ratequota.W022")] if idle else []


def _declares_in_vain(view: Any) -> bool:
    cls = view_class(view)
    if cls is None:
        functions = [view, *(operation.view_func for operation in operations_of(view))]
        found = [getattr(function, DECLARED_ATTRIBUTE, None) for function in functions]
    else:
        found = [method_declaration(view, method) for method in methods_of(view)]
        found.append(class_attribute(view, DECLARED_ATTRIBUTE))
    if all(declared is None or declared.checks for declared in found):
        return False
    return cls is None or not (chooses_throttles(view) or has_throttle(view))


@checks.register
def check_authenticated(**_: Any) -> Messages:
    """W023: ``@ratequota`` checks a request before REST framework has authenticated the caller."""
    try:
        early = [
            route
            for route, _name, view in known_views()
            if is_rest(view_class(view)) and is_decorated(view) and class_attribute(view, "authentication_classes")
        ]
    except Exception:  # Django's own check reports what is wrong with the URLconf
        return []
    text = f"@ratequota around dispatch runs before REST framework knows the user: {_shortened(early)}."
    hint = "Write @throttle_scope(...) on the class instead, with QuotaThrottle among its throttle_classes."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W023")] if early else []


@checks.register
def check_throttle_classes(**_: Any) -> Messages:
    """W024: a subclass of ``QuotaThrottle`` sets a scope or a rate, as for REST framework's own throttles."""
    try:
        views = [view for _route, _name, view in known_views()]
    except Exception:  # Django's own check reports what is wrong with the URLconf
        return []
    messages: Messages = []
    throttles = [one for view in views for one in class_attribute(view, "throttle_classes") or ()]
    for throttle in dict.fromkeys(filter(is_quota_throttle, throttles)):
        own = project_functions(list(throttle.__mro__))
        read = {name for function in own for code in codes_of(function) for name in code.co_names}
        unread = [name for name in _NOT_READ if hasattr(throttle, name) and name not in read]
        if unread:
            text = f"{throttle.__module__}.{throttle.__qualname__} sets {', '.join(unread)}, which nothing reads."
            hint = (
                "Declare the scope on views, as throttle_scope = 'search' or by @throttle_scope('search'), and write "
                "the rate as a policy, in the admin or a file. Then remove the attributes."
            )
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W024"))
    return messages


def _module_limits(name: str) -> bool:
    """Whether a module of the project holds a function or a class that limits."""
    try:
        held = vars(import_module(name)).values()
    except Exception:  # Django raises the same when it uses the module
        return False
    return any(map(_is_limiting, held))


def _is_limiting(value: Any) -> bool:
    """Whether it is a function, a class or an object of a module that limits, or of a subclass."""
    # Exact types, because a proxy (a lazy object, a mock) may run any code when an attribute is read.
    if type(value) is FunctionType:
        return bool(_LIMITING.match(str(value.__module__)))
    kind = value if type(value) is type else type(value)
    return any(_LIMITING.match(str(base.__module__)) for base in kind.__mro__)


def _uses_limiter(function: FunctionType) -> bool:
    """Whether the function's code names or imports something of a module that limits."""
    imported = {name for code in codes_of(function) for name in code.co_names}
    names = any(name == "django_ratequota" or _LIMITING.match(name) for name in imported)
    return names or any(map(_is_limiting, named_values(function)))


def _middleware_code() -> list[Any]:
    """Return the project's middleware: functions, and the methods of classes."""
    found: list[Any] = []
    for path in django_settings.MIDDLEWARE:
        module, _, name = path.rpartition(".")
        if not path.startswith(_FOREIGN) and module in sys.modules:  # what can be imported has been by now
            held = getattr(sys.modules[module], name, None)
            found += vars(held).values() if type(held) is type else [held]
    return found


def _limits_by_default() -> bool:
    """Whether REST framework's views are limited unless they choose other throttles."""
    rest = getattr(django_settings, "REST_FRAMEWORK", None) or {}
    return any("django_ratequota" in str(throttle) for throttle in rest.get("DEFAULT_THROTTLE_CLASSES") or ())


@of_policies
def check_statuses(**_: Any) -> Messages:
    """W011: an endpoint counts statuses that its views never return."""
    messages: Messages = []
    for endpoint, views in _endpoints_with_views(charged_statuses=""):
        statuses = endpoint_facts(endpoint).charged_statuses
        if views and not endpoint.exempt and all(never_answers(view, statuses) for _route, view in views):
            counted = f"The endpoint {endpoint.name!r} counts responses with status {endpoint.charged_statuses} only"
            text = f"{counted}, and none of its views returns it: no request counts there."
            hint = "In the admin, set its charged statuses to those that its views return on a failure."
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W011"))
    return messages


@of_policies
def check_methods(**_: Any) -> Messages:
    """W013: an endpoint counts some methods, and a view there accepts any."""
    messages: Messages = []
    for endpoint, views in _endpoints_with_views(methods=""):
        loose = [f"{_qualified_name(view)} at {route}" for route, view in views if takes_any_method(view)]
        if loose and not endpoint.exempt:
            counted = f"The endpoint {endpoint.name!r} counts {endpoint.methods}, but these views accept any method"
            text = f"{counted}: {_shortened(loose)}. Other methods than GET count there as well."
            listed = ", ".join(f'"{method}"' for method in endpoint.methods.split())
            hint = (
                f"Decorate functions with @require_http_methods([{listed}]), naming all methods that they handle; "
                "give classes methods instead of a dispatch of their own, and http_method_names. Or empty the "
                "endpoint's methods in the admin."
            )
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W013"))
    return messages


@of_policies
def check_unlimited(**_: Any) -> Messages:
    """W017: COUNT_UNCHECKED is on, and views have no policy under which it could count."""
    from ..models import RatePolicy

    if not conf.settings.count_unchecked:
        return []
    for_everyone = RatePolicy.objects.filter(counted_per="ip", user=None, subject="", subject_list=None, plan=None)
    in_force = for_everyone.exclude(mode="off").exclude(ends_at__lte=timezone.now())
    limited = set(in_force.values_list("endpoint", flat=True))
    if None in limited:  # for all endpoints
        return []
    try:
        found = [views for endpoint, views in _endpoints_with_views() if endpoint.pk in limited or endpoint.exempt]
        counted = {route for views in found for route, _view in views}
        # The usage endpoint has a limit that is built in.
        views = [(route, view) for route, _name, view in known_views() if not shows_usage(view)]
        late = [route for route, view in views if _may_refuse_before_its_check(view)]
    except Exception:  # Django's own check reports what is wrong with the URLconf
        return []
    bare = [route for route in late if route not in counted]
    text = f"COUNT_UNCHECKED counts nothing where no policy counted per ip applies ({_shortened(bare)})."
    hint = "Add a policy counted per ip for everyone: for all endpoints, or for the endpoints of these views."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W017")] if bare else []


def _may_refuse_before_its_check(view: Any) -> bool:
    exemption = exemption_of(view)
    limited = [m for m in ("", *methods_of(view)) if exemption is None or not exemption.covers(m)]
    return any(late_check(view, method) for method in limited)


def _endpoints_with_views(**without: str) -> list[tuple[Any, list[tuple[str, Any]]]]:
    """Return the endpoints that lack these field values, each with (route, view) of its views."""
    from ..models import Endpoint
    from ..operations.advice import matched_routes  # web processes need none of it

    endpoints = list(Endpoint.objects.exclude(**without))
    views = known_views() if endpoints else []
    found = []
    for endpoint in endpoints:
        matched = set(matched_routes(endpoint, [(route, name) for route, name, _ in views]))
        of_endpoint = [
            (route, view)
            for route, name, view in views
            if (route, name) in matched or endpoint.name in scopes_of(view)
        ]
        found.append((endpoint, of_endpoint))
    return found


def _shortened(names: list[str]) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"{', '.join(names[:_MAX_SHOWN])}{more}"


def _qualified_name(view: Any) -> str:
    named = view_class(view) or view
    return f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"
