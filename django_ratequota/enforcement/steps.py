"""The steps of a decision that may block, and running them: in this thread, or awaited.

``check`` yields them (see ``utils.sansio``), so that sync and async checks are the same code.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from enum import Enum
from typing import Any

from asgiref.sync import sync_to_async
from django.utils.functional import LazyObject

from ..conf import settings
from ..engine.limiter import REVISION_SHARE, Limiter
from ..exceptions import ConfigurationError, StoreError
from ..runtime import no_limiter, process
from ..store.base import Call
from ..store.commands import Command


class RequestStep(Enum):
    """A step that needs the request; only awaited runs have any."""

    READ_USER = 1


#: A command for Redis, a function that reads the database, what another thread reads, or a step that needs the request.
Step = Command | Callable[[], Any] | Future[Any] | RequestStep


def limiter_or_error() -> Limiter | StoreError:
    """Return the limiter of the settings in force, or the error that explains why there is none."""
    try:
        return process.limiter()
    except ConfigurationError as error:
        return no_limiter(error)


def now_us(limiter: Limiter | StoreError) -> int:
    """Return the store's time, as this process last saw it (µs); without a limiter this machine's."""
    return time.time_ns() // 1000 if isinstance(limiter, StoreError) else limiter.backend.now_us


def stored_revision(limiter: Limiter | StoreError) -> Generator[Command, Any, int]:
    """Return the published revision; 0 where the store does not answer."""
    try:
        return 0 if isinstance(limiter, StoreError) else (yield from limiter.revision_steps(REVISION_SHARE))
    except StoreError:
        return 0


class StepRunner:
    """Runs the steps of one request; its commands share one deadline."""

    __slots__ = ("_call", "_limiter", "_request")

    def __init__(self, limiter: Limiter | StoreError, request: Any = None) -> None:
        """``limiter`` is the one that yields the commands; an error yields none."""
        self._limiter, self._request = limiter, request
        self._call: Call | None = None

    def do(self, step: Step) -> Any:
        """Run a step in this thread."""
        if isinstance(step, Future):
            return step.result(settings.timeout)
        return step() if callable(step) else self._shared_call().do(step)  # type: ignore[arg-type]  # no RequestStep

    async def ado(self, step: Step) -> Any:
        """``do``, awaited; functions run in a thread."""
        if step is RequestStep.READ_USER:
            return await _auser(self._request)
        if isinstance(step, Future):
            return await asyncio.wait_for(asyncio.wrap_future(step), settings.timeout)
        return await sync_to_async(step)() if callable(step) else await self._shared_call().ado(step)

    def _shared_call(self) -> Call:
        if self._call is None:
            if isinstance(self._limiter, StoreError):
                raise self._limiter
            self._call = Call(self._limiter.store, always=False)
        return self._call


async def _auser(request: Any) -> Any:
    """Return the request's user without blocking the event loop.

    ``request.auser`` comes second: it returns the session's user, which a later middleware may have replaced.
    """
    user = vars(request).get("user")
    if user is None and not hasattr(type(request), "user"):
        return await request.auser() if hasattr(request, "auser") else None
    if user is None or isinstance(user, LazyObject):
        # In a thread: DRF's property authenticates when it is read, and a lazy object reads session and user.
        return await sync_to_async(_read_user)(request)
    return user


def _read_user(request: Any) -> Any:
    user = request.user
    if user is not None:
        _ = user.is_authenticated
    return user
