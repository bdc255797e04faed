"""The wire protocol of ``driver.lua``: a check's command, and its reply.

A command is built once and kept for the next check of the same buckets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from datetime import tzinfo
from functools import lru_cache

from ..exceptions import InvalidBucket, StoreError
from ..store.commands import ScriptCall
from .calendar_windows import calendar_window
from .keys import bucket_key, revision_key
from .scripts import DECIDE
from .types import Bucket, BucketStatus, make_status

NO_REVISION = -1
#: Modes that charge the cost.
CHARGING = frozenset({"check", "charge", "acquire"})
#: First number of a reply; the third possible one means that the store's clock is outside a calendar window.
DECIDED, NEWER = 1, 2
#: Most buckets of a check: far above any real request, and few enough for a short script run.
MAX_BUCKETS = 500
#: Most commands kept, some 3 kB each; the least recently used are forgotten.
_CACHE_SIZE = 2048
_FOREVER = 2**63
#: Arguments before those of the buckets.
_HEADER = 5
#: Arguments of a bucket, the last two of them its calendar window.
_STRIDE = 7
#: Numbers of a reply per bucket.
_EACH = 5


_Sent = tuple[Sequence[object], int, int, ScriptCall, list[int]]


class CheckCommand:
    """Builds the commands of a sequence of buckets, and keeps the last one."""

    def __init__(self, prefix: str, zone: tzinfo, buckets: tuple[Bucket, ...]) -> None:
        """Raises ``InvalidBucket`` when two buckets share a counter, or there are too many."""
        self.keys = bucket_keys(prefix, buckets)
        self._revision_key = revision_key(prefix)
        self._zone = zone
        self._buckets = buckets
        self._calendars = [bucket.rate.calendar for bucket in buckets]
        #: The last command: its header, since and until when its calendar windows are the current ones (µs), the
        #: command, the length of each bucket's window (µs).
        self._last: _Sent = ((), 0, 0, ScriptCall(DECIDE, (), ()), [])

    def command(self, header: Sequence[object], now_us: int) -> tuple[ScriptCall, list[int]]:
        """Return the command, and the length of each bucket's window (µs).

        ``header`` is mode, clock (µs), the caller's revision, cost, ``times`` of ``LimiterSteps.steps``.
        """
        last, since_us, until_us, command, windows_us = self._last
        if last != header or not since_us <= now_us < until_us:
            since_us, until_us, args, windows_us = self._arguments(now_us)
            keys = self.keys if header[2] == NO_REVISION else (self._revision_key, *self.keys)
            command = ScriptCall(DECIDE, keys, (*header[:_HEADER], *args, *header[_HEADER:]))
            self._last = (header, since_us, until_us, command, windows_us)
        return command, windows_us

    def seeds(self, seeds: Sequence[int], then_us: int, now_us: int) -> tuple[int, ...]:
        """Return the seeds of ``then_us`` for ``now_us``: 0 of windows that are no longer the current ones."""
        then, now = self._arguments(then_us)[2], self._arguments(now_us)[2]
        starts = slice(_STRIDE - 2, None, _STRIDE)
        return tuple(
            seed if before == after else 0
            for seed, before, after in zip(seeds, then[starts], now[starts], strict=True)
        )

    def _arguments(self, now_us: int) -> tuple[int, int, list[object], list[int]]:
        since_us, until_us = 0, _FOREVER
        args: list[object] = []
        windows_us = []
        for bucket, unit in zip(self._buckets, self._calendars, strict=True):
            rate, start, finish = bucket.rate, 0, 0
            if unit:
                start, finish = calendar_window(unit, now_us, self._zone, bucket.anchor)
                since_us, until_us = max(since_us, start), min(until_us, finish)
            windows_us.append(finish - start or rate.period_us)
            enforced = 1 if bucket.mode == "enforce" else 0
            args += (rate.algorithm, rate.limit, rate.period_us, rate.capacity, enforced, start, finish)
        return since_us, until_us, args, windows_us


#: ``CheckCommand`` by prefix, time zone of calendar windows, and buckets.
prepare = lru_cache(maxsize=_CACHE_SIZE)(CheckCommand)


def bucket_keys(prefix: str, buckets: Sequence[Bucket]) -> list[str]:
    """Return the key of each bucket's counter; raises ``InvalidBucket`` for equal keys, and for too many."""
    keys = [bucket_key(prefix, bucket) for bucket in buckets]
    if len(set(keys)) < len(keys):
        raise InvalidBucket("two buckets share subject, scope, algorithm and period, so one counter; keep one")
    if len(keys) > MAX_BUCKETS:
        raise InvalidBucket(f"a check takes at most {MAX_BUCKETS} buckets, not {len(keys)}")
    return keys


def unpack_reply(reply: object) -> tuple[int, ...]:
    """Return the whole numbers of the script's reply; none for any other value."""
    if not isinstance(reply, bytes) or len(reply) % 8:
        return ()
    return struct.unpack(f">{len(reply) // 8}q", reply)


def read_reply(reply: object, buckets: int) -> tuple[int, ...]:
    """Return the numbers of a reply about ``buckets`` buckets; raises ``StoreError`` for any other value."""
    numbers = unpack_reply(reply)
    extra = {DECIDED: _EACH * buckets, NEWER: 1}.get(numbers[0], 0) if numbers else 0
    if len(numbers) != 4 + extra:
        raise StoreError("response", f"not a decision: {reply!r:.100}")
    return numbers


def statuses_of(
    numbers: tuple[int, ...], buckets: tuple[Bucket, ...], windows_us: list[int]
) -> tuple[BucketStatus, ...]:
    """Return each bucket's status from the numbers of a decision."""
    # A list, because a generator costs every request more.
    statuses = [
        make_status(
            bucket,
            numbers[at] == 1,
            numbers[at + 1],
            None if numbers[at + 2] < 0 else numbers[at + 2],
            numbers[at + 3],
            window_us,
            numbers[at + 4] or None,
            0,
        )
        for at, bucket, window_us in zip(range(4, len(numbers), _EACH), buckets, windows_us, strict=True)
    ]
    if min(numbers[5::_EACH], default=0) < 0:  # rare: only hand-made charges exceed a limit
        statuses = [
            replace(status, remaining=0, debt=-status.remaining) if status.remaining < 0 else status
            for status in statuses
        ]
    return tuple(statuses)
