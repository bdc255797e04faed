"""The customers near a limit: the ledger's counters of the windows that run now, under today's policies.

A function's ``period`` is one of ``QuotaWindow.Period``: the windows of that length are one list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from django.db.models import Q, QuerySet

from ..engine.keys import counter_name
from ..engine.types import Bucket
from ..models import QuotaWindow, RatePolicy
from ..policies.facts import policy_facts, to_datetime
from ..policies.matching import Where
from ..policies.requests.caller import DescribedCaller
from ..policies.resolve_for import Resolved, is_plan_open, own_of, resolve_for
from ..policies.resolver import make_buckets
from ..policies.snapshot import Snapshot
from ..runtime import process
from .explain import newest_policies
from .recorded import policies_by_id

#: Percentages of a limit that operators choose from, beside 0 for all.
LEVELS = (50, 80, 100)
#: Where a list goes on after a row, its percent and key, as a regular expression.
AFTER = "[0-9]{1,18}-[0-9]{1,18}"
#: Counters looked up together for a whole list; how often more are for a page whose first are out of date.
_BATCH, _ROUNDS = 500, 20
#: Rows of the ledger read at once while a whole list is sent.
_CHUNK = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which counters are listed."""

    #: Least percent of the limit that is used.
    level: int = 0
    #: The policies whose counters are listed; None = all.
    policies: QuerySet[RatePolicy] | None = None
    #: None = all.
    subjects: frozenset[str] | None = None

    def condition(self) -> Q:
        """Return this as a condition on rows of the ledger."""
        found = Q(percent__gte=self.level)
        if self.policies is not None:
            found &= Q(policy_id__in=self.policies.order_by().values("pk"))
        if self.subjects is not None:
            # Found first: SQLite without statistics would look at every current row instead.
            found &= Q(pk__in=QuotaWindow.objects.filter(subject__in=self.subjects).order_by().values("pk"))
        return found


def current_periods() -> list[str]:
    """Return those of whose windows any is used now: months, weeks, days."""
    return [period for period in reversed(QuotaWindow.Period.values) if _current(period).exists()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A counter, and the policy that limits it now."""

    policy: RatePolicy
    bucket: Bucket
    #: Units used, including debts.
    used: int
    #: When the window ends.
    ends_at: datetime

    @property
    def limit(self) -> int:
        """Return the limit as it is now."""
        return self.bucket.rate.capacity

    @property
    def percent(self) -> int:
        """Return the whole percent of the limit that is used."""
        return 100 * self.used // self.limit


def near_rows(period: str, chosen: Chosen, start: str, most: int) -> tuple[list[Row], str]:
    """Return ``most`` counters from ``start`` on ("" = the fullest), the fullest first, or a few more or less.

    Rows that are out of date are left out, so more of them are read. Also returns where the next part begins; "" =
    there are no more.
    """
    # Read at once, because each query sorts all windows that run now.
    rows = list(_rows(period, chosen, start)[: _ROUNDS * most + 1])
    # By their names, because a row whose limit was raised since it was written moves down the list meanwhile.
    found: dict[object, Row] = {}
    at = 0
    while at < min(len(rows), _ROUNDS * most) and len(found) < most:
        found |= {row.bucket.counter: row for row in _fitting(chosen, rows[at : at + most])}
        at += most
    start = f"{rows[at - 1].percent}-{rows[at - 1].pk}" if len(rows) > at else ""
    return sorted(found.values(), key=lambda row: (-row.used / row.limit, row.bucket.subject)), start


def all_near(period: str, chosen: Chosen) -> Iterator[list[Row]]:
    """Yield every counter, the fullest first, in batches; not all are in memory at once."""
    rows = _rows(period, chosen).iterator(chunk_size=_CHUNK)
    while batch := list(islice(rows, _BATCH)):
        yield _fitting(chosen, batch)


def _fitting(chosen: Chosen, rows: Sequence[QuotaWindow]) -> list[Row]:
    """Return what the rows are under the limits that apply now, without those that are not chosen any more.

    Of several rows of one counter, after its policy has changed, the first is returned.
    """
    snapshot, now_us = newest_policies(), process.limiter().now_us
    policies = policies_by_id(row.policy_id for row in rows)
    callers = [_caller(row, snapshot) for row in rows]
    live: dict[object, tuple[QuotaWindow, Bucket]] = {}
    for row, caller, own in zip(rows, callers, own_of(callers), strict=True):
        endpoint = snapshot.endpoints.get(row.endpoint_id or 0)
        if row.endpoint_id is not None and (endpoint is None or endpoint.limits == "none"):
            continue
        where = Where(endpoints=(endpoint,) if endpoint else ())
        resolved = resolve_for(caller, where, snapshot.overview.snapshot, now_us, own)
        if bucket := _bucket(row, resolved, policies.get(row.policy_id or 0)):
            live.setdefault(bucket.counter, (row, bucket))
    policies = policies_by_id((bucket.policy_id for _row, bucket in live.values()), chosen.policies)
    found = []
    for row, bucket in live.values():
        correct(row, bucket)
        if policy := policies.get(bucket.policy_id or 0):
            found.append(Row(policy=policy, bucket=bucket, used=row.used, ends_at=row.ends_at))
    return [row for row in found if row.percent >= chosen.level]


def _bucket(row: QuotaWindow, resolved: Resolved, policy: RatePolicy | None) -> Bucket | None:
    """Return the bucket with the row's counter, by the policy that applies to its caller now; None = none does.

    Where the subject alone does not tell which policy applies, it is the last one that did, if it is still active.
    """
    context, resolution = resolved
    found = next((bucket for bucket in resolution.buckets if row.counter == counter_name(bucket)), None)
    # Whether the subject alone tells the plan of its requests.
    known = not is_plan_open(context.caller, resolution)
    by_plan = found and any(one.id == found.policy_id and one.plan_id is not None for one in resolution.winners)
    if (found is not None and (known or not by_plan)) or (known and context.caller.user_id is not None):
        return found
    facts = None if policy is None or policy.mode == RatePolicy.Mode.OFF else policy_facts(policy)
    if facts is not None and facts.active(context.now_us) and facts.endpoint_id == row.endpoint_id:
        endpoint = next(iter(context.endpoints), None)
        buckets = make_buckets(facts, endpoint, row.subject)
        found = next((bucket for bucket in buckets if row.counter == counter_name(bucket)), found)
    return found


def _caller(row: QuotaWindow, snapshot: Snapshot) -> DescribedCaller:
    """Return the caller that the subject names, as far as it does."""
    kind, _colon, value = row.subject.partition(":")
    plan = snapshot.plans.get(int(value)) if kind == "plan" and value.isdecimal() else None
    return DescribedCaller.named(row.subject, plan_slug=plan.slug if plan else None)


def _rows(period: str, chosen: Chosen, start: str = "") -> QuerySet[QuotaWindow]:
    """Return the rows that follow ``start`` (see ``AFTER``; "" = all), the fullest first."""
    found = _current(period).filter(chosen.condition())
    if start:
        percent, _dash, pk = start.partition("-")
        # Without OR, for which SQLite would read all rows by their keys.
        found = found.filter(~Q(percent=int(percent), pk__lte=int(pk or 0)), percent__lte=int(percent))
    return found.order_by("-percent", "pk")


def correct(row: QuotaWindow, bucket: Bucket) -> None:
    """Write the limit that was edited: the row's customer may make no request for weeks."""
    limit = bucket.rate.capacity
    if (row.limit, row.policy_id) != (limit, bucket.policy_id):
        stored = QuotaWindow.objects.filter(pk=row.pk)
        stored.update(limit=limit, policy_id=bucket.policy_id, rate=str(bucket.rate), mixed=True)


def _current(period: str) -> QuerySet[QuotaWindow]:
    return QuotaWindow.objects.filter(period=period, ends_at__gt=to_datetime(process.limiter().now_us))
