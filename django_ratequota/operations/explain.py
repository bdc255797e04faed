"""Explain which policies apply to a caller's request, and why, without consuming units.

The caller and the request are arguments, or the text of a form, a command line or a recorded refusal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from ipaddress import ip_address, ip_network
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import Error as DatabaseError
from django.db.models import Q
from django.urls import Resolver404
from django.utils.translation import gettext as _

from ..changes.validators import primary_key
from ..conf import settings
from ..enforcement.on_error import enforce
from ..enforcement.step_runner import Step, run
from ..engine.decision import Decision, LimitRequest
from ..engine.protocol import MAX_BUCKETS
from ..engine.types import Bucket, check_cost
from ..exceptions import StoreError
from ..models import METHODS, Endpoint, Plan, RatePolicy
from ..monitoring.refusals import Refusal
from ..policies.cache import PolicyCache
from ..policies.exemptions import why_skipped
from ..policies.facts import PlanFacts, policy_facts, to_datetime
from ..policies.matching import NO_METHOD, Where, match_endpoints
from ..policies.reasons import Candidate, explain, explain_winners, plan_source, why_idle
from ..policies.requests.caller import UNKNOWN, Caller, DescribedCaller, client_text
from ..policies.requests.routes import find_route, known_scopes, resolve_path, resolved
from ..policies.requests.view_declarations import least_cost
from ..policies.requests.view_facts import Exemption, facts_of
from ..policies.resolve_for import own_of, resolve_for, unnamed_kinds
from ..policies.resolver import EvaluationContext, Resolution, narrow
from ..policies.snapshot import Snapshot
from ..runtime import default_limiter, process
from ..utils.addresses import Network, named_network, networks_around, unmap

#: Maximum number of endpoints whose limits are read together.
MOST_ENDPOINTS = 100
#: Maximum number of policies that are named though they are not in force, and since when those must have ended.
_MOST_IDLE, _LATELY = 20, timedelta(days=30)
#: Prefix of identifiers in query strings, because an identifier may have the name of another parameter.
IDENTIFIER = "identifier_"
#: The plan in query strings where PLAN_RESOLVER has no opinion; no slug has brackets.
NO_PLAN = "(none)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The policies that apply to a caller's request, and why."""

    plan: PlanFacts | None
    candidates: tuple[Candidate, ...]
    resolution: Resolution
    #: The decision of ``check`` now; statuses in the order of ``resolution.buckets``.
    decision: Decision
    #: The source of the plan, in words for operators.
    plan_source: str
    #: The resolver's input, for resolving again with a change.
    context: EvaluationContext
    #: Why nothing limits the request, in words for operators; "" = it is not exempt.
    exempt: str = ""
    #: Policies at the same endpoints for other callers, by kind of audience.
    others: Mapping[str, int] = field(default_factory=dict)
    #: Whether the limits at all endpoints are explained instead of a request.
    everywhere: bool = False
    #: Whether more endpoints than ``MOST_ENDPOINTS`` may limit the caller.
    more: bool = False

    @property
    def built_in(self) -> list[Bucket]:
        """Buckets that no policy made."""
        return [bucket for bucket in self.resolution.buckets if bucket.policy_id is None]

    @property
    def scope_without_endpoint(self) -> str:
        """The scope of the request if no endpoint has that name; "" = there is one, or it would limit nothing."""
        scope = self.context.scope
        known = scope in self.context.snapshot.names or any(bucket.scope == scope for bucket in self.built_in)
        return "" if scope is None or known or self.exempt else scope

    @property
    def customer(self) -> str:
        """The caller as counters name it; where neither user nor address is known, its first identifier."""
        caller = self.context.caller
        values = {kind: caller.value(kind) for kind in settings.identifiers} if caller.name == UNKNOWN else {}
        return next((f"{kind}:{value}" for kind, value in values.items() if value), caller.name)


def explain_caller(
    caller: Caller,
    *,
    scope: str | None,
    route: str | None = None,
    name: str | None = None,
    method: str = "GET",
    view: Any = None,
    cost: int | None = None,
    everywhere: bool = False,
) -> Explanation:
    """Explain the caller's request of ``cost`` units; None = the endpoint's own cost.

    ``view`` is the view of the route; None = unknown. ``method`` is ``NO_METHOD`` for a check without a request.
    ``everywhere``: instead of a request, the limits at each endpoint, by the policies that win there.
    Raises ``django.db.Error``; without Redis the decision is degraded.
    """

    def steps() -> Generator[Step, Any, Explanation]:
        snapshot, more, where = newest_policies(), False, _where(scope, route, name, method, view)
        [own], exemption = own_of([caller]), where.exemption
        if everywhere:
            endpoints, more = snapshot.overview.limiting(own.entry, MOST_ENDPOINTS)
            snapshot, where = snapshot.overview.snapshot, where._replace(endpoints=endpoints)
        others: Counter[str] = Counter()
        context, resolution = resolve_for(caller, where, snapshot, limiter.now_us, own)
        why_exempt = _why_exempt(limiter, resolution, exemption, method)
        if why_exempt:
            resolution = narrow(resolution, lambda policy: False)
        if everywhere:
            candidates = explain_winners(context, resolution)
        else:
            skipped = why_exempt or why_skipped(name, exemption)
            candidates = explain(context, others, lambda one: skipped if one.endpoint_id is None else why_exempt)
        if cost is not None or everywhere:
            resolution = replace(resolution, cost=1 if cost is None else check_cost(cost))
        buckets = resolution.buckets[:MAX_BUCKETS] if everywhere else resolution.buckets
        asked = LimitRequest(mode="peek", buckets=buckets, cost=resolution.cost)
        decision = yield from enforce(limiter, resolution, asked)
        return Explanation(
            plan=resolution.plan,
            candidates=candidates,
            resolution=resolution,
            decision=decision,
            plan_source=_plan_source(context, resolution),
            context=context,
            exempt=why_exempt,
            others=others,
            everywhere=everywhere,
            more=more,
        )

    limiter = process.limiter()
    return run(steps())


def _where(
    scope: str | None, route: str | None = None, name: str | None = None, method: str = "GET", view: Any = None
) -> Where:
    """Return where the request of ``explain_caller`` goes."""
    facts = facts_of(None if method == NO_METHOD else view)
    return Where(scope, route, name, method, facts.handling(method), facts.exemption)


def idle_policies(explanation: Explanation) -> list[tuple[RatePolicy, str]]:
    """Return policies for the customer and the request that are off, not started or ended lately, each with why.

    The latest 20, without those that ``candidates`` name.
    """
    context = explanation.context
    caller, now = context.caller, to_datetime(context.now_us)
    subjects = [f"{kind}:{value}" for kind in settings.identifiers if (value := caller.value(kind))]
    subjects += networks_around(ip_network(caller.address)) if caller.address else []
    members = context.snapshot.members
    entries = members.entries_of(caller, members.kinds_of(context.snapshot.lists.keys()))
    key = None if caller.user_id is None else primary_key(get_user_model(), caller.user_id)
    chosen = Q(pk=None) if key is None else Q(user=key)
    chosen |= Q(subject__in=subjects) | Q(subject_list__in={entry.list_id for entry in entries})
    plan = explanation.plan
    shared = Q(user=None, subject="", subject_list=None) & (Q(plan=None) | Q(plan=plan.id if plan else None))
    idle = Q(mode=RatePolicy.Mode.OFF) | Q(starts_at__gt=now) | Q(ends_at__lte=now, ends_at__gt=now - _LATELY)
    rows = RatePolicy.objects.filter(chosen | shared, idle).select_related("user", "subject_list", "plan", "endpoint")
    if not explanation.everywhere:
        rows = rows.filter(Q(endpoint=None) | Q(endpoint__in=[one.id for one in context.endpoints]))
    named = {one.policy.id for one in explanation.candidates}
    found = [row for row in rows.order_by("-pk")[: _MOST_IDLE + len(named)] if row.pk not in named]
    return [(row, why_idle(policy_facts(row), context.now_us)) for row in found[:_MOST_IDLE]]


def _why_exempt(limiter: Any, resolution: Resolution, exemption: Exemption | None, method: str) -> str:
    """Return why the request is exempt; "" = it is not."""
    if limiter.unlimited:
        return _("RATEQUOTA['ENABLED'] is False")
    if exemption is not None and exemption.covers(method):
        return _("@exempt decorates the view")
    return resolution.exempt and _("the endpoint %(name)s is exempt") % {"name": resolution.exempt}


def _plan_source(context: EvaluationContext, resolution: Resolution) -> str:
    """Return where the plan comes from, and which kinds of subjects were not named but may have another one."""
    source, unnamed = plan_source(context), unnamed_kinds(context.caller, resolution)
    if not unnamed:
        return source
    text = _("%(source)s, but a request with %(kinds)s may be on another plan")
    return text % {"source": source, "kinds": ", ".join(unnamed)}


def anchor_of(bucket: Bucket) -> int:
    """Return the day on which the bucket's months begin; 0 where they begin on the first, or it has no months."""
    return bucket.anchor if bucket.rate.calendar == "month" and bucket.anchor != 1 else 0


def newest_policies() -> Snapshot:
    """Return the policies that the next request is checked by; while the database is down, the last known ones.

    Raises ``django.db.Error`` where none were ever read.
    """
    policies: PolicyCache = process.policies
    revision = 0
    try:
        limiter = default_limiter()
        revision = limiter.stored_revision()
        if limiter.store.absent:  # because other processes cannot publish their edits to this one
            policies.poll()
    except StoreError:
        pass
    try:
        return policies.reload(revision)
    except DatabaseError:
        known = policies.current()
        if known is None:
            raise
        return known


def caller_params(caller: str) -> dict[str, str]:
    """Return the query string that names a caller: ``user:42`` is ``user=42``; {} without a value."""
    kind, _colon, value = caller.partition(":")
    return {kind if kind in ("user", "ip") else f"{IDENTIFIER}{kind}": value} if value else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuery:
    """A caller and a request, as text; the methods raise ``ValidationError`` on what cannot be read."""

    #: Primary key of the user as text; None = anonymous.
    user_id: str | None = None
    #: An address, or the IPv6 network that counts as one client; "" or ``unknown`` = no address.
    ip: str = ""
    #: Values of IDENTIFIERS by name.
    identifiers: Mapping[str, str] = field(default_factory=dict)
    #: Result of PLAN_RESOLVER; None = no opinion.
    plan_slug: str | None = None
    #: Endpoint name (scope); "" = none.
    endpoint: str = ""
    #: A path, or a route as written in an endpoint; "" = none.
    path: str = ""
    method: str = "GET"
    #: Units; None = the cost that the view declares, else the endpoint's own.
    cost: int | None = None

    @classmethod
    def from_refusal(cls, refusal: Refusal) -> ExplainQuery:
        """Build a query for the request that was refused, to explain it by the current policies.

        A route that this process does not have is left out: then the scope alone says where the request counts.
        """
        slug = None
        if settings.plan_resolver and refusal.plan_named and refusal.plan_id is not None:
            slug = Plan.objects.filter(pk=refusal.plan_id).values_list("slug", flat=True).first()
        known = Endpoint.objects.filter(name=refusal.scope).exists()
        # Its counters and its plan name identifiers that the caller's name lacks.
        named = dict(subject.partition(":")[::2] for subject in (refusal.ip, *refusal.subjects, refusal.caller))
        return cls(
            user_id=named.get("user"),
            ip=named.get("ip", ""),
            identifiers={kind: value for kind, value in named.items() if kind in settings.identifiers},
            plan_slug=slug,
            endpoint=refusal.scope if known else "",
            path=refusal.route if find_route(refusal.route) else "",
            method=refusal.method,
            cost=refusal.cost,
        )

    def params(self) -> dict[str, str]:
        """Return the query string that asks this."""
        fields = {
            "user": self.user_id,
            "ip": self.ip,
            **{f"{IDENTIFIER}{kind}": value for kind, value in self.identifiers.items()},
            "plan": (self.plan_slug or NO_PLAN) if settings.plan_resolver else "",
            "endpoint": self.endpoint,
            "path": self.path,
            "method": self.method,
            "cost": "" if self.cost is None else str(self.cost),
        }
        return {name: text for name, text in fields.items() if text}

    def caller(self) -> DescribedCaller:
        """Return the caller; raises ``ValidationError`` on ``ip``."""
        address = _address(self.ip.strip())
        return DescribedCaller(
            user_id=self.user_id, address=address, identifiers=dict(self.identifiers), plan_slug=self.plan_slug
        )

    def request_arguments(self) -> dict[str, Any]:
        """Return arguments of ``explain_caller``; raises ``ValidationError`` on ``endpoint`` or ``path``.

        Without a path, the view is the only one that declares the scope, or the usage endpoint.
        """
        scope, path = self.endpoint or None, self.path.strip()
        request: dict[str, Any] = {"scope": scope, "method": self.method.upper()}
        if path:
            route, name, view = _resolve(path)
            declared = facts_of(view).scope(request["method"])
            request |= {"route": route, "name": name, "scope": scope or declared, "view": view}
        elif scope:
            first, *others = known_scopes().get(scope, ()) or (None,)
            only = not others or all(facts_of(view).shows_usage for view in (first, *others))
            request["view"] = first if only else None
        # The usage endpoint has a built-in limit, and need not have a row.
        facts = facts_of(request.get("view"))
        built_in = facts.shows_usage and facts.scope() == scope
        if scope and not built_in and not Endpoint.objects.filter(name=scope).exists():
            raise ValidationError({"endpoint": _("There is no endpoint %(name)r.") % {"name": scope[:100]}})
        return request

    def methods(self) -> list[str]:
        """Return one method for each way in which the request's limits differ by its method; there is at least one.

        They are methods that the view answers, and if ``endpoint`` names one, those that count there. OPTIONS is left
        out. Raises ``ValidationError`` and ``django.db.Error``.
        """
        snapshot, found = newest_policies(), dict[Any, str]()
        answered = facts_of(self.request_arguments().get("view")).handlers
        for method in METHODS:
            if method == "OPTIONS" or (answered and method not in answered):
                continue
            where = _where(**replace(self, method=method).request_arguments())
            exempt = where.exemption is not None and where.exemption.covers(method)
            found.setdefault((frozenset(match_endpoints(snapshot, where)), exempt), method)
        own = [method for (at, _exempt), method in found.items() if self.endpoint in {one.name for one in at}]
        return own or list(found.values()) or ["GET"]

    @property
    def everywhere(self) -> bool:
        """Whether it names no request, so that the limits at all endpoints are explained."""
        return not (self.endpoint or self.path)

    def explain(self) -> Explanation:
        """Return what applies now; raises ``ValidationError`` and ``django.db.Error``."""
        request, cost = self.request_arguments(), self.cost
        scope, declared = facts_of(request.get("view")).scope_and_cost(request["method"])
        if cost is None and not self.everywhere and request["scope"] == scope:
            # A function needs a request.
            cost = None if callable(declared) else least_cost(declared)
        return explain_caller(self.caller(), **request, cost=cost, everywhere=self.everywhere)


def _address(text: str) -> str | None:
    """Return one client's address; None where there is none. Raises ``ValidationError``."""
    if not text or f"ip:{text}" == UNKNOWN:
        return None
    try:
        if "/" not in text:
            return str(ip_address(text))
        network = ip_network(text, strict=False)
    except ValueError as error:
        text = _("%(error)s. Enter an address such as 203.0.113.7.") % {"error": str(error)[:100]}
        raise ValidationError({"ip": text}) from error
    if many_clients(text):
        text = _("%(network)s is a network of many clients. Enter the address of one.")
        raise ValidationError({"ip": text % {"network": network}})
    return str(network[0])


def many_clients(name: str) -> Network | None:
    """Return the network that is named, ``203.0.113.0/24`` or ``ip:203.0.113.0/24``; None if it is one client."""
    network = named_network(name)
    # An IPv6 network may be one client: addresses that share IPV6_PREFIX bits are.
    clients = {client_text(unmap(network[at]), settings.ipv6_prefix) for at in (0, -1)} if network else ()
    return network if len(clients) > 1 else None


def _resolve(path: str) -> tuple[str | None, str | None, Any]:
    """Return (route, URL name, view) of a path or a route, in any language; raises ``ValidationError``."""
    found = find_route(path)
    if found is not None:
        return found
    try:
        match = resolve_path(path.partition("?")[0])
    except Resolver404 as error:
        text = _("No route matches %(path)r. Enter a path such as /api/reports/") % {"path": path[:100]}
        raise ValidationError({"path": text}) from error
    return (*resolved(match), match.func)
