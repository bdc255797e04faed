"""Resolves which policies apply: (caller, endpoints, snapshot) -> buckets. Reads nothing else.

Policies compete in groups of one endpoint (or all) and one counted_per. In each group ``precedence`` says which
win. All winners are enforced together. ``explain`` gives the reasons; all others ask ``resolve``.

Because most requests resemble earlier ones, the snapshot's memo keeps the endpoints of each route, the groups that
compete there, and recent resolutions. A resolution is kept until a policy or an assignment starts or ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ..conf import settings
from ..engine.rates import BLOCKED
from ..engine.types import Bucket
from ..utils.problems import note_problem
from .audience_index import Group
from .facts import NOBODY, UNREADABLE, Assigned, Assignment, EndpointFacts, PlanFacts, PolicyFacts, UserEntry
from .precedence import winners_of
from .requests.caller import Caller
from .snapshot import Snapshot

#: Resolutions of callers with longer names are not kept.
_LONGEST = 200
#: Kinds of subjects that callers share who may be on different plans.
_SHARED = ("everyone", "plan", "ip")


class Contest(NamedTuple):
    """The policies that compete at one endpoint (None = all endpoints) and counted_per."""

    endpoint: EndpointFacts | None
    counted_per: str
    #: The user's own policies.
    own: list[PolicyFacts]
    group: Group | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedPolicies:
    """The contests at a set of endpoints. Users without policies of their own share one instance."""

    groups: tuple[Contest, ...]
    #: Kinds of subjects that the contests depend on, and whether they depend on the address as well.
    kinds: tuple[str, ...]
    by_address: bool
    #: Kinds of members of the lists that contests have policies for; () = no contest has one.
    list_kinds: tuple[str, ...]
    endpoint_ids: tuple[int, ...]
    cost: int
    #: Whether the contests depend on the caller's plan.
    by_plan: bool = False
    #: Whether limits count months that a caller's assignment may begin on another day.
    monthly: bool = False
    #: Name of an exempt endpoint among these: then no policy applies. "" = none is exempt.
    exempt: str = ""
    #: Name of an endpoint with limits of its own among these; "" = there is none.
    alone: str = ""

    def stands_back(self, policy: PolicyFacts) -> bool:
        """Whether the policy, which is for all endpoints, yields to an endpoint with limits of its own."""
        return bool(self.alone) and policy.endpoint_id is None and policy.rates != BLOCKED


class Applied(NamedTuple):
    """The winner of a contest at an endpoint (None = all endpoints)."""

    policy: PolicyFacts
    endpoint: EndpointFacts | None
    #: One per rate; () = unlimited, blocked or unreadable.
    buckets: tuple[Bucket, ...]

    @property
    def place(self) -> str:
        """Return the name of the endpoint as clients see it."""
        return self.endpoint.name if self.endpoint else "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What applies to one request. Like requests share one object until a policy or an assignment starts or ends."""

    applied: tuple[Applied, ...]
    #: Those of the winners, and built-in ones.
    buckets: tuple[Bucket, ...]
    #: Names of the enforced winners whose rates are ``blocked``, as clients see them.
    blocked_by: tuple[str, ...]
    #: Ids of the winners whose rates are ``blocked``: enforced, and in log mode.
    blocking: tuple[int, ...]
    would_block: tuple[int, ...]
    plan: PlanFacts | None
    winners: tuple[PolicyFacts, ...]
    #: Ids of the winners, and of the endpoints that the request matched.
    policy_ids: tuple[int, ...]
    endpoint_ids: tuple[int, ...]
    #: Units that the request consumes unless the code names a cost.
    cost: int
    #: The resolution is valid from ``since_us`` until before ``until_us``, in µs since the Unix epoch.
    since_us: int
    until_us: int
    #: (name that clients see, policy) of the enforced winners whose rates are unreadable: their ``on_error`` decides.
    unreadable: tuple[tuple[str, PolicyFacts], ...]
    #: Name of an exempt endpoint that the request matched, so that nothing limits it; "" = none.
    exempt: str
    #: Whether a bucket is durable.
    durable: bool
    #: Whether a bucket limits how many requests run at once.
    concurrent: bool
    #: Whether code named the plan: PLAN_RESOLVER, or ``plan=`` of ``check_caller``.
    plan_named: bool
    #: The subject whose assignment gives the plan unless code names one: ``user:42``, ``tenant:acme``; "" = nobody.
    assigned_to: str


# Not frozen, because each request makes one, and a frozen dataclass takes twice as long to make.
@dataclass(slots=True)
class EvaluationContext:
    """The resolver's input: the caller, the endpoints, the time and the policies."""

    caller: Caller
    entry: UserEntry
    #: In the order of ``match_endpoints``: the one that the scope names comes first.
    endpoints: tuple[EndpointFacts, ...]
    scope: str | None
    snapshot: Snapshot
    #: Redis' time in µs since the Unix epoch, as this process last saw it.
    now_us: int
    #: The entries of the caller's subjects on plans, and of the user among them; () = no subject is on a plan.
    assigned: Assigned = ()


def plan_of(context: EvaluationContext) -> PlanFacts | None:
    """Return the caller's plan: the one that code names, else the one assigned now, else the default plan."""
    snapshot, caller = context.snapshot, context.caller
    if (plan := plan_by_code(context)) is not None:
        return plan
    if caller.plan_slug is not None:
        source = "PLAN_RESOLVER answered" if settings.plan_resolver else "check_caller was called with plan="
        text = f"{source} {caller.plan_slug[:100]!r}, but no plan has that slug; it is ignored"
        note_problem("PLAN_RESOLVER", text)
    default = snapshot.defaults.get("authenticated" if caller.user_id is not None else "anonymous")
    found = assignment_of(context)
    plan_id = found[1].plan_id if found else default
    return None if plan_id is None else snapshot.plans.get(plan_id)


def plan_by_code(context: EvaluationContext) -> PlanFacts | None:
    """Return the plan that PLAN_RESOLVER or ``plan=`` names; None if neither names one that exists."""
    slug = context.caller.plan_slug
    return None if slug is None else context.snapshot.plan_by_slug(slug)


def assignment_of(context: EvaluationContext) -> tuple[str, Assignment] | None:
    """Return the assignment whose plan applies now unless code names one, with the kind of its subject.

    It is that of the first who has one, along CALLER, then the user, then the other IDENTIFIERS; None = nobody has.
    """
    for kind, entry in _assigned(context):
        found = entry.assignment(context.now_us)
        if found is not None:
            return kind, found
    return None


def month_anchor(context: EvaluationContext, subject: str) -> int:
    """Return the day on which the months of a subject's counters begin.

    It is that of the subject's own assignments, else of ``assignment_of``'s subject, else of any other, even if code
    names the plan.
    """
    kind, found, entries = subject.partition(":")[0], assignment_of(context), dict(_assigned(context))
    if kind in _SHARED:
        return 1
    # Its own first: others of the subject's callers may have their plans from elsewhere.
    order = (kind, found[0] if found else kind, *entries)
    return next((day for one in order if one in entries and (day := entries[one].anchor(context.now_us))), 1)


def _assigned(context: EvaluationContext) -> Assigned:
    """Return the entries whose assignments may give the caller's plan and the day of its months."""
    return context.assigned or (("user", context.entry),)


def resolve(context: EvaluationContext) -> Resolution:
    """Return what applies to a request, from the snapshot's memo where it is still valid there."""
    matched = match_policies(context.snapshot, context.endpoints, context.scope, context.entry)
    caller = context.caller
    names = [caller.user_id, caller.name, caller.unknown, caller.plan_slug, *map(caller.value, matched.kinds)]
    # Everything that the resolution depends on, except the time.
    key = (matched, context.entry, context.assigned, caller.address if matched.by_address else None, *names)
    resolutions = context.snapshot.memo.resolutions
    known: Resolution | None = resolutions.get(key)
    if known is None or not known.since_us <= context.now_us < known.until_us:
        known = resolve_uncached(context)
        # Because clients choose some of the names, long ones would fill the memory.
        if all(name is None or len(name) <= _LONGEST for name in names):
            resolutions.put(key, known)
    return known


def resolve_uncached(context: EvaluationContext) -> Resolution:
    """Return what ``resolve`` does, without the memo."""
    matched = match_policies(context.snapshot, context.endpoints, context.scope, context.entry)
    plan, found = plan_of(context), assignment_of(context)
    plan_id = plan.id if plan else None
    applied: list[Applied] = []
    # What may start or end.
    dated: list[Any] = [one for _kind, entry in _assigned(context) for one in entry.assignments]
    # The caller's entries in lists that a policy here is for.
    entries = context.snapshot.members.entries_of(context.caller, matched.list_kinds) if matched.list_kinds else ()
    dated += entries
    lists = {entry.list_id for entry in entries if entry.active(context.now_us)}
    for endpoint, counted_per, own, group in () if matched.exempt else matched.groups:
        subject = context.caller.subject(counted_per, plan_id)
        if subject is None:
            continue
        rivals = list(contenders(context.caller, own, group, plan_id, lists))
        dated += rivals
        for at, winner in enumerate(winners_of(rivals, context.now_us)):
            if not matched.stands_back(winner) and (subject or winner.rates == BLOCKED):
                buckets = make_buckets(winner, endpoint, subject, context, beside=at > 0)
                applied.append(Applied(winner, endpoint, buckets))
    boundaries = [at_us for one in dated for at_us in (one.starts_us, one.ends_us) if at_us is not None]
    return Resolution(
        **_outcome(applied),
        plan=plan,
        endpoint_ids=matched.endpoint_ids,
        cost=matched.cost,
        since_us=max([at_us for at_us in boundaries if at_us <= context.now_us], default=-sys.maxsize),
        until_us=min([at_us for at_us in boundaries if at_us > context.now_us], default=sys.maxsize),
        exempt=matched.exempt,
        plan_named=plan_by_code(context) is not None,
        assigned_to=f"{found[0]}:{context.caller.value(found[0])}" if found else "",
    )


def narrow(resolution: Resolution, only: Callable[[PolicyFacts], bool]) -> Resolution:
    """Return the resolution with the policies for which ``only`` is true, without built-in buckets."""
    return replace(resolution, **_outcome([one for one in resolution.applied if only(one.policy)]))


def _outcome(applied: list[Applied]) -> dict[str, Any]:
    """Return the fields of the resolution that has these winners."""
    enforced = [one for one in applied if one.policy.mode == "enforce"]
    blocks = [one for one in enforced if one.policy.rates == BLOCKED]
    buckets = [bucket for one in applied for bucket in one.buckets]
    winners = [one.policy for one in applied]
    return {
        "applied": tuple(applied),
        "buckets": tuple(buckets),
        "blocked_by": tuple([f"{one.place}/blocked" for one in blocks]),
        "blocking": tuple([one.policy.id for one in blocks]),
        "would_block": tuple([one.id for one in winners if one.mode == "log" and one.rates == BLOCKED]),
        "winners": tuple(winners),
        "policy_ids": tuple([one.id for one in winners]),
        "unreadable": tuple(
            [(f"{one.place}/unreadable", one.policy) for one in enforced if one.policy.rates == UNREADABLE]
        ),
        "durable": any(bucket.durable for bucket in buckets),
        "concurrent": any(bucket.rate.concurrent for bucket in buckets),
    }


def match_policies(
    snapshot: Snapshot, endpoints: tuple[EndpointFacts, ...], scope: str | None, entry: UserEntry
) -> MatchedPolicies:
    """Return the contests at the endpoints, in the order of ``match_endpoints``, with the user's own policies."""
    own = entry if entry.policies else NOBODY
    named = bool(endpoints) and endpoints[0].name == scope
    remembered, key = snapshot.memo.policies, (endpoints, named, own)
    policies = remembered.get(key)
    if policies is None:
        policies = _find_policies(snapshot, endpoints, named, own)
        remembered.put(key, policies)
    return policies


def contenders(
    caller: Caller, own: list[PolicyFacts], group: Group | None, plan_id: int | None, lists: Collection[int]
) -> Iterator[PolicyFacts]:
    """Yield the policies of a contest whose audience includes the caller, who is in ``lists`` now."""
    if own:
        yield from (policy for policy in own if policy.mode != "off")
    if group is not None:
        yield from group.entries_of(caller, group.kinds)
        yield from group.without_subject(lists, () if plan_id is None else (plan_id,))


def make_buckets(
    policy: PolicyFacts,
    endpoint: EndpointFacts | None,
    subject: str,
    context: EvaluationContext | None = None,
    *,
    beside: bool = False,
) -> tuple[Bucket, ...]:
    """Return one bucket per rate of the policy; none for ``unlimited`` and ``blocked``.

    Months begin on the day that ``context`` names for the subject, without it on the first. ``beside`` an enforced
    winner nothing is durable: such a limit is on trial, and bills are made from the other's.
    """
    if isinstance(policy.rates, str):
        return ()
    mode: Literal["enforce", "log"] = "log" if policy.mode == "log" else "enforce"
    durable = not beside and (not subject.startswith("ip:") if policy.durable is None else policy.durable)
    # A list first, because tuple() of a generator takes twice as long.
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
            durable=durable and rate.calendar != "",
            anchor=month_anchor(context, subject) if context and rate.calendar == "month" else 1,
            leads=policy.leads_headers and rate is policy.rates[0],
            beside=beside,
        )
        for rate in policy.rates
    ]
    return tuple(buckets)


def _find_policies(
    snapshot: Snapshot, endpoints: tuple[EndpointFacts, ...], named: bool, entry: UserEntry
) -> MatchedPolicies:
    found: list[Contest] = []
    for endpoint in (None, *endpoints):
        endpoint_id = endpoint.id if endpoint else None
        own: dict[str, list[PolicyFacts]] = {}
        for policy in entry.policies:
            if policy.endpoint_id == endpoint_id:
                own.setdefault(policy.counted_per, []).append(policy)
        groups = snapshot.groups.get(endpoint_id, {})
        # Sorted, because headers and pages keep this order, and databases and edits change the one of the rows.
        found += [Contest(endpoint, per, own.get(per, []), groups.get(per)) for per in sorted({**groups, **own})]
    held = [contest.group for contest in found if contest.group]
    lists = frozenset[int]().union(*[group.having("list") for group in held])
    list_kinds = snapshot.members.kinds_of(lists) if lists else frozenset()
    audiences = list_kinds.union(*[group.kinds for group in held])
    counted = {contest.counted_per for contest in found}
    months = [one for one in found if one.group and one.counted_per not in ("everyone", "ip")]
    return MatchedPolicies(
        groups=tuple(found),
        kinds=tuple(counted.difference(("caller", "plan", "everyone")) | audiences - {"ip"}),
        by_address="ip" in audiences,
        list_kinds=tuple(list_kinds),
        endpoint_ids=tuple(endpoint.id for endpoint in endpoints),
        cost=(endpoints[0].cost if named else 0) or max((e.cost for e in endpoints), default=1),
        by_plan="plan" in counted or any(group.having("plan") for group in held),
        monthly=any(one.group and one.group.having("month") for one in months),
        exempt=next((endpoint.name for endpoint in endpoints if endpoint.limits == "none"), ""),
        alone=next((endpoint.name for endpoint in endpoints if endpoint.limits == "own"), ""),
    )
