"""What a worker's first request would wait for: reading the policies, and connecting to Redis."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import Any

from django.db import Error as DatabaseError
from django.db import close_old_connections

from ..exceptions import StoreError
from ..runtime import process
from ..utils.log import logger
from .step_runner import Step, arun, run


def warm() -> None:
    """Load the policies, connect to Redis and load the script there, before a worker's first request has to.

    Call it in each worker after the fork, because connections are not inherited. While Redis, its settings or the
    database fail, it logs the error instead of raising it: the worker starts, and its requests try again.
    """
    run(_steps())


async def awarm() -> None:
    """``warm``, awaited."""
    await arun(_steps())


def _steps() -> Generator[Step, Any, None]:
    policies, revision = process.policies, 0
    try:
        revision = yield from process.limiter().revision_steps()
    except StoreError as error:
        logger.warning("not connected to Redis before the first request: %s", error)
    with suppress(DatabaseError):  # which is logged where it is read
        yield partial(_load, revision)
        yield policies.load_all_entries
        yield policies.plan_kinds
        yield policies.load_user_endpoints
    yield close_old_connections  # as at the end of a request


def _load(revision: int) -> None:
    """Read the policies without garbage collection, which takes a quarter of the time and frees none of them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        process.policies.reload(revision)
    finally:
        if collects:
            gc.enable()
