"""The slots that a request holds of concurrent buckets, until it has ended.

A slot is no charge and is never refunded. It is released by its id, which is harmless twice, and where it was never
taken. So each bucket is noted before it is asked for a slot: whatever interrupts the check, nothing is left behind.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ..exceptions import InvalidBucket, NewerRevision, StoreError, StoreLeftAlone
from ..utils import forks
from ..utils.shielding import shielded
from .decision import LimitRequest, Steps
from .types import Bucket

#: Seconds of a lease, unless the caller knows better; and of the longest one (µs).
LEASE_SECONDS = 60.0
MOST_LEASE_US = 3600 * 10**6
#: A lease may end this much (µs) later than it is long: servers' clocks differ. As ``prelude.lua``.
FAR_US = 60 * 10**6
#: How many ids a worker has before they start over, of 2^53.
_IDS = 2**32


class _Ids(forks.Renewed):
    """The ids of this worker's slots, which no other request has: the worker's number, then a count."""

    def clear(self) -> None:
        """Draw the number and the first id, as in a process that just started."""
        #: This worker's, from 1.
        self.number = 1 + secrets.randbelow(2**21 - 1)
        self._count = itertools.count(secrets.randbelow(_IDS))

    def new(self) -> int:
        """Return the next id."""
        if forks.pid != os.getpid():
            forks.check()
        return self.number * _IDS + next(self._count) % _IDS


ids = _Ids()


class HeldSlot(NamedTuple):
    """A slot that some request holds."""

    id: int
    since_us: int
    #: When its lease ends, unless it is renewed.
    ends_us: int
    lease_us: int

    @property
    def worker(self) -> int:
        """The number of the worker that took it; any number if that is an older version."""
        return self.id // _IDS

    def counts(self, now_us: int) -> bool:
        """Whether it counts: its lease ends in the future, and no later than a lease may. As ``concurrent.lua``."""
        return now_us < self.ends_us <= now_us + self.lease_us + FAR_US and self.lease_us <= MOST_LEASE_US


class Lease(NamedTuple):
    """One slot of a concurrent bucket, to be taken, renewed or released."""

    bucket: Bucket
    slot_id: int
    length_us: int


class Keeper(Protocol):
    """What counts slots: a limiter. Its verbs return how many of the slots are, or were, held."""

    def renew_slots(self, leases: Sequence[Lease]) -> int: ...
    def release_slots(self, leases: Sequence[Lease]) -> int: ...
    async def arelease_slots(self, leases: Sequence[Lease]) -> int: ...


class Unreleased(NamedTuple):
    """A slot that may be held by a request that has ended."""

    keeper: Keeper
    lease: Lease
    #: When the lease has ended (monotonic seconds).
    until: float


#: For a thread to release. Bounded, as there may be no thread; the oldest are dropped, as their leases end first.
unreleased: deque[Unreleased] = deque(maxlen=10_000)
forks.after_fork(unreleased.clear)

#: The keeper and the counter of a slot.
_Name = tuple[Keeper, tuple[object, ...]]


class Slots:
    """The slots of one request, all with one id until some are released: a late release must hit no later slot."""

    __slots__ = ("__weakref__", "_asked", "_held", "_id", "lease_us", "until")

    def __init__(self, lease_seconds: float = LEASE_SECONDS) -> None:
        # From 1 to 2^53 - 1.
        self._id = ids.new()
        self.lease_us = round(lease_seconds * 10**6)
        #: When they are released, although they are held (monotonic seconds).
        self.until = float("inf")
        # Those that are held, and those that may be: asked for, without a reply, or being released.
        self._held: dict[_Name, Lease] = {}
        self._asked: dict[_Name, Lease] = {}

    @property
    def held(self) -> list[tuple[Keeper, Lease]]:
        """Those that are held, to be renewed."""
        return [(keeper, lease) for (keeper, _counter), lease in list(self._held.items())]

    def take(self, keeper: Keeper, request: LimitRequest, ask: Callable[[LimitRequest], Steps]) -> Steps:
        """Return the steps of a check that takes a slot of each concurrent bucket; its decision holds them."""
        slot = (self._id, self.lease_us)
        asked = {
            (keeper, bucket.counter): Lease(bucket, *slot) for bucket in request.buckets if bucket.rate.concurrent
        }
        new = [name for name in asked if name not in self._asked and name not in self._held]
        self._asked |= asked
        try:
            decision = yield from ask(request._replace(slot=slot))
        except (NewerRevision, StoreLeftAlone, InvalidBucket):  # nothing was taken
            self._forget(new)
            raise
        except BaseException:  # nobody knows what was taken, and another check at once may have dropped it
            self._asked |= asked
            raise
        taken = {status.bucket for status in decision.statuses if decision.allowed and status.allowed}
        self._held |= {name: lease for name, lease in asked.items() if lease.bucket in taken}
        for name in new:  # not ``_forget``, which would cost every check a call
            self._asked.pop(name, None)
        if self._held or self._asked:
            decision.slots = self
        return decision

    def release(self, kept: frozenset[object] = frozenset()) -> None:
        """Release the slots, but for those of the ``kept`` counters; those that fail are left to the thread."""
        for keeper, leases in self._ending(kept).items():
            try:
                keeper.release_slots(list(leases.values()))
            except StoreError:
                self._leave(keeper, leases)
            # Last, so that after an interrupted release the next chance repeats it.
            self._forget(leases)

    async def arelease(self, kept: frozenset[object] = frozenset()) -> None:
        """``release``, awaited; it goes on when the awaiting task is cancelled."""
        if by_keeper := self._ending(kept):
            await shielded(self._arelease(by_keeper))

    async def _arelease(self, by_keeper: dict[Keeper, dict[_Name, Lease]]) -> None:
        for keeper, leases in by_keeper.items():
            try:
                await keeper.arelease_slots(list(leases.values()))
            except StoreError:
                self._leave(keeper, leases)
            self._forget(leases)

    def abandon(self) -> None:
        """Leave the release to the thread, where nothing may wait."""
        for keeper, leases in self._ending().items():
            self._leave(keeper, leases)
            self._forget(leases)

    def _ending(self, kept: frozenset[object] = frozenset()) -> dict[Keeper, dict[_Name, Lease]]:
        """Return the slots that may be held, for release; from now on none of them is renewed."""
        found: dict[Keeper, dict[_Name, Lease]] = {}
        # A forked child must not release the slots of its parent.
        own = forks.pid == os.getpid() and self._id // _IDS == ids.number
        if own and (self._held or self._asked):
            self._id = ids.new()
            for name, lease in {**self._asked, **self._held}.items():
                if name[1] not in kept:
                    self._asked[name] = found.setdefault(name[0], {})[name] = lease
                    self._held.pop(name, None)
        return found

    def _leave(self, keeper: Keeper, leases: dict[_Name, Lease]) -> None:
        until = time.monotonic() + self.lease_us / 1e6
        unreleased.extend(Unreleased(keeper, lease, until) for lease in leases.values())

    def _forget(self, names: Iterable[_Name]) -> None:
        for name in names:
            self._asked.pop(name, None)

    def __del__(self) -> None:
        # Garbage is collected at any place, also where a lock is held: so this takes none, and sends nothing.
        if self._held or self._asked:
            self.abandon()
