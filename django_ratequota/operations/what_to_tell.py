"""An answer to the customer about a refusal, in sentences to copy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import ngettext, ngettext_lazy

from ..engine.rates import BLOCKED, MONTH, UNITS, Rate
from ..models import RatePolicy
from ..monitoring.refusals import Refusal, RefusedBucket
from .recorded import policies_by_id

#: Period of a rate (µs) -> its words; the longest first.
_PER = {
    UNITS["week"]: ngettext_lazy("per week", "per %(count)d weeks", "count"),
    UNITS["day"]: ngettext_lazy("per day", "per %(count)d days", "count"),
    UNITS["hour"]: ngettext_lazy("per hour", "per %(count)d hours", "count"),
    UNITS["min"]: ngettext_lazy("per minute", "per %(count)d minutes", "count"),
    UNITS["s"]: ngettext_lazy("per second", "per %(count)d seconds", "count"),
}


def policies_of(refusal: Refusal) -> dict[int, RatePolicy]:
    """Return the policies that a refusal names and that still exist, by id."""
    return policies_by_id((*refusal.against, *(bucket.policy_id for bucket in refusal.buckets)))


def what_to_tell(refusal: Refusal, policies: Mapping[int, RatePolicy], clock: Callable[[float], str]) -> str:
    """Return what was allowed, what was used, and when the next request is possible.

    ``policies`` are those of ``policies_of``; ``clock`` writes a Unix time for the operator.
    """
    if refusal.error:
        return _("The limits could not be checked at that time, so the request was refused. Please try again.")
    named = (policies.get(pk or 0) for pk in refusal.against)
    if block := next((policy for policy in named if policy and policy.rates == BLOCKED), None):
        return _blocked(block, clock)
    refusing = [bucket for bucket in refusal.buckets if bucket.refused]
    if not refusing:
        return ""
    last = max(refusing, key=lambda bucket: math.inf if bucket.retry_after is None else bucket.retry_after)
    rate = last.rate
    needed = rate.units(refusal.cost)
    used = _("You had used %(used)d.")
    if last.counted_per in ("everyone", "plan"):
        used = _("%(used)d were used.")
    if rate.concurrent:
        used = _("%(used)d were running.")
    sentences = [used % {"used": last.limit - last.remaining}]
    if needed > 1:
        sentences.append(_("This request needed %(needed)d.") % {"needed": needed})
    following = _("Waiting does not help, because one request needs more than the limit.")
    if rate.concurrent:
        following = _("The next request is possible as soon as one of these has ended.")
    elif last.retry_after is not None:
        at = math.ceil(refusal.at.timestamp() + last.retry_after)
        following = _("The next request is possible at %(time)s.") % {"time": clock(at)}
    limit = _limit(rate, requests=needed == 1, endpoint=last.scope)
    return " ".join((_allowed(last, policies.get(last.policy_id or 0), limit), *sentences, following))


def _blocked(block: RatePolicy, clock: Callable[[float], str]) -> str:
    """Return who is blocked, where, and until when."""
    words = {"plan": block.plan, "endpoint": block.endpoint}
    if block.plan is not None:
        text = _("Your plan %(plan)s does not include %(endpoint)s.")
        return (text if block.endpoint else _("Your plan %(plan)s does not allow requests.")) % words
    what = (_("Your access to %(endpoint)s") if block.endpoint else _("Your access")) % words
    if block.ends_at is None:
        return _("%(what)s is blocked.") % {"what": what}
    past = block.ends_at <= timezone.now()
    text = _("%(what)s was blocked until %(end)s.") if past else _("%(what)s is blocked until %(end)s.")
    return text % {"what": what, "end": clock(block.ends_at.timestamp())}


def _allowed(bucket: RefusedBucket, policy: RatePolicy | None, limit: str) -> str:
    """Return who is allowed so much."""
    kind, _colon, value = bucket.subject.partition(":")
    plan = policy and policy.plan
    words = {"plan": plan, "value": value, "limit": limit}
    if bucket.counted_per == "everyone":
        return _("All customers together are allowed %(limit)s.") % words
    if bucket.counted_per == "plan" and plan:
        return _("All customers on the plan %(plan)s together are allowed %(limit)s.") % words
    if plan:
        return _("Your plan %(plan)s allows %(limit)s.") % words
    if kind == "ip":
        return _("Your address %(value)s is allowed %(limit)s.") % words
    if kind != "user":
        return _("%(value)s is allowed %(limit)s.") % words
    if policy is None or policy.user_id is not None or policy.subject or policy.subject_list_id is not None:
        return _("You are allowed %(limit)s.") % words
    return _("Everyone is allowed %(limit)s.") % words


def _limit(rate: Rate, *, requests: bool, endpoint: str) -> str:
    """Return such as ``3 requests per hour for exports``; customers whose requests cost one unit know no units."""
    amount = ngettext("%(count)d unit", "%(count)d units", rate.limit)
    if requests:
        amount = ngettext("%(count)d request", "%(count)d requests", rate.limit)
    if rate.concurrent:
        per = _("at the same time")
    elif rate.period == MONTH:
        per = _("per month")
    else:
        # The largest unit of which the period is a multiple; fractions of a second are written as they are.
        size = next((one for one in _PER if rate.period_us % one == 0), 0)
        per = str(_PER[size] % {"count": rate.period_us // size}) if size else f"/ {rate.period} s"
    text = _("%(amount)s %(per)s for %(endpoint)s") if endpoint else _("%(amount)s %(per)s")
    limit = text % {"amount": amount % {"count": rate.limit}, "per": per, "endpoint": endpoint}
    if rate.burst is None:
        return limit
    return _("%(limit)s, up to %(burst)d at once") % {"limit": limit, "burst": rate.burst}
