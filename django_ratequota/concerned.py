"""Which of the recorded attempts a policy concerns, and whose counter each uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_network
from typing import Any

from django.utils.translation import gettext as _

from .collecting import bounded
from .conf import settings
from .exceptions import RateQuotaError
from .facts import PolicyFacts, policy_facts
from .identity import UNKNOWN
from .models import RatePolicy
from .resolver import precedence
from .statistics import Attempts


class NotEstimable(RateQuotaError):
    """The records do not tell what the policy would have done; the message says why, in the operator's language."""


def _told(kind: str) -> bool:
    """Whether a record's caller says this of everyone who has it: what ``CALLER`` asks for first is never hidden."""
    return bool(settings.caller[0] == kind)


def audience(policy: PolicyFacts) -> Callable[[Attempts], bool]:
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
        return lambda record: _within(record.ip, network)
    if policy.subject:
        kind, _colon, value = policy.subject.partition(":")
        return _is_caller(kind, value)
    if policy.plan_id is not None:
        return lambda record: record.plan_id == policy.plan_id
    return lambda _record: True


def _is_caller(kind: str, value: str) -> Callable[[Attempts], bool]:
    if not _told(kind):
        raise NotEstimable(
            _("Cannot be estimated: the records name callers by %(caller)s, and do not tell every %(kind)s.")
            % {"caller": ", ".join(settings.caller), "kind": kind}
        )
    name = bounded(f"{kind}:{value}")
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
        raise NotEstimable(
            _("Cannot be estimated: the records do not tell every caller's %(kind)s.") % {"kind": counted_per}
        )
    return lambda record: record.caller if record.caller.startswith(f"{counted_per}:") else None


def beaten_by_others(policy: PolicyFacts) -> tuple[Callable[[Attempts], bool], int]:
    """Whether a record's caller has a policy that wins over this one now; and how many such ones cannot be told."""
    same: dict[str, Any] = {"endpoint_id": policy.endpoint_id, "counted_per": policy.counted_per}
    rows = RatePolicy.objects.filter(**same).exclude(pk=policy.id).exclude(mode=RatePolicy.Mode.OFF).order_by()
    now_us = time.time_ns() // 1000
    callers: set[str] = set()
    plans: set[int] = set()
    networks: list[Any] = []
    everyone, untold = False, 0
    for rival in map(policy_facts, rows):
        if not rival.rates or not rival.active(now_us) or precedence(rival) < precedence(policy):
            continue
        kind, _colon, value = f"user:{rival.user}".partition(":") if rival.user else rival.subject.partition(":")
        if rival.network is not None:
            if rival.network.version == 6 and rival.network.prefixlen > settings.ipv6_prefix:
                untold += 1
            else:
                networks.append(rival.network)
        elif kind and _told(kind):
            callers.add(bounded(f"{kind}:{value}"))
        elif kind:
            untold += 1
        elif rival.plan_id is not None:
            plans.add(rival.plan_id)
        else:
            everyone = True
    return (
        lambda record: (
            everyone
            or record.caller in callers
            or record.plan_id in plans
            or any(_within(record.ip, network) for network in networks)
        )
    ), untold


@lru_cache(maxsize=100_000)
def _network(ip: str) -> Any:
    try:
        return ip_network(ip.removeprefix("ip:"), strict=False)
    except ValueError:  # none was recorded
        return None


def _within(ip: str, network: Any) -> bool:
    own = _network(ip)
    return own is not None and own.version == network.version and own.subnet_of(network)
