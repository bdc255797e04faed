"""The slots of requests under rates such as ``20 concurrent``: taken by a check, and renewed by a thread.

``request_end`` releases them; otherwise the thread does: within a second where they are no longer used, and once the
request has held them for CONCURRENCY_MAX.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from weakref import WeakValueDictionary

from ..conf import settings
from ..engine.slots import Keeper, Lease, Slots, Unreleased, unreleased
from ..exceptions import StoreError
from ..monitoring.workers import redis_worker
from ..utils import forks
from ..utils.problems import note_problem
from .earlier_checks import RequestChecks

#: Seconds between two renewals of all leases; at most this part of a lease, so that a worker may be suspended for
#: nearly a whole one.
_SECONDS, _SHARE = 1.0, 0.05
#: Slots that are renewed or released by one command.
_BATCH = 500
#: The slots of the requests that run, by the identity of each object; and those that the thread has just renewed.
running: WeakValueDictionary[int, Slots] = WeakValueDictionary()
_renewed: set[tuple[Keeper, Lease]] = set()
forks.after_fork(running.clear)
forks.after_fork(_renewed.clear)


def new_slots() -> Slots:
    """Return slots that the thread renews once they are taken; each check keeps it running."""
    slots = Slots(settings.concurrency_ttl)
    running[id(slots)] = slots
    return slots


def slots_of(checks: RequestChecks) -> Slots:
    """Return the request's slots."""
    if checks.slots is None:
        checks.slots = new_slots()
        if settings.concurrency_max is not None:
            checks.slots.until = time.monotonic() + settings.concurrency_max
    return checks.slots


def _work() -> None:
    """Renew the leases of the slots that are held, and release what is left over; raises ``StoreError``."""
    if ended := _abandon(time.monotonic()):
        text = f"requests that still ran after CONCURRENCY_MAX ({settings.concurrency_max} s) have lost their slots"
        note_problem("concurrency_max", f"{text}: {ended}")
    held = _held()
    # Released meanwhile: a renewal that came after the release may have taken them again.
    unreleased.extend(Unreleased(*each, time.monotonic() + each[1].length_us / 1e6) for each in _renewed - held)
    _renewed.clear()
    _renewed.update(held)
    failures = [*_renew(held), *_release()]
    if failures:
        raise failures[0]


def _abandon(now: float) -> int:
    """Leave to ``_release`` the slots that may be held until ``now`` at most; returns how many requests held some."""
    ended = 0
    for reference in running.valuerefs():
        if (slots := reference()) is not None and slots.until <= now:
            ended += bool(slots.held)
            slots.abandon()
    return ended


def _held() -> set[tuple[Keeper, Lease]]:
    """Return the slots that are held now. No caller keeps a ``Slots``, which would hold its slots for good."""
    return {lease for reference in running.valuerefs() if (slots := reference()) is not None for lease in slots.held}


def _renew(held: set[tuple[Keeper, Lease]]) -> Iterator[StoreError]:
    """Renew the leases of these, many by one command; yields what fails."""
    for keeper, batch in _batches(held):
        try:
            count = keeper.renew_slots(batch)
        except StoreError as error:
            yield error
            continue
        if count < len(batch) and (lost := len({(keeper, lease) for lease in batch} & _held()) - count) > 0:
            text = f"{lost} of {len(batch)} running requests have lost a slot"
            note_problem("slots", f"{text}, as their leases ended and others took their places")


def _release() -> Iterator[StoreError]:
    """Release what is left over, but for leases that have ended; yields what fails."""
    left = {each[:2]: each for each in [unreleased.popleft() for _ in range(len(unreleased))]}
    for keeper, batch in _batches(name for name, each in left.items() if time.monotonic() < each.until):
        try:
            keeper.release_slots(batch)
        except StoreError as error:
            unreleased.extend(left[keeper, lease] for lease in batch)
            yield error


def _batches(slots: Iterable[tuple[Keeper, Lease]]) -> Iterator[tuple[Keeper, list[Lease]]]:
    """Yield the slots of each keeper, as many at a time as one command takes."""
    by_keeper: dict[Keeper, list[Lease]] = {}
    for keeper, lease in slots:
        by_keeper.setdefault(keeper, []).append(lease)
    for keeper, leases in by_keeper.items():
        for at in range(0, len(leases), _BATCH):
            yield keeper, leases[at : at + _BATCH]


def _end() -> None:
    """Release all slots, as the process ends; raises ``StoreError``."""
    _abandon(float("inf"))
    if failures := [*_release()]:
        raise failures[0]


def _pause() -> float:
    return min(_SECONDS, float(settings.concurrency_ttl) * _SHARE)


renewing = redis_worker.add("slots", _pause, _work, last=_end)
