"""Awaits calls that must reach Redis although their caller is cancelled.

An ASGI server cancels the task of a request whose client hangs up. A charge that ended with it would make the work
that it pays for free of charge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

#: Most calls that go on without their callers; beyond that, a call is cancelled with its caller.
MOST = 1000
#: The calls that go on without their callers: an event loop itself holds its tasks weakly.
_alone: set[asyncio.Task[Any]] = set()


async def shielded(call: Coroutine[Any, Any, Result]) -> Result:
    """Await ``call`` in a task of its own, which goes on when the caller is cancelled.

    ``call`` must bound its own time: a command to Redis ends within its decision's deadline.
    """
    task = asyncio.create_task(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if len(_alone) < MOST:
            _alone.add(task)
            task.add_done_callback(_alone.discard)
        else:
            task.cancel()
        raise
