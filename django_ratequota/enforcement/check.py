"""From a request to a decision: identify, resolve, check, in order.

``unchecked`` reuses the steps before the view runs, and ``check_caller`` without a request.

Each step that may block is yielded (see ``utils.sansio``): a command for Redis, or a function that reads the
database. So sync and async checks are the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from django.db import Error as DatabaseError
from django.dispatch import Signal

from ..conf import settings
from ..engine.decision import Decision
from ..engine.limiter import Limiter
from ..engine.types import check_cost
from ..exceptions import NewerRevision, StoreError
from ..monitoring import alerts, collector  # noqa: F401 - set process.observe and process.record
from ..monitoring.health import keep_reporting, note_degraded
from ..monitoring.records import RequestCost
from ..policies import cache  # noqa: F401 - sets process.policies
from ..policies.assigned import resolve_assigned
from ..policies.exemptions import Exemption, exempt, exemption_of, exemption_of_instance, narrow
from ..policies.facts import NOBODY, EndpointFacts, PolicyFacts, UserEntry
from ..policies.matching import NO_METHOD, match_endpoints, match_policies
from ..policies.requests.caller import Caller
from ..policies.requests.methods import Handling, handling_of_request
from ..policies.requests.routes import resolved
from ..policies.resolver import EvaluationContext, Resolution, resolve
from ..policies.snapshot import Snapshot
from ..runtime import process
from ..utils.sansio import adrive, drive
from .decide import decide
from .earlier_checks import EarlierChecks, drop_held, set_apart
from .on_error import decide_without_store
from .settlement import reserve
from .steps import RequestStep, Step, StepRunner, limiter_or_error, now_us, stored_revision

#: Sent when a request was refused: ``request``, ``decision``. Receivers' errors are logged, not raised.
request_refused = Signal()


def check_request(
    request: Any, scope: str | None = None, cost: int | None = None, *, again: bool = False
) -> Decision:
    """Identify the caller, resolve the policies, and admit or refuse the request in one round trip.

    ``request`` is Django's or DRF's. ``scope`` names the endpoint; endpoints that match its route count as well.
    ``cost`` is in units, None = the endpoint's own.

    A second check of the same request charges a bucket only for the units by which its cost exceeds those already
    paid there; when it refuses, the units of the earlier checks are refunded. ``again=True`` makes the check
    independent, for each item of a batch: it charges the whole cost, and a refusal refunds nothing.

    The decision is kept as ``request.ratequota``, unless there was nothing more to charge. Raises ``InvalidCost``.
    When Redis or the database fails, the policies' ``on_error`` decides.
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


class Evaluation(NamedTuple):
    """How a decision was reached, as far as it is recorded."""

    context: EvaluationContext
    route: str | None
    method: str
    resolution: Resolution
    #: Its cost, as it is recorded.
    units: int | RequestCost


def conclude(http: Any, decision: Decision, evaluation: Evaluation | None) -> Decision:
    """Prepare refunds by response status, alert and record; returns the decision with its ids for the response.

    ``http`` is None where there is no response to come.
    """
    if evaluation is None:
        return decision
    context, route, method, resolution, units = evaluation
    snapshot = context.snapshot
    if snapshot.by_outcome and decision.allowed and http is not None:
        reserve(http, snapshot, decision)
    process.observe(decision)
    refusal_id = process.record(context, route, method, resolution, decision, units)
    if decision.degraded:
        refusal_id = ""  # Redis is down, so the refusal may never get there to be looked up
    if not refusal_id and decision.revision == snapshot.revision:
        return decision
    return replace(decision, revision=snapshot.revision, refusal_id=refusal_id)


def assign(http: Any, decision: Decision) -> None:
    """Set ``request.ratequota``, and send ``request_refused`` for a refusal."""
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
    earlier = None if again else EarlierChecks.of(http)
    decision, evaluation = yield from evaluate(request, http, scope, cost, limiter, earlier, awaited)
    if earlier is not None and decision is earlier.again and evaluation is None:
        return decision
    decision = conclude(http, decision, evaluation)
    if earlier is not None and earlier.recorded:
        decision = yield from earlier.combine(decision, ())
    if again:
        set_apart(http, decision)
    elif evaluation is not None:
        context, _route, _method, resolution, units = evaluation
        if type(units) is int:  # else ``request_cost`` has set it
            http.ratequota_recorded = (context.caller.name, resolution.endpoint_ids, units, resolution.policy_ids)
    assign(http, decision)
    return decision


def evaluate(
    request: Any,
    http: Any,
    scope: str | None,
    cost: int | None,
    limiter: Limiter | StoreError,
    earlier: EarlierChecks | None,
    awaited: bool,
    known: Caller | None = None,
    only: Callable[[PolicyFacts], bool] | None = None,
) -> Generator[Step, Any, tuple[Decision, Evaluation | None]]:
    """Check the units that ``earlier`` has not charged; ``earlier.again`` where nothing is left.

    ``known`` is the caller if it need not be read from the request; ``request`` and ``http`` may be None then.
    ``only`` selects the policies that can be checked before the view authenticates. Returns None as the evaluation
    where there is nothing to record.
    """
    if not settings.enabled and getattr(limiter, "unlimited", False):  # a test's own limiter enforces its policies
        return Decision(allowed=True), None
    route = name = exemption = None
    method: str = NO_METHOD
    handling: Handling = "any"
    if http is not None:
        match = getattr(http, "resolver_match", None)
        method = http.method or "GET"
        exemption = _exemption_by_view(request) if match is None else exemption_of(getattr(match, "func", None))
        if exemption is not None and exemption.covers(method):
            return Decision(allowed=True), None
        route, name = resolved(match, getattr(http, "urlconf", None))
        handling = handling_of_request(request, http, method)
    keep_reporting()
    policies = process.policies
    snapshot = policies.current()
    # There is a snapshot only if this thread's transaction, if any, has changed no policies.
    pending = None if snapshot is None else False
    # At most one reload per request, in case operators publish faster than a process can read.
    may_reload = snapshot is not None
    if snapshot is None or policies.overdue():
        try:
            snapshot = yield from _load_snapshot(limiter, snapshot)
        except DatabaseError as error:
            return _without_database(error)
    user_known = known is not None
    if known is not None:
        caller = known
    while True:
        endpoints = match_endpoints(snapshot, scope=scope, route=route, name=name, method=method, handling=handling)
        if not user_known:
            user_known = "user" in settings.caller or (yield from _needs_user(snapshot, endpoints, scope, pending))
            # Reading the user may block: a step when awaited, else Caller reads it when needed.
            caller = Caller(request, (yield RequestStep.READ_USER) if user_known and awaited else None)
            if not user_known:
                # Not read: that may take queries, and adds ``Vary: Cookie`` to the response.
                caller.user_id, caller.user_read = None, False
        user_id = caller.user_id
        entry = NOBODY if user_id is None else policies.user(user_id, pending) or (yield from _load_user(user_id))
        try:
            context = EvaluationContext(caller, entry, endpoints, scope, snapshot, now_us(limiter))
            if user_known and (pending is None or policies.assigned_kinds != ()):
                resolution = yield partial(resolve_assigned, context, pending)
            elif known is None and (settings.identifiers or settings.plan_resolver):  # they may read the database
                resolution = yield partial(resolve, context)
            else:
                resolution = resolve(context)
        except DatabaseError as error:  # raised by one of the project's own functions
            return _without_database(error)
        if only is not None:
            # Before exemptions: the usage endpoint's built-in limit applies whatever policies it has.
            resolution = narrow(resolution, only)
        resolution = exempt(resolution, name, exemption, caller)
        if only is not None and not (resolution.buckets or resolution.blocked_by or resolution.unreadable):
            return Decision(allowed=True), None
        units = resolution.cost if cost is None else cost
        if earlier is not None and not earlier.fits(resolution.buckets, units):
            yield from earlier.free()
            earlier = None
        buckets, costs = (resolution.buckets, ()) if earlier is None else earlier.owed(resolution.buckets, units)
        if earlier is not None and not buckets and not resolution.blocked_by and not resolution.unreadable:
            if earlier.recorded:
                cost_so_far = earlier.request_cost(caller.name, resolution, units)
                if isinstance(cost_so_far, RequestCost) and cost_so_far.attempt != cost_so_far.before[1:]:
                    # It charges nothing, but belongs to more endpoints, or costs more, than is recorded.
                    again = replace(earlier.again, statuses=())
                    process.record(context, route, method, resolution, again, cost_so_far)
                return earlier.again, None
            decision = earlier.again
            break
        revision = snapshot.revision if may_reload else None
        try:
            decision = yield from decide(limiter, resolution, "check", units, buckets, revision, costs)
            break
        except NewerRevision as newer:
            may_reload = False
            try:
                snapshot = yield partial(policies.reload, newer.revision, newer.instead_of)
            except DatabaseError:
                pass  # the last known policies stay in force
    if earlier is not None and not earlier.recorded:
        decision, costs = (yield from earlier.combine(decision, resolution.buckets)), ()
    if not buckets and resolution.exempt:
        return decision, None
    if earlier is None or not earlier.recorded:
        return decision, Evaluation(context, route, method, resolution, units)
    whole = earlier.request_cost(caller.name, resolution, units)
    return decision, Evaluation(context, route, method, resolution, whole)


def _exemption_by_view(request: Any) -> Exemption | None:
    """Return what REST framework's view is exempt from, for a request that Django has not resolved, as in tests."""
    view = (getattr(request, "parser_context", None) or {}).get("view")
    return None if view is None else exemption_of_instance(view)


def _without_database(error: DatabaseError) -> tuple[Decision, None]:
    note_degraded("database", error)
    return decide_without_store((), "database", 1), None


def _needs_user(
    snapshot: Snapshot, endpoints: tuple[EndpointFacts, ...], scope: str | None, pending: bool | None
) -> Generator[Step, Any, bool]:
    """Return whether what applies at the endpoints depends on the user: plans, lists, overrides, days of months."""
    matched = match_policies(snapshot, endpoints, scope, NOBODY)
    if matched.exempt:
        return False
    if "user" in matched.kinds:
        return True
    for _endpoint, counted_per, _own, group in matched.groups:
        if counted_per == "plan" or (group and group.has_plans):
            return True
    own = process.policies.user_endpoints
    if own is None or pending is None:
        try:
            own = yield process.policies.load_user_endpoints
        except DatabaseError:
            return True
    if process.policies.anchored and matched.monthly:
        return True
    return not own.keys().isdisjoint([None, *[endpoint.id for endpoint in endpoints]])


def _load_snapshot(limiter: Limiter | StoreError, snapshot: Snapshot | None) -> Generator[Step, Any, Snapshot]:
    """Return the first snapshot, or the last one with the changes since."""
    if snapshot is None:
        revision = yield from stored_revision(limiter)
        return (yield partial(process.policies.reload, revision))  # type: ignore[no-any-return]
    try:
        return (yield process.policies.poll) or snapshot
    except DatabaseError:
        return snapshot  # the last known policies stay in force


def _load_user(user_id: str) -> Generator[Step, Any, UserEntry]:
    """Return the user's plan and overrides; none while the database is down, so that shared policies still apply."""
    try:
        return (yield partial(process.policies.load_user, user_id))  # type: ignore[no-any-return]
    except DatabaseError:
        return NOBODY
