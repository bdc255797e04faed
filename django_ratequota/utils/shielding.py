"""Shields calls that must reach Redis even when their caller is cancelled.

An ASGI server cancels the task of a request when its client hangs up. If the charge were cancelled too, the work
would not be paid for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")

#: Most calls that outlive their callers; more are cancelled with their callers.
MAX_DETACHED = 1000
#: Calls that outlive their callers; kept here, as an event loop holds its tasks only weakly.
_detached: set[asyncio.Task[Any]] = set()


async def shielded(call: Coroutine[Any, Any, Result]) -> Result:
    """Await ``call`` in a separate task, which goes on when the caller is cancelled.

    ``call`` must bound its own time: a command to Redis ends within its decision's deadline.
    """
    task = asyncio.create_task(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if len(_detached) < MAX_DETACHED:
            _detached.add(task)
            task.add_done_callback(_detached.discard)
        else:
            task.cancel()
        raise
