"""The steps of a decision that may block, and who does them: in this thread, or awaited.

``enforcement`` yields them (see ``twin``), so the sync and the async way are the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from enum import Enum
from typing import Any

from asgiref.sync import sync_to_async
from django.utils.functional import LazyObject

from ..engine.decision_steps import REVISION_SHARE
from ..engine.limiter import Limiter
from ..exceptions import StoreError
from ..runtime import default_limiter
from ..store.base import Call
from ..store.commands import Command


class Ask(Enum):
    """What awaited steps ask about the request."""

    USER = 1


#: A command for Redis, a function that reads the database, or a question about the request.
Step = Command | Callable[[], Any] | Ask


def limiter_or_error() -> Limiter | StoreError:
    """Return the limiter of the settings in force, or the error that says why there is none."""
    try:
        return default_limiter()
    except StoreError as error:
        return error


def now_us(limiter: Limiter | StoreError) -> int:
    """Return the store's clock, as this process last saw it; without a limiter this machine's."""
    return time.time_ns() // 1000 if isinstance(limiter, StoreError) else limiter.now_us


def stored_revision(limiter: Limiter | StoreError) -> Generator[Command, Any, int]:
    """Return the published revision; 0 where the store does not answer."""
    try:
        return 0 if isinstance(limiter, StoreError) else (yield from limiter.revision_steps(REVISION_SHARE))
    except StoreError:
        return 0


class StepRunner:
    """Does the steps of one request; its commands share one deadline."""

    __slots__ = ("_call", "_limiter", "_request")

    def __init__(self, limiter: Limiter | StoreError, request: Any = None) -> None:
        """``limiter`` is the one that yields the commands; none come where there is none."""
        self._limiter, self._request = limiter, request
        self._call: Call | None = None

    def do(self, step: Step) -> Any:
        """Do a step in this thread."""
        return step() if callable(step) else self._one_call().do(step)  # type: ignore[arg-type]  # nobody asks here

    async def ado(self, step: Step) -> Any:
        """``do``, awaited; functions run in a thread."""
        if step is Ask.USER:
            return await _auser(self._request)
        return await sync_to_async(step)() if callable(step) else await self._one_call().ado(step)

    def _one_call(self) -> Call:
        if self._call is None:
            if isinstance(self._limiter, StoreError):
                raise self._limiter
            self._call = self._limiter.store.call()
        return self._call


async def _auser(request: Any) -> Any:
    """The request's user, found without blocking the event loop.

    ``request.auser`` comes second: it is the session's user, which a later middleware may have replaced.
    """
    user = vars(request).get("user")
    if user is None and not hasattr(type(request), "user"):
        return await request.auser() if hasattr(request, "auser") else None
    if user is None or isinstance(user, LazyObject):
        # DRF's property authenticates when it is read, a lazy object reads session and user: in a thread.
        return await sync_to_async(_read_user)(request)
    return user


def _read_user(request: Any) -> Any:
    user = request.user
    if user is not None:
        _ = user.is_authenticated
    return user
