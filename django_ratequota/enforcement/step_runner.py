"""The steps of a decision that may block, and running them: in this thread, or awaited.

Checks yield them (see ``utils.sansio``), so that sync and async ones are the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseError
from django.utils.functional import LazyObject, empty

from ..runtime import process
from ..store.base import Call
from ..store.commands import Command
from ..utils.sansio import Twins, acall, adrive, call, drive
from ..utils.shielding import shielded

Result = TypeVar("Result")
Default = TypeVar("Default")


class Uncancelled(NamedTuple):
    """Steps that go on when the awaiting task is cancelled: what they refund is taken already."""

    steps: Generator[Any, Any, Any]


#: A command for Redis, a function that may block, one that has an async twin, or commands that must reach Redis.
Step = Command | Callable[[], Any] | Twins | Uncancelled


def unless_down(read: Callable[[], Result], otherwise: Default) -> Generator[Step, Any, Result | Default]:
    """Return what ``read`` returns from the database; ``otherwise`` while that is down."""
    try:
        return (yield read)  # type: ignore[no-any-return]
    except DatabaseError:
        return otherwise


def run(steps: Generator[Step, Any, Result]) -> Result:
    """Run steps in this thread, whose commands share one deadline; returns their result."""
    return drive(steps, _StepCall(process.limiter().store).do)


async def arun(steps: Generator[Step, Any, Result]) -> Result:
    """``run``, awaited; functions run in a thread."""
    return await adrive(steps, _StepCall(process.limiter().store).ado)


class _StepCall(Call):
    """Carries out the steps of one request."""

    def do(self, step: Step) -> Any:
        """Run one step in this thread."""
        if callable(step):
            return step()
        if isinstance(step, Twins):
            return call(step)
        return drive(step.steps, self.do) if isinstance(step, Uncancelled) else super().do(step)

    async def ado(self, step: Step) -> Any:
        """``do``, awaited."""
        if callable(step):
            return await sync_to_async(step)()
        if isinstance(step, Twins):
            return await acall(step)
        if isinstance(step, Uncancelled):
            return await shielded(adrive(step.steps, self.ado))
        return await super().ado(step)


async def aread_user(request: Any) -> Any:
    """Return the request's user without blocking the event loop.

    ``request.auser`` comes second: it returns the session's user, which a later middleware may have replaced.
    """
    user = vars(request).get("user")
    if user is None and not hasattr(type(request), "user"):
        return await request.auser() if hasattr(request, "auser") else None
    if user is None or is_unread(user):
        # In a thread: DRF's property authenticates when it is read, and a lazy object reads session and user.
        return await sync_to_async(read_user)(request)
    return user


def is_unread(user: Any) -> bool:
    """Return whether reading the user may block: it is lazy, and nobody has read it yet."""
    return isinstance(user, LazyObject) and user._wrapped is empty


def read_user(request: Any) -> Any:
    """Return the request's user; reading it may block."""
    user = request.user
    if user is not None:
        _ = user.is_authenticated
    return user
