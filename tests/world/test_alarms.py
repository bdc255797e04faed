"""Exceptions of a signal handler while a check waits for a Redis that does not answer: they are the caller's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import poll

from .alarmed import TIMES
from .scene import Log, Scene
from .servers import running

SECONDS = 60.0


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("plain", "TimeoutError"),
        ("plain", "Failure"),
        ("plain", "KeyboardInterrupt"),
        ("awaited", "TimeoutError"),
        ("awaited", "Failure"),
        ("awaited", "asyncio.timeout"),
    ],
)
def test_a_caller_hears_of_its_alarm(
    way: str, what: str, scenes: Callable[[int], Scene], environment: dict[str, str], tmp_path: Path
) -> None:
    """The exception was taken for a failure of Redis: the check was admitted, and three opened the breaker."""
    scene, output = scenes(1000), tmp_path / "output"
    command = [sys.executable, "-m", "tests.world.alarmed", way, what]
    with running(command, {**environment, "RATEQUOTA_TEST_TIMEOUT": "30"}, output) as process:
        poll(
            lambda: output.read_text().endswith("]\n") or process.poll() is not None, SECONDS, "the alarms have rung"
        )
        assert process.poll() is None, output.read_text()
        came = json.loads(output.read_text().splitlines()[-1])
        raised = "TimeoutError" if what == "asyncio.timeout" else what
        again = Log(f"{environment['WORLD_LOG']}.afterwards").answers()
        assert came == [f"{raised}: the alarm"] * TIMES
        scene.holds(lambda: again, interrupted=[1] * TIMES, others=again)
