"""Blocks: overrides with the rates ``blocked`` and a start, which refuse all requests of a user, subject or network.

A *name* says who is blocked: ``user:42``, ``tenant:acme``, ``ip:203.0.113.7``, ``ip:203.0.113.0/24``.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from ipaddress import ip_network

from django.contrib.auth import get_user_model
from django.db.models import Q
from django.utils.translation import gettext as _

from ..changes.databases import not_ended, started
from ..changes.validators import primary_key
from ..engine.rates import BLOCKED
from ..models import RatePolicy
from ..policies.audience_index import Group
from ..policies.facts import policy_facts, to_datetime
from ..policies.requests.caller import Caller
from ..policies.resolver import contenders
from .boosts import unnameable_reason
from .running_windows import time_us

#: Prefix length of the network that is offered beside an address, by IP version.
_NETWORK_BITS = {4: 24, 6: 64}
_SECOND_US = 10**6


def targets(caller: str, ip: str = "") -> list[str]:
    """Return the names that a block of this caller at this address may have, the narrowest first.

    Both are as refusals name them; ``ip`` may be "".
    """
    kind = caller.partition(":")[0]
    address = caller if kind == "ip" else ip
    names = [*([] if kind == "ip" else [caller]), address, *_network_of(address.removeprefix("ip:"))]
    return [name for name in names if name.startswith("user:") or not unnameable_reason(name)]


def _network_of(address: str) -> list[str]:
    """Return the network of an address that blocks are offered for; none for a wider one, and for what is none."""
    try:
        own = ip_network(address)
    except ValueError:
        return []
    bits = _NETWORK_BITS[own.version]
    return [f"ip:{own.supernet(new_prefix=bits)}"] if own.prefixlen > bits else []


def propose_block(name: str) -> RatePolicy:
    """Return an unsaved block without an end, which starts now."""
    user_id = name.removeprefix("user:") if name.startswith("user:") else None
    return RatePolicy(
        user_id=user_id,
        subject="" if user_id else name,
        rates=BLOCKED,
        starts_at=_this_second(),
    )


def blocks_in_force(names: Iterable[str]) -> dict[str, list[RatePolicy]]:
    """Return the blocks for all endpoints of each of these names that has some, in one query.

    There may be several, such as one that was sent twice. What ends last comes first.
    """
    subjects = {name for name in names if not name.startswith("user:")}
    users = get_user_model()
    user_ids = {primary_key(users, name.removeprefix("user:")) for name in names if name.startswith("user:")} - {None}
    now = to_datetime(time_us())
    blocks = RatePolicy.objects.filter(
        Q(user_id__in=user_ids) | Q(subject__in=subjects),
        started(now),
        not_ended(now),
        endpoint=None,
        rates=BLOCKED,
        mode=RatePolicy.Mode.ENFORCE,
    )
    found: dict[str, list[RatePolicy]] = {}
    for block in sorted(blocks.order_by(), key=lambda one: (one.ends_at is None, one.ends_at or now), reverse=True):
        found.setdefault(block.subject or f"user:{block.user_id}", []).append(block)
    return found


def end_block(block: RatePolicy) -> None:
    """End the block now, and keep it for the history."""
    now = _this_second()
    block.ends_at = now if block.starts_at is None else max(now, block.starts_at + timedelta(microseconds=1))
    block.save(update_fields=["ends_at"])


def _this_second() -> datetime:
    """Return the second that runs: processes see Redis' clock some milliseconds apart, and in all it has begun."""
    return to_datetime(time_us() // _SECOND_US * _SECOND_US)


def caution(block: RatePolicy, operator: Caller) -> str:
    """Return a sentence that warns of a block of the operator, who asks for it; "" where it is not."""
    facts, names = policy_facts(block), {"audience": block.audience}
    if facts.user and facts.user == operator.user_id:
        return _("%(audience)s is you. Your own requests would be refused.") % names
    if not facts.user and any(contenders(operator, [], Group([facts]), None, ())):
        return _("%(audience)s includes you. Your own requests would be refused.") % names
    return ""
