"""What statistics for the operators (STATISTICS_SECONDS) add to a decision, sending them included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import IO

from benchmarks import server
from benchmarks.measure import US, Result, Spent, Table

#: Two processes that differ in this setting only, each with a server of its own; the parent lets them work in turn.
_WAYS = {"with statistics": "1", "STATISTICS_SECONDS = 0": "0"}
_CODE = (
    "from benchmarks.processes import set_django_up; set_django_up();"
    "from benchmarks.counting import obey; import sys; obey(sys.stdin)"
)


def run(quick: bool = False) -> Result:
    """Medians of blocks that outlast the interval at which statistics are sent."""
    blocks, calls = (2, 200) if quick else (15, 8_000)
    spent = {name: Spent() for name in _WAYS}
    with ExitStack() as stack:
        workers, clocks = {}, {}
        for name, seconds in _WAYS.items():
            url = stack.enter_context(server.running())
            workers[name] = stack.enter_context(_worker(seconds, url))
            clocks[name] = stack.enter_context(server.cpu_clock(url))
        used = dict.fromkeys(_WAYS, 0.0)
        for block in range(blocks + 1):
            for name in sorted(workers, reverse=bool(block % 2)):
                wall, client = _ask(workers[name], calls)
                # From one block's end to the next, as in the worker: what is sent in between is a cost as well.
                before, used[name] = used[name], clocks[name]()
                if block:
                    spent[name].add(wall, client, used[name] - before, calls)
        for worker in workers.values():
            _pipe(worker.stdin).close()
    on, off = spent.values()
    more = (on.times(off) - 1) * 100
    rows = [(name, *each.us()) for name, each in spent.items()]
    note = (
        f"`check_request` under 3 policies, in two processes by turns, {blocks} blocks of {calls:,} calls each. CPU "
        f"includes the thread that sends statistics, and what Redis does with them. Statistics add {more:.1f} %."
    )
    return Result([Table("Statistics", ("", *US), rows, note)], {"statistics_percent": more})


def obey(orders: IO[str]) -> None:
    """In a worker: for each number that is ordered, make as many decisions and print their wall and CPU time."""
    from benchmarks.ours import checking
    from benchmarks.scene import in_turn, requests_to, write_policies

    write_policies()
    check = in_turn(checking(requests_to("/api/search/")))
    in_process = time.process_time()
    for order in orders:
        calls = int(order)
        wall = time.perf_counter()
        for _ in range(calls):
            decision = check()
        spent = time.perf_counter() - wall, time.process_time() - in_process
        in_process = time.process_time()
        if not decision.allowed or decision.degraded:  # these cost less
            raise RuntimeError("the limits are too low for this many calls, or Redis gives no decisions")
        print(json.dumps(spent), flush=True)


def _worker(seconds: str, url: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "RATEQUOTA_BENCH_STATISTICS": seconds, "REDIS_URL": url}
    return subprocess.Popen(
        [sys.executable, "-c", _CODE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _ask(worker: subprocess.Popen[str], calls: int) -> list[float]:
    print(calls, file=_pipe(worker.stdin), flush=True)
    answer = _pipe(worker.stdout).readline()
    if not answer:
        raise RuntimeError("a worker of the benchmark ended early; see above")
    told: list[float] = json.loads(answer)
    return told


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
