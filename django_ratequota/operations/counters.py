"""Peek at counters, and give units back. The history records changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
from ..engine.slots import HeldSlot
from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..ledger import book, restoring
from ..models import PolicyChange
from ..monitoring import is_kept
from ..monitoring.health import Health, health, reports
from ..policies.limit_names import limit_name
from ..policies.requests.caller import UNKNOWN, failed_kind
from ..runtime import default_limiter
from ..store.base import Call


def peek(buckets: Iterable[Bucket]) -> dict[Bucket, BucketStatus]:
    """Return the status of each bucket, except those of a Cluster node that is down; raises ``StoreError``.

    With ``ENABLED = False`` every bucket would have the status of an unused one, so that is a ``StoreError`` too.
    """
    limiter = default_limiter()
    if getattr(limiter, "unlimited", False):
        raise StoreError("disabled", limiter.store.absent)
    parts = in_batches(tuple(buckets), MAX_BUCKETS)
    decisions = (restoring.peek(limiter, Call(limiter.store), tuple(part)) for part in parts)
    return {status.bucket: status for decision in decisions for status in decision.statuses}


def give_back(buckets: Iterable[Bucket], units: int | None = None, reason: str = "") -> tuple[BucketStatus, ...]:
    """Give units back to each bucket, record that in the history, and return their statuses before.

    ``units`` None = all, which resets the bucket to zero, and frees the slots of concurrent requests. Subject by
    subject, each completely or not at all. Raises ``ValidationError`` when a bucket has used fewer units, and
    ``StoreError`` at the first subject that fails. Those before it stay changed and recorded. Units consumed between
    peek and reset are not in the statuses.

    What durable counters have used is refunded in the ledger, from which Redis follows.
    """
    limiter, alias, buckets = default_limiter(), policy_alias(PolicyChange), list(buckets)
    if units is not None:
        buckets = _refundable(buckets, units)
    action = PolicyChange.Action.RESET if units is None else PolicyChange.Action.GRANT
    before: list[BucketStatus] = []
    # In the order in which the ledger writes, so that rows are not locked crosswise.
    for subject, own in sorted(_by_subject(buckets), key=lambda group: counter_name(group[1][0])):
        statuses, at_us = peek(own).values(), limiter.now_us
        kept = [status for status in statuses if status.bucket.durable and is_kept(limiter)]
        zone = limiter.time_zone
        first_days = {one.bucket: book.window_of(one.bucket, at_us, zone).first_day for one in kept}
        with transaction.atomic(using=alias):
            was, now = (_states(statuses, given, first_days) for given in (0, units))
            write_counted(subject, action, before=was, after=now, reason=reason)
            others = tuple(status.bucket for status in statuses if status not in kept)
            if others and units is None:
                limiter.reset(others)
            elif others and units is not None:
                # Each bucket's own units: else rates that count requests would keep theirs.
                costs = (units,) * len(others)
                limiter.decide(LimitRequest(mode="refund", buckets=others, cost=units, costs=costs))
            refund = book.refund(limiter, [status.bucket for status in kept], units, at_us)
            # Robust: the units are given back, so Redis failing now must not fail the request.
            transaction.on_commit(refund, using=alias, robust=True)
        before += statuses
    return tuple(before)


def slots_by_worker(bucket: Bucket) -> list[tuple[Health | None, list[HeldSlot]]]:
    """Return the workers that hold slots of a concurrent bucket, with their slots; both the oldest first.

    None stands for all workers without a report. Raises ``StoreError``.
    """
    limiter = default_limiter()
    reported = [] if limiter.store.absent else reports()
    workers = {worker.number: worker for worker in (*reported, health()) if worker.number}
    found: dict[int, list[HeldSlot]] = {}
    for slot in limiter.slots(bucket):
        found.setdefault(slot.worker if slot.worker in workers else 0, []).append(slot)
    return [(workers.get(number), held) for number, held in found.items()]


def _refundable(buckets: list[Bucket], units: int) -> list[Bucket]:
    """Return the buckets that count units; raises ``ValidationError`` where one used fewer, or none counts any."""
    found = [bucket for bucket in buckets if not bucket.rate.concurrent]
    if buckets and not found:
        text = _("%(counter)s counts requests that run. Leave the number empty to free all of their slots.")
        raise ValidationError(text % {"counter": limit_name(buckets[0])})
    for status in peek(found).values():
        if status.used < units:
            text = _(
                "Refund at most %(used)d to %(counter)s, because no more is used. To raise the limit itself, grant a "
                "boost."
            )
            raise ValidationError(text % {"counter": limit_name(status.bucket), "used": status.used})
    return found


def _states(
    statuses: Iterable[BucketStatus], units: int | None, first_days: Mapping[Bucket, date]
) -> dict[str, dict[str, Any]]:
    """Return the counters' states by ``own_title``, once up to ``units`` of each (None = all) are given back.

    ``first_days`` are those of the windows that the ledger has.
    """
    states = {}
    for status in statuses:
        used = status.used + status.debt
        used -= used if units is None else min(units, used)
        first_day = first_days.get(status.bucket)
        window = {} if first_day is None else {"window": window_name(counter_name(status.bucket), first_day)[1]}
        states[own_title(status.bucket)] = {"used": used, "remaining": max(0, status.limit - used), **window}
    return states


def own_title(bucket: Bucket) -> str:
    """Return the bucket's title, marked if its counter is beside that of an enforced limit of the same title."""
    return f"{bucket.title} (log only)" if bucket.beside else bucket.title


def is_shared(counted_per: str, subject: str | None) -> bool:
    """Return whether a counter is not one caller's own, such as that of all callers without a known address."""
    return counted_per in ("plan", "everyone") or subject == UNKNOWN or bool(failed_kind(subject or ""))


def _by_subject(buckets: Iterable[Bucket]) -> list[tuple[str, Sequence[Bucket]]]:
    """Group the buckets by subject, at most ``MAX_BUCKETS`` per group: each group changes atomically."""
    subjects: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        subjects.setdefault(bucket.subject, []).append(bucket)
    return [(subject, part) for subject, own in subjects.items() for part in in_batches(own, MAX_BUCKETS)]
