"""Select the recorded attempts that a policy applies to, and the subject that each counts for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from django.utils.translation import gettext as _

from ..conf import settings
from ..exceptions import RateQuotaError
from ..models import RatePolicy
from ..monitoring.attempts import Attempts
from ..monitoring.records import UNKNOWN_PLAN
from ..policies.audience_index import Group
from ..policies.facts import NOBODY, POLICY_COLUMNS, PolicyFacts, UserEntry, policy_facts
from ..policies.requests.caller import UNKNOWN, DescribedCaller
from ..policies.resolver import EvaluationContext, resolve_uncached
from ..policies.snapshot import Memo, Snapshot
from .explain import newest_policies


class NotEstimable(RateQuotaError):
    """The records do not show what the policy would have done; the message says why, for operators."""


class RecordedAudience:
    """Selects the recorded attempts that a policy counts; raises ``NotEstimable`` where records lack the caller."""

    def __init__(self, policy: PolicyFacts) -> None:
        snapshot, now_us = newest_policies(), time.time_ns() // 1000
        own = _in_force(policy, snapshot, now_us)
        stored = snapshot.groups.get(own.endpoint_id, {}).get(own.counted_per) or Group()
        group = stored.changed({own.id: None if own.user else own})
        self._policy, self._now_us = own.id, now_us
        chosen = own.user or own.subject or own.list_id is not None
        self._needs_plans = own.counted_per == "plan" or bool(not chosen and group.having("plan"))
        # The policies of this endpoint and ``counted_per`` alone; records hold the caller's plan, default ones too.
        groups = {own.endpoint_id: {own.counted_per: group}}
        self._snapshot = snapshot.copied(groups=groups, defaults={}, memo=Memo())
        users: dict[str, list[PolicyFacts]] = {own.user: [own]} if own.user else {}
        place: dict[str, Any] = {"endpoint_id": own.endpoint_id, "counted_per": own.counted_per}
        rows = RatePolicy.objects.filter(user__isnull=False, **place).order_by()
        # Values instead of model instances, because there may be thousands.
        values = rows.values_list(*POLICY_COLUMNS, named=True)
        others = [policy_facts(row) for row in values if row.pk != own.id]
        for facts in others:
            users.setdefault(facts.user, []).append(facts)
        #: Policies that may take precedence for callers that the records do not identify.
        self.unknown = 0 if own.user else _unidentified(group, snapshot) + len(others) * (not _identifies("user"))
        self._entries = {user: UserEntry(policies=tuple(policies)) for user, policies in users.items()}

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
    _check_recorded(policy, snapshot, now_us)
    starts_us = None if policy.starts_us is None else min(policy.starts_us, now_us)
    ends_us = None if policy.ends_us is None else max(policy.ends_us, now_us + 1)
    return replace(policy, mode="enforce", starts_us=starts_us, ends_us=ends_us)


def _unidentified(group: Group, snapshot: Snapshot) -> int:
    """Return the number of the group's policies whose callers the records do not identify."""

    def identifies(trait: str, value: Any) -> bool:
        if trait == "network":
            return not _is_narrow(*value)
        kinds = {value} if trait == "subject" else snapshot.members.kinds_of({value}) if trait == "list" else ()
        return all(map(_identifies, kinds))

    return sum(number for (trait, value), number in group.traits.items() if not identifies(trait, value))


def _is_narrow(bits: int, hosts: int) -> bool:
    """Whether records hold less of an address than the network does: the lengths are in bits."""
    return bits == 128 and hosts < 128 - int(settings.ipv6_prefix)


def _identifies(kind: str) -> bool:
    """Whether recorded caller names identify every caller of this kind.

    True only for the first entry of ``CALLER``: later ones are recorded only when the earlier ones gave no value.
    """
    return kind == "ip" or bool(settings.caller[0] == kind)


def _check_recorded(policy: PolicyFacts, snapshot: Snapshot, now_us: int) -> None:
    """Raise ``NotEstimable`` if the records do not identify every caller in the policy's audience."""
    kinds = {"user" if policy.user else policy.subject.partition(":")[0] or "ip"}
    narrow = policy.network is not None and _is_narrow(*policy.network[:2])
    if policy.list_id is not None:
        members = [one for one in snapshot.members if one.list_id == policy.list_id and one.active(now_us)]
        kinds = {one.kind for one in members}
        narrow = any(_is_narrow(*one.key[:2]) for one in members if not isinstance(one.key, str))
    if narrow:
        text = _(
            "The impact cannot be estimated, because only the first %(bits)d bits of IPv6 addresses are recorded."
        )
        raise NotEstimable(text % {"bits": settings.ipv6_prefix})
    for kind in sorted(kinds):
        if not _identifies(kind):
            raise _lacks(kind)


def _lacks(kind: str) -> NotEstimable:
    text = _("The impact cannot be estimated, because the records do not include the %(kind)s of every customer.")
    return NotEstimable(text % {"kind": kind})
