"""Warnings about a policy or an endpoint that is saved: only what can be proved, each with what to do."""

from __future__ import annotations

import time
from collections.abc import Iterable

from django.utils.translation import gettext as _

from ..changes.validators import visible
from ..engine.rates import Rate
from ..models import Endpoint, RatePolicy
from ..policies.facts import EndpointFacts, PolicyFacts, endpoint_facts, policy_facts
from ..policies.matching import Where, match_endpoints
from ..policies.requests.routes import known_routes, known_scopes
from ..policies.snapshot import Snapshot
from .texts import number_text

#: Maximum length of a name in a warning.
_SHOWN_CHARACTERS = 100
#: The largest limit for which a log is kept without a warning, and the bytes of an entry in it.
_MOST_LOGGED, _ENTRY_BYTES = 100_000, 14


def about_policy(policy: PolicyFacts, endpoint: EndpointFacts | None, now_us: int) -> list[str]:
    """Return warnings about a policy of the endpoint (None = all), the most serious first."""
    if never := _never_applies(policy, endpoint, now_us):
        return [never]
    rates = () if isinstance(policy.rates, str) else policy.rates
    costly = [
        _costs_too_much(rate, endpoint) for rate in rates if endpoint and rate.units(endpoint.cost) > rate.capacity
    ]
    logs = (rate for rate in rates if rate.algorithm == "sliding_window_log")
    return [*costly, *(_logs_too_much(rate) for rate in logs if rate.limit > _MOST_LOGGED)]


def about_endpoint(endpoint: Endpoint) -> list[str]:
    """Return warnings about an endpoint.

    Code may name a scope elsewhere, as in ``check_request``, so the warning says what it depends on.
    """
    if has_views(endpoint):
        return []
    text = _(
        "No view in the URLconf has the scope “%(name)s” or matches its routes. Requests are only counted here if "
        "code uses the scope, as in check_request(request, scope=…). Otherwise correct the name or the routes."
    )
    return [text % {"name": visible(endpoint.name)[:_SHOWN_CHARACTERS]}]


def about_saved(policies: Iterable[RatePolicy]) -> list[list[str]]:
    """Return the warnings about each policy, saved or not, in their order, with one query."""
    facts, now_us = [policy_facts(row) for row in policies], time.time_ns() // 1000
    endpoints = Endpoint.objects.in_bulk({one.endpoint_id for one in facts} - {None})
    known = {None: None, **{pk: endpoint_facts(endpoint) for pk, endpoint in endpoints.items()}}
    return [about_policy(one, known[one.endpoint_id], now_us) for one in facts]


def has_views(endpoint: Endpoint) -> bool:
    """Whether a view in the URLconf, the admin's included, has the endpoint's scope or matches its routes."""
    return endpoint.name in known_scopes() or bool(matched_routes(endpoint, known_routes(admin=True)))


def matched_routes(endpoint: Endpoint, routes: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the (route, URL name or "") that the endpoint's patterns match, for any method."""
    patterns = tuple(endpoint.routes.split())
    facts = EndpointFacts(id=0, name="", routes=patterns, methods=frozenset(), cost=1)
    alone = Snapshot(revision=0, endpoints={0: facts})
    return [
        (route, name)
        for route, name in routes
        if match_endpoints(alone, Where(route=route, name=name or None, method="GET"))
    ]


def _never_applies(policy: PolicyFacts, endpoint: EndpointFacts | None, now_us: int) -> str:
    if endpoint is not None and endpoint.limits == "none":
        text = _(
            "This policy never applies, because the endpoint “%(endpoint)s” is exempt. To use the policy, change "
            "“limits” of the endpoint."
        )
        return text % {"endpoint": endpoint.name}
    if policy.mode == "off":
        return _(
            "This policy never applies, because its mode is “off”. To use the policy, choose “enforce” or “log only”."
        )
    if policy.ends_us is not None and policy.ends_us <= now_us:
        return _("This policy has ended and never applies again. Set a later end or none.")
    return ""


def _costs_too_much(rate: Rate, endpoint: EndpointFacts) -> str:
    """No algorithm admits a cost above the capacity, however long the client waits."""
    text = _(
        "A request to “%(endpoint)s” costs %(cost)s units and is always refused, because “%(rate)s” has room for at "
        "most %(room)s. Raise the limit, raise the burst or lower the cost."
    )
    words = {"endpoint": endpoint.name, "cost": number_text(endpoint.cost), "rate": rate}
    return text % {**words, "room": number_text(rate.capacity)}


def _logs_too_much(rate: Rate) -> str:
    """A log stores each request of the period, and Redis searches it for every decision."""
    text = _(
        "“%(rate)s” stores every request of the period, up to %(size)s MB for each customer. Redis searches all of "
        "it. For limits above %(most)s choose “sliding_window_counter”, which stores a few bytes."
    )
    size = number_text(round(rate.limit * _ENTRY_BYTES / 10**6, 1))
    return text % {"rate": rate, "size": size, "most": number_text(_MOST_LOGGED)}
