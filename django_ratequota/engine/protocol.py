"""The backend in Redis, and its wire protocol: what is sent to ``driver.lua``, and the decision made of its reply.

A command is built once and kept for the next check of the same buckets. Of ``Copies`` it is made of what they share.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from datetime import date, tzinfo
from functools import lru_cache
from typing import Any, NamedTuple

from ..exceptions import InvalidBucket, NewerRevision, StoreError
from ..store.base import Store
from ..store.commands import Command, Script, ScriptCall, ScriptPattern, encoded
from ..utils.bounded_cache import BoundedCache
from .calendar_windows import calendar_window
from .decision import CHARGING, Charged, LimitRequest, Steps, decided
from .keys import beginning, bucket_key, revision_key, window_key
from .scripts import DECIDE, PUBLISH, RAISE, RELEASE, RENEW
from .slots import HeldSlot, Lease
from .types import EACH, Bucket, Copies, Patterns, Reply

NO_REVISION = -1
#: First number of a reply.
DECIDED, NEWER, OUTSIDE, MISSING = 1, 2, 3, 4
#: Most buckets of a check: far above any real request, and few enough for a short script run.
MAX_BUCKETS = 500
#: Largest whole number that the script takes.
MAX_US = 2**53 - 1
#: Most commands kept, some 3 kB each; the least recently used are forgotten.
_CACHE_SIZE = 2048
_FOREVER = 2**63
#: How long the keys of durable counts stay after their window (µs); as in ``calendar_window.lua``.
DURABLE_US = 4 * 86_400 * 10**6

#: A counter and the first day of its window -> units charged, units refunded, when the window ends (µs).
Raised = dict[tuple[str, date], tuple[int, int, int]]


class ScriptBackend:
    """Counts in Redis: each call is one run of the script, by the server's clock or an injected one."""

    def __init__(self, store: Store, prefix: str, zone: tzinfo, clock: Callable[[], int] | None) -> None:
        """``zone`` aligns calendar windows; ``clock`` returns µs since the Unix epoch."""
        self._clustered, self._prefix, self._zone, self._clock = store.clustered, prefix, zone, clock
        # The store's clock minus this process's monotonic one, as last seen (µs).
        self._offset_us = (time.time_ns() - time.monotonic_ns()) // 1000
        #: Patterns of buckets, and the terms -> what the commands about copies share.
        self._shared: BoundedCache[_Shared] = BoundedCache(_CACHE_SIZE)

    @property
    def now_us(self) -> int:
        """The server's clock as this process last saw it, or the injected one."""
        return self._clock() if self._clock else time.monotonic_ns() // 1000 + self._offset_us

    def ask(self, request: LimitRequest) -> Steps:
        """Send the buckets in one atomic call, again while a calendar window is outdated or a durable count missing.

        Raises ``NewerRevision``, ``InvalidBucket`` and ``StoreError``.
        """
        mode, buckets, charged = request.mode, request.buckets, request.charged
        units = request.units()
        # The windows of a refund are those of its charge, whatever the time.
        clock, at_us = self._clock, charged.at_us if charged else self.now_us
        known = NO_REVISION if request.revision is None else min(request.revision, MAX_US)
        since_us, restore = charged.at_us if charged else request.wait_us, request.restore
        for _ in range(3):
            header = (mode, clock() if clock else 0, known, since_us)
            terms = header, units, charged, restore is not None, request.slot
            command, windows_us = self._command(terms, at_us, buckets)
            numbers = read_reply((yield command), len(windows_us))
            outcome, allowed, now_us, stored = numbers[:4]
            if not clock:
                self._offset_us = now_us - time.monotonic_ns() // 1000
            if outcome == DECIDED:
                cost, units = (request.cost, units) if allowed == 1 and mode in CHARGING else (0, ())
                reply = Reply(buckets, windows_us, numbers[4:])
                return decided(reply, request, now_us, allowed=allowed == 1, cost=cost, units=units)
            if outcome == NEWER:
                instead_of = request.revision if stored < known else None
                raise NewerRevision(stored, instead_of=instead_of)
            if outcome == MISSING and restore:
                yield from restore(buckets, at_us)
                restore = None  # what is still missing is counted from 0
            else:
                at_us = now_us
        raise StoreError("clock", "the store's clock left three calendar windows in a row")

    def _command(self, terms: Terms, at_us: int, buckets: Sequence[Bucket]) -> tuple[ScriptCall, tuple[int, ...]]:
        """Return the command, and the length of each bucket's window (µs); raises ``InvalidBucket``."""
        # Other refunds have other charges, and other requests other slots: such terms do not come again.
        if type(buckets) is not Copies or terms[2] is not None or terms[4] is not None:
            return prepare(self._prefix, self._zone, tuple(buckets)).command(terms, at_us)
        shared = self._shared.get((buckets.patterns, terms))
        if shared is None or not shared.since_us <= at_us < shared.until_us:
            shared = self._share(buckets.patterns, terms, at_us)
        keys = buckets.keys
        if keys is None or keys[0] != shared.around:
            prefix, *ends = shared.around
            named = zip(buckets.subjects, ends, strict=True)
            names = tuple([f"{prefix}:{beginning(of)}{end}" for of, end in named])
            keys = buckets.keys = shared.around, names, encoded(names)
        return ScriptCall.like(shared.pattern, *keys[1:]), shared.windows_us

    def _share(self, patterns: Patterns, terms: Terms, at_us: int) -> _Shared:
        """Return what the commands about copies share, and keep it; raises ``InvalidBucket``."""
        built = CheckCommand(self._prefix, self._zone, patterns.buckets).build(terms, at_us)
        pattern = ScriptPattern(DECIDE, built.first, len(built.keys), built.args)
        around = self._prefix, *[key.partition("}:")[2] for key in built.keys]
        shared = _Shared(built.since_us, built.until_us, pattern, around, built.windows_us)
        self._shared.put((patterns, terms), shared)
        return shared

    def verify(self, buckets: Sequence[Bucket]) -> None:
        """Raise ``InvalidBucket`` where buckets cannot be asked about together."""
        prepare(self._prefix, self._zone, tuple(buckets))

    def reset(self, buckets: Iterable[Bucket]) -> Generator[Command, Any, int]:
        """Return the steps that delete the buckets' keys, and return how many there were."""
        keys = prepare(self._prefix, self._zone, tuple(buckets)).keys_at(self.now_us)
        deleted = 0
        for together in self._by_server(keys):
            deleted += int((yield ("DEL", *together)))
        return deleted

    def renew(self, leases: Iterable[Lease]) -> Generator[Command, Any, list[Any]]:
        """Return the steps that prolong the leases of slots, and return how many of these each server holds."""
        packed: dict[str, bytes] = {}
        for bucket, slot_id, length_us in leases:
            key = bucket_key(self._prefix, bucket)
            before = packed.get(key) or struct.pack(">d", bucket.rate.limit)
            packed[key] = before + struct.pack(">dd", slot_id, length_us)
        return self._of_slots(RENEW, packed)

    def release(self, leases: Iterable[Lease]) -> Generator[Command, Any, list[Any]]:
        """Return the steps that release slots, and return how many of these each server held."""
        packed: dict[str, bytes] = {}
        for bucket, slot_id, _length_us in leases:
            key = bucket_key(self._prefix, bucket)
            packed[key] = packed.get(key, b"") + struct.pack(">d", slot_id)
        return self._of_slots(RELEASE, packed)

    def _of_slots(self, script: Script, packed: dict[str, bytes]) -> Generator[Command, Any, list[Any]]:
        clock = self._clock() if self._clock else 0
        keys = self._by_server(list(packed))
        return self._each([ScriptCall(script, some, (clock, *map(packed.get, some))) for some in keys])

    def _each(self, calls: Iterable[ScriptCall]) -> Generator[Command, Any, list[Any]]:
        """Return the steps of all calls, and their replies; a server that is down leaves the others' keys."""
        replies, failure = list[Any](), None
        for call in calls:
            try:
                replies.append((yield call))
            except StoreError as error:
                failure = error
        if failure:
            raise failure
        return replies

    def slots(self, bucket: Bucket) -> Generator[Command, Any, list[HeldSlot]]:
        """Return the step that reads the slots of a concurrent bucket, and returns those that are held."""
        (value,) = yield ("MGET", bucket_key(self._prefix, bucket))
        whole = isinstance(value, bytes) and len(value) % 32 == 0
        stored = struct.iter_unpack(">dddd", value) if whole else ()
        found = [HeldSlot(*map(int, one)) for one in stored if all(map(math.isfinite, one))]
        return [one for one in found if one.counts(self.now_us)]

    def raise_counters(
        self, totals: Raised, *, makes: bool = True
    ) -> Generator[Command, Any, list[tuple[int, int, int]]]:
        """Return the steps that raise counters of calendar windows to these totals.

        They return what each has charged and refunded then, and by how many units both were raised. Totals that are
        higher, as others have charged and refunded since, stay as they are. Counters that are missing are made, if it
        ``makes`` any.
        """
        now_us, prefix = self.now_us, self._prefix
        packed: dict[str, bytes] = {}
        for (counter, first_day), (charged, refunded, ends_us) in totals.items():
            kept_ms = max(1, (ends_us + DURABLE_US - now_us) // 1000)
            packed[window_key(f"{prefix}:{counter}", first_day)] = struct.pack(">ddd", charged, refunded, kept_ms)
        servers = self._by_server(list(packed))
        # One argument and one text as reply: the client takes longer for many than for the rest of the call.
        calls = [ScriptCall(RAISE, keys, (int(makes), b"".join([packed[key] for key in keys]))) for keys in servers]
        replies = yield from self._each(calls)
        return [counter for reply in replies for counter in struct.iter_unpack(">qqq", reply)]

    def publish(self) -> Generator[Command, Any, int]:
        """Return the step that stores a new revision, and return it."""
        return int((yield ScriptCall(PUBLISH, [revision_key(self._prefix)], ())))

    def _by_server(self, keys: list[str]) -> list[list[str]]:
        # On a Cluster each key may live on a server of its own.
        return [[key] for key in keys] if self._clustered else [keys] if keys else []


#: What a command is built for: the script's first arguments (mode, clock in µs, the caller's revision, a time in µs),
#: the cost of each bucket, the charge that is refunded (None = not known), whether no durable count may be missing,
#: and the slot of its concurrent buckets: its id, and how long its lease is (µs).
Terms = tuple[tuple[object, ...], tuple[int, ...], Charged | None, bool, tuple[int, int] | None]


class _Shared(NamedTuple):
    """What commands about copies of the same buckets share: all but the subjects in the keys."""

    since_us: int
    until_us: int
    pattern: ScriptPattern
    #: What is around the subjects in the keys: the prefix, and what follows them in the key of each bucket.
    around: tuple[str, ...]
    windows_us: tuple[int, ...]


class _Built(NamedTuple):
    """What a command is made of."""

    #: Since and until when its calendar windows are the current ones (µs).
    since_us: int
    until_us: int
    #: The key of the revision, or none; and the keys of the counters.
    first: list[str]
    keys: list[str]
    args: list[object]
    #: The length of each bucket's window (µs).
    windows_us: tuple[int, ...]


class CheckCommand:
    """Builds the commands of a sequence of buckets, and keeps the last one."""

    def __init__(self, prefix: str, zone: tzinfo, buckets: tuple[Bucket, ...]) -> None:
        """Raises ``InvalidBucket`` when two buckets share a counter, or there are too many."""
        self._keys = bucket_keys(prefix, buckets)
        self._prefix, self._zone, self._buckets = prefix, zone, buckets
        self._last: tuple[Terms, _Built, ScriptCall] | None = None

    def command(self, made_for: Terms, now_us: int) -> tuple[ScriptCall, tuple[int, ...]]:
        """Return the command, and the length of each bucket's window (µs)."""
        last = self._last
        if last is None or last[0] != made_for or not last[1].since_us <= now_us < last[1].until_us:
            built = self.build(made_for, now_us)
            last = self._last = made_for, built, ScriptCall(DECIDE, [*built.first, *built.keys], built.args)
        return last[2], last[1].windows_us

    def keys_at(self, now_us: int) -> list[str]:
        """Return the key of each bucket's counter; of a calendar window, the one around ``now_us``."""
        keys = list(self._keys)
        for at, bucket in enumerate(self._buckets):
            if unit := bucket.rate.calendar:
                keys[at] = window_key(keys[at], calendar_window(unit, now_us, self._zone, bucket.anchor).first_day)
        return keys

    def build(self, made_for: Terms, now_us: int) -> _Built:
        """Return what the command is made of."""
        header, units, charged, complete, slot = made_for
        since_us, until_us, windows_us = 0, _FOREVER, list[int]()
        args: list[object] = [*header]
        for at, (bucket, cost) in enumerate(zip(self._buckets, units, strict=True)):
            rate, start, finish = bucket.rate, 0, 0
            algorithm, period_us, past = rate.algorithm, rate.period_us, charged.levels_us[at] if charged else 0
            if rate.calendar:
                start, finish, _ = calendar_window(rate.calendar, now_us, self._zone, bucket.anchor)
                since_us, until_us = max(since_us, start), min(until_us, finish)
                algorithm, past = "calendar_window", (2 if complete else 1) if bucket.durable else 0
            elif bucket.queued:
                algorithm = "queue"
            elif rate.concurrent and slot is not None:
                past, period_us = slot
            windows_us.append(finish - start or rate.period_us)
            # No bucket refuses a refund, which needs the units of its charge instead.
            enforced = charged.units if charged else int(bucket.mode == "enforce")
            args += (algorithm, rate.limit, period_us, rate.capacity, enforced, start, finish, cost, past)
        first = [] if header[2] == NO_REVISION else [revision_key(self._prefix)]
        return _Built(since_us, until_us, first, self.keys_at(now_us), args, tuple(windows_us))


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


def read_reply(reply: object, buckets: int) -> tuple[int, ...]:
    """Return the whole numbers of a reply about ``buckets`` buckets; raises ``StoreError`` for any other value."""
    if isinstance(reply, bytes) and reply and len(reply) % 8 == 0:
        numbers = struct.unpack(f">{len(reply) // 8}q", reply)
        outcome, found = numbers[0], len(numbers) - 4
        if found == (EACH * buckets if outcome == DECIDED else 0):
            return numbers
    raise StoreError("response", f"not a decision: {reply!r:.100}")
