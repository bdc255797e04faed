"""Select the recorded attempts that a policy applies to, and the subject that each counts for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from django.utils.translation import gettext as _

from ..conf import settings
from ..exceptions import RateQuotaError
from ..models import RatePolicy
from ..monitoring.attempts import Attempts
from ..monitoring.records import UNKNOWN_PLAN
from ..policies.facts import NOBODY, POLICY_COLUMNS, PolicyFacts, UserEntry, policy_facts
from ..policies.precedence import strongest
from ..policies.requests.caller import UNKNOWN, DescribedCaller
from ..policies.resolver import EvaluationContext, resolve_uncached
from ..policies.snapshot import Memo, Snapshot, regrouped
from .explain import newest_policies


class NotEstimable(RateQuotaError):
    """The records do not show what the policy would have done; the message says why, for operators."""


class RecordedAudience:
    """Selects the recorded attempts that a policy counts; raises ``NotEstimable`` where records lack the caller."""

    def __init__(self, policy: PolicyFacts) -> None:
        snapshot, now_us = newest_policies(), time.time_ns() // 1000
        own = _in_force(policy, snapshot, now_us)
        rivals = [
            rival
            for rival in _others(own, snapshot)
            if strongest((rival, own), now_us) is rival and not _are_apart(rival, own)
        ]
        known = [rival for rival in rivals if _not_recorded(rival, snapshot, now_us) is None]
        #: Policies that take precedence for callers that the records do not identify.
        self.unknown = len(rivals) - len(known)
        self._policy, self._now_us = own.id, now_us
        trial = [own, *known]
        self._needs_plans = own.counted_per == "plan" or any(one.plan_id is not None for one in trial)
        # As if there were no other policies; without default plans, because the records hold each caller's plan.
        shared = regrouped({}, {policy.id: policy for policy in trial if not policy.user})
        self._snapshot = snapshot.copied(groups=shared, defaults={}, memo=Memo())
        users: dict[str, tuple[PolicyFacts, ...]] = {}
        for policy in trial:
            if policy.user:
                users[policy.user] = (*users.get(policy.user, ()), policy)
        self._entries = {user: UserEntry(policies=policies) for user, policies in users.items()}

    def select(self, records: Sequence[Attempts]) -> list[Attempts]:
        """Return the records that the policy counts."""
        known: dict[tuple[object, ...], bool] = {}
        for record in records:
            request = _request(record)
            if request not in known:
                if self._needs_plans and record.plan_id == UNKNOWN_PLAN:
                    raise _lacks("plan")
                known[request] = self._policy in self._winners(record)
        return [record for record in records if known[_request(record)]]

    def _winners(self, record: Attempts) -> tuple[int, ...]:
        """Return the ids of the policies that would apply to a recorded request now."""
        plan = self._snapshot.plans.get(record.plan_id or 0)
        caller = DescribedCaller.named(record.caller, record.ip, plan.slug if plan else None)
        known = self._snapshot.endpoints
        endpoints = tuple([known[pk] for pk in record.endpoint_ids if pk in known])
        entry = self._entries.get(caller.user_id or "", NOBODY)
        return resolve_uncached(
            EvaluationContext(caller, entry, endpoints, None, self._snapshot, self._now_us)
        ).policy_ids


def _request(record: Attempts) -> tuple[object, ...]:
    return record.caller, record.ip, record.plan_id, record.endpoint_ids


def subject_for(counted_per: str) -> Callable[[Attempts], str | None]:
    """Return a function from a record to the subject of its counter; None = none. Raises ``NotEstimable``."""
    if counted_per == "caller":
        return lambda record: record.caller
    if counted_per == "ip":
        return lambda record: record.ip or UNKNOWN
    if counted_per == "plan":
        return lambda record: None if record.plan_id is None else f"plan:{record.plan_id}"
    if counted_per == "everyone":
        return lambda _record: "everyone"
    if not _identifies(counted_per):
        raise _lacks(counted_per)
    return lambda record: record.caller if record.caller.startswith(f"{counted_per}:") else None


def _in_force(policy: PolicyFacts, snapshot: Snapshot, now_us: int) -> PolicyFacts:
    """Return the policy as if it were enforced now; raises ``NotEstimable`` if the records lack its audience."""
    problem = _not_recorded(policy, snapshot, now_us)
    if problem is not None:
        raise problem
    starts_us = None if policy.starts_us is None else min(policy.starts_us, now_us)
    ends_us = None if policy.ends_us is None else max(policy.ends_us, now_us + 1)
    return replace(policy, mode="enforce", starts_us=starts_us, ends_us=ends_us)


def _others(policy: PolicyFacts, snapshot: Snapshot) -> Iterable[PolicyFacts]:
    """Return the other policies of the same endpoint and ``counted_per`` that are not off."""
    group = snapshot.groups.get(policy.endpoint_id, {}).get(policy.counted_per)
    place: dict[str, Any] = {"endpoint_id": policy.endpoint_id, "counted_per": policy.counted_per}
    rows = RatePolicy.objects.filter(user__isnull=False, **place).order_by()
    # Values instead of model instances, because there may be thousands.
    overrides = [policy_facts(row) for row in rows.values_list(*POLICY_COLUMNS, named=True)]
    return (one for one in (*(group or ()), *overrides) if one.id != policy.id and one.mode != "off")


def _are_apart(one: PolicyFacts, other: PolicyFacts) -> bool:
    """Whether no address is in both policies' networks."""
    return one.network is not None and other.network is not None and not one.network.overlaps(other.network)


def _identifies(kind: str) -> bool:
    """Whether recorded caller names identify every caller of this kind.

    True only for the first entry of ``CALLER``: later ones are recorded only when the earlier ones gave no value.
    """
    return kind == "ip" or bool(settings.caller[0] == kind)


def _not_recorded(policy: PolicyFacts, snapshot: Snapshot, now_us: int) -> NotEstimable | None:
    """Return why the records do not identify every caller in the policy's audience; None if they do."""
    unrecorded_bits = 128 - int(settings.ipv6_prefix)
    kinds = {"user" if policy.user else policy.subject.partition(":")[0] or "ip"}
    network, narrow = policy.network, False
    if network is not None:
        narrow = network.version == 6 and network.max_prefixlen - network.prefixlen < unrecorded_bits
    if policy.list_id is not None:
        members = [one for one in snapshot.members if one.list_id == policy.list_id and one.active(now_us)]
        kinds = {one.kind for one in members}
        keys = [one.key for one in members if not isinstance(one.key, str)]
        narrow = any(bits == 128 and hosts < unrecorded_bits for bits, hosts, _number in keys)
    if narrow:
        text = _("Cannot be estimated: of IPv6 addresses only the first %(bits)d bits are recorded.")
        return NotEstimable(text % {"bits": settings.ipv6_prefix})
    return next((_lacks(kind) for kind in sorted(kinds) if not _identifies(kind)), None)


def _lacks(kind: str) -> NotEstimable:
    text = _("Cannot be estimated: the records do not hold every caller's %(kind)s.")
    return NotEstimable(text % {"kind": kind})
