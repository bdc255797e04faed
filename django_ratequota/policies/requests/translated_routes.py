"""Routes that depend on the language: those under ``i18n_patterns``, and those with translated patterns.

Django resolves a request to the route in the active language. Here the route in ``LANGUAGE_CODE`` stands for it, so
that endpoints, statistics and admin pages do not depend on the language of a request.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

from django.conf import settings as django_settings
from django.core.signals import setting_changed
from django.urls import LocalePrefixPattern, URLPattern, URLResolver, get_resolver
from django.utils import translation
from django.utils.functional import Promise

#: A path that begins with a language code: the code, and the rest.
_PREFIXED = re.compile(r"/(\w+(?:[@-]\w+){0,2})(/.*)", re.DOTALL)
#: Most URLconfs that are kept: ``ROOT_URLCONF``, and those that middleware sets as ``request.urlconf``.
_URLCONFS = 32

#: What is kept of each URLconf.
_cached: list[Any] = []
T = TypeVar("T")

#: A view of the URLconf: (pattern objects from the outermost inwards, URL name, view).
Walked = tuple[tuple[Any, ...], str, Any]


def walk(patterns: Any, parents: tuple[Any, ...] = (), namespace: str = "") -> Iterator[Walked]:
    """Yield every view, its name with namespaces; without a name, the namespaces alone."""
    for pattern in patterns:
        parts = (*parents, pattern.pattern)
        if isinstance(pattern, URLResolver):
            inner = f"{namespace}{pattern.namespace}:" if pattern.namespace else namespace
            yield from walk(pattern.url_patterns, parts, inner)
        elif isinstance(pattern, URLPattern):
            yield parts, f"{namespace}{pattern.name or ''}", pattern.callback


@lru_cache(maxsize=4096)
def readable(route: str) -> str:
    """Return a resolved route with a leading slash and without the anchors of regular expressions.

    ``api/^reports/(?P<pk>[^/.]+)/$`` (a DRF router's) becomes ``/api/reports/(?P<pk>[^/.]+)/``.
    """
    plain = re.sub(r"(^|/)\^", r"\1", route)
    plain = re.sub(r"(\$|\\Z|\\z)$", "", plain)
    return plain if plain.startswith("/") else f"/{plain}"


def spell(parts: tuple[Any, ...]) -> str:
    """Return the route of the pattern objects in the active language."""
    return readable("".join(map(str, parts)))


class Languages:
    """The routes of one URLconf in each language. Patterns with the same text are not distinguished."""

    def __init__(self, resolver: URLResolver) -> None:
        default = django_settings.LANGUAGE_CODE
        others = [code for code, _name in django_settings.LANGUAGES] if django_settings.USE_I18N else []
        self._codes = tuple(dict.fromkeys([default, *others]))
        #: Routes that are the same in each language.
        self._fixed: set[str] = set()
        #: Route after the language's prefix -> the prefixes, the default language's first.
        self._prefixed: dict[str, tuple[str, ...]] = {}
        #: Translated route in any language -> the route in each language, the default language's first.
        self._translated: dict[str, tuple[str, ...]] = {}
        translated = []
        for parts, _name, _view in walk(resolver.url_patterns):
            if any(isinstance(getattr(part, "_route", getattr(part, "_regex", "")), Promise) for part in parts):
                translated.append(parts)
            elif isinstance(parts[0], LocalePrefixPattern):  # Django allows it nowhere else
                first = f"/{default}" if parts[0].prefix_default_language else ""
                self._prefixed[spell(parts[1:])] = (first, *(f"/{code}" for code in self._codes[1:]))
            else:
                self._fixed.add(spell(parts))
        for parts in translated:
            own = []
            for code in self._codes:
                with translation.override(code):
                    own.append(spell(parts))
            for route in own:
                self._translated[route] = tuple(dict.fromkeys([*self._translated.get(route, ()), *own]))

    @property
    def paths_in(self) -> tuple[str, ...]:
        """Codes of the languages in which some path differs by more than its prefix."""
        return self._codes if self._translated else ()

    def spellings(self, route: str) -> tuple[str, ...]:
        """Return the route in each language, the default language's first; only the route if none changes it."""
        if route in self._translated:
            return self._translated[route]
        if not self._prefixed:
            return (route,)
        prefixes = self._prefixed.get(route, ())
        if "" in prefixes:
            return tuple(prefix + route for prefix in prefixes)
        found = _PREFIXED.fullmatch(route)
        prefixes = self._prefixed.get(found[2], ()) if found else ()
        # A code that is missing in LANGUAGES may have been activated nevertheless.
        if not found or not prefixes or (f"/{found[1]}" not in prefixes and route in self._fixed):
            return (route,)
        return tuple(prefix + found[2] for prefix in prefixes)


def once_per_urlconf(function: Callable[[URLResolver], T]) -> Callable[[URLResolver], T]:
    """Decorate a function of a URLconf's resolver so that it is called again only if that or a language changes."""
    cached = lru_cache(maxsize=_URLCONFS)(function)
    _cached.append(cached)
    return cached


languages_of = once_per_urlconf(Languages)


@lru_cache(maxsize=4096)
def canonical(route: str, urlconf: Any) -> str:
    """Return a resolved route of any language in the default language."""
    return languages_of(get_resolver(urlconf)).spellings(readable(route))[0]


def each_language(route: str) -> tuple[str, ...]:
    """Return a canonical route of ``ROOT_URLCONF`` in each language, itself first."""
    return languages_of(get_resolver()).spellings(route)


def _forget(*, setting: str, **_: object) -> None:
    if setting in ("LANGUAGES", "LANGUAGE_CODE", "ROOT_URLCONF", "USE_I18N"):
        for cached in (*_cached, canonical):
            cached.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_ratequota.policies.requests.translated_routes")
