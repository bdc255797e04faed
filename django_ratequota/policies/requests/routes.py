"""Routes and scopes: what Django resolved a request to, and what the code and the URLconf know."""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings as django_settings
from django.urls import Resolver404, ResolverMatch, get_resolver, resolve
from django.utils import translation

from ...engine.types import check_cost
from ...exceptions import InvalidCost
from .translated_routes import canonical, each_language, languages_of, spell, walk
from .translated_routes import readable as readable  # what the routes here are

logger = logging.getLogger("django_ratequota")

#: Set by ``@ratequota`` on the views it decorates: the scope, "" = none.
SCOPE_ATTRIBUTE = "ratequota_scope"
#: What DRF's ``format_suffix_patterns`` puts in place of a route's last slash, in regular expressions and in paths.
_FORMAT_SUFFIX = re.compile(
    r"(?:\\\.\(\?P<(?P<regex>\w+)>(?:[^()]|\([^()]*\))+\)/\?|<drf_format_suffix[^:>]*:(?P<path>\w+)>)\Z"
)
#: Set on the class of the usage endpoint.
USAGE_ATTRIBUTE = "ratequota_shows_usage"
#: Set by ``@ratequota`` on the functions that it makes: the function itself, and its cost. Others' wrappers copy it.
WRAPPER_ATTRIBUTE = "ratequota_wrapper"
#: Set on Django Ninja's views of which some operation has a ``QuotaThrottle``: method -> its ``LateCheck``, None
#: where it has no such throttle.
LIMITED_ATTRIBUTE = "ratequota_limited"


class LateCheck(NamedTuple):
    """What a view asks of its quota after it may have refused the request already."""

    #: None = it names none.
    scope: str | None
    #: Units, None = the endpoint's own. The least where the cost is computed from the request.
    cost: int | None


def spellings(route: str) -> tuple[str, ...]:
    """The route in each language; where it ends with DRF's format suffix also without, with and without last slash.

    ``/api/reports\\.(?P<format>[a-z0-9]+)/?`` is ``/api/reports`` and ``/api/reports/`` as well.
    """
    return tuple(text for own in each_language(route) for text in _unsuffixed(own))


def _unsuffixed(route: str) -> tuple[str, ...]:
    suffix = _FORMAT_SUFFIX.search(route)
    if suffix is None or (suffix["regex"] or suffix["path"]) != _format_kwarg():
        return (route,)
    plain = route[: suffix.start()]
    return (route, plain) if plain.endswith("/") else (route, plain, f"{plain}/")


def _format_kwarg() -> str | None:
    # Read from Django's settings: a project without DRF must not import it here.
    rest: dict[str, Any] = getattr(django_settings, "REST_FRAMEWORK", None) or {}
    kwarg: str | None = rest.get("FORMAT_SUFFIX_KWARG", "format")
    return kwarg


def resolved(match: ResolverMatch | None, urlconf: Any = None) -> tuple[str | None, str | None]:
    """(route, URL name with namespaces) of what Django resolved a request to; Nones where it did not.

    The route is that of the default language. ``urlconf`` is the request's own, None = ``ROOT_URLCONF``.
    """
    if match is None:
        return None, None
    return canonical(match.route or "", urlconf), match.view_name or None


@lru_cache(maxsize=4096)
def is_admin_page(name: str | None) -> bool:
    """Whether the URL name, its namespaces included, is one of Django's admin sites."""
    if name is None or ":" not in name or not apps.is_installed("django.contrib.admin"):
        return False
    from django.contrib.admin.sites import all_sites

    return not {site.name for site in all_sites}.isdisjoint(name.split(":")[:-1])


def shows_usage(view: Any) -> bool:
    """Whether the view is the usage endpoint: known by an attribute, as a project without DRF must not import it."""
    return getattr(view_class(view), USAGE_ATTRIBUTE, False) is True


def scope_of(view: Any) -> str | None:
    """The scope that a view names for itself, by decorator or as ``throttle_scope``; None when it names none."""
    holder = view_class(view)
    decorated = getattr(view, SCOPE_ATTRIBUTE, "") or getattr(getattr(holder, "dispatch", None), SCOPE_ATTRIBUTE, "")
    scope = decorated or class_attribute(view, "throttle_scope")
    return scope if isinstance(scope, str) and scope else None


def enforces_itself(view: Any) -> bool:
    """Whether the view is decorated or has our throttle: it knows its scope and cost, and who authenticated."""
    return is_decorated(view) or any(
        _is_ours(throttle) for throttle in class_attribute(view, "throttle_classes") or ()
    )


def is_decorated(view: Any) -> bool:
    """Whether ``@ratequota`` decorates the view, or its class' dispatch."""
    holder = view_class(view)
    return hasattr(view, SCOPE_ATTRIBUTE) or hasattr(getattr(holder, "dispatch", None), SCOPE_ATTRIBUTE)


def late_check(view: Any, method: str) -> LateCheck | None:
    """What a view asks that may refuse a request before it has it checked; None of all others.

    REST framework and Ninja authenticate before they ask throttles; other decorators may be around ``@ratequota``.
    """
    limited: dict[str, LateCheck | None] | None = getattr(view, LIMITED_ATTRIBUTE, None)
    if limited is not None:
        return limited.get(method, LateCheck(None, 1))  # which Ninja answers 405
    if is_decorated(view):
        wrapper, cost = getattr(view, WRAPPER_ATTRIBUTE, (view, None))
        return None if wrapper is view or view_class(view) is not None else LateCheck(scope_of(view), cost)
    if not (chooses_throttles(view) or enforces_itself(view)):
        return None
    return LateCheck(scope_of(view), least_cost(class_attribute(view, "throttle_cost")))


def least_cost(cost: Any) -> int | None:
    """The units that a request consumes at least, by what names its cost; None = the endpoint's own."""
    if isinstance(cost, property) or callable(cost):
        return 1
    try:
        return None if cost is None else check_cost(cost)
    except InvalidCost:
        return None  # as where the throttle is asked


def chooses_throttles(view: Any) -> bool:
    """Whether the view's class picks its throttles for each request, by a ``get_throttles`` of its own."""
    method = getattr(view_class(view), "get_throttles", None)
    return method is not None and getattr(method, "__module__", "") != "rest_framework.views"


def throttles_itself(view: Any, request: Any, args: Any, kwargs: Any) -> bool:
    """Whether our throttle is among those that the view's class picks for the request."""
    try:
        return any(_is_ours(type(throttle)) for throttle in _twin(view, request, args, kwargs).get_throttles())
    except Exception as error:
        # What is the client's fault (a version that is none, a wrong token), the view itself will say.
        if getattr(error, "status_code", 500) >= 500:
            logger.exception("get_throttles of %s failed; ENFORCE_ALL enforces the view", view)
        return False


def _twin(view: Any, request: Any, args: Any, kwargs: Any) -> Any:
    """Another instance like the one that answers, as REST framework has it when it asks for the throttles."""
    twin = view.cls(**(getattr(view, "initkwargs", None) or {}))
    actions = getattr(view, "actions", None) or {}
    twin.action_map = {"head": actions.get("get"), **actions}
    twin.setup(request, *args, **kwargs)
    asked = twin.request = twin.initialize_request(request, *args, **kwargs)
    load = asked._load_stream

    def load_and_keep() -> None:
        # Else ``request.data`` would leave nothing for the view to parse; of forms Django keeps the fields.
        if request.content_type != "multipart/form-data":
            _ = request.body
        load()

    asked._load_stream = load_and_keep
    twin.headers = twin.default_response_headers
    twin.format_kwarg = twin.get_format_suffix(**kwargs)
    asked.accepted_renderer, asked.accepted_media_type = twin.perform_content_negotiation(asked)
    asked.version, asked.versioning_scheme = twin.determine_version(asked, *args, **kwargs)
    return twin


def _is_ours(throttle: Any) -> bool:
    """Whether it is a ``QuotaThrottle``, told by name: a project without DRF must not import it here."""
    return any(
        base.__module__ == "django_ratequota.throttling" and base.__name__ == "QuotaThrottle"
        for base in getattr(throttle, "__mro__", ())
    )


def limits_itself(view: Any) -> bool:
    """Whether anything of this package limits the view, the drop-ins for other packages included."""
    if str(getattr(view, "__module__", "")).startswith("django_ratequota."):
        return False  # the usage endpoint: it limits itself, and none of the project's views
    throttles = class_attribute(view, "throttle_classes") or ()
    bases = [base for throttle in throttles for base in getattr(throttle, "__mro__", ())]
    ours = any(base.__module__.startswith("django_ratequota.") for base in bases)
    return ours or hasattr(view, LIMITED_ATTRIBUTE) or enforces_itself(view)


def view_class(view: Any) -> Any:
    """The class that ``as_view`` made the view from; None of other views."""
    return getattr(view, "cls", None) or getattr(view, "view_class", None)


def class_attribute(view: Any, name: str) -> Any:
    """What the view's instances have under that name: what ``as_view`` was given, else the class's own."""
    given = getattr(view, "initkwargs", None) or getattr(view, "view_initkwargs", None) or {}
    return given[name] if name in given else getattr(view_class(view), name, None)


def known_routes(*, admin: bool = False) -> list[tuple[str, str]]:
    """(route, URL name or "") of every view in the URLconf, in its order; the admin's only where asked for."""
    return [(route, _whole(name)) for route, name, _ in _views() if admin or not name.startswith("admin:")]


def known_views() -> list[tuple[str, str, Any]]:
    """(route in the default language, URL name or "", view) of every view in the URLconf, in its order."""
    return [(route, _whole(name), view) for route, name, view in _views()]


def _views() -> list[tuple[str, str, Any]]:
    with translation.override(django_settings.LANGUAGE_CODE):
        return [(spell(parts), name, view) for parts, name, view in walk(get_resolver().url_patterns)]


def _whole(name: str) -> str:
    """The URL name; "" where there are namespaces alone."""
    return "" if name.endswith(":") else name


def find_route(route: str) -> tuple[str, str | None, Any] | None:
    """(route, URL name, view) of the pattern that some language spells like this; None when there is none."""
    views = ((found, name or None, view) for found, name, view in known_views() if route in each_language(found))
    return next(views, None)


def resolve_path(path: str) -> ResolverMatch:
    """Resolve a path in its own language, not in the active one. Raises ``Resolver404``."""
    first = translation.get_language_from_path(path) or django_settings.LANGUAGE_CODE
    for code in dict.fromkeys([first, *languages_of(get_resolver()).paths_in]):
        with translation.override(code):
            try:
                return resolve(path)
            except Resolver404 as error:
                failed = error
    raise failed


def known_scopes() -> list[str]:
    """Every scope that a view in the URLconf names for itself, sorted."""
    scopes = {scope_of(view) for _, _, view in known_views()}
    return sorted(scope for scope in scopes if scope)
