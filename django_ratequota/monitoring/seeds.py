"""Restores counts that Redis has lost: what their checkpoints say is sent along until a request is charged.

While the windows began after the store's data did (``Limiter.born_us``), nothing is lost and nothing is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

from django.db import Error as DatabaseError

from ..conf import settings
from ..engine.charges import charges_of
from ..engine.decision import Decision
from ..engine.limiter import Limiter
from ..engine.types import Bucket
from ..recording.databases import reading_policies
from ..store.base import Call
from ..utils.bounded_cache import BoundedCache
from ..utils.problems import note_problem
from ..utils.sansio import drive
from .checkpoint_rows import Window, used_in
from .checkpoints import counter_name, in_test_run, window_of, window_start

#: Counters whose seed this process knows, each some 300 bytes.
_SIZE = 50_000
#: A seed that needs not be sent any more, or that there is none.
_NONE = -1
#: No calendar window is longer (µs).
_LONGEST_US = 32 * 86_400 * 10**6


class Seeds:
    """The seeds of one process for the present data of one store."""

    def __init__(self) -> None:
        self._born_us = 0
        self._known: BoundedCache[int] = BoundedCache(_SIZE)
        #: From then on (µs) all windows began after the store's data did, on whatever day a month begins.
        self._whole_us = sys.maxsize

    def of(self, limiter: Limiter, buckets: tuple[Bucket, ...]) -> Generator[Callable[[], Any], Any, tuple[int, ...]]:
        """Yield the function that reads the database, if any; return a seed for each bucket, or nothing."""
        now_us, born_us = limiter.now_us, limiter.born_us
        if born_us != self._born_us:
            self.forget(born_us)
        if now_us >= self._whole_us:
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
        unread = [window for window in lossy if self._known.get(window) is None]
        if unread:
            try:
                found = yield partial(_read, unread)
            except DatabaseError as error:
                note_problem("seeds", f"what Redis has lost cannot be restored from the checkpoints: {error}")
                return ()
            for window in unread:
                self._known.put(window, found.get(window) or _NONE)
        seeds = tuple([max(0, self._known.get(window) or _NONE) if window else 0 for window in windows])
        return seeds if any(seeds) else ()

    def peek(
        self, limiter: Limiter, call: Call, buckets: tuple[Bucket, ...], revision: int | None = None
    ) -> Decision:
        """Return the state of the buckets, with what is to be restored; raises as ``Limiter.peek`` does."""
        lost: tuple[int, ...] = ()
        if any(bucket.durable for bucket in buckets):
            lost = drive(self.of(limiter, buckets), lambda read: read())
        return drive(limiter.steps("peek", buckets, 1, revision=revision, seeds=lost), call.do)

    def sent(self, limiter: Limiter, decision: Decision) -> None:
        """Forget the seeds of the buckets that the decision has charged: now the store has them."""
        if decision.allowed and not decision.degraded:
            for charge in charges_of(decision):
                if charge.bucket.durable:
                    self._known.put(window_of(charge.bucket, charge.at_us, limiter.time_zone), _NONE)

    def forget(self, born_us: int = 0) -> None:
        """Read everything again."""
        self._born_us, self._known = born_us, BoundedCache(_SIZE)
        self._whole_us = born_us + _LONGEST_US if born_us else sys.maxsize


def _read(windows: list[Window]) -> dict[Window, int]:
    with reading_policies():
        return used_in(windows)


#: The seeds of this process.
seeds = Seeds()
