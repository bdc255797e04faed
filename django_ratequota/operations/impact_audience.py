"""Select the recorded attempts that a policy applies to, and the subject that each counts for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

from django.utils.translation import gettext as _

from ..conf import settings
from ..exceptions import RateQuotaError
from ..models import ListMember, RatePolicy
from ..monitoring.attempts import Attempts
from ..monitoring.records import UNKNOWN_PLAN, stored_name
from ..policies.facts import POLICY_COLUMNS, PolicyFacts, policy_facts
from ..policies.loading import load_members
from ..policies.members import Members
from ..policies.precedence import precedence
from ..policies.requests.caller import UNKNOWN
from ..policies.snapshot import Group


class NotEstimable(RateQuotaError):
    """The records do not show what the policy would have done; the message says why, for operators."""


def _identifies(kind: str) -> bool:
    """Whether recorded caller names identify every caller of this kind.

    True only for the first entry of ``CALLER``: later ones are recorded only when the earlier ones gave no value.
    """
    return bool(settings.caller[0] == kind)


class RecordedAudience:
    """Selects the recorded attempts that a policy counts; raises ``NotEstimable`` where records lack the caller."""

    def __init__(self, policy: PolicyFacts) -> None:
        self._is_of_audience = in_audience(policy)
        #: ``unknown``: policies that take precedence for callers that the records do not identify.
        self._is_outranked, self.unknown, plans = _outranking(policy)
        self._needs_plans = plans or policy.plan_id is not None or policy.counted_per == "plan"
        #: Callers left out so far because another policy takes precedence.
        self.left_out: set[str] = set()

    def select(self, records: Sequence[Attempts]) -> list[Attempts]:
        """Return the records that the policy counts."""
        known: dict[tuple[str, str, int | None], bool] = {}
        for record in records:
            caller = (record.caller, record.ip, record.plan_id)
            if caller not in known:
                if self._needs_plans and record.plan_id == UNKNOWN_PLAN:
                    raise _not_recorded("plan")
                known[caller] = self._is_of_audience(record)
                if known[caller] and self._is_outranked(record):
                    known[caller] = False
                    self.left_out.add(record.caller)
        return [record for record in records if known[record.caller, record.ip, record.plan_id]]


def in_audience(policy: PolicyFacts) -> Callable[[Attempts], bool]:
    """Return a function that tells whether a record is in the policy's audience; raises ``NotEstimable``."""
    if policy.user:
        return _is_caller("user", policy.user)
    if policy.network is not None:
        network = policy.network
        if network.version == 6 and network.prefixlen > settings.ipv6_prefix:
            raise _only_first_bits()
        return lambda record: (address := _address(record.ip)) is not None and address in network
    if policy.list_id is not None:
        return _in_lists({policy.list_id})
    if policy.subject:
        kind, _colon, value = policy.subject.partition(":")
        return _is_caller(kind, value)
    if policy.plan_id is not None:
        return lambda record: record.plan_id == policy.plan_id
    return lambda _record: True


def _in_lists(lists: set[int]) -> Callable[[Attempts], bool]:
    """Return a function that tells whether a record's caller is in one of the lists now.

    Raises ``NotEstimable`` if the records do not identify every member.
    """
    now_us = time.time_ns() // 1000
    rows = load_members(ListMember.objects.filter(subject_list__in=lists))
    members = Members().changed({pk: member for pk, member in rows.items() if member.active(now_us)})
    kinds = members.kinds_of(lists)
    for kind in kinds - {"ip"}:
        if not _identifies(kind):
            raise _not_recorded(kind)
    if any(isinstance(one.key, tuple) and one.key[0] == 128 and one.key[1] < _unrecorded_bits() for one in members):
        raise _only_first_bits()
    names = {stored_name(str(one)) for one in members if one.kind != "ip"}
    return lambda record: record.caller in names or bool(members.containing(_address(record.ip)))


def _unrecorded_bits() -> int:
    return 128 - int(settings.ipv6_prefix)


def _only_first_bits() -> NotEstimable:
    text = _("Cannot be estimated: of IPv6 addresses only the first %(bits)d bits are recorded.")
    return NotEstimable(text % {"bits": settings.ipv6_prefix})


def _not_recorded(kind: str) -> NotEstimable:
    text = _("Cannot be estimated: the records do not hold every caller's %(kind)s.")
    return NotEstimable(text % {"kind": kind})


def _is_caller(kind: str, value: str) -> Callable[[Attempts], bool]:
    if not _identifies(kind):
        raise NotEstimable(
            _("Cannot be estimated: the records name callers by %(caller)s, and do not hold every %(kind)s.")
            % {"caller": ", ".join(settings.caller), "kind": kind}
        )
    name = stored_name(f"{kind}:{value}")
    return lambda record: record.caller == name


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
        raise _not_recorded(counted_per)
    return lambda record: record.caller if record.caller.startswith(f"{counted_per}:") else None


def _outranking(policy: PolicyFacts) -> tuple[Callable[[Attempts], bool], int, bool]:
    """Return a function that tells whether another policy takes precedence for a record's caller now.

    Then the number of such policies whose callers the records do not identify, and whether some are for plans.
    Policies whose audience shares no caller with this one are ignored.
    """
    same: dict[str, Any] = {"endpoint_id": policy.endpoint_id, "counted_per": policy.counted_per}
    rows = RatePolicy.objects.filter(**same).exclude(pk=policy.id).exclude(mode=RatePolicy.Mode.OFF).order_by()
    now_us = time.time_ns() // 1000
    callers: set[str] = set()
    plans: set[int] = set()
    lists: set[int] = set()
    networks: list[PolicyFacts] = []
    everyone, unknown = False, 0
    # Values instead of model instances, because there may be a policy for each of thousands of addresses.
    for rival in map(policy_facts, rows.values_list(*POLICY_COLUMNS, named=True)):
        if not rival.rates or not rival.active(now_us) or precedence(rival) < precedence(policy):
            continue
        if _disjoint(rival, policy):
            continue
        kind, _colon, value = f"user:{rival.user}".partition(":") if rival.user else rival.subject.partition(":")
        if rival.network is not None:
            if rival.network.version == 6 and rival.network.prefixlen > settings.ipv6_prefix:
                unknown += 1
            else:
                networks.append(rival)
        elif kind and _identifies(kind):
            callers.add(stored_name(f"{kind}:{value}"))
        elif kind:
            unknown += 1
        elif rival.list_id is not None:
            lists.add(rival.list_id)
        elif rival.plan_id is not None:
            plans.add(rival.plan_id)
        else:
            everyone = True
    by_address = Group(networks)
    listed: Callable[[Attempts], bool] = lambda _record: False  # noqa: E731
    if lists:
        try:
            listed = _in_lists(lists)
        except NotEstimable:
            unknown += len(lists)

    def outranked(record: Attempts) -> bool:
        if everyone or record.caller in callers or record.plan_id in plans:
            return True
        address = _address(record.ip) if networks else None
        if address is not None and next(by_address.containing(address), None) is not None:
            return True
        return listed(record)

    return outranked, unknown, bool(plans)


def _disjoint(one: PolicyFacts, other: PolicyFacts) -> bool:
    """Whether no caller is in both audiences: it has one user, plan, address, and value of an identifier."""
    if one.network is not None and other.network is not None:
        return one.network.version != other.network.version or not one.network.overlaps(other.network)
    if one.user or other.user:
        return bool(one.user and other.user) and one.user != other.user
    if one.subject and other.subject:
        same_kind = one.subject.partition(":")[0] == other.subject.partition(":")[0]
        return same_kind and one.subject != other.subject
    return None not in (one.plan_id, other.plan_id) and one.plan_id != other.plan_id


@lru_cache(maxsize=100_000)
def _address(ip: str) -> Any:
    """Return the recorded address, of an IPv6 network the first; None = none."""
    try:
        return ip_address(ip.removeprefix("ip:").partition("/")[0])
    except ValueError:
        return None
