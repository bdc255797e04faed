"""Explains a resolution: for each policy of the matched endpoints, why it won or lost."""

from __future__ import annotations

from dataclasses import dataclass

from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.types import Bucket
from ..recording.validators import visible
from .facts import UNREADABLE, EndpointFacts, MemberFacts, PlanFacts, PolicyFacts
from .matching import match_policies
from .precedence import precedence, why_beaten, why_first
from .resolver import EvaluationContext, make_buckets, plan_of, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy of the matched endpoints, and whether and why it won or lost."""

    policy: PolicyFacts
    won: bool
    #: A sentence for operators.
    reason: str
    buckets: tuple[Bucket, ...] = ()


def plan_source(context: EvaluationContext) -> str:
    """Return where the caller's plan comes from, in a few words for operators."""
    slug = context.caller.plan_slug
    if slug is not None and context.snapshot.plan_by_slug(slug) is not None:
        return _("from PLAN_RESOLVER")
    resolver = slug is not None or settings.plan_resolver
    if not resolver and context.entry.plan_id(context.now_us) is not None:
        return _("assigned")
    if plan_of(context) is None:
        if resolver:
            return _("PLAN_RESOLVER returned no plan, and there is no default plan")
        return _("no plan is assigned, and there is no default plan")
    if context.caller.user_id is None:
        return _("the default for anonymous callers")
    if resolver:
        return _("the default for logged-in users, because PLAN_RESOLVER returned no plan")
    return _("the default for logged-in users without an assignment")


def explain(context: EvaluationContext) -> tuple[Candidate, ...]:
    """Return every policy of the matched endpoints, and why it won or lost. The winners are those of ``resolve``."""
    plan = plan_of(context)
    won = {policy.id: policy for policy in resolve(context).winners}
    matched = match_policies(context.snapshot, context.endpoints, context.scope, context.entry)
    entries = context.snapshot.members.entries_of(context.caller, matched.list_kinds)
    candidates: list[Candidate] = []
    for endpoint, counted_per, own, group in matched.groups:
        # By audience alone, because all blocked addresses would otherwise come before the caller's own policies.
        rivals = sorted((*(group.policies if group else ()), *own), key=lambda one: precedence(one)[1:], reverse=True)
        subject = context.caller.subject(counted_per, plan.id if plan else None)
        winner = next((policy for policy in rivals if policy.id in won), None)
        for policy in rivals:
            if policy is winner and subject is not None:
                reason = _("wins: %(why)s") % {"why": _why_won(policy, endpoint, context, entries)}
                buckets = make_buckets(policy, endpoint, subject)
                candidates.append(Candidate(policy=policy, won=True, reason=reason, buckets=buckets))
            elif matched.exempt:
                candidates.append(lost(policy, _("the endpoint %(name)s is exempt") % {"name": matched.exempt}))
            else:
                why = _why_not(policy, context, plan, subject, entries)
                why = why or (_("no policy applies here") if winner is None else why_beaten(policy, winner))
                candidates.append(lost(policy, why))
    return tuple(candidates)


def lost(policy: PolicyFacts, why: str) -> Candidate:
    """Return the candidate of a policy that does not apply, with the reason."""
    return Candidate(policy=policy, won=False, reason=_("lost: %(why)s") % {"why": why})


def _why_won(
    policy: PolicyFacts, endpoint: EndpointFacts | None, context: EvaluationContext, entries: list[MemberFacts]
) -> str:
    """Return why the policy won, and what else its counters depend on."""
    reasons = [why_first(policy)]
    if policy.list_id is not None:
        own = (entry for entry in entries if entry.list_id == policy.list_id and entry.active(context.now_us))
        names = {"list": _list_name(policy, context), "members": ", ".join(map(str, own))}
        reasons.append(_("the list %(list)s has %(members)s") % names)
    if endpoint and endpoint.charged_statuses:
        statuses = {"statuses": ", ".join(sorted(endpoint.charged_statuses))}
        reasons.append(_("only responses with status %(statuses)s stay charged") % statuses)
    if policy.unread is not None:
        reasons.append(_fallback(policy))
    return "; ".join(reasons)


def _why_not(
    policy: PolicyFacts,
    context: EvaluationContext,
    plan: PlanFacts | None,
    subject: str | None,
    entries: list[MemberFacts],
) -> str:
    """Return why the policy does not apply to this caller now; "" if it does."""
    if policy.mode == "off":
        return _("it is switched off")
    if not policy.active(context.now_us):
        return _("it has not started yet") if (policy.starts_us or 0) > context.now_us else _("it has ended")
    if policy.network is not None:
        if context.caller.address is None or context.caller.address not in policy.network:
            return _("the caller's address is not in %(network)s") % {"network": policy.network}
    elif policy.subject:
        kind, _colon, value = policy.subject.partition(":")
        if context.caller.value(kind) != value:
            return _("the caller is not %(subject)s") % {"subject": policy.subject}
    elif policy.list_id is not None:
        own = [entry for entry in entries if entry.list_id == policy.list_id]
        if not any(entry.active(context.now_us) for entry in own):
            text = _("the caller is not in the list %(list)s")
            if own:
                text = _("the caller's entry in the list %(list)s has ended, or has not started yet")
            return text % {"list": _list_name(policy, context)}
    elif policy.plan_id is not None and (plan is None or plan.id != policy.plan_id):
        wanted = context.snapshot.plans.get(policy.plan_id)
        names = {"plan": wanted.name if wanted else policy.plan_id, "own": plan.name if plan else _("no plan")}
        return _("it is for plan %(plan)s, the caller is on %(own)s") % names
    if subject is None:
        return _("the caller has no %(name)s to count by") % {"name": policy.counted_per}
    return ""


def _list_name(policy: PolicyFacts, context: EvaluationContext) -> str:
    return visible(context.snapshot.lists.get(policy.list_id or 0, policy.list_id))


def _fallback(policy: PolicyFacts) -> str:
    """Return what counts in place of the policy's unreadable rates."""
    names = {"unread": policy.unread, "text": policy.text}
    if policy.rates == UNREADABLE:
        return _("its rates %(unread)r cannot be read: on_error decides") % names
    return _("its rates %(unread)r cannot be read: the last readable ones apply, %(text)s") % names
