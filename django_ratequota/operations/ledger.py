"""The ledger (``QuotaWindow``) of the windows that run now: which counters are listed, and what they have used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from typing import Any, ClassVar, NamedTuple

from django.db.models import Count, Q, QuerySet

from ..conf import settings
from ..enforcement.steps import limiter_or_error, now_us
from ..engine.rates import MONTH, Rate
from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..models import QuotaWindow, RatePolicy
from ..monitoring import checkpoints
from ..monitoring.near import LEVELS, Candidate, Window
from ..policies.facts import to_datetime, to_us
from ..recording.databases import subject_begins
from ..runtime import default_limiter
from .counters import peeked

#: Rows read at once while a whole list is sent.
_CHUNK = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which counters are listed."""

    #: Least percent of the limit that is used.
    level: int = 0
    endpoint_id: int | None = None
    #: The policies whose counters are listed; None = all.
    policies: QuerySet[RatePolicy] | None = None
    #: Subjects, and what subjects begin with; None = all subjects.
    subjects: frozenset[str] | None = None
    beginnings: tuple[str, ...] = ()

    def matches(self) -> Callable[[Candidate], bool]:
        """Return a function that chooses candidates; reads the ids of the policies."""
        ids = None if self.policies is None else frozenset(self.policies.values_list("pk", flat=True))

        def matches(one: Candidate) -> bool:
            return (
                (ids is None or one.policy_id in ids)
                and (self.endpoint_id is None or one.endpoint_id == self.endpoint_id)
                and (self.subjects is None or one.subject in self.subjects or one.subject.startswith(self.beginnings))
            )

        return matches

    def condition(self) -> Q:
        """Return the same as a condition on rows of the ledger."""
        found = Q(percent__gte=self.level)
        if self.policies is not None:
            found &= Q(policy_id__in=self.policies.order_by().values("pk"))
        if self.endpoint_id is not None:
            found &= Q(endpoint_id=self.endpoint_id)
        if self.subjects is not None:
            named = Q(subject__in=self.subjects)
            for text in self.beginnings:
                named |= subject_begins(text, QuotaWindow.objects.db)
            # Found first: SQLite without statistics would look at every current row instead.
            found &= Q(pk__in=QuotaWindow.objects.filter(named).order_by().values("pk"))
        return found

    def among(self, policy_ids: Iterable[int]) -> set[int]:
        """Return which of these policies are chosen."""
        ids = set(policy_ids)
        return ids if self.policies is None else set(self.policies.filter(pk__in=ids).values_list("pk", flat=True))


class Recorded(NamedTuple):
    """A row of the ledger."""

    pk: int
    counter: str
    subject: str
    policy_id: int | None
    endpoint_id: int | None
    used: int
    limit: int
    percent: int
    starts_at: datetime
    ends_at: datetime
    at_us: int

    @property
    def anchor(self) -> int:
        """Return the day of the month on which its calendar months begin."""
        return anchor_of(local_date(self.starts_at), local_date(self.ends_at))

    def status(self, bucket: Bucket, now_us: int) -> BucketStatus:
        """Return the status of its counter as it was written last, under the bucket's limit."""
        limit, starts_us, ends_us = bucket.rate.capacity, to_us(self.starts_at), to_us(self.ends_at)
        return BucketStatus(
            bucket=bucket,
            allowed=True,
            remaining=max(0, limit - self.used),
            retry_after_us=0,
            reset_after_us=max(0, ends_us - now_us),
            window_us=ends_us - starts_us,
            debt=max(0, self.used - limit),
        )


@dataclass(frozen=True, slots=True)
class Ledger:
    """The counters of durable policies with calendar windows of one length, as they run now."""

    #: One of ``QuotaWindow.Period``.
    name: str
    #: What ``after`` returns.
    START: ClassVar[str] = "[0-9]{1,18}-[0-9]{1,18}"

    @property
    def window(self) -> Window:
        """Return the windows' algorithm and length."""
        days = {"day": 1, "week": 7}
        period: Any = MONTH if self.name == MONTH else days[self.name] * 86_400
        return Window.of(Rate(limit=1, period=period, algorithm="fixed_window"))

    def entries(self, chosen: Chosen, start: str, most: int) -> list[Recorded]:
        """Return up to ``most`` rows, the fullest first."""
        rows = self._rows(chosen)
        if start:
            percent, _dash, pk = start.partition("-")
            # Without OR, for which SQLite would read all rows by their keys.
            rows = rows.filter(~Q(percent=int(percent), pk__lte=int(pk or 0)), percent__lte=int(percent))
        return [Recorded(*row) for row in rows[:most]]

    def all(self, chosen: Chosen) -> Iterator[Recorded]:
        """Return all rows, the fullest first; not in memory at once."""
        return (Recorded(*row) for row in self._rows(chosen).iterator(chunk_size=_CHUNK))

    def after(self, start: str, entries: Sequence[Recorded]) -> str:
        """Return where the list goes on after these entries."""
        return f"{entries[-1].percent}-{entries[-1].pk}" if entries else start

    def is_of(self, entry: Recorded, bucket: Bucket) -> bool:
        """Return whether the row is of the bucket's counter."""
        return bucket.rate.calendar == self.name and checkpoints.counter_name(bucket) == entry.counter

    def read(self, buckets: dict[Recorded, Bucket]) -> tuple[dict[Bucket, tuple[BucketStatus, int | None]], str]:
        """Return the counters, or their rows with the time where Redis does not answer, and why it does not."""
        at_us, error = time_us(), ""
        found: dict[Bucket, tuple[BucketStatus, int | None]] = {
            bucket: (entry.status(bucket, at_us), entry.at_us) for entry, bucket in buckets.items()
        }
        limits = {bucket: (entry.limit, entry.policy_id) for entry, bucket in buckets.items()}
        try:
            for decision in () if default_limiter().store.absent else peeked(buckets.values()):
                found |= {status.bucket: (status, None) for status in decision.statuses}
                # Rows whose limit was edited are written again: their customers may make no request for weeks.
                edited = [one for one in decision.statuses if limits[one.bucket] != (one.limit, one.bucket.policy_id)]
                checkpoints.note(replace(decision, allowed=True, statuses=tuple(edited)))
        except StoreError as failure:
            error = failure.reason
        return found, error

    def correct(self, live: Any) -> dict[int, int]:
        """Return level -> number of counters."""
        counted = {str(level): Count("pk", filter=Q(percent__gte=level)) for level in LEVELS}
        found = _current(self.name).filter(percent__gte=LEVELS[0]).aggregate(**counted)
        return {level: found[str(level)] for level in LEVELS}

    def _rows(self, chosen: Chosen) -> Any:
        rows = _current(self.name).filter(chosen.condition()).order_by("-percent", "pk")
        return rows.values_list(*Recorded._fields)


def current_ledgers() -> list[Ledger]:
    """Return those in which anything is used now: months, weeks, days."""
    return [Ledger(name) for name in reversed(QuotaWindow.Period.values) if _current(name).exists()]


def time_us() -> int:
    """Return Redis' time as this process last saw it (µs since 1970), also where settings name no Redis."""
    return now_us(limiter_or_error())


def anchor_of(begins: date, ends: date) -> int:
    """Return the day on which months begin, from the bounds of one."""
    shorter = min(begins, ends, key=lambda day: day.day)
    # A month's last day may stand for a later one. Other days differ where the day was changed: the end's counts.
    is_last = (shorter + timedelta(days=1)).day == 1
    return max(begins.day, ends.day) if is_last else ends.day


def local_date(at: datetime) -> date:
    """Return the date in TIME_ZONE."""
    return datetime.fromtimestamp(to_us(at) / 10**6, settings.time_zone).date()


def _current(period: str) -> QuerySet[QuotaWindow]:
    return QuotaWindow.objects.filter(period=period, ends_at__gt=to_datetime(time_us()))
