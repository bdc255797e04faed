"""From a request to a decision: identify, resolve, check. The one place that orchestrates.

Each step that may block is yielded (see ``twin``): a command for Redis, or a function that reads the database. So
the sync and the async way are the same code.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseError
from django.utils.functional import LazyObject

from .alerts import watch
from .charges import charges_of
from .collecting import note
from .conf import settings
from .exceptions import InvalidCost, InvalidRate, NewerRevision, StoreError
from .facts import NOBODY, PlanFacts, Snapshot, UserEntry
from .fallback import decide_without_store
from .health import keep_reporting, note_degraded
from .identity import Caller
from .limiter import LOOK_SHARE, Limiter, default_limiter
from .outcome import reserve
from .resolver import Asked, Candidate, Resolution, explain, match_endpoints, plan_of, resolve, why_plan
from .routes import resolved
from .scripts import Command
from .signals import request_refused
from .snapshot import policies
from .store import Call
from .twin import adrive, drive
from .types import Bucket, Decision, check_cost

logger = logging.getLogger("django_ratequota")

Step = Command | Callable[[], Any]


def check_request(request: Any, scope: str | None = None, cost: int | None = None) -> Decision:
    """Identify the caller, resolve the policies, and admit or refuse the request in one round trip.

    ``request`` is Django's or DRF's. ``scope`` names the endpoint; endpoints that match its route count as well.
    ``cost`` is in units, None = the endpoint's own. What this request was charged before is not charged again.
    The decision is kept as ``request.ratequota``. Raises ``InvalidCost``; whatever Redis or the database do is
    decided by the policies' ``on_error``.
    """
    return drive(_check_steps(request, scope, cost, None), _Doer().do)


async def acheck_request(request: Any, scope: str | None = None, cost: int | None = None) -> Decision:
    """``check_request``, awaited."""
    user = await _auser(request)
    return await adrive(_check_steps(request, scope, cost, user), _Doer().ado)


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
    cost: int | None = None,
) -> Explanation:
    """Say what applies to the caller, to a request of so many units; None = the endpoint's own cost.

    Raises ``django.db.Error``; a failing store shows in the decision.
    """

    def steps() -> Generator[Step, Any, Explanation]:
        snapshot, entry = newest(caller)
        asked = _ask(caller, entry, snapshot, scope, route, name, method)
        resolution = resolve(asked)
        if cost is not None:
            resolution = replace(resolution, cost=check_cost(cost))
        decision = yield from _judge(resolution, "peek", resolution.cost, resolution.buckets, None)
        return Explanation(
            plan=plan_of(asked),
            candidates=explain(asked),
            resolution=resolution,
            decision=decision,
            plan_source=why_plan(asked),
            asked=asked,
        )

    return drive(steps(), _Doer().do)


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


def _check_steps(request: Any, scope: str | None, cost: int | None, user: Any) -> Generator[Step, Any, Decision]:
    if cost is not None:
        cost = check_cost(cost)
    http = getattr(request, "_request", request)
    before: Decision | None = getattr(http, "ratequota", None)
    decision = yield from _decide(request, http, scope, cost, user, before)
    http.ratequota = decision
    if not decision.allowed and decision is not before:
        request_refused.send_robust(sender=None, request=http, decision=decision)
    return decision


def _decide(
    request: Any, http: Any, scope: str | None, cost: int | None, user: Any, before: Decision | None
) -> Generator[Step, Any, Decision]:
    keep_reporting()
    route, name = resolved(getattr(http, "resolver_match", None))
    method = http.method or "GET"
    caller = Caller(request, user)
    snapshot = policies.current()
    # Policies are read once a request at most, should operators publish faster than a process can read.
    may_reload = snapshot is not None
    if snapshot is None or policies.overdue():
        try:
            snapshot = yield from _newer(snapshot)
        except DatabaseError as error:
            note_degraded("database", error)
            return decide_without_store((), "database", 1)
    charged = {status.bucket.counter for status in before.statuses} if before and before.allowed else None
    while True:
        user_id = caller.user_id
        entry = NOBODY if user_id is None else policies.user(user_id) or (yield from _load(user_id))
        try:
            asked = _ask(caller, entry, snapshot, scope, route, name, method)
            resolution = (yield partial(resolve, asked)) if _may_block() else resolve(asked)
        except DatabaseError as error:  # one of the project's own functions asked it
            note_degraded("database", error)
            return decide_without_store((), "database", 1)
        buckets = resolution.buckets
        if charged:
            buckets = tuple(bucket for bucket in buckets if bucket.counter not in charged)
        refuses = resolution.blocked_by or resolution.unreadable
        if before is not None and before.allowed and not buckets and not refuses:
            return before
        revision = snapshot.revision if may_reload else None
        units = resolution.cost if cost is None else cost
        try:
            decision = yield from _judge(resolution, "check", units, buckets, revision)
            break
        except NewerRevision as newer:
            may_reload = False
            try:
                snapshot = yield partial(policies.reload, newer.revision)
            except DatabaseError:
                pass  # the last known policies go on
    if snapshot.by_outcome and decision.allowed:
        reserve(http, snapshot, decision)
    watch(decision)
    refusal_id = note(asked, route, method, resolution, decision, units)
    # What was counted in another place says nothing here, and is not to be settled here.
    together = before is not None and before.allowed and before.degraded == decision.degraded
    kept = before.statuses if before is not None and together else ()
    if not kept and not refusal_id and decision.revision == snapshot.revision:
        return decision
    charges = [*(charges_of(before) if before and kept else ()), *charges_of(decision)]
    return replace(
        decision,
        statuses=(*kept, *decision.statuses),
        revision=snapshot.revision,
        refusal_id=refusal_id,
        _charges=charges,
    )


def _newer(snapshot: Snapshot | None) -> Generator[Step, Any, Snapshot]:
    """The first snapshot, or what a look at the database makes of the last one."""
    if snapshot is None:
        revision = 0
        try:
            revision = yield from default_limiter().revision_steps(LOOK_SHARE)
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
    caller: Caller,
    entry: UserEntry,
    snapshot: Snapshot,
    scope: str | None,
    route: str | None,
    name: str | None,
    method: str,
) -> Asked:
    return Asked(
        caller=caller,
        entry=entry,
        endpoints=match_endpoints(snapshot, scope=scope, route=route, name=name, method=method),
        scope=scope,
        snapshot=snapshot,
        now_us=_now_us(),
    )


def _judge(
    resolution: Resolution, mode: str, cost: int, buckets: tuple[Bucket, ...], revision: int | None
) -> Generator[Step, Any, Decision]:
    """Ask the store, or decide by ``on_error`` where it does not answer. Raises ``NewerRevision``."""
    denied_by = _denied_by(resolution)
    # A blocked request consumes nothing, but asks all the same: it, too, sees the edit that lifts the block.
    asked = () if resolution.blocked_by or denied_by else buckets
    try:
        limiter = default_limiter()
        decision = yield from limiter.steps(mode, asked, cost, revision=revision, settler=_Settler(limiter))
    except StoreError as error:
        if mode != "peek":
            note_degraded(error.reason, error)
        peek = mode == "peek" or bool(denied_by)
        decision = decide_without_store(buckets, error.reason, cost, resolution.blocked_by, peek=peek)
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


class _Settler:
    """Charges and refunds after the decision; a store that fails then is logged and fails no request."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    def charge(self, buckets: tuple[Bucket, ...], *, cost: int) -> Decision:
        return drive(self._steps("charge", buckets, cost), _Doer().do)

    def refund(self, buckets: tuple[Bucket, ...], *, cost: int, charged: tuple[int, ...]) -> Decision:
        return drive(self._steps("refund", buckets, cost, charged), _Doer().do)

    async def acharge(self, buckets: tuple[Bucket, ...], *, cost: int) -> Decision:
        return await adrive(self._steps("charge", buckets, cost), _Doer().ado)

    async def arefund(self, buckets: tuple[Bucket, ...], *, cost: int, charged: tuple[int, ...]) -> Decision:
        return await adrive(self._steps("refund", buckets, cost, charged), _Doer().ado)

    def _steps(
        self, mode: str, buckets: tuple[Bucket, ...], cost: int, charged: tuple[int, ...] = (0,)
    ) -> Generator[Step, Any, Decision]:
        try:
            return (yield from self._limiter.steps(mode, buckets, cost, times=charged, settler=self))
        except StoreError as error:
            note_degraded(error.reason, error)
            return Decision(allowed=True, error=error.reason)


def usable_cost(cost: object, of: str) -> int | None:
    """A cost that code computed for one request; None, the endpoint's own, where it is no cost."""
    try:
        return check_cost(cost)
    except InvalidCost as error:
        # A request must not fail for a number computed from it; the endpoint's own cost is a fair stand-in.
        logger.error("%s: %s; the endpoint's cost counts", of, error)
        return None


def _may_block() -> bool:
    """Whether resolving calls the project's own functions, which may read the database."""
    return bool(settings.identifiers or settings.plan_resolver)


def _now_us() -> int:
    try:
        return default_limiter().now_us
    except StoreError:
        return time.time_ns() // 1000


class _Doer:
    """Does the steps of one request; its commands share one deadline."""

    __slots__ = ("_call",)

    def __init__(self) -> None:
        self._call: Call | None = None

    def do(self, step: Step) -> Any:
        return step() if callable(step) else self._one_call().do(step)

    async def ado(self, step: Step) -> Any:
        return await sync_to_async(step)() if callable(step) else await self._one_call().ado(step)

    def _one_call(self) -> Call:
        if self._call is None:
            self._call = default_limiter().store.call()
        return self._call


async def _auser(request: Any) -> Any:
    """The request's user, found without blocking the event loop.

    ``request.auser`` comes second: it is the session's user, whoever a later middleware has put in its place.
    """
    user = vars(request).get("user")
    if user is None and not hasattr(type(request), "user"):
        return await request.auser() if hasattr(request, "auser") else None
    if user is None or isinstance(user, LazyObject):
        # DRF's property authenticates when it is read, a lazy object reads session and user: in a thread.
        return await sync_to_async(_read_user)(request)
    return user


def _read_user(request: Any) -> Any:
    user = request.user
    if user is not None:
        _ = user.is_authenticated
    return user
