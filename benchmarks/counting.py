"""What counting decisions for the operators (STATISTICS_SECONDS) adds to a request, handing them over included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import median
from typing import IO

from benchmarks.measure import Result, Table

#: Two processes that differ in this setting only; the parent lets them work in turn.
_WAYS = {"counting": "1", "STATISTICS_SECONDS = 0": "0"}
_CLOCKS = ("wall clock", "CPU of the thread", "CPU of the process")
_CODE = (
    "from benchmarks.processes import set_django_up; set_django_up();"
    "from benchmarks.counting import obey; import sys; obey(sys.stdin)"
)


def run(quick: bool = False) -> Result:
    """Medians of blocks that outlast the interval at which notes are handed over."""
    blocks, calls = (2, 200) if quick else (15, 8_000)
    spent: dict[str, list[list[float]]] = {name: [] for name in _WAYS}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_worker(seconds)) for name, seconds in _WAYS.items()}
        for block in range(blocks + 1):
            for name in sorted(workers, reverse=bool(block % 2)):
                spent[name].append(_ask(workers[name], calls))
        for worker in workers.values():
            _pipe(worker.stdin).close()
    on, off = ([median(clock) for clock in zip(*spent[name][1:], strict=True)] for name in _WAYS)
    rows = [
        (clock, with_it * 1e6, without * 1e6, (with_it / without - 1) * 100)
        for clock, with_it, without in zip(_CLOCKS, on, off, strict=True)
    ]
    note = (
        f"check_request under 3 policies, in two processes by turns, {blocks} blocks of {calls:,} calls each. "
        "The CPU of the process includes its thread that hands the counts to Redis."
    )
    columns = ("clock", "counting, µs", "not counting, µs", "more, %")
    return Result([Table("Counting for the operators", columns, rows, note)], {"statistics_percent": rows[1][3]})


def obey(orders: IO[str]) -> None:
    """In a worker: for each number that is ordered, make so many decisions and say what one took by each clock."""
    from benchmarks.ours import checking
    from benchmarks.scene import in_turn, requests_to, write_policies

    write_policies()
    check = in_turn(checking(requests_to("/api/search/")))
    # From one block's end to the next: what was handed over meanwhile is this worker's cost as well.
    in_process = time.process_time()
    for order in orders:
        calls = int(order)
        wall, in_thread = time.perf_counter(), time.thread_time()
        for _ in range(calls):
            decision = check()
        spent = (time.perf_counter() - wall, time.thread_time() - in_thread, time.process_time() - in_process)
        in_process = time.process_time()
        if not decision.allowed or decision.degraded:  # these cost less
            raise RuntimeError("the limits are too low for this many calls, or Redis gives no decisions")
        print(json.dumps([each_clock / calls for each_clock in spent]), flush=True)


def _worker(seconds: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "RATEQUOTA_BENCH_STATISTICS": seconds}
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
