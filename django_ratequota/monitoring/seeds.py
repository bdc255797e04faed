"""Restores counts that Redis has lost: what their checkpoints say is sent along until a request is charged.

While the windows began after the store's data did (``Limiter.born_us``), nothing is lost and nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from django.db import Error as DatabaseError

from ..changes.databases import reading_policies
from ..conf import settings
from ..engine.decision import Decision, LimitRequest, charges_of
from ..engine.limiter import Limiter
from ..engine.types import Bucket
from ..store.base import Call
from ..utils.bounded_cache import BoundedCache
from ..utils.problems import note_problem
from ..utils.sansio import drive
from .checkpoint_rows import Window, used_in
from .checkpoints import counter_name, in_test_run, window_of, window_start

#: Counters whose seed this process knows, each some 300 bytes.
_SIZE = 50_000
#: A seed, and the revision of the policies when it was read (-1 = unknown).
_Seed = tuple[int, int]
#: A seed that needs not be sent any more, or that there is none.
_NONE: _Seed = -1, -1
#: No calendar window is longer (µs).
_LONGEST_US = 32 * 86_400 * 10**6
#: The clocks of a lost Redis and the next may differ by as much (µs).
_SKEW_US = 10**6


class Seeds:
    """The seeds of one process for the present data of one store."""

    def __init__(self) -> None:
        #: When the data began, and what is known of it: replaced together, so that a thread that still works with
        #: what it learned of older data cannot spoil the newer.
        self._known = 0, BoundedCache[_Seed](_SIZE)

    def of(
        self, limiter: Limiter, buckets: tuple[Bucket, ...], revision: int | None = None
    ) -> Generator[Callable[[], Any], Any, tuple[int, ...]]:
        """Yield the function that reads the database, if any; return a seed for each bucket, or nothing.

        What was read before another ``revision`` is read again, because operators may have lowered it since.
        """
        now_us, born_us = limiter.now_us, limiter.born_us
        known_since, known = self._known
        if born_us != known_since:
            known = self.forget(born_us)
        if born_us and now_us >= born_us + _LONGEST_US:
            return ()
        if limiter.store.absent or not settings.checkpoint_seconds or in_test_run():
            return ()
        starts = [window_start(bucket, now_us, limiter.time_zone) if bucket.durable else now_us for bucket in buckets]
        if born_us and min(starts) >= born_us:
            return ()
        windows = [
            (counter_name(bucket), start_us) if bucket.durable and not 0 < born_us <= start_us else None
            for bucket, start_us in zip(buckets, starts, strict=True)
        ]
        lossy = [window for window in windows if window]
        unread = [window for window in lossy if not _is_current(known.get(window), revision)]
        if unread:
            try:
                found = yield partial(_read, unread, born_us + _SKEW_US if born_us else None)
            except DatabaseError as error:
                note_problem("seeds", f"what Redis has lost cannot be restored from the checkpoints: {error}")
                return ()
            read_at = -1 if revision is None else revision
            for window in unread:
                known.put(window, (found[window], read_at) if found.get(window) else _NONE)
        seeds = tuple([max(0, (known.get(window) or _NONE)[0]) if window else 0 for window in windows])
        return seeds if any(seeds) else ()

    def peek(
        self, limiter: Limiter, call: Call, buckets: tuple[Bucket, ...], revision: int | None = None
    ) -> Decision:
        """Return the state of the buckets, with what is to be restored; raises as ``Limiter.peek`` does."""
        lost: tuple[int, ...] = ()
        if any(bucket.durable for bucket in buckets):
            lost = drive(self.of(limiter, buckets, revision), lambda read: read())
        request = LimitRequest(mode="peek", buckets=buckets, seeds=lost, revision=revision)
        return drive(limiter.steps(request), call.do)

    def sent(self, limiter: Limiter, decision: Decision, buckets: tuple[Bucket, ...], seeds: tuple[int, ...]) -> None:
        """Forget the seeds of the buckets that the decision has charged with them: now the store has them."""
        lost = dict(zip(buckets, seeds, strict=True))
        born_us, known = self._known
        if decision.allowed and not decision.degraded and decision.at_us > born_us:
            for charge in charges_of(decision):
                window = window_of(charge.bucket, charge.at_us, limiter.time_zone)
                if 0 < (known.get(window) or _NONE)[0] <= lost[charge.bucket]:
                    known.put(window, _NONE)

    def forget(self, born_us: int = 0) -> BoundedCache[_Seed]:
        """Read everything again, for data that began at ``born_us``."""
        known = BoundedCache[_Seed](_SIZE)
        self._known = born_us, known
        return known


def _is_current(seed: _Seed | None, revision: int | None) -> bool:
    return seed is not None and (seed == _NONE or seed[1] == revision)


def _read(windows: list[Window], until_us: int | None) -> dict[Window, int]:
    with reading_policies():
        return used_in(windows, until_us)


#: The seeds of this process.
seeds = Seeds()
