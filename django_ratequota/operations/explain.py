"""Explain which policies apply to a caller's request, and why, without consuming units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from django.db import Error as DatabaseError
from django.utils.translation import gettext as _

from ..conf import settings
from ..enforcement.on_error import enforce
from ..enforcement.step_runner import Step, run
from ..engine.decision import Decision, LimitRequest
from ..engine.protocol import MAX_BUCKETS
from ..engine.types import Bucket, check_cost
from ..exceptions import StoreError
from ..policies.assigned import assigned_to, unnamed_kinds
from ..policies.exemptions import Exemption, exempt, exemption_of, why_skipped
from ..policies.facts import NOBODY, PlanFacts
from ..policies.matching import NO_METHOD, match_endpoints
from ..policies.reasons import Candidate, explain, explain_winners, plan_source
from ..policies.requests.caller import UNKNOWN, Caller
from ..policies.requests.routes import handling_of_view
from ..policies.resolver import EvaluationContext, Resolution, narrow, plan_of, resolve
from ..policies.snapshot import Snapshot
from ..runtime import default_limiter, process

#: Maximum number of endpoints whose limits are read together.
MOST_ENDPOINTS = 100


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
    view = None if method == NO_METHOD else view

    def steps() -> Generator[Step, Any, Explanation]:
        snapshot, more = newest_policies(), False
        entry = NOBODY if caller.user_id is None else process.policies.load_user(caller.user_id)
        request: dict[str, Any] = {"scope": scope, "route": route, "name": name, "method": method}
        endpoints = match_endpoints(snapshot, **request, handling=handling_of_view(view, method))
        if everywhere:
            endpoints, more = snapshot.overview.limiting(entry, MOST_ENDPOINTS)
            snapshot = snapshot.overview.snapshot
        assigned = assigned_to(caller, entry)
        context = EvaluationContext(caller, entry, endpoints, scope, snapshot, limiter.now_us, assigned)
        others: Counter[str] = Counter()
        exemption = exemption_of(view)
        resolution = exempt(resolve(context), name, exemption, caller)
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
            plan=plan_of(context),
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


def _why_exempt(limiter: Any, resolution: Resolution, exemption: Exemption | None, method: str) -> str:
    """Return why the request is exempt; "" = it is not."""
    if limiter.unlimited:
        return _("RATEQUOTA['ENABLED'] is False")
    if exemption is not None and exemption.covers(method):
        return _("@exempt decorates the view")
    return resolution.exempt and _("the endpoint %(name)s is exempt") % {"name": resolution.exempt}


def _plan_source(context: EvaluationContext, resolution: Resolution) -> str:
    """Return where the plan comes from, and which kinds of subjects were not named but may have another one."""
    source, unnamed = plan_source(context), unnamed_kinds(context.caller, resolution.assigned_to)
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
    policies, revision = process.policies, 0
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
