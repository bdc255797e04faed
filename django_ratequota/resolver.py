"""Which policies apply: (caller, endpoints, snapshot) -> buckets. Pure, and able to say why.

Policies compete in groups of one endpoint (or all) and one counted_per. In each group the most specific audience
wins: user > subject (longest prefix) > plan > everyone; among equals a dated policy beats an open one, then the
latest start, then the highest id. All winners are enforced together.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from django.utils.translation import gettext as _

from .facts import EndpointFacts, PlanFacts, PolicyFacts, Snapshot, UserEntry
from .identity import Caller
from .rates import BLOCKED
from .types import Bucket

logger = logging.getLogger("django_ratequota")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What applies to one request."""

    #: One a rate of each winner, unlimited and blocked ones left out.
    buckets: tuple[Bucket, ...]
    #: Names of the enforced winners that say ``blocked``.
    blocked_by: tuple[str, ...]
    #: Ids of the winners that say ``blocked``: those enforced, and those in log mode.
    blocking: tuple[int, ...]
    would_block: tuple[int, ...]
    plan: PlanFacts | None
    winners: tuple[PolicyFacts, ...]
    #: Units the request consumes where the code does not say.
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One policy that was looked at, and what became of it."""

    policy: PolicyFacts
    won: bool
    #: Why it won or lost, in a sentence for operators.
    reason: str
    buckets: tuple[Bucket, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of the resolver: who, for which endpoints, at what time, by which policies."""

    caller: Caller
    entry: UserEntry
    #: As ``match_endpoints`` found them: the one named by the scope first.
    endpoints: tuple[EndpointFacts, ...]
    scope: str | None
    snapshot: Snapshot
    #: The store's clock, as this process last saw it.
    now_us: int


def match_endpoints(
    snapshot: Snapshot, *, scope: str | None, route: str | None, name: str | None, method: str
) -> tuple[EndpointFacts, ...]:
    """The endpoints that a request belongs to: the one named by its scope first, then those matched by route.

    ``route`` is the resolved route with a leading slash, ``name`` the URL name with its namespaces. A scope
    without an endpoint matches nothing.
    """
    method = "GET" if method == "HEAD" else method
    matched = [
        endpoint
        for endpoint in snapshot.endpoints.values()
        if (endpoint.name == scope or any(_matches(pattern, route, name) for pattern in endpoint.routes))
        and (method in endpoint.methods if endpoint.methods else method != "OPTIONS")
    ]
    return tuple(sorted(matched, key=lambda endpoint: (endpoint.name != scope, endpoint.id)))


def plan_of(asked: Asked) -> PlanFacts | None:
    """The caller's plan: PLAN_RESOLVER's answer, else the assignment active now, else the default."""
    snapshot, caller = asked.snapshot, asked.caller
    slug = caller.plan_slug
    if slug is not None:
        plan = snapshot.plan_by_slug(slug)
        if plan is not None:
            return plan
        logger.warning("PLAN_RESOLVER answered %r, but no plan has that slug; the default plan counts", slug[:100])
        plan_id = None
    else:
        plan_id = asked.entry.plan_id(asked.now_us)
    if plan_id is None:
        plan_id = snapshot.defaults.get("authenticated" if caller.user_id is not None else "anonymous")
    return None if plan_id is None else snapshot.plans.get(plan_id)


def why_plan(asked: Asked) -> str:
    """Where the caller's plan comes from, in a few words for operators."""
    slug = asked.caller.plan_slug
    if slug is not None and asked.snapshot.plan_by_slug(slug) is not None:
        return _("as PLAN_RESOLVER says")
    if slug is None and asked.entry.plan_id(asked.now_us) is not None:
        return _("assigned")
    if plan_of(asked) is None:
        return _("none is assigned, and none is the default")
    if asked.caller.user_id is not None:
        return _("the default for logged-in users without an assignment")
    return _("the default for anonymous callers")


def resolve(asked: Asked) -> Resolution:
    """The buckets to check, and the names of those who block."""
    plan = plan_of(asked)
    buckets: list[Bucket] = []
    blocked: list[str] = []
    blocking: dict[str, list[int]] = {"enforce": [], "log": []}
    winners: list[PolicyFacts] = []
    for endpoint, counted_per, own in _groups(asked):
        subject = asked.caller.subject(counted_per, plan.id if plan else None)
        if subject is None:
            continue
        winner = strongest(_contenders(asked, endpoint, counted_per, own, plan), asked.now_us)
        if winner is None:
            continue
        winners.append(winner)
        if winner.rates == BLOCKED:
            blocking[winner.mode].append(winner.id)
            if winner.mode == "enforce":
                blocked.append(f"{endpoint.name if endpoint else 'all'}/blocked")
        else:
            buckets += make_buckets(winner, endpoint, subject)
    return Resolution(
        buckets=tuple(buckets),
        blocked_by=tuple(blocked),
        blocking=tuple(blocking["enforce"]),
        would_block=tuple(blocking["log"]),
        plan=plan,
        winners=tuple(winners),
        cost=next((e.cost for e in asked.endpoints if e.name == asked.scope), None)
        or max((e.cost for e in asked.endpoints), default=1),
    )


def explain(asked: Asked) -> tuple[Candidate, ...]:
    """Every policy of the endpoints asked about, and why it won or lost; winners as ``resolve`` finds them."""
    plan = plan_of(asked)
    won = {policy.id: policy for policy in resolve(asked).winners}
    candidates: list[Candidate] = []
    for endpoint, counted_per, own in _groups(asked):
        group = asked.snapshot.groups.get(endpoint.id if endpoint else None, {}).get(counted_per)
        rivals = sorted((*(group.policies if group else ()), *own), key=precedence, reverse=True)
        subject = asked.caller.subject(counted_per, plan.id if plan else None)
        winner = next((policy for policy in rivals if policy.id in won), None)
        for policy in rivals:
            if policy is winner and subject is not None:
                reason = _("wins: %(audience)s is the most specific audience here") % {"audience": _audience(policy)}
                candidates.append(
                    Candidate(
                        policy=policy,
                        won=True,
                        reason=reason,
                        buckets=make_buckets(policy, endpoint, subject),
                    )
                )
            else:
                lost = _inapplicable(policy, asked, plan, subject) or _beaten(policy, winner)
                candidates.append(Candidate(policy=policy, won=False, reason=_("lost: %(why)s") % {"why": lost}))
    return tuple(candidates)


def strongest(contenders: Iterable[PolicyFacts], now_us: int) -> PolicyFacts | None:
    """Of the policies that compete for one group, the one that counts; None when none of them does now."""
    return max((p for p in contenders if p.active(now_us) and p.rates), key=precedence, default=None)


def make_buckets(policy: PolicyFacts, endpoint: EndpointFacts | None, subject: str) -> tuple[Bucket, ...]:
    """One bucket a rate; none for ``unlimited`` and ``blocked``."""
    if isinstance(policy.rates, str):
        return ()
    mode: Literal["enforce", "log"] = "log" if policy.mode == "log" else "enforce"
    return tuple(
        Bucket(
            subject,
            rate,
            scope=endpoint.name if endpoint else "",
            endpoint_id=endpoint.id if endpoint else None,
            counted_per=policy.counted_per,
            mode=mode,
            on_error=policy.on_error,
            policy_id=policy.id,
        )
        for rate in policy.rates
    )


def _groups(asked: Asked) -> Iterator[tuple[EndpointFacts | None, str, list[PolicyFacts]]]:
    """(endpoint or None for all, counted_per, the user's own policies there), in a stable order."""
    for endpoint in (None, *asked.endpoints):
        endpoint_id = endpoint.id if endpoint else None
        own: dict[str, list[PolicyFacts]] = {}
        for policy in asked.entry.policies:
            if policy.endpoint_id == endpoint_id:
                own.setdefault(policy.counted_per, []).append(policy)
        for counted_per in {**asked.snapshot.groups.get(endpoint_id, {}), **own}:
            yield endpoint, counted_per, own.get(counted_per, [])


def _contenders(
    asked: Asked,
    endpoint: EndpointFacts | None,
    counted_per: str,
    own: list[PolicyFacts],
    plan: PlanFacts | None,
) -> Iterator[PolicyFacts]:
    """The policies of a group whose audience includes the caller."""
    yield from (policy for policy in own if policy.mode != "off")
    group = asked.snapshot.groups.get(endpoint.id if endpoint else None, {}).get(counted_per)
    if group is None:
        return
    if group.by_subject:
        for kind in asked.snapshot.subject_kinds:
            value = asked.caller.value(kind)
            if value is not None:
                yield from group.by_subject.get(f"{kind}:{value}", ())
    yield from (policy for policy in group.networks if _in_network(policy, asked.caller))
    if plan is not None:
        yield from group.by_plan.get(plan.id, ())
    yield from group.everyone


def precedence(policy: PolicyFacts) -> tuple[int, int, bool, int, int]:
    """Sorts the more specific after the less specific."""
    if policy.user:
        audience = 3
    elif policy.subject:
        audience = 2
    else:
        audience = 1 if policy.plan_id is not None else 0
    prefix = policy.network.prefixlen if policy.network else 0
    return audience, prefix, policy.dated, policy.starts_us or 0, policy.id


def _inapplicable(policy: PolicyFacts, asked: Asked, plan: PlanFacts | None, subject: str | None) -> str:
    """Why the policy does not concern this caller now; "" when it does."""
    if policy.mode == "off":
        return _("it is switched off")
    if not policy.rates:
        return _("its rates %(text)r cannot be read") % {"text": policy.text}
    if not policy.active(asked.now_us):
        return _("it has not started yet") if (policy.starts_us or 0) > asked.now_us else _("it has ended")
    if policy.network is not None:
        if not _in_network(policy, asked.caller):
            return _("the caller's address is not in %(network)s") % {"network": policy.network}
    elif policy.subject:
        kind, _colon, value = policy.subject.partition(":")
        if asked.caller.value(kind) != value:
            return _("the caller is not %(subject)s") % {"subject": policy.subject}
    elif policy.plan_id is not None and (plan is None or plan.id != policy.plan_id):
        wanted = asked.snapshot.plans.get(policy.plan_id)
        names = {"plan": wanted.name if wanted else policy.plan_id, "own": plan.name if plan else _("no plan")}
        return _("it is for plan %(plan)s, the caller is on %(own)s") % names
    if subject is None:
        return _("the caller has no %(name)s to count by") % {"name": policy.counted_per}
    return ""


def _beaten(policy: PolicyFacts, winner: PolicyFacts | None) -> str:
    if winner is None:
        return _("nothing applies here")
    names = {"id": winner.id, "audience": _audience(winner)}
    if precedence(policy)[:2] < precedence(winner)[:2]:
        return _("policy %(id)s for %(audience)s is more specific") % names
    if winner.dated and not policy.dated:
        return _("policy %(id)s for the same audience is dated") % names
    return _("policy %(id)s for the same audience is newer") % names


def _audience(policy: PolicyFacts) -> str:
    if policy.user:
        return _("the user")
    return policy.subject or (_("the plan") if policy.plan_id is not None else _("everyone"))


def _in_network(policy: PolicyFacts, caller: Caller) -> bool:
    return policy.network is not None and caller.address is not None and caller.address in policy.network


def _matches(pattern: str, route: str | None, name: str | None) -> bool:
    text = route if pattern.startswith("/") else name
    return text is not None and _glob(pattern).fullmatch(text) is not None


@lru_cache(maxsize=4096)
def _glob(pattern: str) -> re.Pattern[str]:
    # Only * is special: routes are full of brackets, which fnmatch would take for character sets.
    return re.compile(".*".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)
