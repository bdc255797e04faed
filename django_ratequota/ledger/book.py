"""The ledger: what calendar windows have charged and refunded, added to the database each second.

A request notes its units and waits for nothing. One thread adds these up and adds the sums to their rows, another
raises the counters in Redis to the rows, in case Redis lost some or missed a refund. Sums and totals only grow, so
nothing depends on the order in which processes write, and each step may be repeated but the addition, which
``batches`` carries out exactly once.

The rows are sums of checks that have ended. Next to them each row has the units of open ones, which are replaced and
not added, so that nobody is billed for the reservations of a killed worker. What it had not written of checks that
had ended is missing, both ways.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import tzinfo
from itertools import chain, islice
from os import getpid
from typing import Any, NamedTuple
from uuid import UUID, uuid4
from weakref import ref

from django.db import Error as DatabaseError

from ..conf import settings
from ..engine.calendar_windows import CalendarWindow, calendar_window, local_day
from ..engine.decision import Decision, LimitRequest, charges_of, without_room
from ..engine.keys import counter_name
from ..engine.limiter import Limiter
from ..engine.protocol import Raised
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..monitoring.alerts import quota_threshold, send_claimed
from ..monitoring.workers import database_worker, is_kept, receivers_worker, redis_worker
from ..runtime import default_limiter
from ..store.base import Call
from ..utils import forks
from ..utils.bounded_cache import BoundedCache
from ..utils.problems import note_problem
from ..utils.sansio import drive
from . import writers
from .batches import add, drop_silent
from .noted import Entry, Hold, Noted, Refusal, Settled
from .notices import Notices
from .rows import Part, Row, Sums, Window, total_of
from .writers import RENEWED_SECONDS, Levels

#: Most windows that wait for the database. While it does not answer, the oldest are forgotten.
_MOST = 100_000
#: Entries above which a request adds them up itself, as the thread waits for the database.
_MANY = 10_000
#: Rows of a batch, and counters that are raised at once.
_BATCH = 500
#: Windows that are known to be used up.
_MOST_USED_UP = 10_000


class Ledger(forks.Renewed):
    """The entries of this process that are not in the database yet.

    A signal may end any of its methods at any line, so each step is either repeated as a whole or is one assignment.
    """

    def clear(self) -> None:
        """Begin with nothing: the parent writes what it has noted, and a child is a writer of its own."""
        #: Appended to by requests, without a lock.
        self.entries: deque[Noted] = deque()
        #: Their sums, the oldest first, but for those of the batch.
        self._sums: Sums = {}
        #: The charges of checks that are open, by identity, and their units by window.
        self._open: dict[int, tuple[Hold, Sums]] = {}
        self._levels: dict[Window, _Level] = {}
        #: Windows and limits that were notified as used up: further refusals are no news.
        self._used_up = BoundedCache[bool](_MOST_USED_UP)
        #: What is being carried out, to be carried out again if it was interrupted.
        self._change: _Change | None = None
        #: The writer's last batch, the same one until it is known that it is added.
        self._batch = _Batch(0, {}, {}, Notices())
        #: Drawn by the first flush: no two processes are one writer.
        self._writer: UUID | None = None
        self._lock, self._flushing = forks.lock(), forks.lock()
        self._written_until, self._renewed_at = time.time(), time.monotonic()
        #: What the store is still to be raised to.
        self.due: Raised = {}
        #: Units by which the store's totals were below the rows' so far: what it had lost or missed.
        self.raised = 0
        #: Units, charged or refunded, that the database has refused so far.
        self.set_aside = 0

    def write(self, zone: tzinfo) -> int:
        """Add everything to the rows, and note what the store is to be raised to; returns how many rows there were.

        Raises ``django.db.Error``: then what is left is added the next time.
        """
        rows = 0
        with self._flushing:
            began_at = time.time()
            self.add_up(zone)
            self._writer = self._writer or uuid4()
            while (batch := self._next_batch()).sums:
                totals, refused = add(batch.sums, self._writer, batch.number, batch.levels, batch.notices)
                self.owe(totals)
                self.set_aside += refused
                send_claimed(batch.notices.crossings)
                for told in batch.notices.told:
                    self._used_up.put(told, True)
                for window, held in batch.levels.items():
                    level = self._levels.get(window) or _Level(_without_units(batch.sums[window][0]), 0, 0)
                    self._levels[window] = level._replace(told=held)
                self._batch = _Batch(batch.number, {}, {}, Notices())
                rows += len(totals)
            if self._is_known() and time.monotonic() >= self._renewed_at + RENEWED_SECONDS:
                if not writers.renew(self._writer):  # it was dropped: all of it is written the next time
                    self._levels = {window: level._replace(told=0) for window, level in self._levels.items()}
                self._renewed_at = time.monotonic()
            self._written_until = began_at
        return rows

    def owe(self, totals: Raised) -> None:
        """Note what the store is to be raised to."""
        with self._lock:
            self.due |= totals

    def raise_store(self, limiter: Limiter) -> int:
        """Raise the store's counters to what is due; returns by how many units.

        Raises ``StoreError`` at the end if a server failed; then its counters are raised the next time.
        """
        units, failure = 0, None
        with self._lock:
            due = list(self.due.items())
        # In a Cluster each counter is a command with a deadline of its own. A server that hangs costs a few of them
        # until its breaker opens, and then a probe a second.
        size = 1 if limiter.store.clustered else _BATCH
        for at in range(0, len(due), size):
            some = dict(due[at : at + size])
            # A missing counter is restored with the next request, by all that has been written until then.
            steps = limiter.backend.raise_counters(some, makes=False)
            try:
                found = drive(steps, Call(limiter.store).do)
            except StoreError as error:
                failure = error
                continue
            with self._lock:
                for window, totals in some.items():
                    if self.due.get(window) == totals:  # those that were noted meanwhile are higher
                        del self.due[window]
            units += sum(by for _charged, _refunded, by in found)
        if failure is not None:
            raise failure
        return units

    def written_until(self) -> float:
        """Return the moment (Unix time, s) before which all that was noted is in the database."""
        now = time.time()  # read first: what is noted after it may be missing
        if not self.waits():
            self._written_until = now
        return self._written_until

    def unwritten(self, windows: Iterable[Window], zone: tzinfo) -> dict[Window, Row]:
        """Return what this process is still to add to the windows, without the batch that is being added.

        Raises ``django.db.Error``.
        """
        self.add_up(zone)
        # Not what this process has told: its writer may have been dropped.
        told = writers.levels_of(self._writer) if self._writer and self._is_known() else {}
        rows: dict[Window, Row] = {}
        with self._lock:
            for window in windows:
                level = self._levels.get(window)
                held = (level.units if level else 0) - told.get(window, 0)
                rows[window] = Row(*total_of(self._sums.get(window, ())), held)
        return {window: row for window, row in rows.items() if any(row)}

    def add_up(self, zone: tzinfo) -> None:
        """Replace what was noted by its sums."""
        with self._lock:
            self._detach()
            self._repeat()
            for _ in range(len(self.entries)):
                self._carry_out(self._change_by(self.entries[0], zone))
            ended = [hold for hold, _sums in self._open.values() if not hold.is_held()]
            if ended:
                self._carry_out(self._change_by(Settled((), ended), zone))
            self._levels = self._sum_up()
            while len(self._sums) > _MOST:
                self._sums.pop(next(iter(self._sums)))
                text = f"the database does not answer: of more than {_MOST} counters, the oldest are lost"
                note_problem("ledger", text)

    def waits(self) -> bool:
        """Whether anything waits to be written."""
        with self._lock:  # what is being added up waits, too
            ended = any(not hold.is_held() for hold, _sums in self._open.values())
            return bool(self.entries or self._sums or self._batch.sums or ended)

    def is_idle(self) -> bool:
        """Whether nothing waits to be written, and no check is open, nor was when it was last written."""
        return not (self.waits() or self._open or self._is_known())

    def _is_known(self) -> bool:
        """Whether the writer's row has units of open checks, unless another process has dropped it."""
        return any(level.told for level in self._levels.values())

    def _next_batch(self) -> _Batch:
        """Return the batch whose outcome is not known, else the next one; without sums where nothing is left."""
        with self._lock:
            self._repeat()
            batch = self._batch
            if self._sums and not batch.sums:
                sums = dict(islice(self._sums.items(), _BATCH))
                changed = {
                    window: level.units
                    for window in sums
                    if (level := self._levels.get(window)) and level.units != level.told
                }
                self._batch = _Batch(batch.number + 1, sums, changed, Notices())
            self._detach()
            return self._batch

    def _repeat(self) -> None:
        """Carry out the change that was interrupted; the lock must be held."""
        if self._change is not None:
            self._carry_out(self._change)

    def _detach(self) -> None:
        """Remove the batch from what is still added up; the lock must be held."""
        for window, parts in self._batch.sums.items():
            if self._sums.get(window) is parts:
                del self._sums[window]

    def _change_by(self, item: Noted, zone: tzinfo) -> _Change:
        """Return what an item changes; the lock must be held."""
        if isinstance(item, Hold) and item.is_held():
            return _Change(item, {}, (item, _summed(item, {}, zone)), ())
        if isinstance(item, Settled):
            holds = [hold for hold in item.holds if id(hold) in self._open]
            settled = [*chain.from_iterable(holds), *item.entries]
            return _Change(item, _summed(settled, self._sums, zone), None, tuple(map(id, holds)))
        entries: Sequence[Entry | Refusal] = item if isinstance(item, Hold) else (item,)
        if isinstance(item, Refusal):
            window = counter_name(item.bucket), window_of(item.bucket, item.at_us, zone).first_day
            entries = () if (window, item.bucket.rate.capacity) in self._used_up else entries
        return _Change(item, _summed(entries, self._sums, zone), None, ())

    def _carry_out(self, change: _Change) -> None:
        """Carry out a change; harmless twice, so that an interrupted one is repeated."""
        self._change = change
        self._sums |= change.sums
        if change.opened is not None:
            self._open[id(change.opened[0])] = change.opened
        for closed in change.closed:
            self._open.pop(closed, None)
        if self.entries and self.entries[0] is change.item:
            self.entries.popleft()
        self._change = None

    def _sum_up(self) -> dict[Window, _Level]:
        """Return the units of open checks by window, and have those windows written whose units have changed."""
        levels = {window: level._replace(units=0) for window, level in self._levels.items() if level.told}
        for _hold, sums in self._open.values():
            for window, parts in sums.items():
                level = levels.get(window) or _Level(_without_units(parts[-1]), 0, 0)
                levels[window] = level._replace(units=level.units + total_of(parts).charged)
        for window, level in levels.items():
            if level.units != level.told:
                self._sums.setdefault(window, [replace(level.part)])
        return levels


class _Level(NamedTuple):
    """The units of this process's open checks in one window."""

    #: Without units.
    part: Part
    units: int
    #: What the writer's row says of them, as far as this process knows: another may have dropped it.
    told: int


class _Batch(NamedTuple):
    """What one transaction adds: the sums, and the units of open checks in those windows where they have changed."""

    number: int
    sums: Sums
    levels: Levels
    notices: Notices


class _Change(NamedTuple):
    """What an item changes: all parts of its windows as they are then, and which charges are open."""

    item: Noted
    sums: Sums
    opened: tuple[Hold, Sums] | None
    closed: tuple[int, ...]


def _without_units(part: Part) -> Part:
    return Part(part.bucket, part.bounds, part.day, limited_us=part.limited_us)


def _summed(entries: Iterable[Entry | Refusal], before: Sums, zone: tzinfo) -> Sums:
    """Return all parts of the entries' windows, those of before and what the entries add."""
    sums = Sums()
    for entry in entries:
        refusal = isinstance(entry, Refusal)
        bucket, units, charged_us, refunded_us = (*entry, 0) if refusal else entry
        if not units:
            continue
        bounds, day = window_of(bucket, charged_us, zone), local_day(refunded_us or charged_us, zone)
        window = counter_name(bucket), bounds.first_day
        if window not in sums:
            sums[window] = [replace(part) for part in before.get(window, ())]
        under = (day, bucket.policy_id, bucket.rate)
        for part in sums[window]:
            if (part.day, part.bucket.policy_id, part.bucket.rate) == under:
                break
        else:
            part = Part(bucket, bounds, day)
            sums[window].append(part)
        if refunded_us:
            part.refunded += units
            continue
        part.limited_us = max(part.limited_us, charged_us)
        if refusal:
            part.refused = max(part.refused, units)
        else:
            part.charged += units
    return sums


def window_of(bucket: Bucket, at_us: int, zone: tzinfo) -> CalendarWindow:
    """Return the window of a durable bucket around ``at_us``."""
    return calendar_window(bucket.rate.calendar or "day", at_us, zone, bucket.anchor)


def note(items: Iterable[Noted]) -> None:
    """Note what was charged to durable buckets, or refunded."""
    if database_worker.pid != getpid():  # first: a forked child begins with a ledger of its own
        database_worker.keep()
    if quota_threshold.receivers and receivers_worker.pid != getpid():
        receivers_worker.keep()  # now, as a process that ends can start no thread for the notices of its last second
    ledger.entries.extend(items)
    if len(ledger.entries) > _MANY:
        ledger.add_up(default_limiter().time_zone)
    if database_worker.ending and database_worker.wait(0):  # the project's exit handlers may be called after ours
        writing.do(write)


def note_check(decision: Decision, request: LimitRequest, checks: Any) -> None:
    """Note what a check has just charged, and the buckets that had no room, if anybody is to be told.

    The charges are open until the request of ``checks`` has ended; None = they are final, outside of ``with``.
    """
    if quota_threshold.receivers and (refusing := without_room(decision)):
        costs = dict(zip(request.buckets, request.units(), strict=True))
        # A cost above the capacity, which never fits, does not mean that the limit is used up.
        full = [one.bucket for one in refusing if one.bucket.durable and one.retry_after_us is not None]
        note([Refusal(bucket, costs[bucket], decision.at_us) for bucket in full])
    if not decision.allowed:
        return
    charges = [charge for charge in charges_of(decision) if charge.bucket.durable]
    hold = Hold([Entry(charge.bucket, charge.units, charge.at_us) for charge in charges])
    hold.is_open, hold.owner = checks is not None, None if checks is None else ref(checks)
    for charge in charges:
        charge.hold = hold
    if hold:
        note((hold,))


def entries_of(decision: Decision) -> list[Entry]:
    """Return what a decision has charged to durable buckets, on each of several servers by its own clock."""
    return [Entry(each.bucket, each.units, each.at_us) for each in charges_of(decision) if each.bucket.durable]


def flush() -> int:
    """Write what this process has noted, and raise the store to it; returns how many rows. Raises ``StoreError``."""
    rows = write()
    raise_store()
    return rows


def write() -> int:
    """Write what this process has noted; returns how many rows."""
    if forks.pid != getpid():
        forks.check()
    if ledger.is_idle():
        return 0  # no limiter is made where nothing is counted, as in most commands
    try:
        rows = ledger.write(default_limiter().time_zone)
    except DatabaseError as error:
        note_problem("ledger", f"the ledger cannot be written, it is tried again: {error}")
        return 0
    raising.soon()  # before Redis loses its data: a key made by older totals would not be restored
    return rows


def raise_store() -> None:
    """Raise the store to the rows; raises ``StoreError``."""
    if ledger.due:
        ledger.raised += ledger.raise_store(default_limiter())


#: This process's own.
ledger = Ledger()


def drop() -> None:
    """Refund what killed workers held."""
    limiter = default_limiter()
    if is_kept(limiter):
        for totals in drop_silent(local_day(limiter.now_us, limiter.time_zone)):
            ledger.owe(totals)
            raising.soon()


writing = database_worker.add("ledger", lambda: settings.checkpoint_seconds, write, last=write)
dropping = database_worker.add("drop", lambda: RENEWED_SECONDS, drop)
raising = redis_worker.add(
    "raise", lambda: settings.checkpoint_seconds if ledger.due else 0.0, raise_store, last=raise_store
)
