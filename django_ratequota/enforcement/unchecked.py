"""Counting requests that a view refuses before its check: for a wrong key, or an ``Accept`` that it cannot answer.

REST framework and Ninja authenticate before they call throttles. With COUNT_UNCHECKED the middleware charges such a
request before the view runs, under the policies counted per ip, because these apply to any caller. The view's own
check takes the charge over. Without one, the charge stays if the response is an error, and is refunded otherwise.

Where a policy for a plan, a user or an identifier may win once the caller is known, the address is not refused before
the view runs. There the refusal replaces the error response of a view that made no check.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from django.db import Error as DatabaseError

from ..conf import settings
from ..engine.charges import Charges, charges_of
from ..engine.decision import Decision
from ..engine.limiter import Limiter
from ..engine.rates import BLOCKED
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..policies.facts import PolicyFacts
from ..policies.requests.caller import Unidentified
from ..runtime import process
from ..utils.sansio import adrive, drive
from .check import Evaluation, assign, conclude, evaluate
from .earlier_checks import HELD, EarlierChecks
from .steps import Step, StepRunner, limiter_or_error


class HeldCharge(EarlierChecks):
    """The charge of a request before its view runs. The view's own check takes it over."""

    recorded = False

    def __init__(self, request: Any, decision: Decision, evaluation: Evaluation) -> None:
        """``evaluation`` is recorded where the view makes no check of its own."""
        charged = {charge.bucket.counter for charge in charges_of(decision)}
        statuses = tuple(status for status in decision.statuses if status.bucket.counter in charged)
        super().__init__(request, [replace(decision, statuses=statuses)])
        self.again = self._decisions[0]
        self.decision, self.evaluation = decision, evaluation

    def fits(self, buckets: tuple[Bucket, ...], cost: int) -> bool:
        """Return whether a check of ``buckets`` includes all held charges, with at least their units."""
        rates = {bucket.counter: bucket.rate for bucket in buckets}
        charges = self._charges()
        return bool(charges) and all(
            (rate := rates.get(charge.bucket.counter)) == charge.bucket.rate and charge.units <= rate.units(cost)
            for charge in charges
        )

    def combine(self, decision: Decision, buckets: tuple[Bucket, ...]) -> Generator[Step, Any, Decision]:
        """Return the decision of the view's check as if that had checked all ``buckets``; a refusal charges none."""
        held = self._decisions[0]
        if decision.degraded == held.degraded:
            charges, new = charges_of(held), charges_of(decision)
            found = {status.bucket.counter: status for status in (*held.statuses, *decision.statuses)}
            statuses = [
                # The view's check knows which policies apply: several may have the same rate.
                status if status.bucket is bucket else replace(status, bucket=bucket)
                for bucket in buckets
                if (status := found.get(bucket.counter)) is not None
            ]
            # Where nothing was left to check, both are the same list.
            charges = charges if new is charges else Charges((*charges, *new), units=new.units)
            decision = replace(decision, statuses=tuple(statuses), _charges=charges)
        return decision if decision.allowed else (yield from self.give_back(decision))


def hold(request: Any, scope: str | None, cost: int | None) -> Decision | None:
    """Charge a request before its view runs; returns the decision that refuses it, None where it may run.

    ``scope`` and ``cost`` are those of the view's own check. Sends nothing where no policy is counted per ip.
    """
    limiter = limiter_or_error()
    return drive(_hold_steps(request, scope, cost, limiter), StepRunner(limiter).do)


async def ahold(request: Any, scope: str | None, cost: int | None) -> Decision | None:
    """``hold``, awaited."""
    limiter = limiter_or_error()
    return await adrive(_hold_steps(request, scope, cost, limiter), StepRunner(limiter, request).ado)


def release(request: Any, status: int) -> Decision | None:
    """Keep or refund a charge still held, by the response's ``status``; returns a decision if it refuses."""
    return drive(_release_steps(request, status), StepRunner(limiter_or_error()).do)


async def arelease(request: Any, status: int) -> Decision | None:
    """``release``, awaited."""
    return await adrive(_release_steps(request, status), StepRunner(limiter_or_error(), request).ado)


def _hold_steps(
    request: Any, scope: str | None, cost: int | None, limiter: Limiter | StoreError
) -> Generator[Step, Any, Decision | None]:
    if getattr(request, "ratequota", None) is not None:
        return None
    caller = Unidentified(request)
    decision, evaluation = yield from evaluate(request, request, scope, cost, limiter, None, False, caller, _per_ip)
    if not decision.allowed and (evaluation is None or (yield from _binds_everybody(decision, evaluation))):
        decision = conclude(request, decision, evaluation)
        assign(request, decision)
        return decision
    if evaluation is not None:
        vars(request)[HELD] = HeldCharge(request, decision, evaluation)
    return None


def _release_steps(request: Any, status: int) -> Generator[Step, Any, Decision | None]:
    held: HeldCharge = vars(request).pop(HELD)
    if getattr(request, "ratequota", None) is not None or status < 400:
        yield from held.free()
        return None
    decision = conclude(request, held.decision, held.evaluation)
    assign(request, decision)
    return None if decision.allowed else decision


def _per_ip(policy: PolicyFacts) -> bool:
    return policy.counted_per == "ip"


def _binds_everybody(decision: Decision, evaluation: Evaluation) -> Generator[Step, Any, bool]:
    """Return whether a refusal under policies counted per ip applies to any caller.

    It does unless each policy that refused may lose to one for a plan, a user, an identifier or a list of these.
    """
    user_endpoints = process.policies.user_endpoints
    if user_endpoints is None:
        try:
            user_endpoints = yield process.policies.load_user_endpoints
        except DatabaseError:
            user_endpoints = {}
    resolution, on_error = evaluation.resolution, settings.on_error
    refusing = {status.bucket.policy_id for status in decision.refusing}.union(resolution.blocking)
    if None in refusing:  # the usage endpoint's built-in limit
        return True
    for policy in resolution.winners:
        denied = decision.denied_by and policy.mode == "enforce" and (policy.on_error or on_error) == "deny"
        if policy.id not in refusing and not denied:
            continue
        snapshot = evaluation.context.snapshot
        group = snapshot.groups[policy.endpoint_id]["ip"]
        by_address = policy.network is not None or policy.list_id is not None
        if by_address and policy.rates == BLOCKED:  # which no policy outranks
            return True
        kinds = group.kinds.keys() | snapshot.members.kinds_of(group.by_list) - {"ip"}
        if kinds or "ip" in user_endpoints.get(policy.endpoint_id, ()):
            continue
        if by_address or not group.has_plans:
            return True
    return False
