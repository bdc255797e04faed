"""Forks of a process that had asked before, also those that Python is not told of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.faults import poll

from .forking import CHILDREN, FEW, ROOM, SECONDS, TIMES
from .scene import Answer, Log, Scene
from .servers import running


def scene_of_forks(scene: Scene, command: list[str], environment: dict[str, str], output: Path, asked: int) -> None:
    """Run ``forking``, whose processes ask so many times in all, and then live on until the log is looked at."""
    with running([sys.executable, "-m", "tests.world.forking", *command], environment, output) as process:
        all_asked, again = "asked\n" * (CHILDREN + 1), Log(f"{environment['WORLD_LOG']}.afterwards")
        with suppress(AssertionError):  # the figures say more
            poll(lambda: output.read_text() == all_asked or process.poll() is not None, SECONDS, "all have asked")

        def afterwards() -> list[Answer]:
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SECONDS / 2)
            return again.answers()

        scene.holds(afterwards)
        assert (process.returncode, output.read_text()) == (0, all_asked)
    answers = scene.log.answers()
    assert (len(answers), sum(answer.admitted for answer in answers)) == (asked, min(asked, scene.room))
    lived_on = range(CHILDREN + 1) if "returns" not in command else range(1)
    assert {answer.caller for answer in again.answers()} == set(lived_on)
    assert scene.is_written([*answers, *again.answers()]), "after their end"


@pytest.mark.parametrize("awaited", [False, True], ids=["plain", "awaited"])
def test_children_that_were_forked_in_c_ask_for_their_own(
    awaited: bool, scenes: Callable[[int], Scene], environment: dict[str, str], tmp_path: Path
) -> None:
    """They read each other's replies: 1,470 of 5,640 answers were of another caller."""
    command = ["c", "awaited"] if awaited else ["c"]
    asked = (CHILDREN + 1) * (TIMES + 1)
    scene_of_forks(scenes(ROOM), command, environment, tmp_path / "output", asked)


@pytest.mark.parametrize("end", ["lives-on", "returns"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing(
    method: str, end: str, scenes: Callable[[int], Scene], environment: dict[str, str], tmp_path: Path
) -> None:
    """Also those that return as soon as they have asked."""
    asked = (CHILDREN + 1) * (FEW + 1)
    scene_of_forks(scenes(asked // 2), [method, end], environment, tmp_path / "output", asked)
