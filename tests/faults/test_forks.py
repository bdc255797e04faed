"""Forks of a process that had asked before, as of gunicorn --preload: nobody gets another's decision."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Decision, Limiter, Rate
from tests.faults import poll
from tests.support import server
from tests.support.properties import thorough_after

FORKS, TIMES = 4, 250
#: Every caller has a counter and a cost of its own: what is left tells whose it is, and how often it asked.
LIMIT, COST = 10**12, 10**6
ENDLESS = Rate.parse(f"{LIMIT}/3650day fixed_window")
SHARED = [Bucket("everyone", Rate.parse("1000/3650day"))]


def asked(caller: int, decision: Decision) -> int:
    """How often the caller has asked, by the decision; fails when the decision is another's."""
    times, rest = divmod(LIMIT - decision.statuses[0].remaining, COST + caller)
    assert rest == 0, f"caller {caller} got another's decision: {decision}"
    return times


async def work(limiter: Limiter, caller: int, awaited: bool) -> int:
    """How many of this process's requests the shared limit admitted."""
    admitted, own = 0, [Bucket(f"user:{caller}", ENDLESS)]
    for times in range(2, TIMES + 2):
        if awaited:
            both = limiter.acheck(own, COST + caller), limiter.acheck(SHARED)
            decision, shared = await asyncio.gather(*both)
        else:
            decision, shared = limiter.check(own, COST + caller), limiter.check(SHARED)
        assert asked(caller, decision) == times
        admitted += shared.allowed
    return admitted


def forked(url: str, awaited: bool) -> None:
    """Ask, fork, and ask in all processes at once; prints what each was admitted."""
    with redis.Redis.from_url(url) as client:
        limiter = Limiter(client=client, prefix="rqtest", timeout=30)
        for caller in range(FORKS + 1):
            own = [Bucket(f"user:{caller}", ENDLESS)]
            first = asyncio.run(limiter.acheck(own, COST + caller)) if awaited else limiter.check(own, COST + caller)
            assert asked(caller, first) == 1
        fork = multiprocessing.get_context("fork")
        answers = fork.SimpleQueue()
        for caller in range(1, FORKS + 1):
            fork.Process(target=answer, args=(answers, limiter, caller, awaited)).start()
        answer(answers, limiter, 0, awaited)
        print(json.dumps([answers.get() for _ in range(FORKS + 1)]))
        limiter.store.close()


def answer(answers: Any, limiter: Limiter, caller: int, awaited: bool) -> None:
    answers.put(asyncio.run(work(limiter, caller, awaited)))


def connected() -> int:
    """The number of the server's connections, without those that count them."""
    with redis.Redis.from_url(server.url(), client_name="counting") as client:
        return sum(entry["name"] != "counting" for entry in client.client_list())


@pytest.mark.parametrize("awaited", thorough_after(1, [False, True]))
@pytest.mark.usefixtures("redis_client")
def test_four_forks_of_a_process_that_had_asked_before(awaited: bool) -> None:
    """A connection opened before the fork, and used after it, mixes the replies of five."""
    before, call = connected(), f"forked({server.url()!r}, {awaited})"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"from tests.faults.test_forks import forked; {call}"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    assert sum(json.loads(done.stdout)) == 1000
    poll(lambda: connected() <= before, 20, "a fork that is done leaves no connection")
