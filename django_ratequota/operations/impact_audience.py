"""Which of the recorded attempts a policy concerns, and whose counter each uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from ipaddress import ip_address
from typing import Any

from django.utils.translation import gettext as _

from ..conf import settings
from ..exceptions import RateQuotaError
from ..models import RatePolicy
from ..monitoring.attempts import Attempts
from ..monitoring.records import UNKNOWN_PLAN, stored_name
from ..policies.facts import POLICY_COLUMNS, PolicyFacts, policy_facts
from ..policies.precedence import precedence
from ..policies.requests.identity import UNKNOWN
from ..policies.snapshot import Group


class NotEstimable(RateQuotaError):
    """The records do not tell what the policy would have done; the message says why, in the operator's language."""


def _told(kind: str) -> bool:
    """Whether a record's caller says this of everyone who has it: what ``CALLER`` asks for first is never hidden."""
    return bool(settings.caller[0] == kind)


class Concerned:
    """Picks the recorded attempts that a policy counts; raises ``NotEstimable`` where the records do not tell."""

    def __init__(self, policy: PolicyFacts) -> None:
        self._is_of_audience = _audience(policy)
        #: ``untold``: how many policies come first, but for whom the records do not tell.
        self._is_beaten, self.untold, plans = _beaten_by_others(policy)
        self._asks_for_plans = plans or policy.plan_id is not None or policy.counted_per == "plan"
        #: Callers left out so far because another policy comes first for them.
        self.others: set[str] = set()

    def among(self, records: Sequence[Attempts]) -> list[Attempts]:
        """Those of the records that the policy counts."""
        known: dict[tuple[str, str, int | None], bool] = {}
        for record in records:
            who = (record.caller, record.ip, record.plan_id)
            if who not in known:
                if self._asks_for_plans and record.plan_id == UNKNOWN_PLAN:
                    raise _not_told("plan")
                known[who] = self._is_of_audience(record)
                if known[who] and self._is_beaten(record):
                    known[who] = False
                    self.others.add(record.caller)
        return [record for record in records if known[record.caller, record.ip, record.plan_id]]


def _audience(policy: PolicyFacts) -> Callable[[Attempts], bool]:
    """Whether a record is of the policy's audience."""
    if policy.user:
        return _is_caller("user", policy.user)
    if policy.network is not None:
        network = policy.network
        if network.version == 6 and network.prefixlen > settings.ipv6_prefix:
            raise NotEstimable(
                _("Cannot be estimated: of IPv6 addresses only the first %(bits)d bits are recorded.")
                % {"bits": settings.ipv6_prefix}
            )
        return lambda record: (address := _address(record.ip)) is not None and address in network
    if policy.subject:
        kind, _colon, value = policy.subject.partition(":")
        return _is_caller(kind, value)
    if policy.plan_id is not None:
        return lambda record: record.plan_id == policy.plan_id
    return lambda _record: True


def _not_told(kind: str) -> NotEstimable:
    text = _("Cannot be estimated: the records do not tell every caller's %(kind)s.")
    return NotEstimable(text % {"kind": kind})


def _is_caller(kind: str, value: str) -> Callable[[Attempts], bool]:
    if not _told(kind):
        raise NotEstimable(
            _("Cannot be estimated: the records name callers by %(caller)s, and do not tell every %(kind)s.")
            % {"caller": ", ".join(settings.caller), "kind": kind}
        )
    name = stored_name(f"{kind}:{value}")
    return lambda record: record.caller == name


def subject_for(counted_per: str) -> Callable[[Attempts], str | None]:
    """Whose counter a record uses; None = no counter of the policy."""
    if counted_per == "caller":
        return lambda record: record.caller
    if counted_per == "ip":
        return lambda record: record.ip or UNKNOWN
    if counted_per == "plan":
        return lambda record: None if record.plan_id is None else f"plan:{record.plan_id}"
    if counted_per == "everyone":
        return lambda _record: "everyone"
    if not _told(counted_per):
        raise _not_told(counted_per)
    return lambda record: record.caller if record.caller.startswith(f"{counted_per}:") else None


def _beaten_by_others(policy: PolicyFacts) -> tuple[Callable[[Attempts], bool], int, bool]:
    """Whether a record's caller has a policy that comes before this one now; how many such ones cannot be told; and
    whether some of them are for plans.

    Policies that share no caller with this one are left aside.
    """
    same: dict[str, Any] = {"endpoint_id": policy.endpoint_id, "counted_per": policy.counted_per}
    rows = RatePolicy.objects.filter(**same).exclude(pk=policy.id).exclude(mode=RatePolicy.Mode.OFF).order_by()
    now_us = time.time_ns() // 1000
    callers: set[str] = set()
    plans: set[int] = set()
    networks: list[PolicyFacts] = []
    everyone, untold = False, 0
    # Plain rows: there may be a policy for each of thousands of addresses.
    for rival in map(policy_facts, rows.values_list(*POLICY_COLUMNS, named=True)):
        if not rival.rates or not rival.active(now_us) or precedence(rival) < precedence(policy):
            continue
        if _disjoint(rival, policy):
            continue
        kind, _colon, value = f"user:{rival.user}".partition(":") if rival.user else rival.subject.partition(":")
        if rival.network is not None:
            if rival.network.version == 6 and rival.network.prefixlen > settings.ipv6_prefix:
                untold += 1
            else:
                networks.append(rival)
        elif kind and _told(kind):
            callers.add(stored_name(f"{kind}:{value}"))
        elif kind:
            untold += 1
        elif rival.plan_id is not None:
            plans.add(rival.plan_id)
        else:
            everyone = True
    by_address = Group(networks)

    def beaten(record: Attempts) -> bool:
        if everyone or record.caller in callers or record.plan_id in plans:
            return True
        address = _address(record.ip) if networks else None
        return address is not None and next(by_address.containing(address), None) is not None

    return beaten, untold, bool(plans)


def _disjoint(one: PolicyFacts, other: PolicyFacts) -> bool:
    """Whether no request's caller is of both audiences: of users, plans, networks and values of a kind it has one."""
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
    """The address that was recorded, the first one of a network that counts as one client; None = none was."""
    try:
        return ip_address(ip.removeprefix("ip:").partition("/")[0])
    except ValueError:
        return None
