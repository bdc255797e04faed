"""The windows that run now in the ledger: which counters are listed, and what they have used.

A function's ``period`` is one of ``QuotaWindow.Period``: the windows of that length are one list.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q, QuerySet

from ..engine.types import Bucket
from ..models import QuotaWindow, RatePolicy
from ..policies.facts import to_datetime
from ..runtime import process

#: Percentages of a limit that operators choose from, beside 0 for all.
LEVELS = (50, 80, 100)
#: The result of ``after``, as a regular expression.
AFTER = "[0-9]{1,18}-[0-9]{1,18}"


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


def rows(period: str, chosen: Chosen, start: str = "") -> QuerySet[QuotaWindow]:
    """Return the rows that follow ``start`` (see ``after``), the fullest first."""
    found = _current(period).filter(chosen.condition())
    if start:
        percent, _dash, pk = start.partition("-")
        # Without OR, for which SQLite would read all rows by their keys.
        found = found.filter(~Q(percent=int(percent), pk__lte=int(pk or 0)), percent__lte=int(percent))
    return found.order_by("-percent", "pk")


def after(row: QuotaWindow) -> str:
    """Return where the list goes on after the row, as ``AFTER`` describes."""
    return f"{row.percent}-{row.pk}"


def correct(row: QuotaWindow, bucket: Bucket) -> None:
    """Write the limit that was edited: the row's customer may make no request for weeks."""
    limit = bucket.rate.capacity
    if (row.limit, row.policy_id) != (limit, bucket.policy_id):
        stored = QuotaWindow.objects.filter(pk=row.pk)
        # Never unset: another process may just have set it.
        mixed = {"mixed": True} if row.policy_id != bucket.policy_id else {}
        stored.update(limit=limit, policy_id=bucket.policy_id, rate=str(bucket.rate), **mixed)


def time_us() -> int:
    """Return Redis' time as this process last saw it (µs since 1970), also where settings name no Redis."""
    return process.limiter().now_us


def _current(period: str) -> QuerySet[QuotaWindow]:
    return QuotaWindow.objects.filter(period=period, ends_at__gt=to_datetime(time_us()))
