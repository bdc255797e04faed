"""Warnings about a policy or an endpoint that is saved: only what can be proved, each with what to do.

The docstring of each rule proves it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.db.models import Q
from django.utils.translation import gettext as _

from ..changes.validators import visible
from ..engine.rates import BURST_ALGORITHMS, Rate
from ..models import Endpoint, RatePolicy
from ..policies.exemptions import exemption_of, why_skipped
from ..policies.facts import POLICY_COLUMNS, EndpointFacts, PolicyFacts, endpoint_facts, policy_facts
from ..policies.matching import match_endpoints
from ..policies.precedence import precedence, strongest
from ..policies.requests.routes import known_routes, known_scopes, known_views
from ..policies.requests.view_declarations import scopes_of
from ..policies.snapshot import Snapshot
from .numbers import number

#: Most characters of a name in a warning.
_SHOWN_CHARACTERS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The other objects that matter for a policy."""

    now_us: int
    #: Other policies, of any group; may include those that are off or ended.
    others: Sequence[PolicyFacts] = ()
    #: Values of ``counted_per`` for which some user has an override for all endpoints.
    overridden: Collection[str] = ()
    #: The policy's endpoint; None = all endpoints.
    endpoint: EndpointFacts | None = None
    #: Whether policies for all endpoints leave out requests of the endpoint, see ``policies.exemptions``.
    skipped: bool = False


def about_policy(policy: PolicyFacts, around: Surroundings) -> list[str]:
    """Return warnings about a policy, the most serious first."""
    never = _never_applies(policy, around) or _outranked(policy, around)
    if never:
        return [never]
    rates = () if isinstance(policy.rates, str) else policy.rates
    return [*_costs_too_much(rates, around.endpoint), *_bound_elsewhere(policy, rates, around)]


def about_endpoint(endpoint: Endpoint) -> list[str]:
    """Return warnings about an endpoint.

    Scopes of views and routes are read from the URLconf, the admin's included. Code may name a scope elsewhere, as in
    ``check_request``, so the warning says what it depends on.
    """
    if endpoint.name in known_scopes():
        return []
    if endpoint.routes and matched_routes(endpoint, known_routes(admin=True)):
        return []
    text = _(
        "Nothing in the URLconf uses “%(name)s”: no view has it as its scope, and no route matches. Unless code "
        "names it elsewhere, as in check_request(request, scope=…), nothing is counted here. Correct the name or the "
        "routes."
    )
    return [text % {"name": visible(endpoint.name)[:_SHOWN_CHARACTERS]}]


def about_saved(policies: Iterable[RatePolicy], seen: Any) -> list[list[str]]:
    """Return the warnings about each policy, saved or not, in their order; the number of queries is constant.

    ``seen`` is a queryset of the policies that the operator may see: no warning mentions another one.
    """
    facts = [policy_facts(row) for row in policies]
    users = [policy.user for policy in facts if policy.user]
    pks = [policy.endpoint_id for policy in facts if policy.endpoint_id is not None]
    same_endpoints = Q(endpoint=None) | Q(endpoint__in=pks)
    rows = seen.filter(same_endpoints, Q(user=None) | Q(user__in=users)).order_by()
    # Columns instead of objects: networks at all endpoints may be 10,000.
    others = [policy_facts(row) for row in rows.values_list(*POLICY_COLUMNS, named=True)]
    overrides = seen.filter(endpoint=None, user__isnull=False).exclude(mode=RatePolicy.Mode.OFF)
    endpoints = {row.pk: row for row in Endpoint.objects.filter(pk__in=pks)}
    skipped = _skipped(endpoints.values())
    around = Surroundings(
        now_us=time.time_ns() // 1000,
        others=others,
        overridden=set(overrides.order_by().values_list("counted_per", flat=True).distinct()),
    )

    def at(pk: int | None) -> Surroundings:
        endpoint = endpoints.get(pk or 0)
        return replace(around, endpoint=endpoint and endpoint_facts(endpoint), skipped=pk in skipped)

    return [about_policy(policy, at(policy.endpoint_id)) for policy in facts]


def _skipped(endpoints: Iterable[Endpoint]) -> set[int]:
    """Return the ids of endpoints with a view to which policies for all endpoints do not apply."""
    views = [one for one in known_views() if why_skipped(one[1], exemption_of(one[2]))]
    routes, scopes = [view[:2] for view in views], {scope for view in views for scope in scopes_of(view[2])}
    return {one.pk for one in endpoints if one.name in scopes or matched_routes(one, routes)}


def matched_routes(endpoint: Endpoint, routes: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the (route, URL name or "") that the endpoint's patterns match, for any method."""
    patterns = tuple(endpoint.routes.split())
    facts = EndpointFacts(id=0, name="", routes=patterns, methods=frozenset(), cost=1)
    alone = Snapshot(revision=0, endpoints={0: facts})
    return [
        (route, name)
        for route, name in routes
        if match_endpoints(alone, scope=None, route=route, name=name or None, method="GET")
    ]


def _never_applies(policy: PolicyFacts, around: Surroundings) -> str:
    if around.endpoint is not None and around.endpoint.exempt:
        text = _("The endpoint “%(endpoint)s” is exempt: no policy applies there. To use this one, clear “exempt”.")
        return text % {"endpoint": around.endpoint.name}
    if policy.mode == "off":
        return _("Its mode is off: it limits nobody. Choose “enforce” or “log only” to use it.")
    if policy.ends_us is not None and policy.ends_us <= around.now_us:
        return _("It has ended: it never applies again. Set a later end, or none.")
    return ""


def _outranked(policy: PolicyFacts, around: Surroundings) -> str:
    """Another policy applies to the same callers, as long as this one, and wins: so it does at any time.

    A wider network's applies to the same callers, too; it wins where it is blocked.
    """
    start_us = max(policy.starts_us or 0, around.now_us)
    for rival in around.others:
        lasts = rival.ends_us is None or (policy.ends_us is not None and policy.ends_us <= rival.ends_us)
        same = _audience(rival) == _audience(policy) or _contains(rival, policy)
        group = (rival.endpoint_id, rival.counted_per) == (policy.endpoint_id, policy.counted_per)
        if rival.id == policy.id or rival.mode == "off" or not (lasts and same and group):
            continue
        if strongest((policy, rival), start_us) is rival:
            text = _(
                "It never wins: for the same callers %(others)s takes precedence. End that one, or edit it instead."
            )
            return text % {"others": _named(rival)}
    return ""


def _audience(policy: PolicyFacts) -> tuple[object, ...]:
    return policy.user, policy.subject, policy.plan_id, policy.list_id


def _contains(rival: PolicyFacts, policy: PolicyFacts) -> bool:
    wide, narrow = rival.network, policy.network
    if wide is None or narrow is None:
        return False
    return wide.version == narrow.version and narrow.subnet_of(wide)  # type: ignore[arg-type]


def _costs_too_much(rates: Sequence[Rate], endpoint: EndpointFacts | None) -> Iterator[str]:
    """No algorithm admits a cost above the capacity, however long the client waits."""
    for rate in rates:
        if endpoint is not None and rate.units(endpoint.cost) > rate.capacity:
            text = _(
                "A request to “%(endpoint)s” costs %(cost)s units and is always refused: "
                "“%(rate)s” never has room for more than %(room)s. Raise the limit or burst, or lower the cost."
            )
            numbers = {"cost": number(endpoint.cost), "room": number(rate.capacity)}
            yield text % {"endpoint": endpoint.name, "rate": rate, **numbers}


def _bound_elsewhere(policy: PolicyFacts, rates: Sequence[Rate], around: Surroundings) -> Iterator[str]:
    """A policy for all endpoints counts every request that one for an endpoint counts, unless it leaves some out.

    Both are enforced together, and with the same ``counted_per`` they count the same subjects. It must win for all
    callers of the other: its audience is the same or everyone, it has no dates, and nothing takes precedence over it.
    """
    if policy.endpoint_id is None or around.skipped or policy.counted_per in around.overridden:
        return
    group = [
        rival
        for rival in around.others
        if rival.endpoint_id is None
        and rival.counted_per == policy.counted_per
        and rival.mode != "off"
        and (rival.ends_us is None or rival.ends_us > around.now_us)
    ]
    top = max(group, key=precedence, default=None)
    if top is None or top.dated or top.mode != "enforce" or isinstance(top.rates, str):
        return
    if any(_audience(top)) and _audience(top) != _audience(policy):
        return
    for rate in rates:
        if any(_refuses_first(other, rate) for other in top.rates):
            text = _(
                "“%(rate)s” never refuses anything: %(other)s, for all endpoints together, counts the same callers "
                "and always refuses first. Lower this rate, or raise the other."
            )
            yield text % {"rate": rate, "other": _named(top)}


def _refuses_first(stricter: Rate, rate: Rate) -> bool:
    """Whether ``stricter``, which counts the same requests or more, always has as much in use, and no more room.

    So has a bucket that drains no faster than another, and a window of the same length.
    """
    if stricter.counts != rate.counts or stricter.capacity > rate.capacity:
        return False
    if BURST_ALGORITHMS.issuperset((stricter.algorithm, rate.algorithm)):
        return stricter.limit * rate.period_us <= rate.limit * stricter.period_us
    return (stricter.algorithm, stricter.period) == (rate.algorithm, rate.period)


def _named(policy: PolicyFacts) -> str:
    return _("policy %(id)s (%(rates)s)") % {"id": policy.id, "rates": policy.text}
