"""Tasks whose time limit is an exception that a signal handler raises: each hears of it, whatever it waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from django_ratequota.testing.embedded import VARIABLE
from tests.faults import poll
from tests.faults.servers import Node
from tests.faults.wire import Wire
from tests.support import server
from tests.support.projects import ROOT

from . import address_of
from .scene import Log, Scene
from .servers import running

TASKS, ROOM = 6, 400
#: Seconds that all tasks may take.
SECONDS = 60.0
SEND_CELERY = "from tests.world.tasks import celery_task; [celery_task.delay(n) for n in range(1, TASKS + 1)]"
SEND_RQ = """
import os, redis
from rq import Queue
from tests.world.tasks import LIMIT, rq_job
with redis.Redis.from_url(os.environ["WORLD_BROKER"]) as client:
    [Queue(connection=client).enqueue(rq_job, n, job_timeout=LIMIT) for n in range(1, TASKS + 1)]
"""
# RQ's worker has imported the job before it forks: that takes as long as the job may.
WORKERS = {
    "Celery": (
        "import celery.__main__ as main",
        "--app tests.world.tasks worker --pool prefork --concurrency 2 --loglevel ERROR --without-gossip "
        "--without-mingle --hostname one@here",
        SEND_CELERY,
    ),
    "RQ": ("import tests.world.tasks, rq.cli as main", "worker --url {broker}", SEND_RQ),
}


@contextmanager
def slow_redis() -> Iterator[Wire]:
    """The test server at a distance, so that tasks wait for it most of the time."""
    with Wire(address_of(server.url()), round_trip=0.005) as wire:
        yield wire


@pytest.mark.parametrize("name", WORKERS)
def test_tasks_hear_of_their_time_limit(
    name: str, scenes: Callable[[int], Scene], environment: dict[str, str], tmp_path: Path, node: Node
) -> None:
    """None of six did: the exception became a failure of Redis, and ``on_error: allow`` admitted the row."""
    scene, output, log = scenes(ROOM), tmp_path / "output", environment["WORLD_LOG"]
    main, options, send = WORKERS[name]
    with slow_redis() as wire:
        environment = {**environment, VARIABLE: wire.url, "WORLD_BROKER": node.url}
        command = [sys.executable, "-c", f"{main}; main.main()", *options.format(broker=node.url).split()]
        with running(command, environment, output) as process:
            sent = [sys.executable, "-c", send.replace("TASKS", str(TASKS))]
            subprocess.run(sent, cwd=ROOT, env=environment, check=True, timeout=SECONDS)
            heard = Path(f"{log}.heard")
            poll(
                lambda: (
                    process.poll() is not None or (heard.exists() and len(heard.read_text().splitlines()) == TASKS)
                ),
                SECONDS,
                "all tasks have ended",
            )
            assert process.poll() is None, output.read_text()
            hear = [line.split()[1] for line in heard.read_text().splitlines()].count("True")
            afterwards = Log(f"{log}.afterwards").answers()
            assert hear == TASKS, f"{hear} of {TASKS} tasks heard of their time limit"
            callers = range(1, TASKS + 1)
            assert {answer.caller for answer in afterwards} == {1000 + caller for caller in callers}
            scene.holds(lambda: afterwards, interrupted=callers, others=afterwards)
