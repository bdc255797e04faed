"""Peek at counters, reset them or give units back. The history records changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils.translation import gettext as _

from ..changes.databases import policy_alias
from ..changes.writer import in_batches, write_counted
from ..engine.decision import LimitRequest
from ..engine.keys import counter_name, window_name
from ..engine.protocol import MAX_BUCKETS
from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..models import PolicyChange
from ..monitoring import ledger, restoring
from ..policies.limit_names import limit_name
from ..policies.requests.caller import UNKNOWN, failed_kind
from ..runtime import default_limiter
from ..utils.sansio import drive


def peek(buckets: Iterable[Bucket]) -> dict[Bucket, BucketStatus]:
    """Return the status of each bucket, except those of a Cluster node that is down; raises ``StoreError``.

    With ``ENABLED = False`` every bucket would have the status of an unused one, so that is a ``StoreError`` too.
    """
    limiter = default_limiter()
    if getattr(limiter, "unlimited", False):
        raise StoreError("disabled", limiter.store.absent)
    parts = in_batches(tuple(buckets), MAX_BUCKETS)
    decisions = (restoring.peek(limiter, limiter.store.call(), tuple(part)) for part in parts)
    return {status.bucket: status for decision in decisions for status in decision.statuses}


def reset(buckets: Iterable[Bucket], reason: str = "") -> tuple[BucketStatus, ...]:
    """Reset the buckets to zero, record that in the history, and return their statuses before.

    Subject by subject, each completely or not at all. Raises ``StoreError`` at the first that fails; subjects before
    it stay reset and recorded. Units consumed between peek and reset are not in the statuses.
    """
    return _lower(buckets, default_limiter().reset, None, reason)


def grant(buckets: Iterable[Bucket], units: int, reason: str = "") -> tuple[BucketStatus, ...]:
    """Give ``units`` back to each bucket, record that in the history, and return their statuses before.

    Raises ``ValidationError`` when a bucket has used fewer units, and ``StoreError`` as ``reset`` does.
    """
    limiter = default_limiter()
    before = peek(buckets)
    for status in before.values():
        if status.used < units:
            text = _(
                "%(counter)s has used %(used)d: no more than that can be given back. To give the caller more than "
                "the limit, grant a boost: it raises the limit itself."
            )
            raise ValidationError(text % {"counter": limit_name(status.bucket), "used": status.used})

    def give_back(own: list[Bucket]) -> None:
        # Each bucket's own units: else rates that count requests would keep theirs.
        request = LimitRequest(mode="refund", buckets=tuple(own), cost=units, costs=(units,) * len(own))
        drive(limiter.steps(request), limiter.store.call().do)

    return _lower(before, give_back, units, reason)


def _lower(
    buckets: Iterable[Bucket], change: Callable[[list[Bucket]], object], units: int | None, reason: str
) -> tuple[BucketStatus, ...]:
    """Record and change the counters of each subject by ``units`` (None = all); return their statuses before.

    What durable counters have used is refunded in the ledger, from which Redis follows.
    """
    limiter, alias = default_limiter(), policy_alias(PolicyChange)
    action = PolicyChange.Action.RESET if units is None else PolicyChange.Action.GRANT
    before: list[BucketStatus] = []
    # In the order in which the ledger writes, so that rows are not locked crosswise.
    for subject, own in sorted(_by_subject(buckets), key=lambda group: counter_name(group[1][0])):
        statuses, at_us = peek(own).values(), limiter.now_us
        kept = [status for status in statuses if status.bucket.durable and ledger.is_kept(limiter)]
        zone = limiter.time_zone
        first_days = {one.bucket: ledger.window_of(one.bucket, at_us, zone).first_day for one in kept}
        with transaction.atomic(using=alias):
            was, now = (_states(statuses, given, first_days) for given in (0, units))
            write_counted(subject, action, before=was, after=now, reason=reason)
            if others := [status.bucket for status in statuses if status not in kept]:
                change(others)
            refund = ledger.refund(limiter, [status.bucket for status in kept], units, at_us)
            # Robust: the units are given back, so Redis failing now must not fail the request.
            transaction.on_commit(refund, using=alias, robust=True)
        before += statuses
    return tuple(before)


def _states(
    statuses: Iterable[BucketStatus], units: int | None, first_days: Mapping[Bucket, date]
) -> dict[str, dict[str, Any]]:
    """Return the counters' states by title, once up to ``units`` of each (None = all) are given back.

    ``first_days`` are those of the windows that the ledger has.
    """
    states = {}
    for status in statuses:
        used = status.used + status.debt
        used -= used if units is None else min(units, used)
        first_day = first_days.get(status.bucket)
        window = {} if first_day is None else {"window": window_name(counter_name(status.bucket), first_day)[1]}
        states[status.bucket.title] = {"used": used, "remaining": max(0, status.limit - used), **window}
    return states


def shared_reason(counted_per: str, subject: str | None) -> str:
    """Return why a counter is not one caller's own, as a sentence; "" when it is."""
    if counted_per == "plan":
        return _("Everyone on the plan is counted together here.")
    if counted_per == "everyone":
        return _("Everyone is counted together here.")
    if subject == UNKNOWN:
        return _("All callers without a known address are counted together here.")
    kind = failed_kind(subject or "")
    if kind:
        return _("All callers for whom the function of %(kind)s raises are counted together here.") % {"kind": kind}
    return ""


def _by_subject(buckets: Iterable[Bucket]) -> list[tuple[str, Sequence[Bucket]]]:
    """Group the buckets by subject, at most ``MAX_BUCKETS`` per group: each group changes atomically."""
    subjects: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        subjects.setdefault(bucket.subject, []).append(bucket)
    return [(subject, part) for subject, own in subjects.items() for part in in_batches(own, MAX_BUCKETS)]
