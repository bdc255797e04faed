"""The slots of requests under rates such as ``20 concurrent``: taken by a check, renewed, and released at the end.

A request's slots are released by the first of these that notices its end:

- the middleware: before a plain response is sent, with the last part of a streamed body, and for exceptions,
- the ``close`` of the request, which Django calls with that of the response that was sent,
- the body or the slots when it is no longer used; then the thread releases them within a second,
- the thread, once the request has held them for CONCURRENCY_MAX.

A file that a WSGI server sends by itself is not wrapped, because the server would read it through Python then.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from asgiref.sync import sync_to_async

from ..conf import settings
from ..engine.slots import Keeper, Lease, Slots, Unreleased, unreleased
from ..exceptions import StoreError
from ..monitoring.workers import redis_worker
from ..utils import forks
from ..utils.problems import note_problem
from ..utils.shielding import shielded
from .earlier_checks import CHECKS, RequestChecks

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


def slots_of(http: Any, checks: RequestChecks) -> Slots:
    """Return the request's slots, which its ``close`` releases."""
    if checks.slots is None:
        checks.slots = new_slots()
        if settings.concurrency_max is not None:
            checks.slots.until = time.monotonic() + settings.concurrency_max
    # Django has no other hook that the end of a request calls by its name.
    vars(http).setdefault("close", _Close(http, checks.slots))
    return checks.slots


# --- The end of a request. ---


class _Close:
    """A request's ``close`` that releases its slots as well; it makes no cycle of the request."""

    __slots__ = ("_request", "_slots")

    def __init__(self, request: Any, slots: Slots) -> None:
        self._request, self._slots = weakref.ref(request), slots

    def __call__(self) -> None:
        request = self._request()
        try:
            if request is not None:
                type(request).close(request)
        finally:
            self._slots.release()


def end(request: Any) -> None:
    """Release the slots of a request whose view has ended by an exception that Django does not handle."""
    if slots := _known(request):
        slots.release()


async def aend(request: Any, error: BaseException) -> None:
    """``end``, awaited: a sync view of a cancelled task goes on in its thread, so the release waits for that."""
    if not isinstance(error, GeneratorExit):
        await shielded(_release_behind_view(request))
    elif slots := _known(request):  # nothing may be awaited
        slots.abandon()


async def _release_behind_view(request: Any) -> None:
    await sync_to_async(int, thread_sensitive=True)()
    if slots := _known(request):  # the view may have checked the request only now
        await slots.arelease()


def leave_to_body(request: Any, response: Any, slots: Slots) -> bool:
    """Let the end of a streamed body release the slots; returns False for a plain response, whose slots end now."""
    if not getattr(response, "streaming", False):
        return False
    by_server = getattr(response, "file_to_stream", None) is not None
    if not (by_server and "wsgi.file_wrapper" in getattr(request, "environ", ())):
        kind = _AsyncBody if response.is_async else _Body
        response.streaming_content = kind(response.streaming_content, slots)
    return True


def _known(request: Any) -> Slots | None:
    checks: RequestChecks | None = vars(request).get(CHECKS)
    return None if checks is None else checks.slots


class _Body:
    """The parts of a body, with whose last the slots are released, or with an error, or when it is closed."""

    def __init__(self, parts: Any, slots: Slots) -> None:
        self._parts, self._slots = iter(parts), slots

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._parts)  # type: ignore[no-any-return]
        except BaseException:
            self._slots.release()
            raise

    def close(self) -> None:
        """Release the slots; Django closes the body itself."""
        self._slots.release()

    def __del__(self) -> None:
        self._slots.abandon()


class _AsyncBody:
    """``_Body``, awaited.

    Each reader is an object of its own, which is dropped as soon as Django stops reading; the response refers only to
    the first one, and may be kept by an exception.
    """

    def __init__(self, parts: Any, slots: Slots) -> None:
        self._parts, self._slots, self._is_kept = aiter(parts), slots, False

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_kept:
            return _AsyncBody(self._parts, self._slots)
        self._is_kept = True
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._parts)
        except GeneratorExit:  # nothing may be awaited
            self._slots.abandon()
            raise
        except BaseException:
            await self._slots.arelease()
            raise

    def __del__(self) -> None:
        # Django closes no asynchronous body: one whose client left is just no longer used.
        self._slots.abandon()


# --- The thread. ---


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
