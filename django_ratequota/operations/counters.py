"""What was counted: which counters an override has, and how they are reset. Every reset leaves an entry."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from django.db import transaction
from django.utils.translation import gettext as _

from ..conf import settings
from ..engine.protocol import MAX_BUCKETS
from ..engine.types import Bucket, BucketStatus
from ..models import PolicyChange, RatePolicy
from ..policies.facts import UNREADABLE, PolicyFacts, endpoint_facts, policy_facts
from ..policies.requests.identity import UNKNOWN, Caller, DescribedCaller, client_text, failed_kind
from ..policies.resolver import make_buckets
from ..recording.databases import policy_alias
from ..recording.recorder import record_reset
from ..runtime import default_limiter
from .explain import explain_caller


def peek(buckets: Iterable[Bucket]) -> dict[Bucket, BucketStatus]:
    """How the buckets stand; raises ``StoreError``. On a Cluster, those whose server is down are left out."""
    limiter, asked = default_limiter(), tuple(buckets)
    batches = (asked[at : at + MAX_BUCKETS] for at in range(0, len(asked), MAX_BUCKETS))
    return {status.bucket: status for batch in batches for status in limiter.peek(batch).statuses}


def reset(buckets: Iterable[Bucket], reason: str = "") -> tuple[BucketStatus, ...]:
    """Forget what the buckets counted, write it into the history, and return how they stood before.

    One subject after the other, each wholly or not at all. Raises ``StoreError`` at the first that fails; those
    before it stay reset, and written down. What requests consume between the look and the reset is not mentioned.
    """
    limiter = default_limiter()
    before: list[BucketStatus] = []
    for subject, own in by_subject(buckets):
        statuses = limiter.peek(own).statuses
        with transaction.atomic(using=policy_alias(PolicyChange)):
            record_reset(subject, statuses, reason)
            limiter.reset(own)
        before += statuses
    return tuple(before)


def reset_caller(caller: Caller, reason: str = "", **where: Any) -> tuple[BucketStatus, ...]:
    """``reset`` for what counts the caller; takes what ``explain_caller`` takes.

    Only the caller's own: buckets shared with others (counted per plan or everyone, or for want of an address) keep
    their counts.
    """
    buckets = explain_caller(caller, **where).resolution.buckets
    return reset((b for b in buckets if not why_shared(b.counted_per, b.subject)), reason)


def why_shared(counted_per: str, subject: str | None) -> str:
    """Why a counter is not one caller's own, in a sentence; "" when it is."""
    if counted_per == "plan":
        return _("Everyone on the plan is counted together here.")
    if counted_per == "everyone":
        return _("Everyone is counted together here.")
    if subject == UNKNOWN:
        return _("All callers whose address cannot be told are counted together here.")
    kind = failed_kind(subject or "")
    if kind:
        return _("All callers for whom the function of %(kind)s raises are counted together here.") % {"kind": kind}
    return ""


def by_subject(buckets: Iterable[Bucket]) -> list[tuple[str, list[Bucket]]]:
    """The buckets of each subject, which change together or not at all, up to as many as one call takes."""
    subjects: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        subjects.setdefault(bucket.subject, []).append(bucket)
    return [
        (subject, own[at : at + MAX_BUCKETS])
        for subject, own in subjects.items()
        for at in range(0, len(own), MAX_BUCKETS)
    ]


def own_counters(policies: Iterable[RatePolicy]) -> tuple[dict[Bucket, RatePolicy], dict[RatePolicy, str]]:
    """The counters of the policies' own subjects, each with its policy; and the other policies, with the reason.

    Each counter comes once, with the limit of the policy that counts now, if there are several.
    """
    now_us = time.time_ns() // 1000
    rows = [(policy, policy_facts(policy)) for policy in policies]
    rows.sort(key=lambda row: (not row[1].active(now_us), not row[1].dated))
    counters: dict[tuple[object, ...], tuple[Bucket, RatePolicy]] = {}
    without: dict[RatePolicy, str] = {}
    for policy, facts in rows:
        subject = _own_subject(facts)
        endpoint = endpoint_facts(policy.endpoint) if policy.endpoint else None
        buckets = make_buckets(facts, endpoint, subject) if subject else ()
        if not buckets:
            without[policy] = _why_none(facts, subject)
        for bucket in buckets:
            counters.setdefault(bucket.counter, (bucket, policy))
    return dict(counters.values()), without


def _own_subject(policy: PolicyFacts) -> str | None:
    """Whose counter the policy uses, where its audience is one subject and counted as itself; else None."""
    if policy.user:
        own, caller = f"user:{policy.user}", DescribedCaller(user_id=policy.user, address=None)
    elif policy.network is not None:
        # An IPv6 network may be one client: addresses that share IPV6_PREFIX bits are.
        first, last = (client_text(policy.network[at], settings.ipv6_prefix) for at in (0, -1))
        if first != last:
            return None
        own, caller = f"ip:{first}", DescribedCaller(user_id=None, address=str(policy.network[0]))
    elif policy.subject and not _unreadable(policy):
        kind, _colon, value = policy.subject.partition(":")
        own, caller = policy.subject, DescribedCaller(user_id=None, address=None, identifiers={kind: value})
    else:
        return None
    return own if caller.subject(policy.counted_per, None) == own else None


def _unreadable(policy: PolicyFacts) -> bool:
    """Whether the subject, written past the model's validation, names an address that is none."""
    return policy.network is None and policy.subject.startswith("ip:")


def _why_none(policy: PolicyFacts, subject: str | None) -> str:
    if policy.rates in ("unlimited", "blocked"):
        return _("It counts nothing.")
    if policy.rates == UNREADABLE:
        return _("Its rates cannot be read.")
    if subject is None and not policy.user and not policy.subject:
        return _("It is no override: many callers are counted by it.")
    if _unreadable(policy):
        return _("Its subject cannot be read.")
    if policy.network is not None and policy.counted_per in ("caller", "ip"):
        return _("It is for a network: each address in it has a counter of its own.")
    return _("It is counted per %(name)s, not for its user or subject alone.") % {"name": policy.counted_per}
