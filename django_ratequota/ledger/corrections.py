"""Refunds and resets by operators: they correct a window's row and its counter in Redis, which may differ.

The two differ where a worker was killed before it wrote its sums: what Redis alone knows is charged to the row first,
and what the row alone has is refunded there without a trace in Redis. So afterwards both say the same, and neither
is below zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ..engine.calendar_windows import CalendarWindow, local_day
from ..engine.keys import counter_name
from ..engine.limiter import Limiter
from ..engine.protocol import Raised
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..monitoring.workers import redis_worker
from ..utils.sansio import drive
from . import book
from .rows import Part, Row, Sums, Totals, Under, Window, add_once, limited_by, rows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What both sides say of a window, while its row is locked."""

    bucket: Bucket
    bounds: CalendarWindow
    row: Row
    #: Redis', raised to the row's, with the units of open checks; the row's where Redis has no such counter any more.
    store: Totals

    @property
    def window(self) -> Window:
        """The name of the row."""
        return counter_name(self.bucket), self.bounds.first_day

    @property
    def used(self) -> int:
        """The most units that can be refunded: those that either side says are used."""
        return max(0, _used(self.row), _used(self.store))


def read(limiter: Limiter, windows: Mapping[Bucket, CalendarWindow]) -> dict[Bucket, Books]:
    """Lock the rows of the windows in the caller's transaction, raise Redis to them, and return what both say.

    Of windows that are over nothing is made in Redis, which forgets them. Raises ``StoreError``.
    """
    names = {bucket: (counter_name(bucket), bounds.first_day) for bucket, bounds in windows.items()}
    # Locked, so that of two refunds at once the second finds what the first has left.
    rows, stored = rows_of(names.values(), lock=True), dict[Window, Totals]()
    for runs in (True, False):
        raised: Raised = {
            names[bucket]: rows.get(names[bucket], Row()).due(bounds.ends_us)
            for bucket, bounds in windows.items()
            if (bounds.ends_us > limiter.now_us) is runs
        }
        found = drive(limiter.backend.raise_counters(raised, makes=runs), limiter.store.execute) if raised else ()
        stored |= {
            window: Totals(charged, refunded) for window, (charged, refunded, _by) in zip(raised, found, strict=True)
        }
    return {
        bucket: Books(bucket=bucket, bounds=bounds, row=rows.get(names[bucket], Row()), store=stored[names[bucket]])
        for bucket, bounds in windows.items()
    }


def refund(limiter: Limiter, books: Iterable[Books], units: int | None) -> Callable[[], object]:
    """Refund up to ``units`` of each window in the transaction that has read them; None = all that is used.

    Returns what to call after its commit: that refunds them in Redis, now or, where it fails, by a later flush.
    """
    day = local_day(limiter.now_us, limiter.time_zone)
    found = [one for one in books if one.used or _used(one.row) < 0]
    limited = limited_by([one.window for one in found])
    sums, totals = Sums(), Raised()
    for one in found:
        taken = one.used if units is None else min(units, one.used)
        in_row = _used(one.row)
        own = Part(one.bucket, one.bounds, day, charged=taken - min(taken, in_row))
        sums[one.window] = [own, *share(own, taken, in_row + own.charged, limited.get(one.window, {}))]
        charged, refunded = one.store
        refunded += max(0, taken - max(0, in_row - _used(one.store)))
        totals[one.window] = charged, refunded, one.bounds.ends_us
    add_once(sums)
    redis_worker.keep()  # to try again

    def raise_store() -> None:
        book.ledger.owe(totals)
        with suppress(StoreError):
            book.ledger.raise_store(limiter)
        limiter.freed(one.bucket for one in found)

    return raise_store


def share(own: Part, units: int, used: int, limited: Mapping[Under, int]) -> list[Part]:
    """Add a refund to the part, up to what its policy and rate limited; return the parts of others, the last first.

    ``used`` is what all have used, and ``limited`` what each has by the days.
    """
    others = {under: each for under, each in limited.items() if under != (own.bucket.policy_id or 0, own.bucket.rate)}
    rest = units - max(0, used - sum(others.values()))
    found = []
    for (policy, rate), each in reversed(others.items()):
        part = min(rest, each)
        if part > 0:
            bucket = replace(own.bucket, policy_id=policy or None, rate=rate)
            found.append(Part(bucket, own.bounds, own.day, refunded=part))
            units, rest = units - part, rest - part
    own.refunded += units
    return found


def _used(totals: Row | Totals) -> int:
    return totals.charged - totals.refunded
