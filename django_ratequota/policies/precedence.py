"""The order of the policies that compete in one group, and the words for it. No other module knows the rule.

From the strongest to the weakest: an enforced ``blocked`` for a user or a subject; the user; identifiers, in the
order of CALLER, then of IDENTIFIERS; addresses, longest prefix first; the plan; everyone. Among equals a dated policy
beats an open one, then the latest start, then the highest id. ``blocked`` in log mode refuses nobody, and ranks by
its audience.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.rates import BLOCKED
from ..runtime import OncePerSettings
from .facts import PolicyFacts

_EVERYONE, _PLAN, _ADDRESS, _IDENTIFIER, _USER = range(5)


def strongest(rivals: Iterable[PolicyFacts], now_us: int) -> PolicyFacts | None:
    """Return the policy that counts of those that compete in one group; None when none is active now."""
    active = [p for p in rivals if p.rates and p.active(now_us)]
    return max(active, key=precedence) if len(active) > 1 else active[0] if active else None


def precedence(policy: PolicyFacts) -> tuple[bool, int, int, bool, int, int]:
    """Return a sort key: the policy that comes first has the highest."""
    return never_outranked(policy), *specificity(policy), policy.dated, policy.starts_us or 0, policy.id


def never_outranked(policy: PolicyFacts) -> bool:
    """Whether the policy blocks a user or a subject: only another such block takes its place."""
    return policy.rates == BLOCKED and policy.mode == "enforce" and bool(policy.user or policy.subject)


def specificity(policy: PolicyFacts) -> tuple[int, int]:
    """Return (kind of audience, place among audiences of that kind), the more specific the higher."""
    if policy.user:
        return _USER, 0
    kind, _colon, _value = policy.subject.partition(":")
    if kind == "ip":
        return _ADDRESS, policy.network.prefixlen if policy.network else -1
    if kind:
        return _IDENTIFIER, -_order().get(kind, len(_order()))
    return (_EVERYONE if policy.plan_id is None else _PLAN), 0


def why_first(winner: PolicyFacts) -> str:
    """Say why the winner of a group won, in a few words for operators."""
    names = {"audience": audience_words(winner)}
    if never_outranked(winner):
        return _("blocked for %(audience)s, which no other policy outranks") % names
    return _("%(audience)s is the most specific audience here") % names


def why_beaten(policy: PolicyFacts, winner: PolicyFacts) -> str:
    """Say why a policy lost to the winner of its group, in a few words for operators."""
    names = {"id": winner.id, "audience": audience_words(winner)}
    if never_outranked(winner) > never_outranked(policy):
        return _("policy %(id)s blocks %(audience)s, and no other policy outranks that") % names
    (kind, place), (first, before) = specificity(policy), specificity(winner)
    if first == kind == _ADDRESS and before != place:
        return _("policy %(id)s for %(audience)s has the longer prefix") % names
    if first == kind == _IDENTIFIER and before != place:
        text = _(
            "policy %(id)s for %(audience)s comes first: CALLER, then IDENTIFIERS, names %(first)s before %(second)s"
        )
        return text % {**names, "first": _kind(winner), "second": _kind(policy)}
    if first == _IDENTIFIER and kind == _ADDRESS:
        return _("policy %(id)s for %(audience)s comes first: identifiers come before addresses") % names
    if (first, before) != (kind, place):
        return _("policy %(id)s for %(audience)s is more specific") % names
    if winner.dated and not policy.dated:
        return _("policy %(id)s for the same audience is dated") % names
    return _("policy %(id)s for the same audience is newer") % names


def audience_words(policy: PolicyFacts) -> str:
    """Say whom a policy is for."""
    if policy.user:
        return _("the user")
    return policy.subject or (_("the plan") if policy.plan_id is not None else _("everyone"))


def _kind(policy: PolicyFacts) -> str:
    return policy.subject.partition(":")[0]


def _count_kinds() -> dict[str, int]:
    kinds = dict.fromkeys((*settings.caller, *settings.identifiers))
    return {kind: place for place, kind in enumerate(kinds)}


#: Kind of identifier -> its place, by the settings in force.
_order = OncePerSettings(_count_kinds)
