"""Matches a request to its endpoints. Because they are the same for all requests of a route, a memo keeps them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .facts import EndpointFacts, PolicyFacts
from .requests.routes import spellings
from .requests.view_facts import Exemption, Handling
from .snapshot import Snapshot

#: The method of a check without an HTTP request, which counts at the endpoint of its scope, whatever its methods.
NO_METHOD = "-"


class Where(NamedTuple):
    """Where a request goes."""

    #: The name of an endpoint that the view or the caller of ``check_request`` gives.
    scope: str | None = None
    #: The resolved route with a leading slash in the default language, and the URL name with its namespaces.
    route: str | None = None
    name: str | None = None
    method: str = NO_METHOD
    #: What the view has for the method, and what its code exempts it from.
    handling: Handling = "own"
    exemption: Exemption | None = None
    #: Whether it is a preflight of CORS that an ``options`` handler answers, see ``Handling``.
    preflight: bool = False
    #: The policies that are asked about; None = all.
    only: Callable[[PolicyFacts], bool] | None = None
    #: The endpoints, where they are not those of a request; None = those that match.
    endpoints: tuple[EndpointFacts, ...] | None = None


def match_endpoints(snapshot: Snapshot, where: Where) -> tuple[EndpointFacts, ...]:
    """Return the endpoints of a request: first the one that its scope names, then those that match its route.

    A route with DRF's format suffix matches with and without it, a translated route in each language. A scope without
    an endpoint matches nothing.
    """
    scope, route, name, method, handling = where[:5]
    method = "GET" if method == "HEAD" else method
    # Scopes and methods that no endpoint names share a key: clients could fill the memo with made-up ones.
    scope = scope if scope in snapshot.names else None
    method = method if method in snapshot.methods or method == NO_METHOD else ""
    key = (scope, route, name, method, handling)
    remembered = snapshot.memo.endpoints
    matched = remembered.get(key)
    if matched is None:
        routes = () if route is None else spellings(route)
        found = [
            endpoint
            for endpoint in snapshot.endpoints.values()
            if endpoint.name == scope or any(_matches(pattern, routes, name) for pattern in endpoint.routes)
        ]
        counted = [endpoint for endpoint in found if _counts(endpoint, method, handling)]
        matched = tuple(sorted(counted, key=lambda endpoint: (endpoint.name != scope, endpoint.id)))
        remembered.put(key, matched)
    return matched


def _counts(endpoint: EndpointFacts, method: str, handling: Handling) -> bool:
    """Whether a request counts at an endpoint that its route or scope matches.

    An exempt endpoint counts only the methods that it names: no exemption is wider than the operator wrote.
    """
    named = method in endpoint.methods
    if named or (endpoint.limits == "none" and endpoint.methods):
        return named
    if not endpoint.methods or method == NO_METHOD:
        return handling != "preflight"
    return handling == "none" and endpoint.methods != {"GET"}


def _matches(pattern: str, routes: tuple[str, ...], name: str | None) -> bool:
    """Whether a glob covers a spelling of the route, or the URL name."""
    if pattern.startswith("/"):
        return any(_covers(pattern, route) for route in routes)
    return name is not None and _covers(pattern, name)


def _covers(pattern: str, text: str) -> bool:
    """Whether a glob covers a text. Only * is special, because routes are full of brackets."""
    first, *parts = pattern.split("*")
    if not parts:
        return text == pattern
    last = parts.pop()
    if not (text.startswith(first) and text.endswith(last)):
        return False
    at, end = len(first), len(text) - len(last)
    for part in parts:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return at <= end
