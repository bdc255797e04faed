"""Boosts: overrides that raise one caller's limit for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from ..changes.validators import canonical_subject
from ..engine.rates import BLOCKED, MAX_UNITS, UNLIMITED, Rate, format_rate
from ..models import RatePolicy
from ..monitoring.records import digest
from ..monitoring.refusals import Refusal
from ..policies.facts import PolicyFacts, policy_facts, to_datetime
from ..policies.limit_names import limit_name
from ..policies.precedence import never_outranked, specificity
from ..policies.requests.caller import UNKNOWN
from ..policies.resolver import EvaluationContext, resolve
from ..policies.snapshot import with_rows
from .counters import shared_reason
from .explain import Explanation
from .explain_query import ExplainQuery

#: Most different requests that are explained to find the policies that refused them.
_MAX_REQUESTS = 20
_SECOND_US = 10**6
_SUBJECT_LENGTH = RatePolicy._meta.get_field("subject").max_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A boost of a policy that refused one of the caller's requests."""

    #: What applies to that request now.
    explanation: Explanation
    #: The policy in force.
    winner: RatePolicy
    #: Not saved, and without an end.
    boost: RatePolicy

    @property
    def key(self) -> str:
        """Return letters and digits that name the policy and the boost's audience."""
        return digest(f"{self.winner.pk} {self.boost.user_id} {self.boost.subject}")


def no_boost_reason(explanation: Explanation, policy: PolicyFacts) -> str:
    """Return why a boost of this winner is impossible, as a sentence; "" when it is possible."""
    subject = subject_of(explanation, policy)
    shared = shared_reason(policy.counted_per, subject)
    if subject is None or shared:
        return _("%(why)s A boost for one caller would change nothing.") % {"why": shared}
    if policy.rates == UNLIMITED:
        return _("It is unlimited already.")
    if policy.mode != "enforce":
        return _("It refuses nobody: it only logs.")
    blocks = [one for one in explanation.resolution.winners if never_outranked(one)]
    if any(one.endpoint_id in (None, policy.endpoint_id) for one in blocks):
        return _("The caller is blocked here, and no other policy outranks that: end the block first.")
    if policy.user or subject.startswith("user:"):
        return ""
    unnameable = unnameable_reason(subject)
    if not unnameable and policy.network is None and _outranks(policy, subject):
        names = {"winner": policy.subject, "subject": subject}
        return _("It is for %(winner)s, which comes before any policy for %(subject)s: edit it instead.") % names
    return unnameable


def unnameable_reason(subject: str) -> str:
    """Return why no policy can have this subject, as a sentence; "" when one can."""
    try:
        canonical = canonical_subject(subject)
    except ValidationError as error:
        return " ".join(error.messages)
    if canonical != subject or len(subject) > (_SUBJECT_LENGTH or 0):
        return _("No policy can name this subject: it is too long, or begins or ends with a space.")
    return ""


def subject_of(explanation: Explanation, policy: PolicyFacts) -> str | None:
    """Return the subject of a winner's counter; an organisation itself where its callers are counted apart."""
    plan = explanation.plan
    subject = explanation.context.caller.subject(policy.counted_per, plan.id if plan else None)
    return explanation.customer if subject == UNKNOWN else subject


def propose_boost(explanation: Explanation, winner: RatePolicy) -> RatePolicy:
    """Return an unsaved boost without an end: the winner's fields, the caller as audience, and twice the rates."""
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
    elif _outranks(facts, subject):
        boost.subject = facts.subject
    else:
        boost.subject = subject
    return boost


def propose(explanation: Explanation, policy_id: str) -> Proposal:
    """Return a boost of the winner with this id. Raises ``ValidationError`` with why there is none."""
    facts = next((one for one in explanation.resolution.winners if str(one.id) == policy_id), None)
    winner = RatePolicy.objects.select_related("endpoint").filter(pk=facts and facts.id).first()
    if facts is None or winner is None:
        raise ValidationError(_("That policy does not apply to this request, or no longer does. Choose again."))
    if why_not := no_boost_reason(explanation, facts):
        raise ValidationError(why_not)
    return Proposal(explanation=explanation, winner=winner, boost=propose_boost(explanation, winner))


def propose_boosts(refusals: Iterable[Refusal]) -> tuple[list[Proposal], dict[str, str]]:
    """Return a boost of each policy that refused these requests, and other limits by name, with why they have none.

    Newest refusals first: of more than ``_MAX_REQUESTS`` different requests, the others are left out.
    """
    found: list[tuple[Explanation, PolicyFacts]] = []
    without: dict[str, str] = {}
    for title, why_not, explained in _causes(refusals):
        if explained is None:
            without[title] = why_not
        else:
            found.append(explained)
    rows = RatePolicy.objects.select_related("endpoint").in_bulk({facts.id for _explanation, facts in found})
    proposals: dict[str, Proposal] = {}
    for explanation, facts in found:
        row = rows.get(facts.id)
        if row is not None:
            one = Proposal(explanation=explanation, winner=row, boost=propose_boost(explanation, row))
            proposals.setdefault(one.key, one)
    return list(proposals.values()), without


def any_boostable(refusals: Iterable[Refusal]) -> bool:
    """Return whether ``propose_boosts`` would propose any; explains requests until one can be boosted."""
    return any(explained is not None for _title, _why_not, explained in _causes(refusals))


def _causes(refusals: Iterable[Refusal]) -> Iterator[tuple[str, str, tuple[Explanation, PolicyFacts] | None]]:
    """Yield each limit that refused: its name, why it cannot be boosted, or else the request and the policy."""
    seen: set[Any] = set()
    for refusal in refusals:
        refusing = {(limit_name(bucket), bucket.policy_id) for bucket in refusal.buckets if bucket.refused}
        # With the subjects, because an organisation's people may each have a counter of their own.
        counters = frozenset((bucket.title, bucket.subject) for bucket in refusal.buckets if bucket.refused)
        request = (refusal.scope, refusal.route, refusal.method, refusal.violated, counters, refusal.error)
        if request in seen or len(seen) >= _MAX_REQUESTS:
            continue
        seen.add(request)
        names = dict(zip(refusal.violated, refusal.limits, strict=True))
        if refusal.error:
            text = _("Redis gave no decision (%(reason)s), so “on error” decided: higher rates change nothing.")
            yield from ((name, text % {"reason": refusal.error}, None) for name in names.values())
            continue
        try:
            explanation = ExplainQuery.from_refusal(refusal).explain()
        except ValidationError as error:
            yield from ((name, " ".join(error.messages), None) for name in names.values())
            continue
        won = {policy.id: policy for policy in explanation.resolution.winners}
        blocks = [name for title, name in names.items() if title.endswith(f"/{BLOCKED}")]  # which have no bucket
        blocking = [pk for pk, policy in won.items() if policy.rates == BLOCKED and policy.mode == "enforce"]
        refusing |= {(name, pk) for name in blocks for pk in blocking}
        for name, policy_id in refusing:
            facts = won.get(policy_id or 0)
            if facts is None:
                built_in = _("It is built in, and no policy can raise it.")
                gone = _("That policy is not in force there any more.")
                yield name, built_in if policy_id is None else gone, None
            elif why_not := no_boost_reason(explanation, facts):
                yield name, why_not, None
            else:
                yield name, "", (explanation, facts)


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
        twice = replace(rate, limit=min(2 * rate.limit, MAX_UNITS), burst=burst)
        texts.append(format_rate(twice, named=rate.algorithm != algorithm))
    return ", ".join(texts)


def replaced_by(context: EvaluationContext, boost: RatePolicy) -> tuple[int, PolicyFacts | None]:
    """Return when the boost stops winning in the explanation's ``context`` (µs), and the policy in force from then.

    That is its end, or earlier if another policy replaces it.
    """
    facts = replace(policy_facts(boost), id=sys.maxsize)  # the newest policy has the highest id
    if facts.user:
        boosted = replace(context, entry=replace(context.entry, policies=(*context.entry.policies, facts)))
    else:
        boosted = replace(context, snapshot=with_rows(context.snapshot, policies={facts.id: facts}))
    winner: PolicyFacts | None = facts
    while winner is facts and boosted.now_us < sys.maxsize:
        # From one time to the next at which something starts or ends for the caller.
        boosted = replace(boosted, now_us=resolve(boosted).until_us)
        group = (facts.endpoint_id, facts.counted_per)
        winners = resolve(boosted).winners
        winner = next((one for one in winners if (one.endpoint_id, one.counted_per) == group), None)
    return boosted.now_us, winner
