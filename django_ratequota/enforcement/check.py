"""From a request to a decision: identify, resolve, check. The one place that orchestrates.

Each step that may block is yielded (see ``twin``): a command for Redis, or a function that reads the database. So
the sync and the async way are the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from django.db import Error as DatabaseError
from django.dispatch import Signal

from ..conf import settings
from ..engine.limiter import Limiter
from ..engine.types import Decision, check_cost
from ..exceptions import NewerRevision, StoreError
from ..monitoring import alerts, collector  # noqa: F401 - set process.observe and process.record
from ..monitoring.health import keep_reporting, note_degraded
from ..policies.exemptions import exempt, narrow
from ..policies.facts import NOBODY, EndpointFacts, PolicyFacts, UserEntry
from ..policies.matching import match_endpoints, match_policies
from ..policies.requests.identity import Caller, Unidentified
from ..policies.requests.methods import handling_of_request
from ..policies.requests.routes import resolved
from ..policies.resolver import EvaluationContext, Resolution, resolve
from ..policies.snapshot import Snapshot
from ..runtime import process
from ..utils.sansio import adrive, drive
from .deciding import judge
from .on_error import decide_without_store
from .outcome import reserve
from .settlement import Earlier, Held, drop_held, set_apart
from .steps import Ask, Step, StepRunner, limiter_or_error, now_us, stored_revision

#: Sent when a request was refused: ``request``, ``decision``. Receivers' errors are logged, not raised.
request_refused = Signal()


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
    return drive(_check_steps(request, scope, cost, again, limiter), StepRunner(limiter).do)


async def acheck_request(
    request: Any, scope: str | None = None, cost: int | None = None, *, again: bool = False
) -> Decision:
    """``check_request``, awaited."""
    limiter = limiter_or_error()
    steps = _check_steps(request, scope, cost, again, limiter, awaited=True)
    return await adrive(steps, StepRunner(limiter, request).ado)


class Seen(NamedTuple):
    """What a decision was made of, as far as it is noted."""

    context: EvaluationContext
    route: str | None
    method: str
    resolution: Resolution
    #: The most units that it charged a bucket.
    units: int


def conclude(http: Any, decision: Decision, seen: Seen | None) -> Decision:
    """Note the request's decision for outcomes, alerts and statistics; returns it as the request has it."""
    if seen is None:
        return decision
    snapshot = seen.context.snapshot
    if snapshot.by_outcome and decision.allowed:
        reserve(http, snapshot, decision)
    process.observe(decision)
    refusal_id = process.record(seen.context, seen.route, seen.method, seen.resolution, decision, seen.units)
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
    if again:
        yield from drop_held(http)
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
    handling = handling_of_request(request, http, method)
    policies = process.policies
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
        endpoints = match_endpoints(snapshot, scope=scope, route=route, name=name, method=method, handling=handling)
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
            context = EvaluationContext(
                caller=caller,
                entry=entry,
                endpoints=endpoints,
                scope=scope,
                snapshot=snapshot,
                now_us=now_us(limiter),
            )
            resolution = (yield partial(resolve, context)) if only is None and _may_block() else resolve(context)
        except DatabaseError as error:  # one of the project's own functions asked it
            note_degraded("database", error)
            return decide_without_store((), "database", 1), None
        if only is not None:
            # First: whatever policies there are for the usage endpoint, guesses at it count as built in.
            resolution = narrow(resolution, only)
        resolution = exempt(resolution, name, getattr(match, "func", None), caller)
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
            decision = yield from judge(limiter, resolution, "check", units, buckets, revision, costs)
            break
        except NewerRevision as newer:
            may_reload = False
            try:
                snapshot = yield partial(policies.reload, newer.revision, newer.instead_of)
            except DatabaseError:
                pass  # the last known policies go on
    if isinstance(earlier, Held):
        decision, costs = (yield from earlier.hand_over(decision, resolution.buckets)), ()
    return decision, Seen(context, route, method, resolution, max(costs, default=units))


def _asks_for_user(
    snapshot: Snapshot, endpoints: tuple[EndpointFacts, ...], scope: str | None, pending: bool | None
) -> Generator[Step, Any, bool]:
    """Whether a policy at the endpoints is for users or plans, or some user has one of their own there."""
    for _endpoint, counted_per, _own, group in match_policies(snapshot, endpoints, scope, NOBODY).groups:
        if counted_per == "plan" or (group and ("user" in group.kinds or group.has_plans)):
            return True
    own = process.policies.user_endpoints
    if own is None or pending is None:
        try:
            own = yield process.policies.load_user_endpoints
        except DatabaseError:
            return True
    return not own.keys().isdisjoint([None, *[endpoint.id for endpoint in endpoints]])


def _newer(limiter: Limiter | StoreError, snapshot: Snapshot | None) -> Generator[Step, Any, Snapshot]:
    """The first snapshot, or what a look at the database makes of the last one."""
    if snapshot is None:
        revision = yield from stored_revision(limiter)
        return (yield partial(process.policies.reload, revision))  # type: ignore[no-any-return]
    try:
        return (yield process.policies.poll) or snapshot
    except DatabaseError:
        return snapshot  # the last known policies go on


def _load(user_id: str) -> Generator[Step, Any, UserEntry]:
    """What belongs to the user; nothing while the database is down, so that shared policies still hold them."""
    try:
        entry: UserEntry = yield partial(process.policies.load_user, user_id)
    except DatabaseError:
        return NOBODY
    return entry


def _may_block() -> bool:
    """Whether resolving calls the project's own functions, which may read the database."""
    return bool(settings.identifiers or settings.plan_resolver)
