"""System checks of the project: whether anything enforces policies, and whether its views answer what they count."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from importlib import import_module
from types import FunctionType
from typing import Any

from django.conf import settings as django_settings
from django.core import checks
from django.db import Error as DatabaseError
from django.db import connections
from django.utils import timezone

from .. import conf
from ..policies.facts import endpoint_facts
from ..policies.requests.methods import takes_any_method
from ..policies.requests.routes import known_views, late_check, limits_itself, scope_of, shows_usage, view_class
from ..policies.requests.view_code import codes_of, named_values, never_answers, project_functions
from ..recording.databases import policy_alias

#: Modules that define what limits requests, drop-ins included; and modules that are not the project's own.
_LIMITING = re.compile(r"django_ratequota\.(compat|decorators|enforcement|engine\.limiter|ninja|throttling)\b")
_NOT_THEIRS = ("django.", "django_ratequota.")
#: Functions looked into; of a project with more it is unknown what they call.
_MOST = 10_000
#: Views that a message names.
_SHOWN = 5


def connect() -> None:
    """Register the checks."""
    checks.register(check_enforced)
    checks.register(check_unchecked)
    checks.register(check_migrated, checks.Tags.database)
    checks.register(check_statuses, checks.Tags.database)
    checks.register(check_methods, checks.Tags.database)
    checks.register(check_unlimited, checks.Tags.database)


def check_enforced(app_configs: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """W010: no view, no middleware and no code of the project that these call asks for a decision."""
    if conf.settings.enforce_all:
        return []
    try:
        views = [view for _, name, view in known_views() if not name.startswith("admin:")]
    except Exception:  # Django's own check says what is wrong with the URLconf
        return []
    modules = {str(getattr(view, "__module__", "")) for view in views}
    modules |= {path.rpartition(".")[0] for path in django_settings.MIDDLEWARE}
    others = {name for name in modules if name and not name.startswith(_NOT_THEIRS)}
    if any(map(limits_itself, views)) or any(map(_limits, others)) or (not others and _limits_by_default()):
        return []
    functions = project_functions([*views, *_middleware()], _MOST)
    if len(functions) > _MOST or any(map(_asks, functions)):
        return []
    text = "Nothing enforces policies: no view has a throttle or a decorator of django-ratequota, ENFORCE_ALL is off."
    hint = "Add QuotaThrottle to DEFAULT_THROTTLE_CLASSES or to a view, @ratequota to a view, or set ENFORCE_ALL."
    if _limits_by_default():
        hint = (
            "DEFAULT_THROTTLE_CLASSES has QuotaThrottle, but no view is one of REST framework's that uses it. "
            "Add @ratequota to a view, or set ENFORCE_ALL."
        )
    return [checks.Warning(text, hint=hint, id="django_ratequota.W010")]


def check_unchecked(app_configs: Any = None, **_: Any) -> list[checks.CheckMessage]:
    """W015: with ENFORCE_ALL, views with a throttle may refuse requests before it counts them."""
    if not conf.settings.enforce_all or conf.settings.count_unchecked:
        return []
    try:
        late = [route for route, _name, view in known_views() if late_check(view, "") is not None]
    except Exception:  # Django's own check says what is wrong with the URLconf
        return []
    text = f"Failed authentication is not counted at views that enforce policies themselves ({', '.join(late[:3])})."
    hint = "Set RATEQUOTA['COUNT_UNCHECKED'] = True, and have a policy counted per ip for these views."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W015")] if late else []


def _limits(name: str) -> bool:
    """Whether a module of the project holds a function or a class that limits."""
    try:
        held = vars(import_module(name)).values()
    except Exception:  # Django raises the same when it uses the module
        return False
    return any(map(_is_limiting, held))


def _is_limiting(value: Any) -> bool:
    """Whether it is a function, a class or an object of a module that limits, or of a class based on one of these."""
    # Exact types: what stands in for another object may do anything when it is looked at.
    if type(value) is FunctionType:
        return bool(_LIMITING.match(str(value.__module__)))
    kind = value if type(value) is type else type(value)
    return any(_LIMITING.match(str(base.__module__)) for base in kind.__mro__)


def _asks(function: FunctionType) -> bool:
    """Whether the function's code names what limits, or imports it."""
    imported = {name for code in codes_of(function) for name in code.co_names}
    names = any(name == "django_ratequota" or _LIMITING.match(name) for name in imported)
    return names or any(map(_is_limiting, named_values(function)))


def _middleware() -> list[Any]:
    """The project's middleware: its functions, and the methods of its classes."""
    found: list[Any] = []
    for path in django_settings.MIDDLEWARE:
        module, _, name = path.rpartition(".")
        if not path.startswith(_NOT_THEIRS) and module in sys.modules:  # imported before, where it can be
            held = getattr(sys.modules[module], name, None)
            found += vars(held).values() if type(held) is type else [held]
    return found


def _limits_by_default() -> bool:
    """Whether views will be limited, once there are some."""
    rest = getattr(django_settings, "REST_FRAMEWORK", None) or {}
    return any("django_ratequota" in str(one) for one in rest.get("DEFAULT_THROTTLE_CLASSES") or ())


def check_migrated(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """W009, where the database is checked: a migration of this app is not applied."""
    from django.db.migrations.loader import MigrationLoader

    from ..models import RatePolicy

    alias = policy_alias(RatePolicy)
    # ``migrate`` checks first, and then applies them.
    if alias not in (databases or ()) or sys.argv[1:2] == ["migrate"]:
        return []
    try:
        loader = MigrationLoader(connections[alias])
    except DatabaseError:  # Django's own checks say so
        return []
    label = RatePolicy._meta.app_label
    missing = sorted(
        name for app, name in set(loader.disk_migrations) - set(loader.applied_migrations) if app == label
    )
    text = f"Migrations of {label} are not applied to {alias!r}: {', '.join(missing)}."
    hint = "Run manage.py migrate: until then policies cannot be read."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W009")] if missing else []


def check_statuses(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """W011, where the database is checked: an endpoint counts statuses that its views never answer."""
    messages = []
    for endpoint, views in _endpoints(databases, charged_statuses=""):
        statuses = endpoint_facts(endpoint).charged_statuses
        if views and all(never_answers(view, statuses) for _route, view in views):
            counted = f"The endpoint {endpoint.name!r} counts responses with status {endpoint.charged_statuses} only"
            text = f"{counted}, and none of its views answers that: no request counts there."
            hint = "Set its charged statuses to what its views answer to a failure, in the admin."
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W011"))
    return messages


def check_methods(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """W013, where the database is checked: an endpoint counts some methods, and a view there takes any."""
    messages = []
    for endpoint, views in _endpoints(databases, methods=""):
        loose = [f"{_named(view)} at {route}" for route, view in views if takes_any_method(view)]
        if loose:
            more = f" and {len(loose) - _SHOWN} more" if len(loose) > _SHOWN else ""
            counted = f"The endpoint {endpoint.name!r} counts {endpoint.methods}, but these views take any method"
            text = f"{counted}: {', '.join(loose[:_SHOWN])}{more}. Other methods than GET count there as well."
            listed = ", ".join(f'"{method}"' for method in endpoint.methods.split())
            hint = (
                f"Decorate functions with @require_http_methods([{listed}]), and what else they are to answer; give "
                "classes methods instead of a dispatch of their own, and http_method_names. Or empty the endpoint's "
                "methods, in the admin."
            )
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W013"))
    return messages


def check_unlimited(app_configs: Any = None, databases: Collection[str] | None = None, **_: Any) -> list[Any]:
    """W017, where the database is checked: COUNT_UNCHECKED, and views without a policy that it could count under."""
    from ..models import RatePolicy

    if not conf.settings.count_unchecked or policy_alias(RatePolicy) not in (databases or ()):
        return []
    for_all = RatePolicy.objects.filter(counted_per="ip", user=None, subject="", plan=None).exclude(mode="off")
    try:
        limited = set(for_all.exclude(ends_at__lte=timezone.now()).values_list("endpoint", flat=True))
    except DatabaseError:  # not migrated yet
        return []
    if None in limited:  # for all endpoints
        return []
    try:
        found = [(endpoint.pk, views) for endpoint, views in _endpoints(databases)]
        counted = {route for pk, views in found if pk in limited for route, _view in views}
        # The usage endpoint has a limit that is built in.
        views = [(route, view) for route, _name, view in known_views() if not shows_usage(view)]
        late = [route for route, view in views if late_check(view, "") is not None]
    except Exception:  # Django's own check says what is wrong with the URLconf
        return []
    bare = [route for route in late if route not in counted]
    more = f" and {len(bare) - _SHOWN} more" if len(bare) > _SHOWN else ""
    text = (
        f"COUNT_UNCHECKED counts nothing where no policy counted per ip applies ({', '.join(bare[:_SHOWN])}{more})."
    )
    hint = "Add a policy counted per ip for everyone: for all endpoints, or for the endpoints of these views."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W017")] if bare else []


def _endpoints(databases: Collection[str] | None, **without: str) -> list[tuple[Any, list[tuple[str, Any]]]]:
    """The endpoints that lack these field values, each with (route, view) of its views; none without a database."""
    from ..models import Endpoint
    from ..operations.advice import matched_routes  # web processes need none of it

    if policy_alias(Endpoint) not in (databases or ()):
        return []
    try:
        endpoints = list(Endpoint.objects.exclude(**without))
    except DatabaseError:  # not migrated yet
        return []
    views = known_views() if endpoints else []
    found = []
    for endpoint in endpoints:
        matched = set(matched_routes(endpoint, [(route, name) for route, name, _ in views]))
        its = [
            (route, view)
            for route, name, view in views
            if (route, name) in matched or scope_of(view) == endpoint.name
        ]
        found.append((endpoint, its))
    return found


def _named(view: Any) -> str:
    named = view_class(view) or view
    return f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"
