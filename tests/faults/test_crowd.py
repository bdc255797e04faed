"""Callers who give up at any moment, in several event loops and after forks: nobody gets another's decision."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Decision, Rate, acheck_request, check_request
from django_ratequota.models import RatePolicy
from django_ratequota.runtime import default_limiter
from tests.faults import poll
from tests.project.views import request_from
from tests.support import server
from tests.support.properties import thorough_after

ROOT = Path(__file__).parent.parent.parent
LOOPS = 3
#: In each loop ten callers ask on and on, beside eight at a time of whom 334 are cancelled.
STEADY, TIMES, DOOMED, AT_ONCE = 10, 50, 334, 8
#: Every caller has a counter and a cost of its own: what is left tells whose it is, and how often it asked.
LIMIT, COST = 10**12, 10**6
ENDLESS = f"{LIMIT}/3650day fixed_window"
SECONDS = 60.0


def asked(caller: int, decision: Decision) -> int:
    """How often the caller has asked, by the decision; fails when the decision is another's."""
    assert decision.allowed
    assert not decision.error
    (status,) = decision.statuses
    times, rest = divmod(LIMIT - status.remaining, COST + caller)
    assert rest == 0, f"caller {caller} got another's decision: {status}"
    return times


@dataclass
class Crowd:
    """Callers by the numbers ``first`` and on, in one event loop."""

    ask: Callable[[int, int], Awaitable[Decision]]
    first: int
    #: Those whose task was to be cancelled: True where it was before it had its decision.
    doomed: dict[int, bool] = field(default_factory=dict)
    #: Seconds within which a call is cancelled: about as long as one takes, on however busy a machine.
    span: float = 0.003

    @property
    def steady(self) -> range:
        return range(self.first, self.first + STEADY)

    async def run(self, at_most: int) -> None:
        rng = Random(self.first)
        await asyncio.gather(*map(self._ask_on, self.steady), *(self._doom(rng) for _ in range(AT_ONCE)))
        # While the loop still runs.
        poll(lambda: connected() <= at_most, 20, f"{at_most} connections, however many calls were cancelled")

    async def _ask_on(self, caller: int) -> None:
        for times in range(1, TIMES + 1):
            assert asked(caller, await self.ask(caller, COST + caller)) == times

    async def _doom(self, rng: Random) -> None:
        while sum(self.doomed.values()) < DOOMED:
            caller = self.steady.stop + len(self.doomed)
            self.doomed[caller] = False
            task = asyncio.ensure_future(self.ask(caller, COST + caller))
            late = rng.randrange(2)
            if late:
                asyncio.get_running_loop().call_later(rng.random() * self.span, task.cancel)
            else:
                for _ in range(rng.randrange(8)):
                    await asyncio.sleep(0)  # one turn of the loop: it is cancelled at a step of its way
                task.cancel()
            try:
                assert asked(caller, await task) == 1
            except asyncio.CancelledError:
                self.doomed[caller] = True
            if late:
                self.span *= 1.05 if self.doomed[caller] else 0.95


def connected() -> int:
    """The number of the server's connections, without those that count them."""
    with redis.Redis.from_url(server.url(), client_name="counting") as client:
        return sum(entry["name"] != "counting" for entry in client.client_list())


def by_limiter() -> tuple[Callable[[int, int], Awaitable[Decision]], Callable[[int, int], Decision]]:
    limiter, rate = default_limiter(), Rate.parse(ENDLESS)

    def bucket(caller: int) -> Bucket:
        return Bucket(f"user:{caller}", rate)

    return (
        lambda caller, cost: limiter.acheck([bucket(caller)], cost),
        lambda caller, cost: limiter.check([bucket(caller)], cost),
    )


def by_request() -> tuple[Callable[[int, int], Awaitable[Decision]], Callable[[int, int], Decision]]:
    RatePolicy.objects.create(rates=ENDLESS)

    def request(caller: int) -> Any:
        return request_from(address=f"10.{caller >> 8}.{caller & 255}.1")

    return (
        lambda caller, cost: acheck_request(request(caller), None, cost),
        lambda caller, cost: check_request(request(caller), None, cost),
    )


@pytest.fixture
def quick(settings: Any) -> Iterator[None]:
    """No deadline, no search for policy changes meanwhile, and connections of the tests' own."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TIMEOUT": 60.0, "POLL_SECONDS": 86_400.0}
    yield
    default_limiter().store.close()
    gc.collect()  # whatever a loop left behind warns now, and warnings are errors


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies", "quick")
@pytest.mark.parametrize("at_once", thorough_after(1, [True, False]), ids=["at the same time", "one after another"])
@pytest.mark.parametrize("way", [by_limiter, by_request])
def test_a_thousand_cancelled_calls_in_three_loops(way: Any, at_once: bool) -> None:
    """A connection released with an unread reply delivers it to the next caller; one not released is lost."""
    ask, ask_plainly = way()
    outsider = LOOPS * 10_000
    assert asked(outsider, ask_plainly(outsider, COST + outsider)) == 1
    crowds = [Crowd(ask, 1 + loop * 10_000) for loop in range(LOOPS)]
    before = connected()
    together = LOOPS if at_once else 1
    most = before + together * (STEADY + AT_ONCE)
    barrier = threading.Barrier(together + 1 if at_once else 1)

    def start(crowd: Crowd) -> None:
        if at_once:
            barrier.wait(timeout=SECONDS)
        asyncio.run(crowd.run(most))

    with ThreadPoolExecutor(together) as threads:
        running = threads.map(start, crowds)
        barrier.wait(timeout=SECONDS)
        for times in range(2, 102):
            assert asked(outsider, ask_plainly(outsider, COST + outsider)) == times
        list(running)
    poll(lambda: connected() <= before, 20, "a loop that is done leaves no connection")

    cancelled = counted = 0
    for crowd in crowds:
        for caller in crowd.steady:
            assert asked(caller, ask_plainly(caller, COST + caller)) == TIMES + 1
        for caller, was_cancelled in crowd.doomed.items():
            times = asked(caller, ask_plainly(caller, COST + caller)) - 1
            assert times in ((0, 1) if was_cancelled else (1,))
            cancelled += was_cancelled
            counted += times if was_cancelled else 0
    assert cancelled >= 1000
    assert counted > 10, "some were cancelled after the server had counted them, and before they knew"


# --- Forks. ---

FORKS = 4
PRELOADED = """
import asyncio, json, os, sys, traceback

import django

django.setup()
from django.core.management import call_command
from django.db import connections

from django_ratequota import Bucket, Rate, acheck_request, check_request
from django_ratequota.runtime import default_limiter
from django_ratequota.models import RatePolicy
from tests.faults.test_crowd import COST, ENDLESS, FORKS, asked
from tests.project.views import request_from

awaited = sys.argv[1] == "awaited"
call_command("migrate", verbosity=0)
RatePolicy.objects.create(rates=ENDLESS)
limiter = default_limiter()
own, shared = Rate.parse(ENDLESS), [Bucket("everyone", Rate.parse("1000/3650day"))]


async def await_one(function, *args):
    return await function(*args)


def once(plain, waiting, *args):
    return asyncio.run(await_one(waiting, *args)) if awaited else plain(*args)


def ask(caller, times):
    buckets, request = [Bucket(f"user:{caller}", own)], request_from(address=f"10.0.0.{caller}")
    assert asked(caller, once(limiter.check, limiter.acheck, buckets, COST + caller)) == times
    request = request_from(address=f"10.0.0.{caller}")
    assert asked(caller, once(check_request, acheck_request, request, None, COST + caller)) == times


async def work_waiting(caller):
    admitted = 0
    for times in range(2, 152):
        buckets, request = [Bucket(f"user:{caller}", own)], request_from(address=f"10.0.0.{caller}")
        decisions = await asyncio.gather(
            limiter.acheck(buckets, COST + caller),
            acheck_request(request, None, COST + caller),
            limiter.acheck(shared),
        )
        assert [asked(caller, decision) for decision in decisions[:2]] == [times] * 2
        admitted += decisions[2].allowed
    return admitted


def work(caller):
    if awaited:
        return asyncio.run(work_waiting(caller))
    admitted = 0
    for times in range(2, 302):
        ask(caller, times)
        admitted += limiter.check(shared).allowed
    return admitted


check_request(request_from())  # the policies are in memory
for caller in range(1, FORKS + 2):
    ask(caller, 1)
connections.close_all()

children = []
begin, begun = os.pipe()
for caller in range(1, FORKS + 1):
    answer, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(begun)
            os.read(begin, 1)  # returns when the parent has closed its end
            os.write(tell, json.dumps(work(caller)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(tell)
    children.append((pid, answer))
os.close(begun)
answers = [work(FORKS + 1)]
for pid, answer in children:
    with open(answer, "rb") as pipe:
        answers.append(json.loads(pipe.read() or b"-1"))
    os.waitpid(pid, 0)
connections.close_all()
limiter.store.close()
print(json.dumps(answers))
"""


@pytest.mark.parametrize("way", thorough_after(1, ["plain", "awaited"]))
@pytest.mark.usefixtures("redis_client")
def test_four_forks_of_a_process_that_had_asked_before(tmp_path: Path, way: str) -> None:
    """As gunicorn --preload: a connection opened before the fork, and used after it, mixes the replies of five."""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    environment |= {"DJANGO_SETTINGS_MODULE": "tests.project.settings"}
    environment |= {"RATEQUOTA_TEST_DATABASE": f"sqlite:///{tmp_path / 'preloaded.sqlite3'}"}
    before = connected()
    parent = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELOADED, way],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        answers = json.loads(parent.communicate(timeout=SECONDS)[0])
    finally:
        try:
            os.killpg(parent.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        parent.communicate()
    assert len(answers) == FORKS + 1
    assert min(answers) >= 0, "a fork failed; its traceback is above"
    asks = 300 if way == "plain" else 150
    assert sum(answers) == min(1000, (FORKS + 1) * asks)
    poll(lambda: connected() <= before, 20, "a fork that is done leaves no connection")
