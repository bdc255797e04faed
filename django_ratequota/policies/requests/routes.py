"""The route of a request, and all routes, views and scopes of the URLconf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from django.apps import apps
from django.conf import settings as django_settings
from django.urls import Resolver404, ResolverMatch, URLResolver, get_resolver, resolve
from django.utils import translation

from .translated_routes import canonical, each_language, languages_of, once_per_urlconf, spell, walk
from .view_facts import facts_of

#: What DRF's ``format_suffix_patterns`` puts in place of a route's last slash, in regular expressions and paths.
_FORMAT_SUFFIX = re.compile(
    r"(?:\\\.\(\?P<(?P<regex>\w+)>(?:[^()]|\([^()]*\))+\)/\?|<drf_format_suffix[^:>]*:(?P<path>\w+)>)\Z"
)


def spellings(route: str) -> tuple[str, ...]:
    """Return the route in each language; with DRF's format suffix also without it, with and without a last slash.

    ``/api/reports\\.(?P<format>[a-z0-9]+)/?`` is ``/api/reports`` and ``/api/reports/`` as well.
    """
    return tuple(text for own in each_language(route) for text in _unsuffixed(own))


def _unsuffixed(route: str) -> tuple[str, ...]:
    suffix = _FORMAT_SUFFIX.search(route)
    # Read from Django's settings, because a project may not have DRF.
    rest = getattr(django_settings, "REST_FRAMEWORK", None) or {}
    if suffix is None or (suffix["regex"] or suffix["path"]) != rest.get("FORMAT_SUFFIX_KWARG", "format"):
        return (route,)
    plain = route[: suffix.start()]
    return (route, plain) if plain.endswith("/") else (route, plain, f"{plain}/")


def resolved(match: ResolverMatch | None, urlconf: Any = None) -> tuple[str | None, str | None]:
    """Return (route in the default language, URL name with namespaces) of a match; (None, None) without a match.

    ``urlconf`` is the request's own, None = ``ROOT_URLCONF``.
    """
    if match is None:
        return None, None
    return canonical(match.route or "", urlconf), match.view_name or None


@lru_cache(maxsize=4096)
def is_admin_page(name: str | None) -> bool:
    """Whether the URL name (with namespaces) belongs to one of Django's admin sites."""
    if name is None or ":" not in name or not apps.is_installed("django.contrib.admin"):
        return False
    from django.contrib.admin.sites import all_sites

    return not {site.name for site in all_sites}.isdisjoint(name.split(":")[:-1])


class KnownView(NamedTuple):
    """A view in the URLconf."""

    #: In the default language.
    route: str
    #: With namespaces; "" = the view has none of its own.
    name: str
    view: Any
    #: Whether it is a page of Django's admin.
    is_admin: bool


def known_routes(*, admin: bool = False) -> list[tuple[str, str]]:
    """Return (route, URL name or "") of every view in the URLconf, in its order; of the admin only if ``admin``."""
    return [(each.route, each.name) for each in known_views() if admin or not each.is_admin]


def known_views() -> tuple[KnownView, ...]:
    """Return every view in the URLconf, in its order."""
    return _views_of(get_resolver())


@once_per_urlconf
def _views_of(resolver: URLResolver) -> tuple[KnownView, ...]:
    with translation.override(django_settings.LANGUAGE_CODE):
        return tuple(
            # Without a name of the view's own there are only namespaces.
            KnownView(spell(parts), "" if name.endswith(":") else name, view, name.startswith("admin:"))
            for parts, name, view in walk(resolver.url_patterns)
        )


def find_route(route: str) -> tuple[str, str | None, Any] | None:
    """Return (route, URL name, view) of the pattern with this route in any language; None if there is none."""
    own = each_language(route)[0]
    found = ((own, each.name or None, each.view) for each in known_views() if each.route == own)
    return next(found, None) if route in each_language(own) else None


def resolve_path(path: str) -> ResolverMatch:
    """Resolve a path in the path's language, not in the active one. Raises ``Resolver404``."""
    first = translation.get_language_from_path(path) or django_settings.LANGUAGE_CODE
    for code in dict.fromkeys([first, *languages_of(get_resolver()).paths_in]):
        with translation.override(code):
            try:
                return resolve(path)
            except Resolver404 as error:
                failed = error
    raise failed


def known_scopes() -> Mapping[str, tuple[Any, ...]]:
    """Return every scope that a view in the URLconf declares, sorted, with the views that do."""
    return _scopes_of(get_resolver())


@once_per_urlconf
def _scopes_of(resolver: URLResolver) -> Mapping[str, tuple[Any, ...]]:
    found: dict[str, list[Any]] = {}
    for each in _views_of(resolver):
        for scope in facts_of(each.view).scopes():
            found.setdefault(scope, []).append(each.view)
    return {scope: tuple(found[scope]) for scope in sorted(found)}
