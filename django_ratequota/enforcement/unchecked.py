"""Requests that a view refuses before it has them checked: a wrong key, an ``Accept`` that it cannot answer.

REST framework and Ninja authenticate before they ask throttles. With COUNT_UNCHECKED the middleware charges such a
request before the view runs, under the policies counted per ip: these apply whoever the caller turns out to be. The
view's own check takes the charge over. Without one it stays where the response is an error, and goes back otherwise.

Where a policy for a plan, a user or an identifier may win once the caller is known, an address is not refused before
the view runs. There the refusal takes the place of an error that the view answered without a check.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from django.db import Error as DatabaseError

from ..conf import settings
from ..engine.limiter import Limiter
from ..engine.rates import BLOCKED
from ..engine.types import Decision
from ..exceptions import StoreError
from ..policies.facts import PolicyFacts
from ..runtime import process
from ..utils.sansio import adrive, drive
from .check import Seen, assign, conclude, decide
from .settlement import HELD, Held
from .steps import Step, StepRunner, limiter_or_error


def hold(request: Any, scope: str | None, cost: int | None) -> Decision | None:
    """Charge a request before its view runs; returns the decision that refuses it, None where it may run.

    ``scope`` and ``cost`` are those of the view's own check. Asks nothing where no policy is counted per ip.
    """
    limiter = limiter_or_error()
    return drive(_hold_steps(request, scope, cost, limiter), StepRunner(limiter).do)


async def ahold(request: Any, scope: str | None, cost: int | None) -> Decision | None:
    """``hold``, awaited."""
    limiter = limiter_or_error()
    return await adrive(_hold_steps(request, scope, cost, limiter), StepRunner(limiter, request).ado)


def release(request: Any, status: int) -> Decision | None:
    """Keep or give back what is still held, by the response's ``status``; returns a decision that refuses it."""
    return drive(_release_steps(request, status), StepRunner(limiter_or_error()).do)


async def arelease(request: Any, status: int) -> Decision | None:
    """``release``, awaited."""
    return await adrive(_release_steps(request, status), StepRunner(limiter_or_error(), request).ado)


def _hold_steps(
    request: Any, scope: str | None, cost: int | None, limiter: Limiter | StoreError
) -> Generator[Step, Any, Decision | None]:
    if getattr(request, "ratequota", None) is not None:
        return None
    decision, seen = yield from decide(request, request, scope, cost, limiter, None, False, _per_ip)
    if not decision.allowed and (seen is None or (yield from _binds_everybody(decision, seen))):
        decision = conclude(request, decision, seen)
        assign(request, decision)
        return decision
    if seen is not None:
        vars(request)[HELD] = Held(request, decision, seen)
    return None


def _release_steps(request: Any, status: int) -> Generator[Step, Any, Decision | None]:
    held: Held = vars(request).pop(HELD)
    if getattr(request, "ratequota", None) is not None or status < 400:
        yield from held.free()
        return None
    decision = conclude(request, held.decision, held.seen)
    assign(request, decision)
    return None if decision.allowed else decision


def _per_ip(policy: PolicyFacts) -> bool:
    return policy.counted_per == "ip"


def _binds_everybody(decision: Decision, seen: Seen) -> Generator[Step, Any, bool]:
    """Whether a refusal under policies counted per ip stands whoever the caller turns out to be.

    It does unless each of the policies that refused may lose to one for a plan, a user or an identifier.
    """
    own = process.policies.user_endpoints
    if own is None:
        try:
            own = yield process.policies.load_user_endpoints
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
        group = seen.context.snapshot.groups[policy.endpoint_id]["ip"]
        if policy.network is not None and policy.rates == BLOCKED:  # which nothing outranks
            return True
        if group.kinds or "ip" in own.get(policy.endpoint_id, ()):
            continue
        if policy.network is not None or not group.has_plans:
            return True
    return False
