"""System checks of the views: whether anything enforces policies, and what views declare in vain."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from django.conf import settings as django_settings
from django.core import checks
from django.utils import timezone

from .. import conf
from ..engine.rates import CONCURRENT
from ..models import Endpoint, RatePolicy
from ..operations.advice import has_views, matched_routes
from ..policies.requests import view_declarations as views
from ..policies.requests.routes import known_views
from ..policies.requests.view_facts import facts_of, scope_name
from .database import Messages

#: Packages that are not the project's own.
_FOREIGN = {"", "django", "django_ratequota"}
#: Attributes of REST framework's own throttle classes, which a ``QuotaThrottle`` does not read.
_NOT_READ = ("scope", "rate", "THROTTLE_RATES", "get_cache_key", "parse_rate")
_THROTTLE_MODULES = ("django_ratequota.throttling", "rest_framework.throttling")
#: Who shares a counter of a policy counted per these.
_SHARED = ("everyone", "plan")
#: Most views that a message names.
_MAX_SHOWN = 5


def check_enforced(**_: Any) -> Messages:
    """W010: no view is limited."""
    limited = [view for _, name, view in _views() if not name.startswith("admin:")]
    if conf.settings.enforce_all or any(map(_is_limited, limited)) or not _views():
        return []
    own = [view for view in limited if str(getattr(view, "__module__", "")).partition(".")[0] not in _FOREIGN]
    # REST framework's views are limited by default, unless they choose other throttles.
    rest = getattr(django_settings, "REST_FRAMEWORK", None) or {}
    defaults = map(str, rest.get("DEFAULT_THROTTLE_CLASSES") or ())
    if not own and any("django_ratequota" in throttle for throttle in defaults):
        return []
    text = (
        "No view enforces policies. Views need a throttle or decorator of django-ratequota, unless ENFORCE_ALL is on."
    )
    hint = (
        "Add QuotaThrottle to DEFAULT_THROTTLE_CLASSES or to a view, add @ratequota to a view or set ENFORCE_ALL. If "
        "your code calls check_request or a Limiter instead, add this check to SILENCED_SYSTEM_CHECKS."
    )
    return [checks.Warning(text, hint=hint, id="django_ratequota.W010")]


def check_declared(**_: Any) -> Messages:
    """W022: a view declares a scope or a cost by ``@throttle_scope``, and has no throttle that enforces it."""
    idle = [route for route, _name, view in _views() if _declares_in_vain(view)]
    text = f"The @throttle_scope of these views has no effect: {_shortened(idle)}."
    hint = (
        "Add QuotaThrottle to DEFAULT_THROTTLE_CLASSES or to their throttle_classes. "
        "On views that do not use REST framework, use @ratequota(...)."
    )
    return [checks.Warning(text, hint=hint, id="django_ratequota.W022")] if idle else []


def check_authenticated(**_: Any) -> Messages:
    """W023: ``@ratequota`` checks a request before REST framework has authenticated the caller."""
    early = [
        route
        for route, _name, view in _views()
        for facts in [facts_of(view)]
        if facts.is_rest and facts.is_decorated() and facts.attribute("authentication_classes")
    ]
    text = f"@ratequota around dispatch runs before REST framework authenticates the user: {_shortened(early)}."
    hint = "Use @throttle_scope(...) on the class instead, with QuotaThrottle in its throttle_classes."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W023")] if early else []


def check_throttle_classes(**_: Any) -> Messages:
    """W024: a subclass of ``QuotaThrottle`` sets a scope or a rate, as for REST framework's own throttles."""
    messages: Messages = []
    throttles = [one for *_, view in _views() for one in facts_of(view).attribute("throttle_classes") or ()]
    for throttle in dict.fromkeys(filter(views.is_quota_throttle, throttles)):
        ignored = [name for name in _NOT_READ if hasattr(throttle, name)]
        own = [vars(base) for base in throttle.__mro__ if base.__module__ not in _THROTTLE_MODULES]
        methods = {name for held in own for name, value in held.items() if isinstance(value, FunctionType)}
        if ignored and methods.issubset(_NOT_READ):  # other methods may read them
            text = f"{throttle.__module__}.{throttle.__qualname__} sets {', '.join(ignored)}, which have no effect."
            hint = (
                "Declare the scope on views with throttle_scope = 'search' or @throttle_scope('search'), and enter "
                "the rate as a policy in the admin or a file. Then remove the attributes."
            )
            messages.append(checks.Warning(text, hint=hint, id="django_ratequota.W024"))
    return messages


def check_scopes(**_: Any) -> Messages:
    """E009: the ``throttle_scope`` of a view is not a text."""
    messages: Messages = []
    for route, _name, view in _views():
        try:
            scope_name(facts_of(view).attribute("throttle_scope") if facts_of(view).has_throttle else None)
        except TypeError as error:
            text = f"The throttle_scope of {route} is not valid: {error}."
            hint = "Change it to a string. Until then, each request fails with a TypeError."
            messages.append(checks.Error(text, hint=hint, id="django_ratequota.E009"))
    return messages


def check_unlimited() -> Messages:
    """W017: COUNT_UNCHECKED is on, and views have no policy under which it could count."""
    if not conf.settings.count_unchecked:
        return []
    for_everyone = RatePolicy.objects.filter(counted_per="ip", user=None, subject="", subject_list=None, plan=None)
    in_force = for_everyone.exclude(mode="off").exclude(ends_at__lte=timezone.now())
    limited = set(in_force.values_list("endpoint", flat=True))
    # The usage endpoint has a limit that is built in.
    found = [one for one in _views() if not facts_of(one[2]).shows_usage and _may_refuse_before_its_check(one[2])]
    counted, alone = list[Any](), list[Any]()
    for endpoint in Endpoint.objects.all() if found else ():
        matched = set(matched_routes(endpoint, [one[:2] for one in found]))
        own = [one for one in found if one[:2] in matched or endpoint.name in facts_of(one[2]).scopes()]
        if endpoint.pk in limited or endpoint.limits == Endpoint.Limits.NONE:
            counted += own
        elif endpoint.limits == Endpoint.Limits.OWN:  # where policies for all endpoints do not apply
            alone += own
    bare = [one for one in found if one not in counted and (None not in limited or one in alone)]
    routes = _shortened([route for route, _name, _view in bare])
    text = f"COUNT_UNCHECKED has no effect on views without a policy counted per ip ({routes})."
    hint = (
        "Add a policy counted per ip for everyone, for all endpoints or for the endpoints of these views. "
        "Endpoints to which only their own policies apply need such a policy of their own."
    )
    return [checks.Warning(text, hint=hint, id="django_ratequota.W017")] if bare else []


def check_shared_slots() -> Messages:
    """W031: a view's concurrent limits are all for its clients together, so that one client can hold every slot."""
    rows = RatePolicy.objects.filter(rates__icontains=CONCURRENT, mode="enforce").exclude(ends_at__lte=timezone.now())
    everybody = rows.filter(user=None, subject="", subject_list=None, plan=None).exclude(starts_at__gt=timezone.now())
    own = set(everybody.exclude(counted_per__in=_SHARED).values_list("endpoint", flat=True))
    shared = set(rows.filter(counted_per__in=_SHARED).values_list("endpoint", flat=True)) - own
    limits = ["own"] if None in own else ["own", "besides"]
    alone = Endpoint.objects.filter(pk__in=shared - {None}, limits__in=limits)
    names = ["all"] * (None in shared) + [one.name for one in alone if _views() and has_views(one)]
    text = f"One client can hold all concurrent requests of these endpoints: {_shortened(names)}."
    hint = "Add a policy counted per caller with a concurrent limit, so that each client can hold only a few."
    return [checks.Warning(text, hint=hint, id="django_ratequota.W031")] if names else []


def _views() -> list[tuple[str, str, Any]]:
    """Return (route, URL name, view) of all views; none where Django's own check reports a broken URLconf."""
    try:
        return [each[:3] for each in known_views()]
    except Exception:
        return []


def _is_limited(view: Any) -> bool:
    """Return whether this package limits the view, also by a drop-in for another package."""
    if str(getattr(view, "__module__", "")).startswith("django_ratequota."):
        return False  # the usage endpoint, which is no view of the project
    facts = facts_of(view)
    throttles = facts.attribute("throttle_classes") or ()
    bases = [base for throttle in throttles for base in getattr(throttle, "__mro__", ())]
    ours = any(base.__module__.startswith("django_ratequota.") for base in bases)
    return ours or facts.limited is not None or facts.enforces_itself()


def _declares_in_vain(view: Any) -> bool:
    facts = facts_of(view)
    declared = [views.declaration_on(handler) for handler in facts.handlers.values()]
    declared += facts.attribute(views.DECLARED_ATTRIBUTE), views.declaration_on(view)
    if all(one is None or one.checks for one in declared):
        return False
    return not (facts.chooses_throttles or facts.has_throttle)


def _may_refuse_before_its_check(view: Any) -> bool:
    facts = facts_of(view)
    limited = [m for m in ("", *facts.handlers) if facts.exemption is None or not facts.exemption.covers(m)]
    return any(map(facts.late_check, limited))


def _shortened(names: list[str]) -> str:
    """Join the first names, and say how many more there are."""
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"{', '.join(names[:_MAX_SHOWN])}{more}"
