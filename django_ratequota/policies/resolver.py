"""Resolves which policies apply: (caller, endpoints, snapshot) -> buckets. Reads nothing else.

Policies compete in groups of one endpoint (or all) and one counted_per. In each group ``precedence`` says which
win. All winners are enforced together. ``explain`` gives the reasons; all others ask ``resolve``.

Because most requests resemble earlier ones, the snapshot's memo keeps the endpoints of each route, the groups that
compete there, and recent resolutions. A resolution is kept until a policy or an assignment starts or ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from ..conf import settings
from ..engine.rates import BLOCKED
from ..engine.types import Bucket, Copies, Patterns
from ..utils.problems import note_problem
from .audience_index import Group
from .facts import NOBODY, UNREADABLE, Assigned, Assignment, EndpointFacts, PlanFacts, PolicyFacts, UserEntry
from .matching import NO_METHOD, Where, match_endpoints
from .precedence import winners_of
from .requests.caller import Caller, is_verified
from .snapshot import Snapshot

#: Resolutions of callers with longer names are not kept.
_LONGEST = 200
#: Methods of which the memo keeps where a request goes.
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", NO_METHOD))
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
    #: The ``counted_per`` of the contests, each once.
    counted: tuple[str, ...]
    #: Kinds of subjects that the contests depend on, and whether they depend on the address as well.
    kinds: tuple[str, ...]
    by_address: bool
    #: Kinds of members of the lists that contests have policies for; () = no contest has one.
    list_kinds: tuple[str, ...]
    endpoints: tuple[EndpointFacts, ...]
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


class Standing(NamedTuple):
    """What a caller's assignments, or code, say of it from ``since_us`` until before ``until_us``."""

    plan: PlanFacts | None
    #: Whether code named the plan: PLAN_RESOLVER, or ``plan=`` of ``check_caller``.
    plan_named: bool
    #: The kind of the subject whose assignment gives the plan unless code names one; "" = nobody's does.
    assigned_kind: str
    #: (kind, day) of the subjects whose assignments tell on which day their months begin; 0 = none is active.
    anchors: tuple[tuple[str, int], ...]
    since_us: int
    until_us: int


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


# Not frozen, because that takes three times as long to make one.
@dataclass(slots=True)
class Resolution:
    """What applies to one request. Like requests share one object until a policy or an assignment starts or ends."""

    #: Of each winner of a contest the policy, the endpoint, and how many of the buckets are its own.
    won: tuple[tuple[PolicyFacts, EndpointFacts | None, int], ...]
    #: Those of the winners, in their order, and built-in ones.
    buckets: Sequence[Bucket]
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

    @property
    def applied(self) -> tuple[Applied, ...]:
        """Return the winners with their buckets."""
        buckets = iter(self.buckets)
        return tuple([Applied(policy, where, tuple(islice(buckets, number))) for policy, where, number in self.won])


class Shape:
    """What is the same for callers of one standing, with subjects of the same kinds: all but the subjects' names."""

    def __init__(self, resolution: Resolution, counted: tuple[str, ...]) -> None:
        """``resolution`` is that of one of them; ``counted`` are the ``counted_per`` of the contests."""
        self.resolution = resolution
        self._patterns = Patterns(tuple(resolution.buckets))
        self._places = [counted.index(one.counted_per) for one in resolution.buckets]

    def of(self, subjects: Sequence[Any], caller: Caller, standing: Standing) -> Resolution:
        """Return the resolution of the caller, whose ``subjects`` are in the order of ``counted``."""
        one, kind = self.resolution, standing.assigned_kind
        copies = Copies(self._patterns, tuple([subjects[at] for at in self._places])) if self._places else ()
        return Resolution(
            one.won,
            copies,
            one.blocked_by,
            one.blocking,
            one.would_block,
            one.plan,
            one.winners,
            one.policy_ids,
            one.endpoint_ids,
            one.cost,
            max(one.since_us, standing.since_us),
            min(one.until_us, standing.until_us),
            one.unreadable,
            one.exempt,
            one.durable,
            one.concurrent,
            one.plan_named,
            f"{kind}:{caller.value(kind)}" if kind else "",
        )


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


def resolve(context: EvaluationContext, matched: MatchedPolicies | None = None) -> Resolution:
    """Return what applies to a request, from the snapshot's memo where it is still valid there.

    ``matched`` are the contests at its endpoints, where these are known.
    """
    if matched is None:
        matched = match_policies(context.snapshot, context.endpoints, context.scope, context.entry)
    caller = context.caller
    names = [caller.user_id, caller.name, caller.unknown, caller.plan_slug, *map(caller.value, matched.kinds)]
    # Everything that the resolution depends on, except the time.
    key = (matched, context.entry, context.assigned, caller.address if matched.by_address else None, *names)
    resolutions = context.snapshot.memo.resolutions
    known: Resolution | None = resolutions.get(key)
    if known is None or not known.since_us <= context.now_us < known.until_us:
        known = _resolve_alike(context, matched)
        # Because clients choose some of the names, long ones would fill the memory.
        if all(name is None or len(name) <= _LONGEST for name in names):
            resolutions.put(key, known)
    return known


def _resolve_alike(context: EvaluationContext, matched: MatchedPolicies) -> Resolution:
    """Return what ``resolve_uncached`` does, from that of another caller who differs in the names alone."""
    caller, snapshot, now_us = context.caller, context.snapshot, context.now_us
    standings, shapes = snapshot.memo.standings, snapshot.memo.shapes
    who = (context.entry, context.assigned, caller.plan_slug, caller.user_id is None)
    standing: Standing | None = standings.get(who)
    if standing is None or not standing.since_us <= now_us < standing.until_us:
        standing = standing_of(context)
        standings.put(who, standing)
    plan = standing.plan
    subjects = [caller.subject(counted_per, plan.id if plan else None) for counted_per in matched.counted]
    kinds = tuple([subject and subject.partition(":")[0] for subject in subjects])
    entries = snapshot.members.entries_of(caller, matched.list_kinds) if matched.list_kinds else ()
    lists = tuple([entry if entry.dated else entry.list_id for entry in entries])
    # Policies whose audience is a subject of the caller: most callers have none.
    groups = [contest.group for contest in matched.groups if contest.group and contest.group.kinds]
    own = tuple([policy.id for group in groups for policy in group.entries_of(caller, group.kinds)])
    key = (matched, *standing[:4], kinds, lists, own)
    shape: Shape | None = shapes.get(key)
    if shape is None or not shape.resolution.since_us <= now_us < shape.resolution.until_us:
        shape = Shape(resolve_uncached(context, standing), matched.counted)
        shapes.put(key, shape)
    return shape.of(subjects, caller, standing)


def standing_of(context: EvaluationContext) -> Standing:
    """Return the caller's standing now: the plan that code names, else the one assigned, else the default plan."""
    snapshot, caller, assigned = context.snapshot, context.caller, _assigned(context)
    found, named = assignment_of(context), plan_by_code(context)
    if caller.plan_slug is not None and named is None:
        source = "PLAN_RESOLVER answered" if settings.plan_resolver else "check_caller was called with plan="
        text = f"{source} {caller.plan_slug[:100]!r}, but no plan has that slug; it is ignored"
        note_problem("PLAN_RESOLVER", text)
    default = snapshot.defaults.get("authenticated" if caller.user_id is not None else "anonymous")
    plan_id = found[1].plan_id if found else default
    dated = [one for _kind, entry in assigned for one in entry.assignments]
    return Standing(
        named or (None if plan_id is None else snapshot.plans.get(plan_id)),
        named is not None,
        found[0] if found else "",
        tuple([(kind, entry.anchor(context.now_us)) for kind, entry in assigned]),
        *_bounds(dated, context.now_us),
    )


def resolve_uncached(context: EvaluationContext, standing: Standing | None = None) -> Resolution:
    """Return what ``resolve`` does, without the memo; ``standing`` is the caller's, where it is known."""
    matched = match_policies(context.snapshot, context.endpoints, context.scope, context.entry)
    standing = standing or standing_of(context)
    plan, kind = standing.plan, standing.assigned_kind
    plan_id = plan.id if plan else None
    applied: list[Applied] = []
    # The caller's entries in lists that a policy here is for.
    entries = context.snapshot.members.entries_of(context.caller, matched.list_kinds) if matched.list_kinds else ()
    # What may start or end.
    dated: list[Any] = [*entries]
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
    since_us, until_us = _bounds(dated, context.now_us)
    return Resolution(
        **_outcome(applied),
        plan=plan,
        endpoint_ids=matched.endpoint_ids,
        cost=matched.cost,
        since_us=since_us,
        until_us=until_us,
        exempt=matched.exempt,
        plan_named=standing.plan_named,
        assigned_to=f"{kind}:{context.caller.value(kind)}" if kind else "",
    )


def _bounds(dated: Iterable[Any], now_us: int) -> tuple[int, int]:
    """Return since and until when nothing of these starts or ends, around ``now_us``."""
    boundaries = [at_us for one in dated for at_us in (one.starts_us, one.ends_us) if at_us is not None]
    since_us = max([at_us for at_us in boundaries if at_us <= now_us], default=-sys.maxsize)
    return since_us, min([at_us for at_us in boundaries if at_us > now_us], default=sys.maxsize)


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
        "won": tuple([(one.policy, one.endpoint, len(one.buckets)) for one in applied]),
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


def match(snapshot: Snapshot, where: Where, entry: UserEntry) -> MatchedPolicies:
    """Return the contests where a request goes, with the user's own policies."""
    if where.endpoints is not None:
        return match_policies(snapshot, where.endpoints, where.scope, entry)
    remembered, key = snapshot.memo.places, (where, entry if entry.policies else NOBODY)
    policies = remembered.get(key)
    if policies is None:
        policies = match_policies(snapshot, match_endpoints(snapshot, where), where.scope, entry)
        # Clients could fill the memo with made-up scopes and methods.
        if (where.scope is None or where.scope in snapshot.names) and where.method in _METHODS:
            remembered.put(key, policies)
    return policies


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
    durable = is_verified(subject.partition(":")[0]) if policy.durable is None else policy.durable
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
            durable=durable and not beside and rate.calendar != "",
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
        counted=tuple(sorted(counted)),
        kinds=tuple(counted.difference(("caller", "plan", "everyone")) | audiences - {"ip"}),
        by_address="ip" in audiences,
        list_kinds=tuple(list_kinds),
        endpoints=endpoints,
        endpoint_ids=tuple(endpoint.id for endpoint in endpoints),
        cost=(endpoints[0].cost if named else 0) or max((e.cost for e in endpoints), default=1),
        by_plan="plan" in counted or any(group.having("plan") for group in held),
        monthly=any(one.group and one.group.having("month") for one in months),
        exempt=next((endpoint.name for endpoint in endpoints if endpoint.limits == "none"), ""),
        alone=next((endpoint.name for endpoint in endpoints if endpoint.limits == "own"), ""),
    )
