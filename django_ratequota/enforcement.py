"""From a request to a decision: identify, resolve, check. The one place that orchestrates.

Each step that may block is yielded (see ``twin``): a command for Redis, or a function that reads the database. So
the sync and the async way are the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from django.db import Error as DatabaseError

from .alerts import watch
from .collecting import note
from .conf import settings
from .exceptions import InvalidRate, NewerRevision, StoreError
from .facts import NOBODY, EndpointFacts, Group, PlanFacts, PolicyFacts, Snapshot, UserEntry
from .fallback import decide_without_store
from .health import keep_reporting, note_degraded, note_problem
from .identity import Caller, Unidentified
from .limiter import LOOK_SHARE, Limiter, default_limiter
from .methods import how_explained, how_heard
from .outcome import reserve
from .places import place_of
from .prepared import MAX_BUCKETS
from .rates import BLOCKED
from .resolver import Asked, Candidate, Resolution, explain, match_endpoints, plan_of, resolve, why_plan
from .routes import resolved
from .settling import Earlier, Held, StoreSettler, set_apart
from .signals import request_refused
from .snapshot import policies
from .sparing import narrowed, spare, spare_candidate
from .steps import Ask, Doer, Step, limiter_or_error
from .twin import adrive, drive
from .types import Bucket, Decision, check_cost


def check_request(
    request: Any, scope: str | None = None, cost: int | None = None, *, again: bool = False
) -> Decision:
    """Identify the caller, resolve the policies, and admit or refuse the request in one round trip.

    ``request`` is Django's or DRF's. ``scope`` names the endpoint; endpoints that match its route count as well.
    ``cost`` is in units, None = the endpoint's own. Another check of the same request charges a bucket only what its
    cost exceeds the units that the request paid there; when it refuses, the units of the earlier checks go back.
    ``again=True`` charges the whole cost once more, for each item of a batch: such a check stands by itself, deducts
    nothing, and when it refuses, nothing goes back.
    The decision is kept as ``request.ratequota``, unless there was nothing more to charge. Raises ``InvalidCost``;
    failures of Redis and of the database are decided by the policies' ``on_error``.
    """
    limiter = limiter_or_error()
    return drive(_check_steps(request, scope, cost, again, limiter), Doer(limiter).do)


async def acheck_request(
    request: Any, scope: str | None = None, cost: int | None = None, *, again: bool = False
) -> Decision:
    """``check_request``, awaited."""
    limiter = limiter_or_error()
    steps = _check_steps(request, scope, cost, again, limiter, awaited=True)
    return await adrive(steps, Doer(limiter, request).ado)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What applies to a caller at an endpoint, and why; nothing was consumed."""

    plan: PlanFacts | None
    candidates: tuple[Candidate, ...]
    resolution: Resolution
    #: What ``check`` would decide now; its statuses stand in the order of ``resolution.buckets``.
    decision: Decision
    #: Where the plan comes from, in a few words for operators.
    plan_source: str
    #: What the resolver was asked, for whoever asks it what if.
    asked: Asked


def explain_caller(
    caller: Caller,
    *,
    scope: str | None,
    route: str | None = None,
    name: str | None = None,
    method: str = "GET",
    view: Any = None,
    cost: int | None = None,
) -> Explanation:
    """Say what applies to the caller, to a request of so many units; None = the endpoint's own cost.

    ``view`` is what the URLconf has for the route, None = unknown. Raises ``django.db.Error``; a failing store shows
    in the decision.
    """

    def steps() -> Generator[Step, Any, Explanation]:
        snapshot, entry = newest(caller)
        how = how_explained(view, method)
        endpoints = match_endpoints(snapshot, scope=scope, route=route, name=name, method=method, how=how)
        asked = _ask(limiter, caller, entry, snapshot, endpoints, scope)
        resolution, candidates = resolve(asked), explain(asked)
        resolution = spare(resolution, name, view, caller)
        candidates = tuple(spare_candidate(one, name, view) for one in candidates)
        if cost is not None:
            resolution = replace(resolution, cost=check_cost(cost))
        decision = yield from _judge(limiter, resolution, "peek", resolution.cost, resolution.buckets, None)
        return Explanation(
            plan=plan_of(asked),
            candidates=candidates,
            resolution=resolution,
            decision=decision,
            plan_source=why_plan(asked),
            asked=asked,
        )

    limiter = limiter_or_error()
    return drive(steps(), Doer(limiter).do)


def newest(caller: Caller) -> tuple[Snapshot, UserEntry]:
    """The newest policies, which the caller's next request will be judged by, and what is the caller's own.

    Raises ``django.db.Error``.
    """
    revision = 0
    try:
        revision = default_limiter().stored_revision()
    except StoreError:
        pass
    snapshot = policies.reload(revision)
    user_id = caller.user_id
    return snapshot, NOBODY if user_id is None else (policies.user(user_id) or policies.load_user(user_id))


class Seen(NamedTuple):
    """What a decision was made of, as far as it is noted."""

    asked: Asked
    route: str | None
    method: str
    resolution: Resolution
    #: The most units that it charged a bucket.
    units: int


def conclude(http: Any, decision: Decision, seen: Seen | None) -> Decision:
    """Note the request's decision for outcomes, alerts and statistics; returns it as the request has it."""
    if seen is None:
        return decision
    snapshot = seen.asked.snapshot
    if snapshot.by_outcome and decision.allowed:
        reserve(http, snapshot, decision)
    watch(decision)
    refusal_id = note(seen.asked, seen.route, seen.method, seen.resolution, decision, seen.units)
    if decision.degraded:
        refusal_id = ""  # Redis is down, so the refusal may never get there to be looked up
    if not refusal_id and decision.revision == snapshot.revision:
        return decision
    return replace(decision, revision=snapshot.revision, refusal_id=refusal_id)


def assign(http: Any, decision: Decision) -> None:
    """Make the decision the request's, and send ``request_refused`` where it refuses."""
    http.ratequota = decision
    if not decision.allowed:
        request_refused.send_robust(sender=None, request=http, decision=decision)


def _check_steps(
    request: Any,
    scope: str | None,
    cost: int | None,
    again: bool,
    limiter: Limiter | StoreError,
    awaited: bool = False,
) -> Generator[Step, Any, Decision]:
    if cost is not None:
        cost = check_cost(cost)
    http = getattr(request, "_request", request)
    earlier = None if again else Earlier.of(http)
    decision, seen = yield from decide(request, http, scope, cost, limiter, earlier, awaited)
    if earlier is not None and decision is earlier.again and seen is None:
        return decision
    decision = conclude(http, decision, seen)
    if earlier is not None and not isinstance(earlier, Held):
        decision = earlier.together(decision)
        if not decision.allowed:
            decision = yield from earlier.give_back(decision)
    if again:
        set_apart(http, decision)
    assign(http, decision)
    return decision


def decide(
    request: Any,
    http: Any,
    scope: str | None,
    cost: int | None,
    limiter: Limiter | StoreError,
    earlier: Earlier | None,
    awaited: bool,
    only: Callable[[PolicyFacts], bool] | None = None,
) -> Generator[Step, Any, tuple[Decision, Seen | None]]:
    """Judge what ``earlier`` checks have not charged; ``earlier.again`` where that is nothing.

    ``only`` selects the policies that can be judged before the view authenticates: the caller is nobody yet.
    Returns None in place of what to note where nothing was judged.
    """
    keep_reporting()
    match = getattr(http, "resolver_match", None)
    route, name = resolved(match, getattr(http, "urlconf", None))
    method = http.method or "GET"
    how = how_heard(request, http, method)
    snapshot = policies.current()
    # A snapshot says that this thread's transaction, if any, has changed no policies.
    pending = None if snapshot is None else False
    # Policies are read once a request at most, should operators publish faster than a process can read.
    may_reload = snapshot is not None
    if snapshot is None or policies.overdue():
        try:
            snapshot = yield from _newer(limiter, snapshot)
        except DatabaseError as error:
            note_degraded("database", error)
            return decide_without_store((), "database", 1), None
    user_known = only is not None
    if user_known:
        caller: Caller = Unidentified(request)
    while True:
        endpoints = match_endpoints(snapshot, scope=scope, route=route, name=name, method=method, how=how)
        if not user_known:
            user_known = "user" in settings.caller or (yield from _asks_for_user(snapshot, endpoints, scope, pending))
            # Reading it may block; in a thread the caller does so by itself.
            caller = Caller(request, (yield Ask.USER) if user_known and awaited else None)
            if not user_known:
                # Reading it may take queries, and adds ``Vary: Cookie`` to the response.
                caller.user_id, caller.user_read = None, False
        user_id = caller.user_id
        entry = NOBODY if user_id is None else policies.user(user_id, pending) or (yield from _load(user_id))
        try:
            asked = _ask(limiter, caller, entry, snapshot, endpoints, scope)
            resolution = (yield partial(resolve, asked)) if only is None and _may_block() else resolve(asked)
        except DatabaseError as error:  # one of the project's own functions asked it
            note_degraded("database", error)
            return decide_without_store((), "database", 1), None
        if only is not None:
            resolution = narrowed(resolution, only)
        resolution = spare(resolution, name, getattr(match, "func", None), caller)
        if only is not None and not (resolution.buckets or resolution.blocked_by or resolution.unreadable):
            return Decision(allowed=True), None
        units = resolution.cost if cost is None else cost
        if isinstance(earlier, Held) and not earlier.fits(resolution.buckets, units):
            yield from earlier.free()
            earlier = None
        buckets, costs = (resolution.buckets, ()) if earlier is None else earlier.owed(resolution.buckets, units)
        if earlier is not None and not buckets and not resolution.blocked_by and not resolution.unreadable:
            if not isinstance(earlier, Held):
                return earlier.again, None
            decision = earlier.again
            break
        revision = snapshot.revision if may_reload else None
        try:
            decision = yield from _judge(limiter, resolution, "check", units, buckets, revision, costs)
            break
        except NewerRevision as newer:
            may_reload = False
            try:
                snapshot = yield partial(policies.reload, newer.revision, newer.instead_of)
            except DatabaseError:
                pass  # the last known policies go on
    if isinstance(earlier, Held):
        decision, costs = (yield from earlier.hand_over(decision, resolution.buckets)), ()
    return decision, Seen(asked, route, method, resolution, max(costs, default=units))


def _asks_for_user(
    snapshot: Snapshot, endpoints: tuple[EndpointFacts, ...], scope: str | None, pending: bool | None
) -> Generator[Step, Any, bool]:
    """Whether a policy at the endpoints is for users or plans, or some user has one of their own there."""
    for _endpoint, counted_per, _own, group in place_of(snapshot, endpoints, scope, NOBODY).groups:
        if counted_per == "plan" or (group and ("user" in group.kinds or _has_plans(group))):
            return True
    own = policies.user_endpoints
    if own is None or pending is None:
        try:
            own = yield policies.load_user_endpoints
        except DatabaseError:
            return True
    return not own.keys().isdisjoint([None, *[endpoint.id for endpoint in endpoints]])


def binds_everybody(decision: Decision, seen: Seen) -> Generator[Step, Any, bool]:
    """Whether a refusal under policies counted per ip stands whoever the caller turns out to be.

    It does unless each of the policies that refused may lose to one for a plan, a user or an identifier.
    """
    own = policies.user_endpoints
    if own is None:
        try:
            own = yield policies.load_user_endpoints
        except DatabaseError:
            own = {}
    resolution, on_error = seen.resolution, settings.on_error
    refusing = {status.bucket.policy_id for status in decision.refusing}.union(resolution.blocking)
    if None in refusing:  # the limit of the usage endpoint that is built in
        return True
    for policy in resolution.winners:
        denied = decision.denied_by and policy.mode == "enforce" and (policy.on_error or on_error) == "deny"
        if policy.id not in refusing and not denied:
            continue
        group = seen.asked.snapshot.groups[policy.endpoint_id]["ip"]
        if policy.network is not None and policy.rates == BLOCKED:  # which nothing outranks
            return True
        if group.kinds or "ip" in own.get(policy.endpoint_id, ()):
            continue
        if policy.network is not None or not _has_plans(group):
            return True
    return False


def _has_plans(group: Group) -> bool:
    """Whether a policy of the group is for a plan; ``by_plan`` has those for everyone under None."""
    return len(group.by_plan) > (None in group.by_plan)


def _newer(limiter: Limiter | StoreError, snapshot: Snapshot | None) -> Generator[Step, Any, Snapshot]:
    """The first snapshot, or what a look at the database makes of the last one."""
    if snapshot is None:
        revision = 0
        try:
            if not isinstance(limiter, StoreError):
                revision = yield from limiter.revision_steps(LOOK_SHARE)
        except StoreError:
            pass
        return (yield partial(policies.reload, revision))  # type: ignore[no-any-return]
    try:
        return (yield policies.poll) or snapshot
    except DatabaseError:
        return snapshot  # the last known policies go on


def _load(user_id: str) -> Generator[Step, Any, UserEntry]:
    """What belongs to the user; nothing while the database is down, so that shared policies still hold them."""
    try:
        entry: UserEntry = yield partial(policies.load_user, user_id)
    except DatabaseError:
        return NOBODY
    return entry


def _ask(
    limiter: Limiter | StoreError,
    caller: Caller,
    entry: UserEntry,
    snapshot: Snapshot,
    endpoints: tuple[EndpointFacts, ...],
    scope: str | None,
) -> Asked:
    now_us = time.time_ns() // 1000 if isinstance(limiter, StoreError) else limiter.now_us
    return Asked(caller=caller, entry=entry, endpoints=endpoints, scope=scope, snapshot=snapshot, now_us=now_us)


def _judge(
    limiter: Limiter | StoreError,
    resolution: Resolution,
    mode: str,
    cost: int,
    buckets: tuple[Bucket, ...],
    revision: int | None,
    costs: tuple[int, ...] = (),
) -> Generator[Step, Any, Decision]:
    """Ask the store, or decide by ``on_error`` where it does not answer. Raises ``NewerRevision``.

    ``costs`` are the units of each bucket; empty = ``cost`` in each.
    """
    if len(buckets) > MAX_BUCKETS:
        buckets, costs = _first(buckets, costs)
    denied_by = _denied_by(resolution)
    # A blocked request consumes nothing, but asks all the same: it, too, sees the edit that lifts the block.
    asked = () if resolution.blocked_by or denied_by else buckets
    times = (0, *costs) if costs and asked else (0,)
    try:
        if isinstance(limiter, StoreError):
            raise limiter
        settler = StoreSettler(limiter)
        decision = yield from limiter.steps(mode, asked, cost, revision=revision, times=times, settler=settler)
    except StoreError as error:
        if mode != "peek":
            note_degraded(error.reason, error)
        peek = mode == "peek" or bool(denied_by)
        blocked = resolution.blocked_by
        decision = decide_without_store(buckets, error.reason, cost, blocked, peek=peek, costs=costs)
    if resolution.unreadable:
        if mode != "peek":
            note_degraded("rates", _cannot_be_read(resolution))
        if denied_by:
            names = (*decision.denied_by, *denied_by)
            decision = replace(decision, allowed=False, denied_by=names, error=decision.error or "rates")
    if resolution.blocked_by:
        return replace(decision, allowed=False, blocked_by=resolution.blocked_by)
    return decision


def _denied_by(resolution: Resolution) -> tuple[str, ...]:
    """Names of the policies that refuse because nothing tells what their rates mean."""
    on_error = settings.on_error
    return tuple(name for name, policy in resolution.unreadable if (policy.on_error or on_error) == "deny")


def _cannot_be_read(resolution: Resolution) -> InvalidRate:
    ids = ", ".join(str(policy.id) for _name, policy in resolution.unreadable)
    return InvalidRate("the rates of policy %(ids)s cannot be read", ids=ids)


def _first(buckets: tuple[Bucket, ...], costs: tuple[int, ...]) -> tuple[tuple[Bucket, ...], tuple[int, ...]]:
    """As many buckets as one call takes, those that refuse before those that only log."""
    text = f"a request has {len(buckets)} limits, of which {MAX_BUCKETS} are checked: merge policies or endpoints"
    note_problem("buckets", text)
    order = sorted(range(len(buckets)), key=lambda at: buckets[at].mode != "enforce")[:MAX_BUCKETS]
    return tuple(buckets[at] for at in order), tuple(costs[at] for at in order if costs)


def _may_block() -> bool:
    """Whether resolving calls the project's own functions, which may read the database."""
    return bool(settings.identifiers or settings.plan_resolver)
