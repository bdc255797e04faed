"""Slots of concurrent requests amid clock steps, many streams at a distance, and a suspended worker."""

from __future__ import annotations

import os
import signal
import time

import pytest
import redis

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.testing.embedded import VARIABLE
from tests.conftest import Clock
from tests.faults import poll
from tests.faults.wire import Wire
from tests.support import server
from tests.support.worker import Process

from . import address_of

#: Slots of the limit.
LIMIT = 5


# --- A clock that is set back. ---


@pytest.mark.parametrize("back", [60, 61, 119, 50 * 60, 24 * 3600])
def test_slots_of_a_killed_worker_are_free_soon_after_a_step_back(back: int, redis_client: redis.Redis) -> None:
    """Of 50 minutes: they stayed for 3,060 s."""
    clock, bucket = Clock(), Bucket("everyone", Rate.parse(f"{LIMIT} concurrent"))
    killed = Limiter(client=redis_client, clock=clock, prefix="rqtest", timeout=5)
    others = Limiter(client=redis_client, clock=clock, prefix="rqtest", timeout=5)
    held = [killed.check([bucket]) for _ in range(LIMIT)]
    assert [decision.allowed for decision in held] == [True] * LIMIT
    assert not others.check([bucket]).allowed
    clock.advance(-back)
    # Others ask all the time.
    for _ in range(13):
        with others.check([bucket]):
            clock.advance(10)
    taken = [others.check([bucket]).allowed for _ in range(LIMIT + 1)]
    assert taken == [True] * LIMIT + [False], "130 s later"
    killed.store.close()
    others.store.close()


# --- Many streams. ---

#: Streams of as many users, the round trip to Redis (seconds), and how long a lease is.
STREAMS, ROUND_TRIP, LEASE = 2600, 0.025, 6.0
POLICIES = """
from django_ratequota.models import Endpoint, RatePolicy
endpoint = Endpoint.objects.create(name="streams")
RatePolicy.objects.create(endpoint=endpoint, counted_per="PER", rates="LIMIT concurrent")
"""
BEGIN_STREAMS = """
from concurrent.futures import ThreadPoolExecutor
from django_ratequota import check_caller
def begin(number):
    return check_caller(identifiers={"tenant": str(number)}, scope="streams")
with ThreadPoolExecutor(32) as threads:
    streams = list(threads.map(begin, range(STREAMS)))
answer = sum(stream.allowed and not stream.error for stream in streams)
"""
COUNT_STREAMS = """
from django_ratequota import peek_caller
peeked = [peek_caller(identifiers={"tenant": str(number)}, scope="streams") for number in range(STREAMS)]
assert not any(peek.error for peek in peeked)
answer = sum(not peek.allowed for peek in peeked)
"""


@pytest.fixture
def leases(environment: dict[str, str]) -> dict[str, str]:
    """Short leases."""
    return {**environment, "RATEQUOTA_TEST_CHANGES": f'{{"CONCURRENCY_TTL": {LEASE}}}'}


def test_streams_of_as_many_users_keep_their_leases_while_they_run(editor: Process, leases: dict[str, str]) -> None:
    """Renewed one by one, none of 2,600 leases was left, though all streams ran."""
    editor.run(POLICIES.replace("PER", "tenant").replace("LIMIT", "1"))
    with Wire(address_of(server.url()), round_trip=ROUND_TRIP) as wire:
        worker = Process({**leases, VARIABLE: wire.url})
        try:
            assert worker.run(BEGIN_STREAMS.replace("STREAMS", str(STREAMS))) == STREAMS
            begun, held = time.monotonic(), []
            while time.monotonic() < begun + 3 * LEASE:  # each look takes as many round trips
                held.append(editor.run(COUNT_STREAMS.replace("STREAMS", str(STREAMS))))
            assert set(held) == {STREAMS}, f"leases that were left, as time went on: {held}"
            worker.run("streams.clear(); import gc; gc.collect()")
            left = COUNT_STREAMS.replace("STREAMS", str(STREAMS))
            poll(lambda: editor.run(left) == 0, 60, "streams that have ended hold none")
        finally:
            worker.close()


# --- A worker that is suspended. ---

#: Seconds of a lease, and the parts of it after which a worker is suspended, and for how long.
LONG_LEASE, BEFORE, SUSPENDED = 20.0, 0.3, 0.9
HOLD = "import os; held = [check_caller(scope='streams') for _ in range(LIMIT)]; "
HOLD += "answer = [os.getpid(), sum(one.allowed and not one.error for one in held)]"
ASK = """
from django_ratequota import check_caller
admitted = 0
for _ in range(20):
    with check_caller(scope="streams") as decision:
        assert not decision.error
        admitted += decision.allowed
answer = admitted
"""


def test_a_worker_that_is_suspended_for_most_of_a_lease_keeps_its_slots(
    editor: Process, environment: dict[str, str]
) -> None:
    """After 5 s of a lease of 6 s it had lost them all, and others ran beside it."""
    editor.run(POLICIES.replace("PER", "everyone").replace("LIMIT", str(LIMIT)))
    worker = Process({**environment, "RATEQUOTA_TEST_CHANGES": f'{{"CONCURRENCY_TTL": {LONG_LEASE}}}'})
    process = None
    admitted = 0

    def ask_for(seconds: float) -> int:
        until, asked = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            asked += editor.run(ASK)
        return asked

    try:
        process, held = worker.run("from django_ratequota import check_caller; " + HOLD.replace("LIMIT", str(LIMIT)))
        assert held == LIMIT
        # Where it was renewed at each third of a lease, that is shortly before.
        admitted += ask_for(BEFORE * LONG_LEASE)
        os.kill(process, signal.SIGSTOP)
        admitted += ask_for(SUSPENDED * LONG_LEASE)
        os.kill(process, signal.SIGCONT)
        admitted += ask_for(2.0)
        assert admitted == 0, f"{admitted} admitted beside {LIMIT} that run"
        worker.run("held.clear(); import gc; gc.collect()")
        poll(lambda: editor.run(ASK) == 20, 60, "it releases them")
    finally:
        if process is not None:
            os.kill(process, signal.SIGCONT)
        worker.close()
