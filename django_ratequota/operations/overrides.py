"""Overrides: boosts, which raise one caller's limit for a while, and blocks, which refuse all of its requests.

A block has the rates ``blocked`` and a start. Its *name* says who is blocked: ``user:42``, ``tenant:acme``,
``ip:203.0.113.7``, ``ip:203.0.113.0/24``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import Q
from django.utils.translation import gettext as _

from ..changes.databases import not_ended, started
from ..changes.validators import canonical_subject, primary_key, visible
from ..engine.rates import BLOCKED, MAX_CONCURRENT, MAX_UNITS, UNLIMITED, Rate, format_rate
from ..models import PolicyChange, RatePolicy
from ..monitoring.refusals import Refusal
from ..policies.audience_index import Group
from ..policies.facts import PolicyFacts, policy_facts, to_datetime
from ..policies.precedence import never_outranked, specificity
from ..policies.requests.caller import UNKNOWN, Caller
from ..policies.resolver import contenders
from ..runtime import process
from ..utils.addresses import named_network
from .counters import is_shared
from .explain import Explanation
from .texts import moment

#: Prefix length of the network that is offered beside an address, by IP version.
_NETWORK_BITS = {4: 24, 6: 64}
_SUBJECT_LENGTH = RatePolicy._meta.get_field("subject").max_length


def no_boost_reason(explanation: Explanation, policy: PolicyFacts) -> str:
    """Return why a boost of this winner is impossible, as a sentence; "" when it is possible."""
    subject = _subject_of(explanation, policy)
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
    return _unnameable_reason(subject)


def _unnameable_reason(subject: str) -> str:
    """Return why no policy can have this subject, as a sentence; "" when one can."""
    try:
        canonical = canonical_subject(subject)
    except ValidationError as error:
        return " ".join(error.messages)
    if canonical != subject or len(subject) > (_SUBJECT_LENGTH or 0):
        return _("A policy cannot have this subject, because it is too long or begins or ends with a space.")
    return ""


def _subject_of(explanation: Explanation, policy: PolicyFacts) -> str | None:
    """Return the subject of a winner's counter; an organisation itself where its callers are counted apart."""
    plan = explanation.plan
    subject = explanation.context.caller.subject(policy.counted_per, plan.id if plan else None)
    return explanation.customer if subject == UNKNOWN else subject


def propose_boost(explanation: Explanation, winner: RatePolicy) -> RatePolicy:
    """Return an unsaved boost without an end: the winner's fields, the caller as audience, and twice the rates.

    Where the winner comes before any policy for the caller, the boost has the winner's audience.
    """
    facts = policy_facts(winner)
    same = ("endpoint", "counted_per", "algorithm", "mode", "on_error", "durable", "leads_headers")
    boost = RatePolicy(**{name: getattr(winner, name) for name in same})
    boost.rates = doubled(facts.rates, winner.algorithm)
    # Not before the winner, because of two dated policies the one that started last wins.
    boost.starts_at = to_datetime(max(_begun_second(explanation.context.now_us), facts.starts_us or 0))
    subject = _subject_of(explanation, facts) or ""
    kind, _colon, value = subject.partition(":")
    if facts.user or kind == "user":
        boost.user_id = facts.user or value
    else:
        boost.subject = facts.subject if _outranks(facts, subject) else subject
    return boost


def propose_boosts(explanation: Explanation, policy_ids: Collection[str]) -> list[tuple[RatePolicy, RatePolicy]]:
    """Return each of these winners with a boost of it, see ``propose_boost``.

    Raises ``ValidationError`` with why there is none of one of them.
    """
    facts = [one for one in explanation.resolution.winners if str(one.id) in policy_ids]
    rows = RatePolicy.objects.select_related("endpoint").in_bulk(one.id for one in facts)
    if not policy_ids or len(rows) < len({*policy_ids}):
        raise ValidationError(
            _boosted_by(explanation) or _("That policy does not apply to this request. Choose again.")
        )
    if whys := [why for one in facts if (why := no_boost_reason(explanation, one))]:
        raise ValidationError(whys)
    return [(rows[one.id], propose_boost(explanation, rows[one.id])) for one in facts]


def _boosted_by(explanation: Explanation) -> str:
    """Return in a sentence who granted the latest boost that applies to the request; "" where none does."""
    granted = {str(one.id): one for one in explanation.resolution.winners if is_boost(one)}
    changes = PolicyChange.objects.filter(model="ratepolicy", action="create", object_id__in=granted)
    if (change := changes.select_related("actor").order_by("-pk").first()) is None:
        return ""
    boost = granted[change.object_id]
    text = _("A boost was granted here by %(actor)s at %(at)s: %(rates)s until %(end)s. Choose again.")
    actor = visible(change.actor or _("Code or a command"))
    end = moment(to_datetime(boost.ends_us or 0))
    return text % {"actor": actor, "at": moment(change.at), "rates": visible(boost.text), "end": end}


def is_boost(policy: PolicyFacts) -> bool:
    """Whether the policy is for a user or a subject, enforced, and dated, unlike most of a customer's own limits."""
    dated = policy.starts_us is not None and policy.ends_us is not None
    return bool(policy.user or policy.subject) and dated and policy.mode == "enforce" and policy.rates != BLOCKED


def boosts_in_force(explanation: Explanation, policy_ids: Collection[str]) -> dict[str, RatePolicy]:
    """Return by id which of these policies are boosts that apply to the request."""
    ids = [one.id for one in explanation.resolution.winners if is_boost(one) and str(one.id) in policy_ids]
    return {str(row.pk): row for row in RatePolicy.objects.select_related("endpoint", "user").filter(pk__in=ids)}


def refuse_lower(boost: RatePolicy, winner: RatePolicy) -> None:
    """Raise ``ValidationError`` where the boost admits less than the policy that it replaces.

    A rate is compared with that of the same period, and the lowest one with the lowest of the policy.
    """
    new, old = policy_facts(boost).rates, policy_facts(winner).rates
    if new == BLOCKED or (
        isinstance(new, tuple) and (old == UNLIMITED or (isinstance(old, tuple) and _less(new, old)))
    ):
        text = _("A boost cannot admit less than %(rates)s. To lower a limit, add a rate policy for the customer.")
        raise ValidationError({"rates": text % {"rates": visible(winner.rates)}})


def _less(new: tuple[Rate, ...], old: tuple[Rate, ...]) -> bool:
    before = {(rate.concurrent, rate.counts, rate.period): (rate.limit, rate.capacity) for rate in old}
    same = ((rate.limit, rate.capacity) < before.get((rate.concurrent, rate.counts, rate.period), ()) for rate in new)
    lowest, lowest_before = (min(rate.limit / rate.period_us for rate in rates) for rates in (new, old))
    return any(same) or lowest < lowest_before


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


def block_targets(caller: str, ip: str = "") -> list[str]:
    """Return the names that a block of this caller at this address may have, the narrowest first.

    Both are as refusals name them; ``ip`` may be "".
    """
    kind = caller.partition(":")[0]
    address = caller if kind == "ip" else ip
    names = [*([] if kind == "ip" else [caller]), address, *_network_of(address)]
    return [name for name in names if name.startswith("user:") or not _unnameable_reason(name)]


def _network_of(address: str) -> list[str]:
    """Return the network of an address that blocks are offered for; none for a wider one, and for what is none."""
    own = named_network(address)
    bits = _NETWORK_BITS[own.version] if own else 0
    return [f"ip:{own.supernet(new_prefix=bits)}"] if own and own.prefixlen > bits else []


def propose_block(name: str) -> RatePolicy:
    """Return an unsaved block without an end, which starts now."""
    user_id = name.removeprefix("user:") if name.startswith("user:") else None
    return RatePolicy(user_id=user_id, subject="" if user_id else name, rates=BLOCKED, starts_at=this_second())


def blocks_in_force(names: Iterable[str]) -> dict[str, list[RatePolicy]]:
    """Return the blocks for all endpoints of each of these names that has some, in one query.

    There may be several, such as one that was sent twice. What ends last comes first.
    """
    subjects = {name for name in names if not name.startswith("user:")}
    users = get_user_model()
    user_ids = {primary_key(users, name.removeprefix("user:")) for name in names if name.startswith("user:")} - {None}
    now = to_datetime(process.limiter().now_us)
    blocks = RatePolicy.objects.filter(endpoint=None, rates=BLOCKED, mode=RatePolicy.Mode.ENFORCE)
    blocks = blocks.filter(Q(user_id__in=user_ids) | Q(subject__in=subjects), started(now), not_ended(now))
    found: dict[str, list[RatePolicy]] = {}
    for block in sorted(blocks.order_by(), key=lambda one: (one.ends_at is None, one.ends_at or now), reverse=True):
        found.setdefault(block.subject or f"user:{block.user_id}", []).append(block)
    return found


def end(override: RatePolicy) -> None:
    """End the block or the boost now, and keep it for the history."""
    now = this_second()
    begins = override.starts_at
    override.ends_at = now if begins is None else max(now, begins + timedelta(microseconds=1))
    override.save(update_fields=["ends_at"])


def this_second() -> datetime:
    """Return the second that runs, by the clock that requests are checked with."""
    return to_datetime(_begun_second(process.limiter().now_us))


def _begun_second(now_us: int) -> int:
    """Return the second (µs) that has begun in all processes: they see Redis' clock some milliseconds apart."""
    return now_us // 10**6 * 10**6


def block_caution(block: RatePolicy, caller: Caller) -> str:
    """Return a sentence that warns of a block of the caller, who asks for it; "" where it is not."""
    facts, names = policy_facts(block), {"audience": block.audience}
    if facts.user and facts.user == caller.user_id:
        return _("%(audience)s is you. Your own requests would be refused.") % names
    if not facts.user and any(contenders(caller, [], Group([facts]), None, ())):
        return _("%(audience)s includes you. Your own requests would be refused.") % names
    return ""
