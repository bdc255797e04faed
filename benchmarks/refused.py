"""Part 4: a flood from one refused client, and a flood of clients that nobody has seen before."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import redis

from benchmarks import load, server
from benchmarks.measure import Cell, Result, Table, interleave
from benchmarks.serving import KINDS, ROOT, Cores, Served, cores_apart, serving, site
from benchmarks.site.variants import VARIANTS
from django_ratequota import Bucket, Limiter, Rate

DENY_SECONDS = 1.0
_HTTP = ("none", "ours", "asking", "drf", "smart", "plus")


def run(quick: bool = False) -> Result:
    """In process, then over HTTP, then subjects that nobody has seen; on a server that nobody else asks."""
    with server.running() as url, site(url) as environment:
        in_process, figures = _in_process(url, quick)
        with cores_apart(url) as cores:
            over_http = _over_http(url, environment, cores, quick)
        flood = _flood(url, environment, quick)
    return Result([in_process, over_http, flood], figures)


def _in_process(url: str, quick: bool) -> tuple[Table, dict[str, float]]:
    """What ``Limiter.check`` takes to refuse, and what it asks of Redis meanwhile."""
    with redis.Redis.from_url(url) as client:
        sha = client.script_load("return 1")
        calls: dict[str, Callable[[], object]] = {"bare": lambda: client.evalsha(sha, 1, "bare")}
        for count in (1, 3):
            calls[f"{count}, asking"] = _refused(client, count, 0)
            calls[f"{count}, cached"] = _refused(client, count, DENY_SECONDS)
        seconds = interleave(calls, *((3, 100) if quick else (31, 300)))
        rows: list[tuple[Cell, ...]] = [("redis-py, evalsha `return 1`", seconds["bare"] * 1e6, "", "")]
        speedups, asked = [], []
        for count in (1, 3):
            buckets = f"{count} bucket{'s' * (count > 1)}"
            asking, cached = seconds[f"{count}, asking"], seconds[f"{count}, cached"]
            speedups.append(asking / cached)
            asked.append(_calls_a_second(client, calls[f"{count}, cached"], 2 if quick else 5) * DENY_SECONDS)
            rows.append((f"Limiter.check, {buckets}, deny cache off", asking * 1e6, "", "every request"))
            rows.append((f"Limiter.check, {buckets}, deny cache on", cached * 1e6, speedups[-1], f"{asked[-1]:.2f}"))
    note = (
        f"The same client refused over and over by one bucket of 1/day; one process. Calls are EVALSHA and EVAL, as "
        f"the server counts them, per DENY_CACHE_SECONDS ({DENY_SECONDS:g}), while the client asks as fast as it can."
    )
    columns = ("", "µs a refusal", "times faster", "calls to Redis per second")
    table = Table("A refused client, in process", columns, rows, note)
    return table, {"refused_speedup": min(speedups), "refused_calls": max(asked)}


def _refused(client: redis.Redis, count: int, deny_seconds: float) -> Callable[[], object]:
    limiter = Limiter(client=client, timeout=10, deny_cache_seconds=deny_seconds)
    rates = ("1/day", "1000000/hour", "1000000/min")[:count]
    buckets = tuple(Bucket("user:refused", Rate.parse(rate), scope=f"refused{count}") for rate in rates)
    limiter.check(buckets)
    if limiter.check(buckets).allowed:
        raise RuntimeError("the client is not refused")
    return lambda: limiter.check(buckets)


def _calls_a_second(client: redis.Redis, ask: Callable[[], object], seconds: float) -> float:
    """Scripts that the server runs each second while ``ask`` is called over and over."""
    with _counting(client) as calls:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ask()
    # Two that are a second apart fit into one second.
    return (calls[0] - 1) / seconds


@contextmanager
def _counting(client: redis.Redis) -> Iterator[list[int]]:
    """How many scripts the server has run in here, once it is over."""
    counted = [0]
    before = _scripts_run(client)
    yield counted
    counted[0] = _scripts_run(client) - before


def _scripts_run(client: redis.Redis) -> int:
    stats = client.info("commandstats")
    return sum(int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in ("evalsha", "eval"))


def _over_http(url: str, environment: dict[str, str], cores: Cores, quick: bool) -> Table:
    """A DRF view that refuses, under gunicorn."""
    kind = "gunicorn, one worker of 4 threads"
    names = ("none", "ours") if quick else _HTTP
    rounds, seconds = (1, 1) if quick else (7, 2)
    loads: dict[str, list[tuple[load.Load, int, float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        servers = stack.enter_context(serving(KINDS[kind], names, environment, cores.servers))
        client = stack.enter_context(redis.Redis.from_url(url))
        for name in names:
            _be_refused(servers[name], name)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                cpu = servers[name].cpu_seconds()
                with _counting(client) as calls:
                    status = 200 if name == "none" else 429
                    done = load.put(servers[name].port, "/refused/", seconds, users=1, status=status)
                loads[name].append((done, calls[0], servers[name].cpu_seconds() - cpu))
    rows: list[tuple[Cell, ...]] = []
    for name in names:
        rate, calls_a_second, cpu_us = (
            median(values)
            for values in zip(
                *[(done.rate, calls / done.seconds, cpu * 1e6 / done.requests) for done, calls, cpu in loads[name]],
                strict=True,
            )
        )
        rows.append((f"DRF, {VARIANTS[name].title}", rate, cpu_us, calls_a_second))
    note = (
        f"{kind}; {load.generator()}, {load.CONNECTIONS} connections, one user, whom every server but the first "
        "refuses. Scripts are all that Redis ran, reports and statistics of two servers included; DRF's throttle "
        f"runs none, it reads and writes the cache. {cores}"
    )
    columns = ("", "requests/s", "CPU µs a request", "scripts/s")
    return Table("A refused client, over HTTP", columns, rows, note)


def _be_refused(served: Served, name: str) -> None:
    statuses = []
    for _ in range(2):
        try:
            with urlopen(
                Request(f"http://127.0.0.1:{served.port}/refused/", headers={"Authorization": "Number 1"})
            ) as answer:
                statuses.append(answer.status)
        except HTTPError as error:
            statuses.append(error.code)
            error.close()
    if statuses[1] != (200 if name == "none" else 429):
        raise RuntimeError(f"{name}: the second request was answered {statuses[1]}")


def _flood(url: str, environment: dict[str, str], quick: bool) -> Table:
    """Every request another client, in a process of its own for each kind."""
    count = 300 if quick else 15_000
    rows: list[tuple[Cell, ...]] = []
    for kind, title in _KINDS.items():
        with redis.Redis.from_url(url) as client:
            client.flushall()
        words = [sys.executable, "-m", "benchmarks.flood", kind, str(count)]
        done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
        told = json.loads(done.stdout)
        thirds = " ".join(f"{each / 2**20:+.1f}" for each in told["resident"])
        rows.append((title, told["known_us"], told["new_us"], thirds, told["redis_bytes"] / count))
    note = (
        f"`check_request` in process, {count:,} clients; one that is refused asks twice. Process: what each third of "
        "the flood adds to its memory, in MiB; users in memory and the deny cache are 10,000 each, the least recent "
        "go. Redis: its memory a new client, until the counters expire."
    )
    columns = ("each request is", "µs, known before", "µs, new", "process, MiB", "Redis, bytes")
    return Table("A flood of new clients", columns, rows, note)


#: Kinds of floods that ``benchmarks.flood`` knows.
_KINDS = {
    "addresses": "from another address",
    "users": "by another user (two queries each)",
    "refused": "from another address, refused at the second request",
}
