"""Runs one piece of logic synchronously or asynchronously.

Code that needs input or output is written once, as a generator that yields what it wants done and is sent the
result (or thrown the error); it runs under either driver. So no verb exists in two versions that drift apart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")


def drive(steps: Generator[Step, Any, Result], do: Callable[[Step], Any]) -> Result:
    """Run the generator, doing each step with ``do``; returns what it returns, raises what it raises."""
    try:
        step = next(steps)
        while True:
            try:
                result = do(step)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        value: Result = stop.value
        return value


async def adrive(steps: Generator[Step, Any, Result], do: Callable[[Step], Awaitable[Any]]) -> Result:
    """``drive`` with an awaitable ``do``."""
    try:
        step = next(steps)
        while True:
            try:
                result = await do(step)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        value: Result = stop.value
        return value
