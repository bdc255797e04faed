"""Which of the policies that compete in one group win, and the words for it. No other module knows the rule.

The strongest enforced policy applies. A log-only one that is stronger applies beside it and never takes its place.

From the strongest to the weakest: an enforced ``blocked`` for a user, a subject or a list; the user; identifiers, in
the order of CALLER, then of IDENTIFIERS; addresses, longest prefix first; subject lists; the plan; everyone. Among
equals, such as two lists that the caller is in, a dated policy beats an open one, then the latest start, then a
log-only one, then the highest id. ``blocked`` in log mode refuses nobody and ranks by its audience.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.rates import BLOCKED
from ..runtime import OncePerSettings
from .facts import PolicyFacts

_EVERYONE, _PLAN, _LIST, _ADDRESS, _IDENTIFIER, _USER = range(6)


def winners_of(rivals: Iterable[PolicyFacts], now_us: int) -> list[PolicyFacts]:
    """Return the policies that win among the rivals of one group: an enforced one, and a stronger log-only one."""
    active = [p for p in rivals if p.rates and p.active(now_us)]
    if len(active) < 2:
        return active
    strongest = max(active, key=precedence)
    enforced = max((p for p in active if p.mode == "enforce"), key=precedence, default=strongest)
    return [strongest] if enforced is strongest else [enforced, strongest]


def precedence(policy: PolicyFacts) -> tuple[bool, int, int, bool, int, bool, int]:
    """Return a sort key: the strongest policy has the highest."""
    since, logs = policy.starts_us or 0, policy.mode == "log"
    return never_outranked(policy), *specificity(policy), policy.dated, since, logs, policy.id


def never_outranked(policy: PolicyFacts) -> bool:
    """Whether the policy is an enforced block of a user, a subject or a list: only another such block outranks it."""
    chosen = bool(policy.user or policy.subject or policy.list_id is not None)
    return policy.rates == BLOCKED and policy.mode == "enforce" and chosen


def specificity(policy: PolicyFacts) -> tuple[int, int]:
    """Return (kind of audience, rank within that kind): the more specific, the higher."""
    if policy.user:
        return _USER, 0
    kind, _colon, _value = policy.subject.partition(":")
    if kind == "ip":
        return _ADDRESS, policy.network[0] - policy.network[1] if policy.network else -1
    if kind:
        return _IDENTIFIER, -_ranks().get(kind, len(_ranks()))
    if policy.list_id is not None:
        return _LIST, 0
    return (_EVERYONE if policy.plan_id is None else _PLAN), 0


def outranks_plans(policy: PolicyFacts) -> bool:
    """Whether no policy for a plan can outrank the policy."""
    return specificity(policy)[0] > _PLAN


def why_first(winner: PolicyFacts) -> str:
    """Return why the winner of a group won, in a few words for operators."""
    names = {"audience": audience_words(winner)}
    if never_outranked(winner):
        return _("a block of %(audience)s takes precedence over all other policies") % names
    return _("%(audience)s is the most specific audience here") % names


def why_beaten(policy: PolicyFacts, winner: PolicyFacts) -> str:
    """Return why a policy lost to the winner of its group, in a few words for operators."""
    names = {"id": winner.id, "audience": audience_words(winner)}
    if never_outranked(winner) > never_outranked(policy):
        return _("policy %(id)s blocks %(audience)s, which takes precedence over all other policies") % names
    (kind, rank), (winning_kind, winning_rank) = specificity(policy), specificity(winner)
    if winning_kind == kind == _ADDRESS and winning_rank != rank:
        return _("policy %(id)s for %(audience)s has the longer prefix") % names
    if winning_kind == kind == _IDENTIFIER and winning_rank != rank:
        text = _(
            "policy %(id)s for %(audience)s comes first, because CALLER and IDENTIFIERS list %(first)s before "
            "%(second)s"
        )
        return text % {**names, "first": _kind(winner), "second": _kind(policy)}
    if winning_kind == _IDENTIFIER and kind == _ADDRESS:
        return _("policy %(id)s for %(audience)s comes first, because identifiers come before addresses") % names
    if (winning_kind, winning_rank) != (kind, rank):
        return _("policy %(id)s for %(audience)s is more specific") % names
    if winner.list_id != policy.list_id:
        return _("policy %(id)s for another list of the customer has dates or is newer") % names
    if winner.dated and not policy.dated:
        return _("policy %(id)s for the same audience has dates") % names
    return _("policy %(id)s for the same audience is newer") % names


def audience_words(policy: PolicyFacts) -> str:
    """Return the policy's audience in words."""
    if policy.user:
        return _("the user")
    if policy.list_id is not None:
        return _("the list")
    return policy.subject or (_("the plan") if policy.plan_id is not None else _("everyone"))


def _kind(policy: PolicyFacts) -> str:
    return policy.subject.partition(":")[0]


def _rank_kinds() -> dict[str, int]:
    return {kind: rank for rank, kind in enumerate(dict.fromkeys((*settings.caller, *settings.identifiers)))}


#: Kind of identifier -> rank, lowest first, by the settings in force.
_ranks = OncePerSettings(_rank_kinds)
