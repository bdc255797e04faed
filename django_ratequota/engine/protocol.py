"""What is sent to judge some buckets, and what comes back.

A command is worked out once, and kept for the next time that the same buckets are asked about.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import tzinfo
from functools import lru_cache

from ..exceptions import InvalidBucket, StoreError
from ..store.commands import ScriptCall
from .calendar_windows import calendar_window
from .keys import bucket_key, revision_key
from .scripts import DECIDE
from .types import Bucket, BucketStatus, make_status

NO_REVISION = -1
#: What the first number of a reply says; the third possibility is that the store's clock left a window.
DECIDED, NEWER = 1, 2
#: Far above any real request; keeps one script run short.
MAX_BUCKETS = 500
#: Sequences of buckets that are kept, the last used: some 3 kB each.
_KEPT = 2048
_FOR_EVER = 2**63
#: What is sent before the buckets' arguments.
_HEADER = 5
#: Numbers of a reply per bucket.
_EACH = 5


class CheckCommand:
    """The keys and arguments of some buckets, and the last command that they were sent in."""

    def __init__(self, prefix: str, zone: tzinfo, buckets: tuple[Bucket, ...]) -> None:
        """Raises ``InvalidBucket`` where two share a counter, or there are too many."""
        self.keys = bucket_keys(prefix, buckets)
        self._revision_key = revision_key(prefix)
        self._zone = zone
        self._buckets = buckets
        self._calendars = [bucket.rate.calendar for bucket in buckets]
        #: The header of the last command, since and until when its windows are the current ones (µs), the command,
        #: how long each bucket's window lasts (µs).
        self._last: tuple[Sequence[object], int, int, ScriptCall, list[int]] = (
            (),
            0,
            0,
            ScriptCall(DECIDE, (), ()),
            [],
        )

    def command(self, header: Sequence[object], now_us: int) -> tuple[ScriptCall, list[int]]:
        """The command, and how long each bucket's window lasts (µs).

        ``header`` is mode, clock (µs), the caller's revision, cost, longest wait to book (µs). Of a refund whose
        charge is known the last is when it was made (µs), and for each bucket follows how long after that it was
        full again (µs).
        """
        last, since_us, until_us, command, windows_us = self._last
        if last != header or not since_us <= now_us < until_us:
            since_us, until_us, args, windows_us = self._arguments(now_us)
            keys = self.keys if header[2] == NO_REVISION else (self._revision_key, *self.keys)
            command = ScriptCall(DECIDE, keys, (*header[:_HEADER], *args, *header[_HEADER:]))
            self._last = (header, since_us, until_us, command, windows_us)
        return command, windows_us

    def _arguments(self, now_us: int) -> tuple[int, int, list[object], list[int]]:
        since_us, until_us = 0, _FOR_EVER
        args: list[object] = []
        windows_us = []
        for bucket, unit in zip(self._buckets, self._calendars, strict=True):
            rate, start, finish = bucket.rate, 0, 0
            if unit:
                start, finish = calendar_window(unit, now_us, self._zone)
                since_us, until_us = max(since_us, start), min(until_us, finish)
            windows_us.append(finish - start or rate.period_us)
            enforced = 1 if bucket.mode == "enforce" else 0
            args += (rate.algorithm, rate.limit, rate.period_us, rate.capacity, enforced, start, finish)
        return since_us, until_us, args, windows_us


#: ``CheckCommand`` by prefix, time zone of calendar windows, and buckets.
prepare = lru_cache(maxsize=_KEPT)(CheckCommand)


def bucket_keys(prefix: str, buckets: Sequence[Bucket]) -> list[str]:
    """The key of each bucket's counter; raises ``InvalidBucket`` where two are the same, or there are too many."""
    keys = [bucket_key(prefix, bucket) for bucket in buckets]
    if len(set(keys)) < len(keys):
        raise InvalidBucket("two buckets share subject, scope, algorithm and period, so one counter; keep one")
    if len(keys) > MAX_BUCKETS:
        raise InvalidBucket(f"a check takes at most {MAX_BUCKETS} buckets, not {len(keys)}")
    return keys


def unpack_reply(reply: object) -> tuple[int, ...]:
    """The whole numbers of the script's reply; none when it is no such reply."""
    if not isinstance(reply, bytes) or len(reply) % 8:
        return ()
    return struct.unpack(f">{len(reply) // 8}q", reply)


def read_reply(reply: object, buckets: int) -> tuple[int, ...]:
    """The numbers of a reply about so many buckets; raises ``StoreError`` where it is none."""
    numbers = unpack_reply(reply)
    if len(numbers) != 4 + _EACH * buckets * (numbers[:1] == (DECIDED,)):
        raise StoreError("response", f"not a decision: {reply!r:.100}")
    return numbers


def statuses_of(
    numbers: tuple[int, ...], buckets: tuple[Bucket, ...], windows_us: list[int]
) -> tuple[BucketStatus, ...]:
    """How each bucket stands by the numbers of a decision."""
    # A list, though a tuple is wanted: a generator costs every request more.
    statuses = [
        make_status(
            bucket,
            numbers[at] == 1,
            numbers[at + 1],
            None if numbers[at + 2] < 0 else numbers[at + 2],
            numbers[at + 3],
            window_us,
            numbers[at + 4] or None,
        )
        for at, bucket, window_us in zip(range(4, len(numbers), _EACH), buckets, windows_us, strict=True)
    ]
    return tuple(statuses)
