"""Routes and scopes: what Django resolved a request to, and what the code and the URLconf know."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from django.apps import apps
from django.conf import settings as django_settings
from django.urls import Resolver404, ResolverMatch, get_resolver, resolve
from django.utils import translation

from .translated_routes import canonical, each_language, languages_of, spell, walk
from .translated_routes import readable as readable  # what the routes here are
from .views import scope_of

#: What DRF's ``format_suffix_patterns`` puts in place of a route's last slash, in regular expressions and in paths.
_FORMAT_SUFFIX = re.compile(
    r"(?:\\\.\(\?P<(?P<regex>\w+)>(?:[^()]|\([^()]*\))+\)/\?|<drf_format_suffix[^:>]*:(?P<path>\w+)>)\Z"
)


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
