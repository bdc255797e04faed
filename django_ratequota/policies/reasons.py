"""Explains a resolution: for each policy of the matched endpoints that is for the caller, why it won or lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..changes.validators import visible
from ..engine.types import Bucket
from . import resolver
from .audience_index import Group
from .facts import UNREADABLE, MemberFacts, PolicyFacts
from .precedence import precedence, why_beaten, why_first, winners_of


class Candidate(NamedTuple):
    """A policy of the matched endpoints, and whether and why it won or lost."""

    policy: PolicyFacts
    won: bool
    #: A sentence for operators.
    reason: str
    buckets: tuple[Bucket, ...] = ()


def plan_source(context: resolver.EvaluationContext) -> str:
    """Return where the caller's plan comes from, in a few words for operators."""
    if resolver.plan_by_code(context) is not None:
        return _("from PLAN_RESOLVER")
    found = resolver.assignment_of(context)
    if found is not None and found[0] == "user":
        return _("assigned to the user")
    if found is not None:
        return _("assigned to %(subject)s") % {"subject": visible(context.caller.subject(found[0], None))}
    if resolver.standing_of(context).plan is None:
        return _("no plan is assigned, and there is no default plan")
    if context.caller.user_id is None:
        return _("the default for anonymous clients")
    return _("the default for logged-in users without an assignment")


def explain(
    context: resolver.EvaluationContext,
    others: Counter[str] | None = None,
    why_exempt: Callable[[PolicyFacts], str] = lambda policy: "",
) -> tuple[Candidate, ...]:
    """Return the policies of the matched endpoints for the caller, and why each won or lost, as ``resolve`` decides.

    Policies for other callers are counted in ``others``, by kind of audience: there may be 100,000 of them.
    ``why_exempt`` returns why a policy does not apply to the request, whatever the caller; "" = it may.
    """
    resolution, counts = resolver.resolve(context), Counter() if others is None else others
    plan_id = resolution.plan.id if resolution.plan else None
    won = {one.policy.id: one for one in resolution.applied}
    matched = resolver.match_policies(context.snapshot, context.endpoints, context.scope, context.entry)
    entries = _entries(context, (policy for contest in matched.groups for policy in contest.group or ()))
    lists = {entry.list_id for entry in entries}
    candidates: list[Candidate] = []
    for _endpoint, counted_per, own, group in matched.groups:
        policies = group or ()
        # Policies that are off have no place in the index of their group.
        off = Group(replace(policy, mode="log") for policy in policies if policy.mode == "off")
        found = (resolver.contenders(context.caller, [], one, plan_id, lists) for one in (group, off))
        for_caller = {policy.id for policy in chain.from_iterable(found)}
        rivals = [*own, *(policy for policy in policies if policy.id in for_caller)]
        counts.update(_kind(policy) for policy in policies if policy.id not in for_caller)
        # By audience alone, because blocks would otherwise come before the caller's own policies.
        rivals.sort(key=lambda one: precedence(one)[1:], reverse=True)
        subject = context.caller.subject(counted_per, plan_id)
        whys = {policy.id: _why_not(policy, context, subject, entries) for policy in rivals}
        winners = winners_of((policy for policy in rivals if not whys[policy.id]), context.now_us)
        for policy in rivals:
            why = why_exempt(policy) or whys[policy.id]
            if not why and policy.id in won:
                candidates.append(_winner(won[policy.id], context, entries))
                continue
            why = why or _why_lost(policy, winners, matched)
            candidates.append(Candidate(policy=policy, won=False, reason=_("lost: %(why)s") % {"why": why}))
    return tuple(candidates)


def explain_winners(context: resolver.EvaluationContext, resolution: resolver.Resolution) -> tuple[Candidate, ...]:
    """Return the policies of the resolution and why each won, without those that lost."""
    entries = _entries(context, resolution.winners)
    return tuple(_winner(one, context, entries) for one in resolution.applied)


def _entries(context: resolver.EvaluationContext, policies: Iterable[PolicyFacts]) -> list[MemberFacts]:
    """Return the caller's entries in the policies' lists, also in those of policies that are off, and ended ones."""
    members, lists = context.snapshot.members, {policy.list_id for policy in policies if policy.list_id is not None}
    return members.entries_of(context.caller, sorted(members.kinds_of(lists))) if lists else []


def _winner(applied: resolver.Applied, context: resolver.EvaluationContext, entries: list[MemberFacts]) -> Candidate:
    """Return the winner of a contest, why it won, and what else its counters depend on."""
    policy, endpoint, buckets = applied
    reasons = [why_first(policy)]
    if policy.list_id is not None:
        own = (entry for entry in entries if entry.list_id == policy.list_id and entry.active(context.now_us))
        names = {"list": _list_name(policy, context), "members": ", ".join(map(str, own))}
        reasons.append(_("the list %(list)s has %(members)s") % names)
    if endpoint and endpoint.charged_statuses:
        statuses = {"statuses": ", ".join(sorted(endpoint.charged_statuses))}
        reasons.append(_("only responses with status %(statuses)s stay charged") % statuses)
    if policy.rates == UNREADABLE:
        reasons.append(_("its rates %(unread)r cannot be read, so on_error applies") % {"unread": policy.text})
    reason = _("wins: %(why)s") % {"why": "; ".join(reasons)}
    return Candidate(policy=policy, won=True, reason=reason, buckets=buckets)


def others_in_words(others: Mapping[str, int]) -> list[str]:
    """Return a sentence for each kind of policies that are for other callers."""
    return [
        ngettext(
            "%(count)d more policy is for other customers (%(kind)s).",
            "%(count)d more policies are for other customers (%(kind)s).",
            count,
        )
        % {"count": count, "kind": kind}
        for kind, count in others.items()
    ]


def why_idle(policy: PolicyFacts, now_us: int) -> str:
    """Return why the policy applies to nobody at that time (Unix time, µs); "" if it may apply."""
    if policy.mode == "off":
        return _("it is switched off")
    if policy.active(now_us):
        return ""
    return _("it has not started yet") if (policy.starts_us or 0) > now_us else _("it has ended")


def _why_not(
    policy: PolicyFacts, context: resolver.EvaluationContext, subject: str | None, entries: list[MemberFacts]
) -> str:
    """Return why the policy, which is for this caller, does not apply now; "" if it does."""
    if why := why_idle(policy, context.now_us):
        return why
    if policy.list_id is not None:
        own = [entry for entry in entries if entry.list_id == policy.list_id]
        if not any(entry.active(context.now_us) for entry in own):
            text = _("the customer's entry in the list %(list)s has ended or has not started yet")
            return text % {"list": _list_name(policy, context)}
    if subject is None:
        return _("the customer has no %(name)s to count by") % {"name": policy.counted_per}
    return ""


def _why_lost(policy: PolicyFacts, winners: list[PolicyFacts], matched: resolver.MatchedPolicies) -> str:
    """Return why a policy that took part in a contest does not apply; it may be a winner of the contest."""
    if winners and policy not in winners:
        return why_beaten(policy, winners[0 if policy.mode == "enforce" else -1])
    if matched.stands_back(policy):
        return _("it stands back, because the endpoint %(name)s has limits of its own") % {"name": matched.alone}
    return _("no policy applies here")


def _kind(policy: PolicyFacts) -> str:
    """Return ``plan``, ``list``, or the kind of the policy's subject."""
    return policy.subject.partition(":")[0] or ("plan" if policy.list_id is None else "list")


def _list_name(policy: PolicyFacts, context: resolver.EvaluationContext) -> str:
    return visible(context.snapshot.lists.get(policy.list_id or 0, policy.list_id))
