"""Running a generator's steps: whatever a step raises is raised where the generator yielded it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from django_ratequota.utils.sansio import adrive, drive


class TimeLimit(Exception):
    """What a signal's handler raises."""


@pytest.mark.parametrize("kind", [TimeLimit, TimeoutError, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("awaited", [False, True])
def test_what_a_step_raises_passes_and_ends_the_generator(kind: type[BaseException], awaited: bool) -> None:
    """A cancellation, which is no ``Exception``, ended it only when the garbage was collected."""
    error, ended = kind(), []

    def steps() -> Generator[int, Any, None]:
        try:
            yield 1
        finally:
            ended.append((yield 2))

    def do(step: int) -> int:
        if step == 1:
            raise error
        return step

    async def ado(step: int) -> int:
        return do(step)

    async def run() -> BaseException | None:
        try:
            await adrive(steps(), ado)
        except kind as caught:
            return caught
        return None

    def run_plainly() -> BaseException | None:
        try:
            drive(steps(), do)
        except kind as caught:
            return caught
        return None

    assert (asyncio.run(run()) if awaited else run_plainly()) is error
    assert ended == [2]
