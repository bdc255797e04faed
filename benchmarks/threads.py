"""Part 7: threads, tasks and processes that decide at once, three limits each, on clients they share."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import redis
import redis.asyncio

from benchmarks.measure import Cell, Result, Table
from django_ratequota import Bucket, Limiter, Rate

THREADS = (1, 2, 4, 8, 16, 64)
PROCESSES = (1, 2, 4)
#: Clients asked for in turn, and how often each may: never refused.
CLIENTS, LIMIT = 200, 1_000_000_000
_UNITS = ("minute", "hour", "day")
_BARE, _OURS = "redis-py, evalsha `return 1`", "django-ratequota, Limiter.check"

Hit = Callable[[int], object]


def _bare(url: str) -> Hit:
    client = redis.Redis.from_url(url)
    sha = client.script_load("return 1")
    return lambda n: client.evalsha(sha, 1, f"bare:{n}")


def _ours(url: str) -> Hit:
    limiter = Limiter(client=redis.Redis.from_url(url), timeout=10)
    buckets = _buckets()
    return lambda n: limiter.check(buckets[n])


def _buckets() -> list[tuple[Bucket, ...]]:
    rates = [Rate.parse(f"{LIMIT}/{unit}") for unit in _UNITS]
    return [tuple(Bucket(f"user:{n}", rate, scope="threads") for rate in rates) for n in range(CLIENTS)]


def _limits(url: str) -> Hit:
    from limits import parse
    from limits.storage import RedisStorage
    from limits.strategies import FixedWindowRateLimiter

    strategy = FixedWindowRateLimiter(RedisStorage(url))
    items = [parse(f"{LIMIT}/{unit}") for unit in _UNITS]

    def hit(n: int) -> None:
        for item in items:
            strategy.hit(item, str(n))
            strategy.get_window_stats(item, str(n))

    return hit


def _throttled(url: str) -> Hit:
    from throttled import RateLimiterType, Throttled
    from throttled.store import RedisStore

    store = RedisStore(server=url)
    kind = RateLimiterType.TOKEN_BUCKET.value
    throttles = [Throttled(using=kind, quota=f"{LIMIT}/{unit[0]}", store=store) for unit in _UNITS]

    def hit(n: int) -> None:
        for unit, throttle in zip(_UNITS, throttles, strict=True):
            throttle.limit(f"{n}:{unit}")

    return hit


#: Everything knows the units left and the time until they are back; the first is what the others are compared with.
CANDIDATES: dict[str, Callable[[str], Hit]] = {
    _BARE: _bare,
    _OURS: _ours,
    "limits, FixedWindow": _limits,
    "throttled-py, token_bucket": _throttled,
}


@dataclass(frozen=True, slots=True)
class Block:
    """What some seconds of asking came to."""

    rate: float
    #: Seconds each call took, in no order.
    took: list[float]

    def quantile(self, share: float) -> float:
        """Seconds that ``share`` of the calls did not exceed."""
        return sorted(self.took)[int(len(self.took) * share)]


def run(quick: bool = False) -> Result:
    """Blocks of a part of a second, each candidate in turn."""
    url = os.environ["REDIS_URL"]
    seconds, rounds = (0.1, 1) if quick else (0.4, 7)
    hits = {name: prepare(url) for name, prepare in CANDIDATES.items()}
    threads = {
        count: _in_turn(
            {name: lambda c=count, h=hit: in_threads(h, c, seconds) for name, hit in hits.items()}, rounds
        )
        for count in ((1, 16) if quick else THREADS)
    }
    tasks = {
        count: asyncio.run(_tasks_in_turn(url, count, seconds, rounds)) for count in ((1, 16) if quick else THREADS)
    }
    processes = {}
    for count in (2,) if quick else PROCESSES:
        with _children(count, url) as children:
            asks = {name: lambda name=name: _in_children(children, name, seconds) for name in CANDIDATES}
            processes[count] = _in_turn(asks, rounds)
    return Result(
        [
            _table("Threads of one process", "threads", threads, "All threads share one client, or one limiter."),
            _table("Tasks of one event loop", "tasks", tasks, "The asynchronous twins, on redis-py's own client."),
            _table("Processes of one thread", "processes", processes, "They share the cores with Redis."),
        ]
    )


def in_threads(hit: Hit, count: int, seconds: float) -> Block:
    """So many threads call ``hit`` for so long, each for the next of the clients."""
    begin = threading.Barrier(count + 1)
    took: list[list[float]] = [[] for _ in range(count)]
    failed: list[BaseException] = []

    def ask(own: list[float], first: int) -> None:
        try:
            begin.wait()
            end = time.perf_counter() + seconds
            for n in cycle([*range(first, CLIENTS), *range(first)]):
                began = time.perf_counter()
                if began >= end:
                    return
                hit(n)
                own.append(time.perf_counter() - began)
        except BaseException as error:
            failed.append(error)

    asking = [threading.Thread(target=ask, args=(own, 3 * at % CLIENTS)) for at, own in enumerate(took)]
    for thread in asking:
        thread.start()
    begin.wait()
    begun = time.perf_counter()
    for thread in asking:
        thread.join()
    if failed:
        raise failed[0]
    together = [each for own in took for each in own]
    return Block(len(together) / (time.perf_counter() - begun), together)


async def _tasks_in_turn(url: str, count: int, seconds: float, rounds: int) -> dict[str, list[Block]]:
    client = redis.asyncio.Redis.from_url(url)
    sha = await client.script_load("return 1")
    limiter = Limiter(client=client, timeout=10)
    buckets = _buckets()
    hits: dict[str, Callable[[int], Awaitable[object]]] = {
        _BARE: lambda n: client.evalsha(sha, 1, f"bare:{n}"),
        _OURS: lambda n: limiter.acheck(buckets[n]),
    }
    measured: dict[str, list[Block]] = {name: [] for name in hits}
    for _ in range(rounds + 1):
        for name, hit in hits.items():
            measured[name].append(await _in_tasks(hit, count, seconds))
    await client.aclose()
    return {name: blocks[1:] for name, blocks in measured.items()}


async def _in_tasks(hit: Callable[[int], Awaitable[object]], count: int, seconds: float) -> Block:
    took: list[float] = []
    begun = time.perf_counter()

    async def ask(first: int) -> None:
        for n in cycle([*range(first, CLIENTS), *range(first)]):
            began = time.perf_counter()
            if began >= begun + seconds:
                return
            await hit(n)
            took.append(time.perf_counter() - began)

    await asyncio.gather(*(ask(3 * at % CLIENTS) for at in range(count)))
    return Block(len(took) / (time.perf_counter() - begun), took)


@contextmanager
def _children(count: int, url: str) -> Iterator[list[Connection]]:
    """Processes that ask when told to; ended whatever happens."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        ends: list[Connection] = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_child, args=(theirs, url), daemon=True)
            process.start()
            stack.callback(_end, process)
            theirs.close()
            ends.append(mine)
        for end in ends:
            end.recv()  # it is ready
        yield ends


def _end(process: Any) -> None:
    process.terminate()
    process.join()


def _child(end: Connection, url: str) -> None:
    hits = {name: prepare(url) for name, prepare in CANDIDATES.items()}
    end.send("ready")
    while True:
        name, seconds = end.recv()
        end.send(in_threads(hits[name], 1, seconds))


def _in_children(children: list[Connection], name: str, seconds: float) -> Block:
    for child in children:
        child.send((name, seconds))
    blocks: list[Block] = [child.recv() for child in children]
    return Block(sum(block.rate for block in blocks), [each for block in blocks for each in block.took])


def _in_turn(asks: dict[str, Callable[[], Block]], rounds: int) -> dict[str, list[Block]]:
    """Round after round; the first warms up and does not count."""
    measured: dict[str, list[Block]] = {name: [] for name in asks}
    names = list(asks)
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            measured[name].append(asks[name]())
    return {name: blocks[1:] for name, blocks in measured.items()}


def _table(title: str, what: str, measured: dict[int, dict[str, list[Block]]], note: str) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for count, by_name in measured.items():
        base = next(iter(by_name.values()))
        for name, blocks in by_name.items():
            share = median(mine.rate / bare.rate for mine, bare in zip(blocks, base, strict=True))
            p50, p99 = (median(block.quantile(q) for block in blocks) * 1000 for q in (0.5, 0.99))
            rows.append((count, name, median(block.rate for block in blocks), share, p50, p99))
    columns = (what, "", "decisions/s", "of the bare call's", "p50, ms", "p99, ms")
    return Table(title, columns, rows, f"Three limits a decision, {CLIENTS} clients in turn. {note}")
