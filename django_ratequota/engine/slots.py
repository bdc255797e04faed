"""The slots that a request holds of concurrent buckets, until it has ended.

A slot is no charge and is never refunded. Its request releases it once, by the first of several chances. A release
that fails is left in ``unreleased`` for a thread. If there is no thread, or the process is killed, the slot's lease
ends.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from ..exceptions import StoreError
from ..utils import forks
from ..utils.shielding import shielded
from .decision import Decision, LimitRequest, Settler, Slot
from .types import Bucket

#: Seconds of a lease, unless the caller knows better; and of the longest one (µs).
LEASE_SECONDS = 60.0
MOST_LEASE_US = 3600 * 10**6


#: How many ids a worker has before they start over, of 2^53.
_IDS = 2**32


class _Ids:
    """The ids of this worker's slots, which no other request has: the worker's number, then a count."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
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

    @property
    def worker(self) -> int:
        """The number of the worker that took it; any number if that is an older version."""
        return self.id // _IDS


class Held(NamedTuple):
    """A slot of one bucket that a holder has."""

    bucket: Bucket
    settler: Settler
    #: False = the store has not said whether it is held; so it is released, but not renewed.
    sure: bool
    #: Whether an earlier check had no reply: then a later refusal does not tell that there is no slot.
    doubtful: bool = False


class Unreleased(NamedTuple):
    """Slots that may be held by a request that has ended."""

    settler: Settler
    request: LimitRequest
    #: When their leases have ended (monotonic seconds).
    until: float


#: The holders of this process that have slots, by their ids.
holders: dict[int, weakref.ref[Holder]] = {}
#: Bounded, as nothing may empty it where there is no thread; the oldest are dropped, as their leases end first.
unreleased: deque[Unreleased] = deque(maxlen=10_000)


def new_slot(lease_seconds: float = LEASE_SECONDS) -> Slot:
    """Return a slot with an id that no other request has."""
    return Slot(ids.new(), round(lease_seconds * 10**6))


def releasing(decision: Decision, slot: Slot | None) -> list[LimitRequest]:
    """Return what releases the slots that a decision has taken; nothing where it has taken none."""
    taken = (status.bucket for status in decision.statuses if decision.allowed and status.allowed)
    buckets = tuple(bucket for bucket in taken if bucket.rate.concurrent)
    return [_release(buckets, slot)] if slot and buckets else []


def _release(buckets: tuple[Bucket, ...], slot: Slot) -> LimitRequest:
    return LimitRequest(mode="refund", buckets=buckets, costs=(1,) * len(buckets), slot=slot)


def is_released(answer: Decision) -> bool:
    """Return whether a release has reached what counts its slots."""
    return answer.error in ("", "local")


class Holder:
    """The slots of one request: those that it holds, and those of which it is not known."""

    __slots__ = ("__weakref__", "_held", "renew_at", "slot")

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        #: When its leases are due to be renewed (monotonic seconds).
        self.renew_at = time.monotonic() + slot.lease_us / 3e6
        # By settler and counter. Each entry is removed by one caller only, as ``pop`` is atomic.
        self._held: dict[tuple[Settler | None, object], Held] = {}

    @classmethod
    def of(cls, decision: Decision, slot: Slot) -> Holder | None:
        """Return the holder of what an admitted decision has taken; None where that is nothing."""
        holder = cls(slot)
        holder.decided(decision)
        return holder if holder._held else None

    @property
    def held(self) -> list[Held]:
        """The slots that are known to be held."""
        return [held for held in list(self._held.values()) if held.sure]

    def asks(self, settler: Settler, buckets: Iterable[Bucket]) -> None:
        """Note that these buckets are about to be asked for a slot, whose fate is unknown until ``decided``."""
        for bucket in buckets:
            if not bucket.rate.concurrent:
                continue
            self._note(Held(bucket, settler, sure=False, doubtful=(settler, bucket.counter) in self._held))

    def _note(self, held: Held) -> None:
        self._held[held.settler, held.bucket.counter] = held
        holders[self.slot.id] = weakref.ref(self)

    def spared(self, settler: Settler | None, buckets: Iterable[Bucket]) -> None:
        """Note that these buckets have given no slot, as they refused or were not asked after all."""
        for bucket in buckets:
            name = settler, bucket.counter
            if (held := self._held.get(name)) and not held.sure and not held.doubtful:
                self._held.pop(name, None)
        if not self._held:
            holders.pop(self.slot.id, None)

    def decided(self, decision: Decision) -> None:
        """Note which slots the decision has taken."""
        settler = decision.settler
        if settler is None:
            return
        refused = []
        for status in decision.statuses:
            bucket = status.bucket
            if not (decision.allowed and status.allowed):
                refused.append(bucket)
            elif bucket.rate.concurrent:
                self._note(Held(bucket, settler, sure=True))
        self.spared(settler, refused)

    def take(self, kept: frozenset[object] = frozenset()) -> list[tuple[Settler, LimitRequest]]:
        """Return what releases the slots, to be carried out by the caller; those in the ``kept`` counters stay."""
        taken: dict[Settler, list[Bucket]] = {}
        for name in list(self._held):
            held = None if name[1] in kept else self._held.pop(name, None)
            if held is not None:
                taken.setdefault(held.settler, []).append(held.bucket)
        if not self._held:
            holders.pop(self.slot.id, None)
        return [(settler, _release(tuple(buckets), self.slot)) for settler, buckets in taken.items()]

    def release(self) -> None:
        """Release all slots; what the store does not answer is left to the thread."""
        for settler, request in self.take():
            try:
                self.note(settler, request, settler.decide(request))
            except StoreError:
                self._leave(settler, request)

    async def arelease(self) -> None:
        """``release``, awaited; it goes on when the awaiting task is cancelled."""
        taken = self.take()
        if taken:
            await shielded(self._arelease(taken))

    async def _arelease(self, taken: list[tuple[Settler, LimitRequest]]) -> None:
        for done, (settler, request) in enumerate(taken):
            try:
                self.note(settler, request, await settler.adecide(request))
            except StoreError:
                self._leave(settler, request)
            except BaseException:  # the event loop ends
                for left in taken[done:]:
                    self._leave(*left)
                raise

    def abandon(self) -> None:
        """Leave the release to the thread, where nothing may wait."""
        for settler, request in self.take():
            self._leave(settler, request)

    def note(self, settler: Settler, request: LimitRequest, answer: Decision) -> None:
        """Note how a release ended; the store's failures are errors of the answer."""
        if not is_released(answer):
            self._leave(settler, request)

    def _leave(self, settler: Settler, request: LimitRequest) -> None:
        unreleased.append(Unreleased(settler, request, time.monotonic() + self.slot.lease_us / 1e6))

    def __del__(self) -> None:
        # Garbage is collected at any place, also where a lock is held: so this takes none, and sends nothing.
        self.abandon()


def _forget() -> None:
    # A forked child has copies of its parent's slots, which it must not release.
    for holder in [ref() for ref in holders.values()]:
        if holder is not None:
            holder._held.clear()
    holders.clear()
    unreleased.clear()
    ids.begin()


forks.after_fork(_forget)
