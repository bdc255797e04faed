"""Boosts: overrides that raise one caller's limit for a while."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.translation import gettext as _

from ..changes.validators import canonical_subject
from ..conf import settings
from ..engine.calendar_windows import window_end_us
from ..engine.rates import BLOCKED, MAX_UNITS, UNLIMITED, Rate, format_rate
from ..engine.types import Bucket
from ..models import RatePolicy
from ..monitoring.records import digest
from ..monitoring.refusals import Refusal
from ..policies.facts import PolicyFacts, policy_facts, to_datetime
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
class Outlook:
    """What a boost would change: the policy in force now, and those that follow it."""

    #: The policy in force now; None = none.
    now: PolicyFacts | None
    #: The policy that replaces the boost before its end, and when (µs); None = none.
    overtaken: tuple[PolicyFacts, int] | None
    #: The policy in force after the boost's end; None = none.
    after: PolicyFacts | None


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
    if never_outranked(policy):
        return _(
            "It blocks a user, a subject or a list, and no other policy outranks that: end it, or set an end date."
        )
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
    winners = {str(one.policy.id): one.policy for one in explanation.candidates if one.won}
    facts = winners.get(policy_id)
    rows = RatePolicy.objects.select_related("endpoint")
    winner = None if facts is None else rows.filter(pk=facts.id).first()
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
        refusing = {(bucket.title, bucket.policy_id) for bucket in refusal.buckets if bucket.refused}
        # With the subjects, because an organisation's people may each have a counter of their own.
        counters = frozenset((bucket.title, bucket.subject) for bucket in refusal.buckets if bucket.refused)
        request = (refusal.scope, refusal.route, refusal.method, refusal.violated, counters, refusal.error)
        if request in seen or len(seen) >= _MAX_REQUESTS:
            continue
        seen.add(request)
        if refusal.error:
            text = _("Redis gave no decision (%(reason)s), so “on error” decided: higher rates change nothing.")
            yield from ((name, text % {"reason": refusal.error}, None) for name in refusal.violated)
            continue
        try:
            explanation = ExplainQuery.from_refusal(refusal).explain()
        except ValidationError as error:
            yield from ((name, " ".join(error.messages), None) for name in refusal.violated)
            continue
        won = {candidate.policy.id: candidate.policy for candidate in explanation.candidates if candidate.won}
        if any(name.endswith(f"/{BLOCKED}") for name in refusal.violated):  # which has no bucket
            blocks = [policy for policy in won.values() if policy.rates == BLOCKED and policy.mode == "enforce"]
            refusing |= {(name, policy.id) for name in refusal.violated for policy in blocks}
        for title, policy_id in refusing:
            facts = None if policy_id is None else won.get(policy_id)
            if facts is None:
                built_in = _("It is built in, and no policy can raise it.")
                gone = _("That policy is not in force there any more.")
                yield title, built_in if policy_id is None else gone, None
            elif why_not := no_boost_reason(explanation, facts):
                yield title, why_not, None
            else:
                yield title, "", (explanation, facts)


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


def window_end(bucket: Bucket, now_us: int) -> Any:
    """Return when the bucket's window ends, as a model field's value; None for algorithms without windows."""
    if bucket.rate.algorithm != "fixed_window":
        return None
    return to_datetime(window_end_us(bucket.rate, now_us, settings.time_zone, bucket.anchor))


def outlook(context: EvaluationContext, boost: RatePolicy) -> Outlook:
    """Return what the boost would change in the explanation's ``context``."""
    facts = replace(policy_facts(boost), id=sys.maxsize)  # the newest policy has the highest id
    boosted = _with_policy(context, facts)
    end_us, at_us = facts.ends_us or sys.maxsize, context.now_us
    overtaken = None
    # From one time to the next at which something starts or ends for the caller.
    while overtaken is None and (at_us := resolve(replace(boosted, now_us=at_us)).until_us) < end_us:
        winner = _winner(boosted, facts, at_us)
        overtaken = (winner, at_us) if winner is not None and winner is not facts else None
    return Outlook(
        now=_winner(context, facts, context.now_us), overtaken=overtaken, after=_winner(boosted, facts, end_us)
    )


def _winner(context: EvaluationContext, policy: PolicyFacts, at_us: int) -> PolicyFacts | None:
    """Return the winner in the policy's group at that time."""
    winners = resolve(replace(context, now_us=at_us)).winners
    group = (policy.endpoint_id, policy.counted_per)
    return next((winner for winner in winners if (winner.endpoint_id, winner.counted_per) == group), None)


def _with_policy(context: EvaluationContext, policy: PolicyFacts) -> EvaluationContext:
    """Return the context with one more policy."""
    if policy.user:
        return replace(context, entry=replace(context.entry, policies=(*context.entry.policies, policy)))
    return replace(context, snapshot=with_rows(context.snapshot, policies={policy.id: policy}))
