"""From a request to a decision: identify, match, resolve, ask, settle, record.

``Evaluation`` has the steps that all checks share. Each mode has its own short path through them: ``RequestCheck``
here, ``unchecked.FirstCheck`` before the view runs, and ``check_caller`` without a request.

Each step that may block is yielded (see ``utils.sansio``): a command for Redis, or a function that reads the
database. So sync and async checks are the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import getpid
from typing import Any
from weakref import ref

from django.db import Error as DatabaseError
from django.dispatch import Signal

from ..conf import settings
from ..engine.decision import Decision, LimitRequest, Mode
from ..engine.limiter import Limiter
from ..engine.rates import show
from ..engine.slots import Slots
from ..engine.types import Bucket, check_cost
from ..exceptions import NewerRevision, StoreError
from ..monitoring.health import note_degraded
from ..monitoring.records import Recorded
from ..monitoring.workers import redis_worker
from ..policies.cache import PolicyCache
from ..policies.facts import NOBODY, PolicyFacts
from ..policies.matching import Where
from ..policies.requests.caller import Caller
from ..policies.requests.routes import resolved
from ..policies.requests.view_facts import Exemption, exemption_of_request, facts_of, scope_name
from ..policies.resolve_for import Own, aresolve_for, own_in_memory, resolve_for
from ..policies.resolver import EvaluationContext, Resolution, match
from ..policies.snapshot import Snapshot
from ..runtime import process
from ..utils.sansio import Twins
from ..utils.signals import send_robustly
from .earlier_checks import (
    CHECKS,
    Admitted,
    RequestChecks,
    again,
    combine,
    owed,
    refund_others,
    release,
    release_others,
)
from .on_error import enforce, without_store
from .request_end import close
from .settlement import reserve, store_settler
from .slots import slots_of
from .step_runner import Step, aread_user, arun, read_user, run, unless_down

#: Sent when a request was refused: ``request``, ``decision``. Receivers' errors are logged, not raised.
request_refused = Signal()
#: The headers that make a request by OPTIONS a preflight of CORS, and those that no browser sends with one.
_PREFLIGHT = ("HTTP_ORIGIN", "HTTP_ACCESS_CONTROL_REQUEST_METHOD")
_CREDENTIALS = ("HTTP_COOKIE", "HTTP_AUTHORIZATION")
#: What belongs to a caller on whom nothing depends.
_NOTHING = Own()


def check_request(
    request: Any, scope: str | None = None, cost: int | None = None, *, again: bool = False
) -> Decision:
    """Identify the caller, resolve the policies, and admit or refuse the request in one round trip.

    ``request`` is Django's or DRF's. ``scope`` names the endpoint; endpoints that match its route count as well.
    ``cost`` is in units, None = the endpoint's own.

    A second check of the same request charges a bucket only for the units by which its cost exceeds those already
    paid there; when it refuses, the units of the earlier checks are refunded. ``again=True`` makes the check
    independent, for each item of a batch: it charges the whole cost, and a refusal refunds nothing.

    The decision is kept as ``request.ratequota``, unless there was nothing more to charge. Raises ``InvalidCost``,
    and ``TypeError`` for a scope that is no text. When Redis or the database fails, the policies' ``on_error``
    decides.
    """
    return run(RequestCheck(request, scope, cost, independent=again).steps())


async def acheck_request(
    request: Any, scope: str | None = None, cost: int | None = None, *, again: bool = False
) -> Decision:
    """``check_request``, awaited."""
    return await arun(RequestCheck(request, scope, cost, independent=again, awaited=True).steps())


def is_free(limiter: Limiter, exemption: Exemption | None, method: str) -> bool:
    """Whether requests of this method are not counted: ENABLED is off, or ``@exempt`` covers their view."""
    return limiter.unlimited or (exemption is not None and exemption.covers(method))


def _is_preflight(sent: Callable[[str], object]) -> bool:
    """Whether a request by OPTIONS with these headers is a preflight of CORS."""
    return all(map(sent, _PREFLIGHT)) and not any(map(sent, _CREDENTIALS))


def _place(request: Any, http: Any, scope: Any, only: Callable[[PolicyFacts], bool] | None) -> Where:
    """Return where a request goes; raises ``TypeError`` for what is none, and for a scope that is no text."""
    try:
        method = http.method or "GET"
    except AttributeError as error:
        text = "check_request needs Django's or DRF's request, not %s; without one, call check_caller"
        raise TypeError(text % show(request)) from error
    match = getattr(http, "resolver_match", None)
    route, name = resolved(match, getattr(http, "urlconf", None))
    view = facts_of(getattr(match, "func", None))
    handling = view.handling(method, authenticated=request is not http)
    preflight = handling == "preflight" and _is_preflight(http.META.get)
    scope = scope if scope is None or type(scope) is str else scope_name(scope)
    exemption = exemption_of_request(request, http) if match is None else view.exemption
    return Where(scope, route, name, method, handling, exemption, preflight, only)


class Evaluation(ABC):
    """One check on its way to a decision: what it asks for, and what each step has found."""

    #: How Redis is asked: peek = nothing is charged.
    mode: Mode = "check"
    #: Whether ``caller`` is final. A newer revision may have policies that depend on the user, so that it is read.
    identified = False
    #: What is known once ``evaluate`` has returned; no resolution = there is nothing to record.
    snapshot: Snapshot
    caller: Caller
    context: EvaluationContext
    resolution: Resolution | None = None
    #: What the request costs.
    units: int

    def __init__(self, where: Where, cost: int | None) -> None:
        """Raises ``InvalidCost``. ``cost`` None = the endpoint's own."""
        self.limiter, self.where = process.limiter(), where
        self.cost = None if cost is None else check_cost(cost)
        #: Whether a transaction of this thread has changed policies; None = find out.
        self.pending: bool | None = None

    def evaluate(self) -> Generator[Step, Any, Decision]:
        """Decide by the policies in force, and again by the next ones where they have just changed."""
        if redis_worker.pid != getpid():
            redis_worker.keep()
        try:
            revision = yield from self.load()
            resolution = yield from self.resolve()
            try:
                return (yield from self.enforce(resolution, revision))
            except NewerRevision as newer:
                # The last known policies stay in force while the database is down.
                read = partial(process.policies.reload, newer.revision, newer.instead_of)
                self.snapshot = yield from unless_down(read, self.snapshot)
                resolution = yield from self.resolve()
                # At most one reload per request, in case operators publish faster than a process can read.
                return (yield from self.enforce(resolution, None))
        except DatabaseError as error:  # of the first policies, or raised by one of the project's own functions
            self.resolution = None
            note_degraded("database", error)
            return (yield from without_store(LimitRequest(mode="check", buckets=()), "database"))

    def load(self) -> Generator[Step, Any, int | None]:
        """Set ``snapshot``; returns the revision to compare with the published one, None = it was just read."""
        policies: PolicyCache = process.policies
        known = policies.current()
        if known is None:
            revision = 0
            with suppress(StoreError):
                revision = yield from self.limiter.revision_steps()
            self.snapshot = yield partial(policies.reload, revision)
            return None
        self.pending = False  # else there would be no current snapshot
        if policies.overdue():
            known = (yield from unless_down(policies.poll, None)) or known
        self.snapshot = known
        return known.revision

    def identify(self) -> Generator[Step, Any, None]:
        """Set ``caller``, where it is not known from the start."""
        yield from ()

    def resolve(self) -> Generator[Step, Any, Resolution]:
        """Identify the caller, and return the policies that apply."""
        if not self.identified:
            yield from self.identify()
        own = own_in_memory(self.caller, self.pending) if self.identified else _NOTHING
        asked = (self.caller, self.where, self.snapshot, self.limiter.now_us, own)
        blocks = own is None or settings.identifiers or settings.plan_resolver
        self.context, resolution = (yield Twins(resolve_for, aresolve_for, asked)) if blocks else resolve_for(*asked)
        self.resolution = resolution
        self.units = resolution.cost if self.cost is None else self.cost
        return resolution

    @abstractmethod
    def enforce(self, resolution: Resolution, revision: int | None) -> Generator[Step, Any, Decision]:
        """Check the buckets; raises ``NewerRevision`` where ``revision`` is not the last."""

    def request_for(
        self, buckets: Sequence[Bucket], revision: int | None, slots: Slots | None, costs: tuple[int, ...] = ()
    ) -> LimitRequest:
        """Return what the limiter is asked; ``costs`` are the units of each bucket, () = by its rate."""
        if slots is not None:  # which look at each of the buckets
            buckets = tuple(buckets)
        return LimitRequest(self.mode, buckets, self.units, store_settler(self.limiter), costs, revision, slots=slots)

    def replaced(self, resolution: Resolution, own: Decision) -> Recorded | None:
        """Return what the record of this check replaces; None = nothing."""
        return None

    def record(self, decision: Decision, own: Decision) -> Decision:
        """Record ``own``, what this check has found; returns the decision with its ids for the response."""
        resolution = self.resolution
        if resolution is None or resolution.exempt:
            return decision
        process.observe(own, self.units)
        before, where = self.replaced(resolution, own), self.where
        refusal_id = process.record(self.context, where.route, where.method, resolution, own, self.units, before)
        if decision.error:
            refusal_id = ""  # Redis is down, so the refusal may never get there to be looked up
        revision = self.snapshot.revision
        if not refusal_id and decision.revision == revision:
            return decision
        return replace(decision, revision=revision, refusal_id=refusal_id)


class RequestCheck(Evaluation):
    """A check of an HTTP request."""

    #: The policies that this check is about; None = all.
    only: Callable[[PolicyFacts], bool] | None = None

    def __init__(
        self, request: Any, scope: str | None, cost: int | None, *, independent: bool = False, awaited: bool = False
    ) -> None:
        """``independent``: earlier and later checks of the request do not matter. ``awaited``: in an event loop."""
        self.request, self.http = request, getattr(request, "_request", request)
        self.independent, self.awaited = independent, awaited
        http = self.http
        super().__init__(_place(request, http, scope, self.only), cost)
        checks: RequestChecks | None = vars(http).get(CHECKS)
        if checks is None:
            checks = vars(http)[CHECKS] = RequestChecks()
        self.checks = checks
        #: Those that this one builds on; none for most requests, which are checked once.
        self.earlier: Admitted = () if independent else checks.admitted
        #: Whether the earlier checks have paid for all that this one asks for.
        self.is_paid = False

    def steps(self) -> Generator[Step, Any, Decision]:
        """Check the request, and set ``request.ratequota``."""
        if is_free(self.limiter, self.where.exemption, self.where.method):
            return (yield from self.assign(Decision(allowed=True)))
        own = yield from self.evaluate()
        if self.is_paid:
            return self.record_rest(own)
        decision, checks = own, self.checks
        if self.earlier:
            decision = yield from combine(self.earlier, own, self.resolution.buckets if self.resolution else ())
        if checks.slots is not None and not own.allowed and not self.independent:
            yield release(checks.slots)
        return (yield from self.assign(self.record(decision, own if checks.recorded else decision)))

    def identify(self) -> Generator[Step, Any, None]:
        """Set ``caller``, with its user where a policy at the endpoints depends on it."""
        self.identified = "user" in settings.caller or (yield from self._needs_user())
        # Reading the user may block: a step when awaited, else Caller reads it when needed.
        user = (yield Twins(read_user, aread_user, (self.request,))) if self.identified and self.awaited else None
        self.caller = caller = Caller(self.request, user)
        if not self.identified:
            # Not read: that may take queries, and adds ``Vary: Cookie`` to the response.
            caller.user_id, caller.user_read = None, False

    def enforce(self, resolution: Resolution, revision: int | None) -> Generator[Step, Any, Decision]:
        """Check what the earlier checks have not paid, and remember what the response's status may refund."""
        buckets, slots = resolution.buckets, self.checks.slots
        costs: tuple[int, ...] = ()  # not ``tuple[int, ...]()``, which takes 50 times as long
        if resolution.concurrent and self.independent:  # one item of a batch: the request has its slots
            buckets = tuple(bucket for bucket in buckets if not bucket.rate.concurrent)
        if self.earlier:
            if not self.checks.recorded:  # made before the caller was known: other policies may apply to it
                self.earlier = yield from refund_others(self.earlier, buckets)
            if slots is not None:
                yield from release_others(slots, buckets, elsewhere=not self.checks.recorded)
            buckets, costs = owed(self.earlier, buckets, self.units, slots)
            if not buckets and not resolution.blocked_by and not resolution.unreadable:
                self.is_paid = True
                return again(self.earlier, resolution.buckets)
        slots = slots_of(self.checks) if resolution.concurrent and not self.independent else None
        self.checks.durable |= resolution.durable
        if slots is not None or (resolution.durable and not self.checks.watched):
            vars(self.http).setdefault("close", partial(close, ref(self.http), self.checks))
        request = self.request_for(buckets, revision, slots, costs)
        decision = yield from enforce(self.limiter, resolution, request, self.checks)
        if self.snapshot.by_outcome and decision.allowed:
            reserve(self.http, self.snapshot, decision)
        return decision

    def replaced(self, resolution: Resolution, own: Decision) -> Recorded | None:
        """Return what the request's earlier checks recorded, and remember the whole for its next one."""
        if self.independent:
            return None
        before = self.recorded_before()
        second, caller = own.at_us // 10**6, self.caller.name
        this = Recorded(second, caller, resolution.endpoint_ids, self.units, resolution.policy_ids)
        self.checks.recorded = this.joined(before) if before else this
        return before

    def recorded_before(self) -> Recorded | None:
        """Return what the request's earlier checks recorded of this caller; None without a clock."""
        before = self.checks.recorded if self.earlier else None
        return before if before and before.second and before.caller == self.caller.name else None

    def record_rest(self, paid: Decision) -> Decision:
        """Record a check that charges nothing where it belongs to more endpoints, or costs more, than is recorded."""
        checks, resolution = self.checks, self.resolution
        if not checks.recorded:
            checks.first = None
            self.http.ratequota = self.record(self.earlier[-1], self.earlier[-1])
        elif resolution is not None:
            before = self.recorded_before()
            if before is not None and not before.covers(resolution.endpoint_ids, self.units):
                self.record(paid, replace(paid, statuses=()))
        return paid

    def assign(self, decision: Decision) -> Generator[Step, Any, Decision]:
        """Set ``request.ratequota``, and send ``request_refused`` for a refusal; returns the decision."""
        if not self.independent:
            self.checks.add(decision)
        self.http.ratequota = decision
        if not decision.allowed and request_refused.receivers:
            yield partial(send_robustly, request_refused, sender=None, request=self.http, decision=decision)
        return decision

    def _needs_user(self) -> Generator[Step, Any, bool]:
        """Return whether what applies depends on the user: plans, lists, overrides, days of months."""
        policies: PolicyCache = process.policies
        matched = match(self.snapshot, self.where, NOBODY)
        if matched.exempt:
            return False
        if matched.by_plan or "user" in matched.kinds:
            return True
        own = policies.user_endpoints
        if own is None or self.pending is None:
            own = yield from unless_down(policies.load_user_endpoints, None)
            if own is None:
                return True
        if policies.anchored and matched.monthly:
            return True
        return not own.keys().isdisjoint([None, *matched.endpoint_ids])
