"""Which policies apply: (caller, endpoints, snapshot) -> buckets. Pure, and able to say why.

Policies compete in groups of one endpoint (or all) and one counted_per. In each group the one that comes first by
``precedence`` wins. All winners are enforced together.

A request is seldom the first of its kind: the snapshot remembers the endpoints of a route, the groups that compete
there, and what applies to the callers of late, until a policy or an assignment starts or ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.rates import BLOCKED
from ..engine.types import Bucket
from ..utils.problems import note_problem
from .facts import UNREADABLE, EndpointFacts, PlanFacts, PolicyFacts, UserEntry
from .matching import MatchedPolicies, contenders, match_policies
from .matching import match_endpoints as match_endpoints  # part of what callers need to ask
from .precedence import precedence, strongest, why_beaten, why_first
from .requests.identity import Caller
from .snapshot import Snapshot

#: Callers with a longer name are resolved anew each time.
_LONGEST = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What applies to one request; the same object for all requests alike while nothing starts or ends."""

    #: One a rate of each winner, unlimited and blocked ones left out.
    buckets: tuple[Bucket, ...]
    #: Names of the enforced winners that say ``blocked``.
    blocked_by: tuple[str, ...]
    #: Ids of the winners that say ``blocked``: those enforced, and those in log mode.
    blocking: tuple[int, ...]
    would_block: tuple[int, ...]
    plan: PlanFacts | None
    winners: tuple[PolicyFacts, ...]
    #: Ids of the winners, and of the endpoints asked about.
    policy_ids: tuple[int, ...]
    endpoint_ids: tuple[int, ...]
    #: Units the request consumes where the code does not say.
    cost: int
    #: µs since the Unix epoch: it holds from the first, and before the second.
    since_us: int
    until_us: int
    #: The enforced winners whose rates cannot be read, with the names that clients see: their ``on_error`` decides.
    unreadable: tuple[tuple[str, PolicyFacts], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One policy that was looked at, and what became of it."""

    policy: PolicyFacts
    won: bool
    #: Why it won or lost, in a sentence for operators.
    reason: str
    buckets: tuple[Bucket, ...] = ()


# Not frozen, as every request makes one: that would double what it costs.
@dataclass(slots=True, kw_only=True)
class EvaluationContext:
    """What is asked of the resolver: who, for which endpoints, at what time, by which policies."""

    caller: Caller
    entry: UserEntry
    #: As ``match_endpoints`` found them: the one named by the scope first.
    endpoints: tuple[EndpointFacts, ...]
    scope: str | None
    snapshot: Snapshot
    #: The store's clock, as this process last saw it.
    now_us: int


def plan_of(context: EvaluationContext) -> PlanFacts | None:
    """The caller's plan: PLAN_RESOLVER's answer, or without one the assignment active now; else the default."""
    snapshot, caller = context.snapshot, context.caller
    plan_id = None
    if caller.plan_slug is not None:
        plan = snapshot.plan_by_slug(caller.plan_slug)
        if plan is not None:
            return plan
        text = (
            f"PLAN_RESOLVER answered {caller.plan_slug[:100]!r}, but no plan has that slug; the default plan counts"
        )
        note_problem("PLAN_RESOLVER", text)
    elif not settings.plan_resolver:
        plan_id = context.entry.plan_id(context.now_us)
    if plan_id is None:
        plan_id = snapshot.defaults.get("authenticated" if caller.user_id is not None else "anonymous")
    return None if plan_id is None else snapshot.plans.get(plan_id)


def plan_source(context: EvaluationContext) -> str:
    """Where the caller's plan comes from, in a few words for operators."""
    slug = context.caller.plan_slug
    if slug is not None and context.snapshot.plan_by_slug(slug) is not None:
        return _("as PLAN_RESOLVER says")
    resolver = slug is not None or settings.plan_resolver
    if not resolver and context.entry.plan_id(context.now_us) is not None:
        return _("assigned")
    if plan_of(context) is None:
        if resolver:
            return _("PLAN_RESOLVER names none, and none is the default")
        return _("none is assigned, and none is the default")
    if context.caller.user_id is None:
        return _("the default for anonymous callers")
    if resolver:
        return _("the default for logged-in users, as PLAN_RESOLVER names none")
    return _("the default for logged-in users without an assignment")


def resolve(context: EvaluationContext) -> Resolution:
    """The buckets to check, and the names of those who block."""
    place, caller = _place(context), context.caller
    names = [caller.user_id, caller.subject("caller", None), caller.plan_slug, *map(caller.value, place.kinds)]
    # All that the answer depends on, time aside.
    key = (place, context.entry, caller.address if place.by_address else None, *names)
    resolutions = context.snapshot.memo.resolutions
    known: Resolution | None = resolutions.get(key)
    if known is None or not known.since_us <= context.now_us < known.until_us:
        known = resolve_uncached(context)
        # Clients choose some names; long ones would fill the memory.
        if all(name is None or len(name) <= _LONGEST for name in names):
            resolutions.put(key, known)
    return known


def resolve_uncached(context: EvaluationContext) -> Resolution:
    """``resolve`` without remembering."""
    place, plan = _place(context), plan_of(context)
    plan_id = plan.id if plan else None
    buckets: list[Bucket] = []
    blocked: list[str] = []
    blocking: dict[str, list[int]] = {"enforce": [], "log": []}
    winners: list[PolicyFacts] = []
    unreadable: list[tuple[str, PolicyFacts]] = []
    moments = [moment for a in context.entry.assignments for moment in (a.starts_us, a.ends_us)]
    for endpoint, counted_per, own, group in place.groups:
        subject = context.caller.subject(counted_per, plan_id)
        if subject is None:
            continue
        rivals = list(contenders(context.caller, own, group, plan_id))
        moments += [moment for p in rivals if p.dated for moment in (p.starts_us, p.ends_us)]
        winner = strongest(rivals, context.now_us)
        if winner is None:
            continue
        winners.append(winner)
        if isinstance(winner.rates, tuple):
            buckets += make_buckets(winner, endpoint, subject)
        elif winner.rates == BLOCKED:
            blocking[winner.mode].append(winner.id)
            if winner.mode == "enforce":
                blocked.append(f"{endpoint.name if endpoint else 'all'}/blocked")
        elif winner.mode == "enforce" and winner.rates == UNREADABLE:
            unreadable.append((f"{endpoint.name if endpoint else 'all'}/unreadable", winner))
    since_us, until_us = _around(context.now_us, moments) if moments else (-sys.maxsize, sys.maxsize)
    return Resolution(
        buckets=tuple(buckets),
        blocked_by=tuple(blocked),
        blocking=tuple(blocking["enforce"]),
        would_block=tuple(blocking["log"]),
        plan=plan,
        winners=tuple(winners),
        policy_ids=tuple([policy.id for policy in winners]),
        endpoint_ids=place.endpoint_ids,
        cost=place.cost,
        since_us=since_us,
        until_us=until_us,
        unreadable=tuple(unreadable),
    )


def explain(context: EvaluationContext) -> tuple[Candidate, ...]:
    """Every policy of the endpoints asked about, and why it won or lost; winners as ``resolve`` finds them."""
    plan = plan_of(context)
    won = {policy.id: policy for policy in resolve(context).winners}
    candidates: list[Candidate] = []
    for endpoint, counted_per, own, group in _place(context).groups:
        # By audience, blocks among the others: else all blocked addresses would stand before the caller's own.
        rivals = sorted((*(group.policies if group else ()), *own), key=lambda one: precedence(one)[1:], reverse=True)
        subject = context.caller.subject(counted_per, plan.id if plan else None)
        winner = next((policy for policy in rivals if policy.id in won), None)
        for policy in rivals:
            if policy is winner and subject is not None:
                reason = _("wins: %(why)s") % {"why": why_first(policy)}
                if endpoint and endpoint.charged_statuses:
                    statuses = {"statuses": ", ".join(sorted(endpoint.charged_statuses))}
                    # Not within an f-string: there gettext's own tools do not find what is to be translated.
                    only = _("only responses with status %(statuses)s stay charged") % statuses
                    reason = f"{reason}; {only}"
                if policy.unread is not None:
                    reason = f"{reason}; {_what_goes_on(policy)}"
                candidates.append(
                    Candidate(
                        policy=policy,
                        won=True,
                        reason=reason,
                        buckets=make_buckets(policy, endpoint, subject),
                    )
                )
            else:
                lost = _inapplicable(policy, context, plan, subject) or _beaten(policy, winner)
                candidates.append(Candidate(policy=policy, won=False, reason=_("lost: %(why)s") % {"why": lost}))
    return tuple(candidates)


def make_buckets(policy: PolicyFacts, endpoint: EndpointFacts | None, subject: str) -> tuple[Bucket, ...]:
    """One bucket a rate; none for ``unlimited`` and ``blocked``."""
    if isinstance(policy.rates, str):
        return ()
    mode: Literal["enforce", "log"] = "log" if policy.mode == "log" else "enforce"
    # A list in between: it takes half as long as a generator.
    buckets = [
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
    ]
    return tuple(buckets)


def _place(context: EvaluationContext) -> MatchedPolicies:
    return match_policies(context.snapshot, context.endpoints, context.scope, context.entry)


def _around(now_us: int, moments: Sequence[int | None]) -> tuple[int, int]:
    """The last moment that has come, and the first that has not."""
    past = [moment for moment in moments if moment is not None and moment <= now_us]
    future = [moment for moment in moments if moment is not None and moment > now_us]
    return max(past, default=-sys.maxsize), min(future, default=sys.maxsize)


def _inapplicable(
    policy: PolicyFacts, context: EvaluationContext, plan: PlanFacts | None, subject: str | None
) -> str:
    """Why the policy does not concern this caller now; "" when it does."""
    if policy.mode == "off":
        return _("it is switched off")
    if not policy.active(context.now_us):
        return _("it has not started yet") if (policy.starts_us or 0) > context.now_us else _("it has ended")
    if policy.network is not None:
        if not _in_network(policy, context.caller):
            return _("the caller's address is not in %(network)s") % {"network": policy.network}
    elif policy.subject:
        kind, _colon, value = policy.subject.partition(":")
        if context.caller.value(kind) != value:
            return _("the caller is not %(subject)s") % {"subject": policy.subject}
    elif policy.plan_id is not None and (plan is None or plan.id != policy.plan_id):
        wanted = context.snapshot.plans.get(policy.plan_id)
        names = {"plan": wanted.name if wanted else policy.plan_id, "own": plan.name if plan else _("no plan")}
        return _("it is for plan %(plan)s, the caller is on %(own)s") % names
    if subject is None:
        return _("the caller has no %(name)s to count by") % {"name": policy.counted_per}
    return ""


def _what_goes_on(policy: PolicyFacts) -> str:
    """What counts in place of rates that cannot be read."""
    names = {"unread": policy.unread, "text": policy.text}
    if policy.rates == UNREADABLE:
        return _("its rates %(unread)r cannot be read: on_error decides") % names
    return _("its rates %(unread)r cannot be read: the last readable ones, %(text)s, go on") % names


def _beaten(policy: PolicyFacts, winner: PolicyFacts | None) -> str:
    return _("nothing applies here") if winner is None else why_beaten(policy, winner)


def _in_network(policy: PolicyFacts, caller: Caller) -> bool:
    return policy.network is not None and caller.address is not None and caller.address in policy.network
