"""Boosts: overrides that raise one caller's limit for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from ..changes.validators import canonical_subject
from ..engine.rates import MAX_CONCURRENT, MAX_UNITS, UNLIMITED, Rate, format_rate
from ..models import RatePolicy
from ..monitoring.refusals import Refusal
from ..policies.facts import PolicyFacts, policy_facts, to_datetime
from ..policies.precedence import never_outranked, specificity
from ..policies.requests.caller import UNKNOWN
from .counters import is_shared
from .explain import Explanation

_SECOND_US = 10**6
_SUBJECT_LENGTH = RatePolicy._meta.get_field("subject").max_length


class Proposal(NamedTuple):
    """A boost of a policy in force."""

    winner: RatePolicy
    #: Not saved, and without an end.
    boost: RatePolicy


def no_boost_reason(explanation: Explanation, policy: PolicyFacts) -> str:
    """Return why a boost of this winner is impossible, as a sentence; "" when it is possible."""
    subject = subject_of(explanation, policy)
    if subject is None or is_shared(policy.counted_per, subject):
        return _("Several customers share this counter.")
    if policy.rates == UNLIMITED:
        return _("It is unlimited already.")
    if policy.mode != "enforce":
        return _("The policy never refuses requests, because its mode is “log only”.")
    blocks = [one for one in explanation.resolution.winners if never_outranked(one)]
    if any(one.endpoint_id in (None, policy.endpoint_id) for one in blocks):
        return _(
            "The customer is blocked here. End the block first, because it takes precedence over all other policies."
        )
    if policy.user or subject.startswith("user:"):
        return ""
    return unnameable_reason(subject)


def unnameable_reason(subject: str) -> str:
    """Return why no policy can have this subject, as a sentence; "" when one can."""
    try:
        canonical = canonical_subject(subject)
    except ValidationError as error:
        return " ".join(error.messages)
    if canonical != subject or len(subject) > (_SUBJECT_LENGTH or 0):
        return _("A policy cannot have this subject, because it is too long or begins or ends with a space.")
    return ""


def subject_of(explanation: Explanation, policy: PolicyFacts) -> str | None:
    """Return the subject of a winner's counter; an organisation itself where its callers are counted apart."""
    plan = explanation.plan
    subject = explanation.context.caller.subject(policy.counted_per, plan.id if plan else None)
    return explanation.customer if subject == UNKNOWN else subject


def propose_boost(explanation: Explanation, winner: RatePolicy) -> RatePolicy:
    """Return an unsaved boost without an end: the winner's fields, the caller as audience, and twice the rates.

    Where the winner comes before any policy for the caller, the boost has the winner's audience.
    """
    facts = policy_facts(winner)
    boost = RatePolicy(
        endpoint=winner.endpoint,
        counted_per=winner.counted_per,
        rates=doubled(facts.rates, winner.algorithm),
        algorithm=winner.algorithm,
        mode=winner.mode,
        on_error=winner.on_error,
        durable=winner.durable,
        leads_headers=winner.leads_headers,
        # Rounded down to the second, because processes see Redis' clock some milliseconds apart.
        # Not before the winner, because of two dated policies the one that started last wins.
        starts_at=to_datetime(max(explanation.context.now_us // _SECOND_US * _SECOND_US, facts.starts_us or 0)),
    )
    subject = subject_of(explanation, facts) or ""
    kind, _colon, value = subject.partition(":")
    if facts.user or kind == "user":
        boost.user_id = facts.user or value
    else:
        boost.subject = facts.subject if _outranks(facts, subject) else subject
    return boost


def propose_boosts(explanation: Explanation, policy_ids: Collection[str]) -> list[Proposal]:
    """Return a boost of each of these winners. Raises ``ValidationError`` with why there is none of one of them."""
    facts = [one for one in explanation.resolution.winners if str(one.id) in policy_ids]
    rows = RatePolicy.objects.select_related("endpoint").in_bulk(one.id for one in facts)
    if not policy_ids or len(rows) < len({*policy_ids}):
        raise ValidationError(_("That policy does not apply to this request. Choose again."))
    if whys := [why for one in facts if (why := no_boost_reason(explanation, one))]:
        raise ValidationError(whys)
    return [Proposal(rows[one.id], propose_boost(explanation, rows[one.id])) for one in facts]


def boostable(explanation: Explanation, refusals: Iterable[Refusal]) -> list[int]:
    """Return the ids of winners that decided some of these refusals, and that can be boosted."""
    # While Redis did not answer, "on error" decided, and higher rates change nothing.
    ids = {policy_id for refusal in refusals if not refusal.error for policy_id in refusal.against}
    winners = [one for one in explanation.resolution.winners if one.id in ids]
    return [one.id for one in winners if not no_boost_reason(explanation, one)]


def _outranks(winner: PolicyFacts, subject: str) -> bool:
    """Whether a boost for the subject would lose to the winner, for one an address to its /64 network."""
    return specificity(winner) > specificity(policy_facts(RatePolicy(subject=subject, rates="1/s")))


def doubled(rates: tuple[Rate, ...] | str, algorithm: str) -> str:
    """Return twice the rates as text, without naming ``algorithm``; "" for ``unlimited`` and ``blocked``."""
    if isinstance(rates, str):
        return ""
    texts = []
    for rate in rates:
        burst = None if rate.burst is None else min(2 * rate.burst, MAX_UNITS)
        most = MAX_CONCURRENT if rate.concurrent else MAX_UNITS
        twice = replace(rate, limit=min(2 * rate.limit, most), burst=burst)
        texts.append(format_rate(twice, named=rate.algorithm != algorithm))
    return ", ".join(texts)
