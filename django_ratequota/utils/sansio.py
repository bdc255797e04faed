"""Sans-I/O drivers: run one generator synchronously or awaited.

Logic with input and output is written once, as a generator: it yields each step, and gets its result sent or its
error thrown. So a verb and its async twin cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from inspect import isawaitable
from typing import Any, NamedTuple, TypeVar

Step = TypeVar("Step")
Result = TypeVar("Result")


def drive(steps: Generator[Step, Any, Result], do: Callable[[Step], Any]) -> Result:
    """Run the generator, carrying out each step with ``do``; returns its result, raises its error."""
    try:
        step = next(steps)
        while True:
            try:
                result = do(step)
            except BaseException as error:  # a cancellation too: what the generator holds is freed at once
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


async def adrive(steps: Generator[Step, Any, Result], do: Callable[[Step], Awaitable[Any]]) -> Result:
    """``drive`` with an awaitable ``do``."""
    try:
        step = next(steps)
        while True:
            try:
                result = await do(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


class Twins(NamedTuple):
    """A step that calls a function, or awaits its async twin, with the same arguments."""

    call: Callable[..., Any]
    acall: Callable[..., Any]
    args: tuple[Any, ...]


def call(step: Twins) -> Any:
    """``do`` of a generator of ``Twins``."""
    return step.call(*step.args)


async def acall(step: Twins) -> Any:
    """``do`` of a generator of ``Twins`` that is awaited; what a twin returns need not be awaitable."""
    result = step.acall(*step.args)
    return await result if isawaitable(result) else result
