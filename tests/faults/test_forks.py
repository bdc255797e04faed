"""Forks of a process that had asked before, as of gunicorn --preload: nobody gets another's decision."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


def forked(url: str, fork: Callable[[], int], awaited: bool) -> None:
    """Ask, fork, and ask in all processes at once; prints what each was admitted."""
    with redis.Redis.from_url(url) as client:
        limiter = Limiter(client=client, prefix="rqtest", timeout=30)
        for caller in range(FORKS + 1):
            own = [Bucket(f"user:{caller}", ENDLESS)]
            first = asyncio.run(limiter.acheck(own, COST + caller)) if awaited else limiter.check(own, COST + caller)
            assert asked(caller, first) == 1
        answers, answer = os.pipe()
        for caller in range(1, FORKS + 1):
            if not fork():
                try:
                    os.write(answer, b"%d " % asyncio.run(work(limiter, caller, awaited)))
                    limiter.store.close()
                finally:
                    os._exit(0)
        own_admitted = asyncio.run(work(limiter, 0, awaited))
        for _ in range(FORKS):
            os.wait()
        os.close(answer)
        with open(answers) as read:
            print(json.dumps([own_admitted, *map(int, read.read().split())]))
        limiter.store.close()


def connected() -> int:
    """The number of the server's connections, without those that count them."""
    with redis.Redis.from_url(server.url(), client_name="counting") as client:
        return sum(entry["name"] != "counting" for entry in client.client_list())


@pytest.mark.parametrize("awaited", thorough_after(1, [False, True]))
@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
@pytest.mark.usefixtures("redis_client")
def test_four_forks_of_a_process_that_had_asked_before(fork: str, awaited: bool) -> None:
    """A connection opened before the fork, and used after it, mixes the replies of five. uWSGI forks in C."""
    before, call = connected(), f"forked({server.url()!r}, {fork}, {awaited})"
    code = f"import ctypes, os; from tests.faults.test_forks import forked; {call}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", code],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    assert sum(json.loads(done.stdout)) == 1000
    poll(lambda: connected() <= before, 20, "a fork that is done leaves no connection")
