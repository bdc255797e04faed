"""What the composed script costs the server, beside ``return 1`` and INCR.

    python -m benchmarks.server_side [redis://127.0.0.1:6379/0]

50 connections, no pipelining: ``redis-benchmark -c 50 evalsha ...`` (or ``valkey-benchmark``); where neither is
installed, pipelined commands on one connection of our own, which leave ``return 1`` no network to hide behind and so
make every ratio smaller. The cases take turns, each with a short block, and all of them again; medians are compared.

Every call is admitted and writes, the dearest outcome, unless the case says refused: the limits are far above what a
block sends. Each call is by one of 1000 callers at random, who have asked for nothing when a block begins.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from benchmarks.measure import Cell, Result, Table
from django_ratequota.engine.rates import ALGORITHMS, DEFAULT_ALGORITHM
from django_ratequota.engine.scripts import DECIDE

CLIENTS = 50
CALLERS = 1000
#: redis-benchmark puts twelve random digits here.
RANDOM = "__rand_int__"
PREFIX = "rqbench:"
BUCKETS = (1, 3, 5)
_LIMIT, _PERIOD_US = 100_000, 86_400_000_000
_REVISION = 2**50
_PIPELINE = 200


@dataclass
class Case:
    """One command to send over and over, and what each block of it took."""

    name: str
    command: list[str]
    #: Buckets a call; 0 for what we compare with.
    buckets: int = 0
    #: Requests a second, and the server's CPU time a request (µs): one item a block.
    rps: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


def run(quick: bool = False) -> Result:
    """The table of ``measure``, and the shares of ``return 1`` that the default and the slowest algorithm reach."""
    rows = measure(os.environ["REDIS_URL"], quick)
    cells: list[tuple[Cell, ...]] = [
        (row["case"], row["buckets"] or "", row["ratio"], row["cpu_ratio"], row["cpu_us"], row["rps"]) for row in rows
    ]
    columns = ("script", "buckets", "of `return 1`", "of it by CPU", "CPU µs", "requests/s")
    with_tool = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
    how = (
        f"redis-benchmark, {CLIENTS} connections"
        if with_tool
        else "One connection, pipelined: no benchmark tool here"
    )
    note = f"{how}; all admitted unless it says refused. By CPU: the server's own CPU time a request, compared."
    figures: dict[str, float] = {}
    for buckets in (1, 3):
        ratios = {
            row["case"]: row["ratio"] for row in rows if row["buckets"] == buckets and row["case"] in ALGORITHMS
        }
        figures[f"script_{buckets}"] = ratios[DEFAULT_ALGORITHM]
        figures[f"script_{buckets}_slowest"] = min(ratios.values())
    return Result([Table("The script on the server", columns, cells, note)], figures)


def measure(url: str, quick: bool = False) -> list[dict[str, Any]]:
    """One row a case, ``return 1`` first: name, buckets, medians of rps and of the server's CPU time, and ratios.

    ``ratio`` is requests a second as a share of those of ``return 1``, ``cpu_ratio`` the same by CPU time, which
    does not depend on who else uses the machine. The server may hold other data: only keys below ``rqbench:`` go.
    """
    client = redis.Redis.from_url(url)
    blocks, requests = (3, 2_000) if quick else (7, 10_000)
    cases = _cases(client)
    for _ in range(blocks):
        for case in cases:
            _prepare(client)
            before = _cpu_seconds(client)
            case.rps.append(_load(url, client, case.command, requests))
            case.cpu_us.append((_cpu_seconds(client) - before) * 1e6 / requests)
    _prepare(client, revision=False)
    base_rps, base_cpu = (statistics.median(taken) for taken in (cases[0].rps, cases[0].cpu_us))
    return [
        {
            "server": server_name(client),
            "load": "pipelined" if _tool() is None else "redis-benchmark",
            "case": case.name,
            "buckets": case.buckets,
            "rps": round(statistics.median(case.rps)),
            "cpu_us": round(statistics.median(case.cpu_us), 2),
            "ratio": round(statistics.median(case.rps) / base_rps, 3),
            "cpu_ratio": round(base_cpu / statistics.median(case.cpu_us), 3),
        }
        for case in cases
    ]


def server_name(client: redis.Redis) -> str:
    """``valkey 9.1.2``, ``redis 7.0.15``."""
    info: dict[str, Any] = client.info("server")
    return f"{info.get('server_name', 'redis')} {info.get('valkey_version') or info['redis_version']}"


def decide_command(
    algorithm: str, buckets: int, *, sha: str = DECIDE.sha, refused: bool = False, revision: bool = False
) -> list[str]:
    """EVALSHA with so many buckets of one caller, each of another endpoint."""
    keys = [f"{PREFIX}{{user:{RANDOM}}}:{endpoint}:{algorithm}86400" for endpoint in range(buckets)]
    cost = _LIMIT + 1 if refused else 1
    args: list[object] = ["check", 0, _REVISION if revision else -1, 0]
    if revision:
        keys.insert(0, f"{PREFIX}revision")
    for _ in range(buckets):
        args += (algorithm, _LIMIT, _PERIOD_US, _LIMIT, 1, 0, 0, cost, 0)
    return ["EVALSHA", sha, str(len(keys)), *keys, *map(str, args)]


def _cases(client: redis.Redis) -> list[Case]:
    client.script_load(DECIDE.source)
    cases = [
        Case("return 1", ["EVALSHA", str(client.script_load("return 1")), "0"]),
        Case("INCR", ["INCR", f"{PREFIX}{RANDOM}"]),
    ]
    for algorithm in ALGORITHMS:
        cases += [Case(algorithm, decide_command(algorithm, buckets), buckets) for buckets in BUCKETS]
    for buckets in BUCKETS:
        cases.append(Case("token_bucket, refused", decide_command("token_bucket", buckets, refused=True), buckets))
        cases.append(Case("token_bucket, revision", decide_command("token_bucket", buckets, revision=True), buckets))
    # What the arguments alone cost: sent, read by the server and handed to a script that looks at none.
    ignored = client.script_load("#!lua\nreturn 1")
    for buckets in BUCKETS:
        command = decide_command("token_bucket", buckets, sha=str(ignored))
        cases.append(Case("return 1, same arguments", command, buckets))
    return cases


def _prepare(client: redis.Redis, *, revision: bool = True) -> None:
    """Forget what the blocks before counted."""
    for keys in _batches(client):
        client.unlink(*keys)
    if revision:
        client.set(f"{PREFIX}revision", _REVISION)


def _batches(client: redis.Redis) -> list[list[bytes]]:
    keys = list(client.scan_iter(match=f"{PREFIX}*", count=1000))
    return [keys[at : at + 1000] for at in range(0, len(keys), 1000)]


def _cpu_seconds(client: redis.Redis) -> float:
    info: dict[str, Any] = client.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def _tool() -> str | None:
    return shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")


def _load(url: str, client: redis.Redis, command: Sequence[str], requests: int) -> float:
    """Requests a second. Raises when the server answers with an error."""
    client.execute_command(*[part.replace(RANDOM, "0" * 12) for part in command])
    tool = _tool()
    if tool is None:
        return _pipelined(client, command, requests)
    arguments = ["-u", url, "-c", CLIENTS, "-n", requests, "-r", CALLERS, "--csv", *command]
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True)
    # Before the two lines of the table may come a warning that CONFIG GET is not allowed.
    *_, names, figures = csv.reader(io.StringIO(done.stdout))
    return float(dict(zip(names, figures, strict=True))["rps"])


def _pipelined(client: redis.Redis, command: Sequence[str], requests: int) -> float:
    """Without a tool at hand: commands packed beforehand, so many a write, on a socket of our own."""
    options = client.connection_pool.connection_kwargs
    connection = client.connection_pool.get_connection()
    try:
        chunks = []
        for first in range(0, requests, _PIPELINE):
            numbers = range(first, min(first + _PIPELINE, requests))
            lines = [[part.replace(RANDOM, f"{n % CALLERS:012}") for part in command] for n in numbers]
            chunks.append((b"".join(b"".join(connection.pack_command(*line)) for line in lines), len(numbers)))
        lines_each = _reply_lines(client, [part.replace(RANDOM, "0" * 12) for part in command])
    finally:
        client.connection_pool.release(connection)
    with socket.create_connection((options.get("host", "localhost"), options.get("port", 6379))) as raw:
        begun = time.perf_counter()
        for chunk, count in chunks:
            raw.sendall(chunk)
            missing = count * lines_each
            while missing:
                missing -= raw.recv(1 << 16).count(b"\n")
        return requests / (time.perf_counter() - begun)


def _reply_lines(client: redis.Redis, command: Sequence[str]) -> int:
    reply = client.execute_command(*command)
    return 1 + len(reply) if isinstance(reply, list) else 1


def main() -> None:
    """Print the table."""
    rows = measure(sys.argv[1] if len(sys.argv) > 1 else "redis://127.0.0.1:6379/0")
    print(f"{rows[0]['server']}, {rows[0]['load']}\n{'':26} buckets     rps   ratio   CPU µs   CPU ratio")
    for row in rows:
        buckets = row["buckets"] or ""
        print(
            f"{row['case']:26} {buckets:>7} {row['rps']:>7} {row['ratio']:>7.2f} {row['cpu_us']:>8.2f}"
            f" {row['cpu_ratio']:>11.2f}"
        )


if __name__ == "__main__":
    main()
