"""The ledger: what calendar windows have charged and refunded, added to the database each second.

A request appends its entries and waits for nothing. One thread adds the entries up and adds the sums to their rows,
another raises the counters in Redis to the rows, in case Redis lost some or missed a refund. Sums and totals only
grow, so nothing depends on the order in which processes write, and each step may be repeated but the addition, which
``rows`` carries out exactly once. What a killed process had not written is missing, both ways.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import tzinfo
from itertools import islice
from os import getpid
from typing import NamedTuple
from uuid import UUID, uuid4

from django.db import Error as DatabaseError

from ..conf import settings
from ..engine.calendar_windows import CalendarWindow, calendar_window, local_day
from ..engine.decision import Decision, charges_of
from ..engine.keys import counter_name
from ..engine.limiter import Limiter
from ..engine.protocol import Raised
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..monitoring.workers import database_worker, redis_worker
from ..runtime import default_limiter
from ..store.base import Call
from ..utils import forks
from ..utils.problems import note_problem
from ..utils.sansio import drive
from .rows import Part, Sums, Totals, Window, add, add_once, give_back, limited_by, total_of, totals_of

#: Most windows that wait for the database. While it does not answer, the oldest are forgotten.
_MOST = 100_000
#: Entries above which a request adds them up itself, as the thread waits for the database.
_MANY = 10_000
#: Rows of a batch, and counters that are raised at once.
_BATCH = 500


class Entry(NamedTuple):
    """Units that were charged to a bucket, or refunded."""

    bucket: Bucket
    units: int
    #: When they were charged, by the store's clock (µs): that names the window, of a refund too.
    charged_us: int
    #: When they were refunded (µs); 0 = they were charged.
    refunded_us: int = 0


class Ledger(forks.Renewed):
    """The entries of this process that are not in the database yet.

    A signal may end any of its methods at any line, so each step is either repeated as a whole or is one assignment.
    """

    def clear(self) -> None:
        """Begin with nothing: the parent writes what it has noted, and a child is a writer of its own."""
        #: Appended to by requests, without a lock.
        self.entries: deque[Entry] = deque()
        #: Their sums, the oldest first, but for those of the batch.
        self._sums: Sums = {}
        #: The entry that is being added up, its part, and what that part had charged and refunded before.
        self._adding: tuple[Entry | None, Part | None, tuple[int, int]] = (None, None, (0, 0))
        #: The number of the writer's last batch, and its sums, the same ones until it is known that they are added.
        self._batch: tuple[int, Sums] = (0, {})
        #: Drawn by the first flush: no two processes are one writer.
        self._writer: UUID | None = None
        self._lock, self._flushing = forks.lock(), forks.lock()
        self._written_until = time.time()
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
            while (batch := self._next_batch())[1]:
                number, sums = batch
                totals, refused = add(sums, self._writer, number)
                self.owe(totals)
                self.set_aside += refused
                self._batch = number, {}
                rows += len(totals)
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

    def unwritten(self, windows: Iterable[Window], zone: tzinfo) -> dict[Window, Totals]:
        """Return what this process is still to add to the windows, without the batch that is being added."""
        self.add_up(zone)
        with self._lock:
            found = {window: self._sums.get(window) for window in windows}
        return {window: total_of(parts) for window, parts in found.items() if parts}

    def add_up(self, zone: tzinfo) -> None:
        """Replace the entries by their sums."""
        with self._lock:
            entry, part, before = self._adding
            if part is not None and self.entries and self.entries[0] is entry:  # interrupted before it was removed
                part.charged, part.refunded = before
            self._detach()
            for _ in range(len(self.entries)):
                self._add(self.entries[0], zone)
                self.entries.popleft()
            self._adding = (None, None, (0, 0))
            while len(self._sums) > _MOST:
                self._sums.pop(next(iter(self._sums)))
                text = f"the database does not answer: of more than {_MOST} counters, the oldest are lost"
                note_problem("ledger", text)

    def waits(self) -> bool:
        """Whether anything waits to be written."""
        with self._lock:  # an entry that is being added up waits, too
            return bool(self.entries or self._sums or self._batch[1])

    def _next_batch(self) -> tuple[int, Sums]:
        """Return the batch whose outcome is not known, else the next one; without sums where nothing is left."""
        with self._lock:
            number, sums = self._batch
            if self._sums and not sums:
                self._batch = number + 1, dict(islice(self._sums.items(), _BATCH))
            self._detach()
            return self._batch

    def _detach(self) -> None:
        """Remove the batch from what is still added up; the lock must be held."""
        for window, parts in self._batch[1].items():
            if self._sums.get(window) is parts:
                del self._sums[window]

    def _add(self, entry: Entry, zone: tzinfo) -> None:
        bucket, units, charged_us, refunded_us = entry
        if not units:
            return
        bounds, day = window_of(bucket, charged_us, zone), local_day(refunded_us or charged_us, zone)
        window = counter_name(bucket), bounds.first_day
        for part in self._sums.get(window, ()):
            if part.day == day and part.bucket.policy_id == bucket.policy_id:
                break
        else:
            part = Part(bucket, bounds, day)
            if window in self._sums:
                self._sums[window].append(part)
            else:
                self._sums[window] = [part]
        self._adding = entry, part, (part.charged, part.refunded)
        if refunded_us:
            part.refunded += units
        else:  # a refund is of the rate that limited its charge
            part.bucket, part.charged = bucket, part.charged + units


def window_of(bucket: Bucket, at_us: int, zone: tzinfo) -> CalendarWindow:
    """Return the window of a durable bucket around ``at_us``."""
    return calendar_window(bucket.rate.calendar or "day", at_us, zone, bucket.anchor)


def note(entries: Iterable[Entry]) -> None:
    """Note what was charged to durable buckets, or refunded."""
    if database_worker.pid != getpid():  # first: a forked child begins with a ledger of its own
        database_worker.keep()
    ledger.entries.extend(entries)
    if len(ledger.entries) > _MANY:
        ledger.add_up(default_limiter().time_zone)
    if database_worker.ending and database_worker.wait(0):  # the project's exit handlers may be called after ours
        writing.do(write)


def note_charges(decision: Decision) -> None:
    """Note what a decision has just charged, each of several servers by its own clock."""
    note([Entry(each.bucket, each.units, each.at_us) for each in charges_of(decision) if each.bucket.durable])


def refund(limiter: Limiter, buckets: Iterable[Bucket], units: int | None, at_us: int) -> Callable[[], object]:
    """Refund durable buckets, at most ``units`` of each, in the caller's transaction; None = all that they have used.

    Returns what to call after its commit: that refunds them in the store, now or, where it fails, by a later flush.
    Raises ``StoreError``.
    """
    zone = limiter.time_zone
    day, sums, totals = local_day(at_us, zone), Sums(), Raised()
    for bucket in buckets:
        bounds = window_of(bucket, at_us, zone)
        sums[counter_name(bucket), bounds.first_day] = [Part(bucket, bounds, day)]
    # Locked, so that of two refunds at once the second finds what the first has left.
    rows, limited = totals_of(sums, lock=True), limited_by(sums)
    for window, (own,) in sums.items():
        totals[window] = (*rows.get(window, (0, 0)), own.bounds.ends_us)
    found = drive(limiter.backend.raise_counters(totals), limiter.store.execute)
    for (window, parts), (charged, refunded, _by) in zip(sums.items(), found, strict=True):
        own, used = parts[0], charged - refunded
        taken = used if units is None else min(units, used)
        give_back(parts, taken, used, limited.get(window, {}))
        totals[window] = charged, refunded + taken, own.bounds.ends_us
    add_once(sums)
    redis_worker.keep()  # to try again

    def raise_store() -> None:
        ledger.owe(totals)
        with suppress(StoreError):
            ledger.raise_store(limiter)
        limiter.freed(parts[0].bucket for parts in sums.values())

    return raise_store


def flush() -> int:
    """Write what this process has noted, and raise the store to it; returns how many rows. Raises ``StoreError``."""
    rows = write()
    raise_store()
    return rows


def write() -> int:
    """Write what this process has noted; returns how many rows."""
    if forks.pid != getpid():
        forks.check()
    if not ledger.waits():
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
writing = database_worker.add("ledger", lambda: settings.checkpoint_seconds, write, last=write)
raising = redis_worker.add("raise", lambda: settings.checkpoint_seconds if ledger.due else 0.0, raise_store)
