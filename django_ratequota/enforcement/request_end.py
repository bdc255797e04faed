"""The end of a request: then its slots are released, and its charges are final.

The first of these notices it:

- the middleware: before a plain response is sent, with the last part of a streamed body, and for exceptions,
- the ``close`` of the request, which Django calls with that of the response that was sent,
- the body or the request when it is no longer used.

A file that a WSGI server sends by itself is not wrapped, because the server would read it through Python then.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async

from ..utils.shielding import shielded
from .earlier_checks import CHECKS, RequestChecks


def close(request: weakref.ref[Any], checks: RequestChecks) -> None:
    """End the checks with the request's own ``close``, in whose place it is called.

    Django has no other hook that the end of a request calls by its name. It makes no cycle of the request.
    """
    http = request()
    try:
        if http is not None:
            type(http).close(http)
    finally:
        checks.end()


def end(request: Any) -> None:
    """End the checks of a request after its view has raised an exception that Django does not handle."""
    if checks := _known(request):
        checks.end()


async def aend(request: Any, error: BaseException) -> None:
    """``end``, awaited: a sync view of a cancelled task goes on in its thread, so the release waits for that."""
    if not isinstance(error, GeneratorExit):
        await shielded(_end_behind_view(request))
    elif checks := _known(request):  # nothing may be awaited
        checks.abandon()


async def _end_behind_view(request: Any) -> None:
    await sync_to_async(int, thread_sensitive=True)()
    if checks := _known(request):  # the view may have checked the request only now
        await checks.aend()


def leave_to_body(request: Any, response: Any, checks: RequestChecks) -> None:
    """End the checks with a streamed body."""
    by_server = getattr(response, "file_to_stream", None) is not None
    if by_server and "wsgi.file_wrapper" in getattr(request, "environ", ()):
        vars(request).setdefault("close", partial(close, weakref.ref(request), checks))
    else:
        kind = _AsyncBody if response.is_async else _Body
        response.streaming_content = kind(response.streaming_content, checks)


def _known(request: Any) -> RequestChecks | None:
    checks: RequestChecks | None = vars(request).get(CHECKS)
    return checks


class _Body:
    """The parts of a body, with whose last the checks end, or with an error, or when it is closed."""

    def __init__(self, parts: Any, checks: RequestChecks) -> None:
        self._parts, self._checks = iter(parts), checks

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._parts)  # type: ignore[no-any-return]
        except BaseException:
            self._checks.end()
            raise

    def close(self) -> None:
        """End the checks; Django closes the body itself."""
        self._checks.end()

    def __del__(self) -> None:
        self._checks.abandon()


class _AsyncBody:
    """``_Body``, awaited.

    Each reader is an object of its own, which is dropped as soon as Django stops reading; the response refers only to
    the first one, and may be kept by an exception.
    """

    def __init__(self, parts: Any, checks: RequestChecks) -> None:
        self._parts, self._checks, self._is_kept = aiter(parts), checks, False

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._is_kept:
            return _AsyncBody(self._parts, self._checks)
        self._is_kept = True
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._parts)
        except GeneratorExit:  # nothing may be awaited
            self._checks.abandon()
            raise
        except BaseException:
            await self._checks.aend()
            raise

    def __del__(self) -> None:
        # Django closes no asynchronous body: one whose client left is just no longer used.
        self._checks.abandon()
