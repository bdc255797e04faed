"""Routes and scopes: what Django resolved a request to, and what the code and the URLconf know."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

#: Scopes named by decorators, as their modules were imported.
_decorated: set[str] = set()


def remember_scope(scope: str) -> None:
    """Note a scope that code names, for the admin to offer."""
    _decorated.add(scope)


def readable(route: str) -> str:
    """A resolved route with a leading slash and without the anchors of regular expressions.

    ``api/^reports/(?P<pk>[^/.]+)/$`` (a DRF router's) becomes ``/api/reports/(?P<pk>[^/.]+)/``.
    """
    plain = re.sub(r"(^|/)\^", r"\1", route)
    plain = re.sub(r"(\$|\\Z|\\z)$", "", plain)
    return plain if plain.startswith("/") else f"/{plain}"


def resolved(request: Any) -> tuple[str | None, str | None]:
    """(route, URL name with namespaces) that Django resolved the request to; Nones where it did not."""
    match = getattr(request, "resolver_match", None)
    if match is None:
        return None, None
    return readable(match.route or ""), match.view_name or None


def known_routes() -> list[tuple[str, str]]:
    """(route, URL name or "") of every view in the URLconf, the admin's left out, in URLconf order."""
    return [
        (readable(route), name) for route, name, _ in _walk(get_resolver().url_patterns, "", "") if name[:6] != "admin:"
    ]


def known_scopes() -> list[str]:
    """Every scope that code names: by decorator, or as ``throttle_scope`` of a view in the URLconf; sorted."""
    scopes = set(_decorated)
    for _, _, view in _walk(get_resolver().url_patterns, "", ""):
        for holder in (view, getattr(view, "cls", None), getattr(view, "view_class", None)):
            scope = getattr(holder, "throttle_scope", None)
            if isinstance(scope, str) and scope:
                scopes.add(scope)
    return sorted(scopes)


def _walk(patterns: Any, prefix: str, namespace: str) -> Iterator[tuple[str, str, Any]]:
    for pattern in patterns:
        route = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            inner = f"{namespace}{pattern.namespace}:" if pattern.namespace else namespace
            yield from _walk(pattern.url_patterns, route, inner)
        elif isinstance(pattern, URLPattern):
            yield route, f"{namespace}{pattern.name}" if pattern.name else "", pattern.callback
