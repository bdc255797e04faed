"""An exception at each line of a check, a settlement, a release and a flush, six times over."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import poll
from tests.support.worker import Process

from .interrupted import AFTERWARDS, SLOTS
from .scene import Log, Scene
from .servers import running

SECONDS = 120.0
#: Connections that may be open beside those before.
IDLE = 4
SLOTS_POLICY = f"""
slots = Endpoint.objects.create(name="slots")
RatePolicy.objects.create(endpoint=slots, counted_per="everyone", rates="{SLOTS} concurrent")
"""
#: Where a project's function for an identifier is called: it may raise anything, and never fails a request.
OF_IDENTIFIERS = "policies/requests/caller.py:"
#: The settings: short leases, and a flush only by the test's own.
CHANGES: dict[str, dict[str, Any]] = {"release": {"CONCURRENCY_TTL": 2}, "flush": {"CHECKPOINT_SECONDS": 3600}}


@pytest.mark.parametrize("verb", ["check", "check_request", "settle", "refund", "release", "flush"])
def test_an_exception_at_each_line(
    verb: str, scenes: Callable[[int], Scene], editor: Process, environment: dict[str, str], tmp_path: Path
) -> None:
    """At 14 of 164 lines of a check, a connection was counted that was not there: after 64, no check had one."""
    scene, output = scenes(10**6), tmp_path / "output"
    editor.run(SLOTS_POLICY)
    environment = {**environment, "RATEQUOTA_TEST_CHANGES": json.dumps(CHANGES.get(verb, {}))}
    with running([sys.executable, "-m", "tests.world.interrupted", verb], environment, output) as process:
        poll(lambda: output.read_text().endswith("}\n") or process.poll() is not None, SECONDS, "all is asked")
        assert process.poll() is None, output.read_text()
        found = json.loads(output.read_text().splitlines()[-1])
        again = Log(f"{environment['WORLD_LOG']}.afterwards").answers()
        print({**found, "interrupted": len(found["interrupted"])})
        scene.holds(lambda: again, interrupted=found["interrupted"], others=again, has_ledger=verb != "check")
    assert len(again) == 2 * AFTERWARDS
    assert found["left open"] <= IDLE
    assert [line for line in found["swallowed"] if not line.startswith(OF_IDENTIFIERS)] == []
    assert found["lines"] > 20, "it has interrupted the verb"
