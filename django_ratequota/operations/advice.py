"""Warnings about a policy or an endpoint that is saved: only what can be proved, each with what to do.

The docstring of each rule proves it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from django.db.models import Exists, OuterRef, Q
from django.utils import timezone
from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.rates import Rate
from ..models import Endpoint, Plan, PlanAssignment, RatePolicy
from ..policies.facts import POLICY_COLUMNS, EndpointFacts, PolicyFacts, endpoint_facts, policy_facts
from ..policies.matching import match_endpoints
from ..policies.precedence import precedence
from ..policies.requests.routes import known_routes, known_scopes
from ..policies.snapshot import Snapshot
from ..recording.validators import visible
from .redundancy import binds_first
from .scenarios import duration, number

_NEVER_US = 2**63
_HOUR_US = 3600 * 10**6
_MANY_PERIODS = 100
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
    #: Plans without assignments: id -> name.
    empty_plans: dict[int, str] = field(default_factory=dict)
    #: The policy's endpoint; None = all endpoints.
    endpoint: EndpointFacts | None = None


def about_policy(policy: PolicyFacts, around: Surroundings) -> list[str]:
    """Return warnings about a policy, the most serious first."""
    never = _never_counts(policy, around)
    if never:
        return [never]
    rates = () if isinstance(policy.rates, str) else policy.rates
    warnings = [_shadowed(policy, around), _nobody_on_plan(policy, around)]
    warnings += _costs_too_much(rates, around.endpoint)
    warnings += _never_binds(rates)
    warnings += _bound_elsewhere(policy, rates, around)
    warnings += _meaningless_bursts(rates)
    return [text for text in warnings if text]


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
    now = timezone.now()
    plans = {policy.plan_id for policy in facts if policy.plan_id is not None}
    users = [policy.user for policy in facts if policy.user]
    pks = [policy.endpoint_id for policy in facts if policy.endpoint_id is not None]
    same_endpoints = Q(endpoint=None) | Q(endpoint__in=pks)
    rows = seen.filter(same_endpoints, Q(user=None) | Q(user__in=users)).order_by()
    # Columns instead of objects: networks at all endpoints may be 10,000.
    others = [policy_facts(row) for row in rows.values_list(*POLICY_COLUMNS, named=True)]
    overrides = seen.filter(endpoint=None, user__isnull=False).exclude(mode=RatePolicy.Mode.OFF)
    assignments = PlanAssignment.objects.filter(Q(ends_at=None) | Q(ends_at__gt=now), plan=OuterRef("pk"))
    empty = Plan.objects.filter(~Exists(assignments.order_by()), pk__in=plans, default_for="")
    endpoints = {row.pk: endpoint_facts(row) for row in Endpoint.objects.filter(pk__in=pks)}
    around = Surroundings(
        now_us=time.time_ns() // 1000,
        others=others,
        overridden=set(overrides.order_by().values_list("counted_per", flat=True).distinct()),
        # Unknown with PLAN_RESOLVER, which needs a request.
        empty_plans={} if settings.plan_resolver else dict(empty.values_list("pk", "name")),
    )
    return [
        about_policy(policy, replace(around, endpoint=endpoints.get(policy.endpoint_id or 0))) for policy in facts
    ]


def matched_routes(endpoint: Endpoint, routes: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the (route, URL name or "") that the endpoint's patterns match, for any method."""
    patterns = tuple(endpoint.routes.split())
    facts = EndpointFacts(id=0, name="", routes=patterns, methods=frozenset(), cost=1)
    alone = Snapshot(revision=0, plans={}, defaults={}, endpoints={0: facts}, groups={})
    return [
        (route, name)
        for route, name in routes
        if match_endpoints(alone, scope=None, route=route, name=name or None, method="GET")
    ]


def _never_counts(policy: PolicyFacts, around: Surroundings) -> str:
    if around.endpoint is not None and around.endpoint.exempt:
        text = _("The endpoint “%(endpoint)s” is exempt: no policy applies there. To use this one, clear “exempt”.")
        return text % {"endpoint": around.endpoint.name}
    if policy.mode == "off":
        return _("Its mode is off: it limits nobody. Choose “enforce” or “log only” to use it.")
    if policy.ends_us is not None and policy.ends_us <= around.now_us:
        return _("It has ended: it never applies again. Set a later end, or none.")
    return ""


def _shadowed(policy: PolicyFacts, around: Surroundings) -> str:
    """Policies with exactly the same audience, or with a network around this one's, apply to the same callers.

    This policy loses whenever one of them is active that comes first. If they cover its whole remaining time, it
    never wins. A wider network comes first only where it is blocked.
    """
    start = max(policy.starts_us or 0, around.now_us)
    end = _NEVER_US if policy.ends_us is None else policy.ends_us
    rivals = [
        rival
        for rival in around.others
        if _audience_key(rival)[:2] == _audience_key(policy)[:2]
        and _includes(rival, policy)
        and rival.id != policy.id
        and rival.mode != "off"
        and rival.rates
        and precedence(rival) > precedence(policy)
    ]
    covering = []
    for rival in sorted(rivals, key=lambda rival: rival.starts_us or 0):
        until = _NEVER_US if rival.ends_us is None else rival.ends_us
        if (rival.starts_us or 0) <= start < until:
            covering.append(rival)
            start = until
        if start >= end:
            text = _(
                "It never wins: for the same callers %(others)s takes precedence. End that one, or edit it instead."
            )
            return text % {"others": ", ".join(_named(rival) for rival in covering)}
    return ""


def _includes(rival: PolicyFacts, policy: PolicyFacts) -> bool:
    """Whether the audience of ``rival`` includes that of ``policy``."""
    wide, narrow = rival.network, policy.network
    if wide is None or narrow is None:
        return _audience_key(rival)[2:] == _audience_key(policy)[2:]
    return wide.version == narrow.version and narrow.subnet_of(wide)  # type: ignore[arg-type]


def _audience_key(policy: PolicyFacts) -> tuple[object, ...]:
    return (policy.endpoint_id, policy.counted_per, policy.user, policy.subject, policy.plan_id, policy.list_id)


def _nobody_on_plan(policy: PolicyFacts, around: Surroundings) -> str:
    """Without PLAN_RESOLVER, only assignments and ``default_for`` put callers on a plan."""
    name = around.empty_plans.get(policy.plan_id or 0)
    if name is None:
        return ""
    text = _(
        "Nobody is on the plan “%(plan)s”: no user and no subject is assigned to it, and it is nobody's default. "
        "Assign users or subjects."
    )
    return text % {"plan": visible(name)[:_SHOWN_CHARACTERS]}


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


def _never_binds(rates: Sequence[Rate]) -> Iterator[str]:
    """All rates of a policy that count the same are charged at the same instants."""
    for position, rate in enumerate(rates):
        for other, stricter in enumerate(rates):
            how = binds_first(stricter, rate)
            # Of two equal rates the first one stays.
            if other != position and how and not (other > position and binds_first(rate, stricter)):
                yield (
                    _("“%(rate)s” never refuses anything: “%(stricter)s” always refuses first. Drop or change one.")
                    % {"rate": rate, "stricter": stricter}
                ) + _condition(how)
                break


def _bound_elsewhere(policy: PolicyFacts, rates: Sequence[Rate], around: Surroundings) -> Iterator[str]:
    """A policy for all endpoints counts every request that one for an endpoint counts, and maybe more.

    Both are enforced together, and with the same ``counted_per`` they count the same subjects. It must win for all
    callers of the other: its audience is the same or everyone, it has no dates, and nothing takes precedence over it.
    """
    if policy.endpoint_id is None or policy.counted_per in around.overridden:
        return
    group = [
        rival
        for rival in around.others
        if rival.endpoint_id is None
        and rival.counted_per == policy.counted_per
        and rival.mode != "off"
        and rival.id != policy.id
        and (rival.ends_us is None or rival.ends_us > around.now_us)
    ]
    top = max(group, key=precedence, default=None)
    if top is None or top.dated or top.mode != "enforce" or isinstance(top.rates, str):
        return
    everyone = not (top.user or top.subject or top.plan_id or top.list_id)
    if not everyone and _audience_key(top)[2:] != _audience_key(policy)[2:]:
        return
    for rate in rates:
        stricter = next((other for other in top.rates if binds_first(other, rate)), None)
        if stricter is not None:
            text = _(
                "“%(rate)s” never refuses anything: %(other)s, for all endpoints together, counts the same callers "
                "and always refuses first. Lower this rate, or raise the other."
            )
            yield text % {"rate": rate, "other": _named(top)} + _condition(binds_first(stricter, rate))


def _meaningless_bursts(rates: Sequence[Rate]) -> Iterator[str]:
    """A bucket is defined by its capacity B and the time T to fill it: ``L/P burst B`` equals ``B/T``."""
    for rate in rates:
        fills_us = rate.capacity * rate.period_us // rate.limit
        if rate.capacity >= _MANY_PERIODS * rate.limit and fills_us >= _HOUR_US:
            text = _(
                "“%(rate)s” is the same bucket as %(burst)s units in %(span)s: that many pass at once before the "
                "limit takes effect. Lower the burst, or write the rate with the longer period."
            )
            yield text % {"rate": rate, "burst": number(rate.capacity), "span": duration(fills_us)}


def _condition(how: str) -> str:
    return "" if how == "always" else " " + _("(Unless code charges requests afterwards.)")


def _named(policy: PolicyFacts) -> str:
    return _("policy %(id)s (%(rates)s)") % {"id": policy.id, "rates": policy.text}
