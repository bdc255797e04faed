"""Redis loses its data under load: what is admitted above the limit is what was not in the ledger yet.

Four processes count one quota, with eight threads or tasks each, and write to the ledger meanwhile.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import redis

from django_ratequota.testing.embedded import VARIABLE
from tests.enforcement.test_propagation import Process, environment, migrated  # noqa: F401 - fixtures
from tests.support.properties import scaled, thorough_after

from . import poll
from .cluster import Cluster
from .servers import Node
from .test_http_servers import GUNICORN, SECONDS, serving

LIMIT = 6000
#: Requests of a process at once.
AT_ONCE = 8
SETTINGS = {"PREFIX": "rqtest", "TIMEOUT": 5, "STATISTICS_SECONDS": 0, "DENY_CACHE_SECONDS": 0, "ON_ERROR": "deny"}
USED = "answer = sum(QuotaWindow.objects.values_list('used', flat=True))"


class Crowd:
    """The processes, and what they were admitted."""

    def __init__(self, environment: dict[str, str], awaited: bool, **settings: Any) -> None:  # noqa: F811
        self.processes = [Process(environment) for _ in range(4)]
        self._awaited = awaited
        for process in self.processes:
            process.run(
                "from django.test import override_settings; from tests.support import spending; "
                f"override_settings(RATEQUOTA={ {**SETTINGS, **settings}!r}).enable()"
            )
        self.one.run("User.objects.create(username='alice')")
        self.one.run(f"RatePolicy.objects.create(rates='{LIMIT}/month')")
        self.found: list[Any] = []

    @property
    def one(self) -> Process:
        """One of the processes."""
        return self.processes[0]

    @property
    def used(self) -> int:
        """The units that are in the database."""
        return int(self.one.run(USED))

    @property
    def admitted(self) -> int:
        """Requests that Redis admitted; those of ``on_error`` are refused."""
        return sum(allowed for allowed, *_ in self.found)

    def start(self) -> None:
        for process in self.processes:
            process.run(f"spending.start('alice', {AT_ONCE}, awaited={self._awaited})")

    def go_on(self, times: int = 20) -> None:
        """Wait until each process has made more decisions."""
        for process in self.processes:
            process.run(f"spending.go_on({times})")

    def warm_up(self) -> int:
        """Wait until all processes count, and some of it is in the database; returns how much."""
        self.go_on(5)
        poll(lambda: self.used > LIMIT / 20, 60, "the ledger is written")
        return self.used

    def stop(self) -> None:
        """Wait until the limit refuses, and collect the decisions."""
        for process in self.processes:
            process.run("spending.wait_until_refused()")
        self.found = [tuple(entry) for process in self.processes for entry in process.run("answer = spending.stop()")]

    def write(self) -> int:
        """Have all processes write what they have noted; returns the units that are in the database."""
        for process in self.processes:
            poll(lambda process=process: process.run("answer = spending.flush_all()"), 60, "the ledger is written")
        return self.used

    def close(self) -> None:
        for process in self.processes:
            process.close()


Crowds = Callable[..., Crowd]


@pytest.fixture(params=thorough_after(1, [False, True]), ids=["threads", "awaited"])
def crowds(environment: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Crowds]:  # noqa: F811
    """Makes the processes, with these settings."""
    made: list[Crowd] = []

    def make(url: str = "", **settings: Any) -> Crowd:
        there = {**environment, VARIABLE: url} if url else environment
        made.append(Crowd(there, request.param, CHECKPOINT_SECONDS=0.5, STATISTICS_SECONDS=0, **settings))
        return made[-1]

    yield make
    for crowd in made:
        crowd.close()


def test_a_flushed_redis(crowds: Crowds, redis_client: redis.Redis) -> None:
    crowd = crowds()
    crowd.start()
    kept = crowd.warm_up()
    counted = flush(redis_client)
    crowd.stop()
    print(f"\n{counted} counted, {kept} of them kept; {crowd.admitted} admitted of {LIMIT}")
    assert counted >= kept > 0
    assert LIMIT <= crowd.admitted <= LIMIT + counted - kept
    assert {error for _, error, *_ in crowd.found} == {""}
    assert crowd.write() == crowd.admitted


def test_a_server_that_is_replaced_by_an_empty_one(crowds: Crowds, node: Node) -> None:
    crowd = crowds(node.url)
    crowd.start()
    kept = crowd.warm_up()
    node.kill()
    dead_us = time.time_ns() // 1000
    node.start()
    crowd.stop()
    before = sum(allowed for allowed, _, at_us, _ in crowd.found if at_us <= dead_us)
    print(f"\n{before} admitted by the first, {kept} of them kept; {crowd.admitted} admitted of {LIMIT}")
    assert before >= kept > 0
    # Requests whose replies were lost when the server died were not admitted, and are not in the ledger.
    assert LIMIT <= crowd.admitted <= LIMIT + before - kept
    assert crowd.write() == crowd.admitted


def test_a_server_that_is_replaced_by_an_older_snapshot(crowds: Crowds, node: Node) -> None:
    crowd = crowds(node.url)
    crowd.start()
    crowd.go_on(5)
    with node.client() as client:
        [key] = client.keys("rqtest:{user:*")
        older = used_of(client.get(key))
        client.save()
    crowd.warm_up()
    node.kill()
    node.start()
    crowd.stop()
    print(f"\n{older} in the snapshot; {crowd.admitted} admitted of {LIMIT}")
    assert LIMIT <= crowd.admitted <= LIMIT + LIMIT - older
    assert crowd.write() == crowd.admitted
    with node.client() as client:
        assert used_of(client.get(key)) >= crowd.admitted, "raised to the row"


def test_a_flushed_cluster(crowds: Crowds, cluster: Cluster) -> None:
    """One master after the other."""
    crowd = crowds(REDIS_URL=cluster.url, CLUSTER=True)
    crowd.start()
    kept = crowd.warm_up()
    counted = 0
    for one in cluster.primaries():
        with one.client() as client:
            counted += flush(client)
    crowd.stop()
    print(f"\n{counted} counted, {kept} of them kept; {crowd.admitted} admitted of {LIMIT}")
    assert counted >= kept > 0
    assert LIMIT <= crowd.admitted <= LIMIT + counted - kept
    assert crowd.write() == crowd.admitted


def flush(client: redis.Redis) -> int:
    """Empty the server; returns the units that were counted there."""
    keys = client.keys("rqtest:{user:*")
    if not keys:
        client.flushall()
        return 0
    value, _ = client.pipeline(transaction=True).get(*keys).flushall().execute()
    return used_of(value)


def used_of(value: Any) -> int:
    charged, refunded = struct.unpack(">dd", value)
    return int(charged - refunded)


def test_nothing_is_lost_after_the_command_checkpoint(
    environment: dict[str, str],  # noqa: F811
    redis_client: redis.Redis,
) -> None:
    """Before a planned move: four processes that write seldom, at work and at rest."""
    crowd = Crowd(environment, awaited=False, CHECKPOINT_SECONDS=2, STATISTICS_SECONDS=0.04)
    command = "import io; from django.core.management import call_command; out = io.StringIO(); "
    command += "call_command('ratequota', 'checkpoint', stdout=out); answer = out.getvalue()"
    written = "All counters are in the database, from 4 workers\n"
    try:
        crowd.one.run("RatePolicy.objects.update(rates='1000000/month')")
        crowd.start()
        crowd.go_on(5)
        admitted = sum(process.run("answer = spending.admitted()") for process in crowd.processes)
        assert crowd.one.run(command) == written
        assert crowd.used >= admitted > 4 * 5
        for process in crowd.processes:
            process.run("spending.stop()")
        [key] = redis_client.keys("rqtest:{user:*")
        assert crowd.one.run(command) == written
        assert crowd.used == used_of(redis_client.get(key))
    finally:
        crowd.close()


def test_a_process_that_ends_while_redis_hangs_writes_its_counts_in_two_seconds(
    environment: dict[str, str],  # noqa: F811
    node: Node,
) -> None:
    """As a child of ``multiprocessing`` it waited once for each thread."""
    process, other = (Process({**environment, VARIABLE: node.url}) for _ in range(2))
    try:
        settings = {**SETTINGS, "TIMEOUT": 5, "CHECKPOINT_SECONDS": 3600, "STATISTICS_SECONDS": 3600}
        process.run(f"from django.test import override_settings; override_settings(RATEQUOTA={settings!r}).enable()")
        process.run("User.objects.create(username='alice')")
        process.run("RatePolicy.objects.create(rates='1000/month, 10 concurrent')")
        for _ in range(10):
            assert process.check()["error"] == ""
        node.freeze()
        took = process.end()
        print(f"\nended after {took:.2f} s")
        assert took < 2 + scaled(1)
        assert other.run(USED) == 10
    finally:
        process.close()
        other.close()


def hourly() -> Any:
    """A WSGI application that writes to the ledger when it starts and an hour later."""
    from django.core.wsgi import get_wsgi_application
    from django.test import override_settings

    application = get_wsgi_application()
    override_settings(RATEQUOTA={**SETTINGS, "CHECKPOINT_SECONDS": 3600, "STATISTICS_SECONDS": 0}).enable()
    return application


def test_a_worker_that_ends_after_its_last_request_writes_its_counts(
    environment: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    process = Process(environment)
    try:
        process.run("RatePolicy.objects.create(rates='1000/month', counted_per='everyone')")
        command = GUNICORN.replace("--workers 2 --threads 8", "--workers 1 --max-requests 10")
        there = {**environment, "DJANGO_SETTINGS_MODULE": "tests.project.settings"}
        with serving(f"{command} tests.faults.test_lost_counts:hourly()", there, tmp_path / "log") as port:
            for _ in range(10):
                with urlopen(f"http://127.0.0.1:{port}/search/", timeout=SECONDS) as response:
                    assert response.status == 200
            poll(lambda: process.run(USED) == 10, SECONDS, "the ended worker's counts are in the database")
    finally:
        process.close()
