"""Counting requests that a view refuses before its check: for a wrong key, or an ``Accept`` that it cannot answer.

REST framework and Ninja authenticate before they call throttles. With COUNT_UNCHECKED the middleware makes a first
check of such a request before the view runs, of the policies counted per ip, because these apply to any caller. The
view's own check builds on it, as on any earlier one. It is recorded with the view's check, or else by the response.

Where an enforced policy for a plan, a user or an identifier may win once the caller is known, the address is not
refused before the view runs. There the refusal replaces the error response of a view that made no check.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from ..engine.decision import Decision
from ..engine.rates import BLOCKED
from ..policies.requests.caller import Unidentified
from ..policies.resolver import Resolution
from ..runtime import process
from .check_request import RequestCheck, is_free
from .on_error import action_of
from .step_runner import Step, unless_down


class FirstCheck(RequestCheck):
    """The check of a request before its view runs, of the policies counted per ip."""

    only = staticmethod(lambda policy: policy.counted_per == "ip")
    #: What it has decided, if its view may run.
    found: Decision

    def refuse(self) -> Generator[Step, Any, Decision | None]:
        """Return the decision that refuses the request; None where its view may run."""
        if "ratequota" in vars(self.http) or is_free(self.limiter, self.where.exemption, self.where.method):
            return None
        self.caller, self.identified = Unidentified(self.request), True
        decision = yield from self.evaluate()
        resolution = self.resolution
        if not decision.allowed and (resolution is None or (yield from self._binds_everybody(decision, resolution))):
            return (yield from self.assign(self.record(decision, decision)))
        if resolution is not None:
            self.checks.add(decision)
            self.checks.first, self.found = self, decision
        return None

    def conclude(self, status: int) -> Generator[Step, Any, Decision | None]:
        """Record the check, on which no other one was built; returns its refusal in place of an error response.

        ``status`` is the response's. A view that answers without an error has let the request pass, refused or not.
        """
        self.checks.first = None
        if not self.found.allowed and status < 400:
            return None
        decision = self.record(self.found, self.found)
        if decision.allowed:
            vars(self.http).setdefault("ratequota", decision)  # else that of an independent check
            return None
        return (yield from self.assign(decision))

    def enforce(self, resolution: Resolution, revision: int | None) -> Generator[Step, Any, Decision]:
        """Check nothing where no policy is counted per ip."""
        if resolution.buckets or resolution.blocked_by or resolution.unreadable:
            return (yield from super().enforce(resolution, revision))
        self.resolution = None
        return Decision(allowed=True)

    def _binds_everybody(self, decision: Decision, resolution: Resolution) -> Generator[Step, Any, bool]:
        """Return whether a refusal under policies counted per ip applies to any caller.

        It does unless each policy that refused may lose to an enforced one for a plan, user, identifier or list.
        """
        user_endpoints = process.policies.user_endpoints
        if user_endpoints is None:
            user_endpoints = yield from unless_down(process.policies.load_user_endpoints, {})
        members = self.snapshot.members
        refusing = {status.bucket.policy_id for status in decision.refusing}.union(resolution.blocking)
        if None in refusing:  # the usage endpoint's built-in limit
            return True
        for policy in resolution.winners:
            denied = decision.denied_by and policy.mode == "enforce" and action_of(policy) == "deny"
            if policy.id not in refusing and not denied:
                continue
            group = self.snapshot.groups[policy.endpoint_id]["ip"]
            by_address = policy.network is not None or policy.list_id is not None
            if by_address and policy.rates == BLOCKED:  # which no policy outranks
                return True
            kinds = group.having("enforced subject") | members.kinds_of(group.having("enforced list"))
            if kinds - {"ip"} or "ip" in user_endpoints.get(policy.endpoint_id, ()):
                continue
            if by_address or not group.having("enforced plan"):
                return True
        return False
