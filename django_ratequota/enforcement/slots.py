"""The slots of requests under rates such as ``20 concurrent``: taken by a check, renewed, and released at the end.

A request's slots are released by the first of these that notices its end:

- the middleware: before a plain response is sent, with the last part of a streamed body, and for exceptions,
- the ``close`` of the request, which Django calls with that of the response that was sent,
- the body or the holder when it is no longer used; then the thread releases them within a second.

A file that a WSGI server sends by itself is not wrapped, because the server would read it through Python then.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

from asgiref.sync import sync_to_async

from ..conf import settings
from ..engine.decision import Settler
from ..engine.memory import LocalLimiter
from ..engine.slots import Holder, holders, is_released, new_slot, unreleased
from ..engine.types import Bucket
from ..exceptions import StoreError
from ..monitoring.background import Background
from ..utils.shielding import shielded
from .earlier_checks import CHECKS, RequestChecks
from .settlement import StoreSettler
from .step_runner import run

#: Seconds between two looks at what is to be renewed or released; at most this part of a lease.
_SECONDS, _SHARE = 1.0, 0.25


def new_holder() -> Holder:
    """Return a holder without slots, and keep its thread running."""
    renewing.keep()
    return Holder(new_slot(settings.concurrency_ttl))


def holder_of(http: Any, checks: RequestChecks) -> Holder:
    """Return the holder of a request's slots, which the request's ``close`` releases."""
    if checks.holder is None:
        checks.holder = new_holder()
    # Django has no other hook that the end of a request calls by its name.
    vars(http).setdefault("close", _Close(http, checks.holder))
    return checks.holder


# --- The end of a request. ---


class _Close:
    """A request's ``close`` that releases its slots as well; it makes no cycle of the request."""

    __slots__ = ("_holder", "_request")

    def __init__(self, request: Any, holder: Holder) -> None:
        self._request, self._holder = weakref.ref(request), holder

    def __call__(self) -> None:
        request = self._request()
        try:
            if request is not None:
                type(request).close(request)
        finally:
            self._holder.release()


def end(request: Any) -> None:
    """Release the slots of a request whose view has ended by an exception that Django does not handle."""
    holder = _known(request)
    if holder is not None:
        holder.release()


async def aend(request: Any, error: BaseException) -> None:
    """``end``, awaited: a sync view of a cancelled task goes on in its thread, so the release waits for that."""
    if not isinstance(error, GeneratorExit):
        await shielded(_release_behind_view(request))
    elif (holder := _known(request)) is not None:  # nothing may be awaited
        holder.abandon()


async def _release_behind_view(request: Any) -> None:
    await sync_to_async(int, thread_sensitive=True)()
    holder = _known(request)  # the view may have checked the request only now
    if holder is not None:
        await holder.arelease()


def leave_to_body(request: Any, response: Any, holder: Holder) -> bool:
    """Let the end of a streamed body release the slots; returns False for a plain response, whose slots end now."""
    if not getattr(response, "streaming", False):
        return False
    by_server = getattr(response, "file_to_stream", None) is not None
    if not (by_server and "wsgi.file_wrapper" in getattr(request, "environ", ())):
        kind = _AsyncBody if response.is_async else _Body
        response.streaming_content = kind(response.streaming_content, holder)
    return True


def _known(request: Any) -> Holder | None:
    checks: RequestChecks | None = vars(request).get(CHECKS)
    return None if checks is None else checks.holder


class _Body:
    """The parts of a body, with whose last the slots are released, or with an error, or when it is closed."""

    def __init__(self, parts: Any, holder: Holder) -> None:
        self._parts, self._holder = iter(parts), holder

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            part: bytes = next(self._parts)
        except BaseException:
            self._holder.release()
            raise
        return part

    def close(self) -> None:
        """Release the slots; Django closes the body itself."""
        self._holder.release()

    def __del__(self) -> None:
        self._holder.abandon()


class _AsyncBody:
    """``_Body``, awaited.

    Each reader is an object of its own, which is dropped as soon as Django stops reading; the response refers only to
    the first one, and may be kept by an exception.
    """

    def __init__(self, parts: Any, holder: Holder) -> None:
        self._parts, self._holder, self._is_kept = aiter(parts), holder, False

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_kept:
            return _AsyncBody(self._parts, self._holder)
        self._is_kept = True
        return self

    async def __anext__(self) -> bytes:
        try:
            part: bytes = await anext(self._parts)
        except GeneratorExit:  # nothing may be awaited
            self._holder.abandon()
            raise
        except BaseException:
            await self._holder.arelease()
            raise
        return part

    def __del__(self) -> None:
        # Django closes no asynchronous body: one whose client left is just no longer used.
        self._holder.abandon()


# --- The thread. ---


def _work() -> None:
    """Renew the leases of the slots that are held, and release what is left over; raises ``StoreError``."""
    failure, renewed, late = None, set[Holder](), set[Holder]()
    for (settler, _counter, lease_us), (bucket, due) in _due().items():
        try:
            _renew(settler, bucket, [holder.slot.id for holder in due], lease_us)
            renewed.update(due)
        except StoreError as error:
            failure = error
            late.update(due)
    for holder in renewed - late:
        holder.renew_at = time.monotonic() + holder.slot.lease_us / 3e6
    for _ in range(len(unreleased)):
        left = unreleased.popleft()
        try:
            done = time.monotonic() >= left.until or is_released(left.settler.decide(left.request))
        except StoreError as error:
            failure, done = error, False
        if not done:
            unreleased.append(left)
    if failure:
        raise failure


def _due() -> dict[tuple[Settler, object, int], tuple[Bucket, list[Holder]]]:
    """Return the holders whose slots are due, by what one command renews: settler, counter, lease (µs)."""
    now, due = time.monotonic(), dict[tuple[Settler, object, int], tuple[Bucket, list[Holder]]]()
    for reference in list(holders.values()):
        holder = reference()
        if holder is None or now < holder.renew_at:
            continue
        for held in holder.held:
            group = held.settler, held.bucket.counter, holder.slot.lease_us
            due.setdefault(group, (held.bucket, []))[1].append(holder)
    return due


def _renew(settler: Settler, bucket: Bucket, slot_ids: list[int], lease_us: int) -> None:
    if isinstance(settler, LocalLimiter):
        steps = settler.renew(bucket, tuple(slot_ids), lease_us)
    elif isinstance(settler, StoreSettler):
        steps = settler.limiter.renew_steps(bucket, slot_ids, lease_us)
    else:  # a limiter that the project has made: its slots are held for the time of a lease
        return
    run(steps)


def _pause() -> float:
    return min(_SECONDS, float(settings.concurrency_ttl) * _SHARE)


#: Each check that takes a slot keeps it running.
renewing = Background("ratequota-slots", _pause, _work)
