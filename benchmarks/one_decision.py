"""Part 1: one decision, beside a bare call of redis-py and beside other packages that do the same job."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count as count_from
from typing import Any

import redis
import redis.asyncio

from benchmarks.measure import Cell, Result, Table, ainterleave, compared, interleave_by
from benchmarks.ours import bare, checking, engine, new_limiter, own_candidates, throttling
from benchmarks.peers import Candidate, Told, candidates
from benchmarks.scene import CLIENTS, MORE_RATES, RATES, Each, buckets_of, in_turn, requests_to, write_policies
from django_ratequota.engine.rates import ALGORITHMS, DEFAULT_ALGORITHM

BARE = "redis-py: evalsha of `return 1`"
_COUNTS = (1, 3, 5)
_CLOCKS = (time.perf_counter, time.thread_time)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: so many blocks of so many calls of each candidate."""

    blocks: int
    calls: int


def run(quick: bool = False) -> Result:
    """All tables of the part."""
    url = os.environ["REDIS_URL"]
    size = Size(3, 20) if quick else Size(40, len(CLIENTS))
    write_policies()
    engine, figures = _engine(url, size)
    one, best_1 = _beside(url, size, 1)
    three, best_3 = _beside(url, size, 3)
    figures |= {"peers_1": best_1, "peers_3": best_3}
    tables = [engine, one, three, asyncio.run(_awaited(url, size))]
    if not os.environ.get("RATEQUOTA_BENCH_HIREDIS"):
        tables += _with_hiredis(quick)
    return Result(tables, figures)


def _engine(url: str, size: Size) -> tuple[Table, dict[str, float]]:
    limiter = new_limiter(url)
    calls: dict[str, Callable[[], object]] = {BARE: _with_turn(bare(url))}
    for algorithm in ALGORITHMS:
        for count in _COUNTS:
            calls[_named(algorithm, count)] = in_turn(engine(limiter, algorithm, MORE_RATES[:count]))
    strangers = engine(limiter, DEFAULT_ALGORITHM, RATES[:1], range(CLIENTS.stop, 100 * CLIENTS.stop))
    following = count_from(CLIENTS.stop).__next__
    calls[_named(DEFAULT_ALGORITHM, 1) + ", clients not seen before"] = lambda: strangers(following())
    calls |= _framework()
    seconds, cpu = interleave_by(_CLOCKS, calls, size.blocks, size.calls)
    figures = {
        "check_1": _ratio(seconds, _named(DEFAULT_ALGORITHM, 1)),
        "check_3": _ratio(seconds, _named(DEFAULT_ALGORITHM, 3)),
        "check_1_slowest": max(_ratio(seconds, _named(algorithm, 1)) for algorithm in ALGORITHMS),
        "check_3_slowest": max(_ratio(seconds, _named(algorithm, 3)) for algorithm in ALGORITHMS),
        "check_request_3": _ratio(seconds, "check_request, 3 policies"),
        "throttle_3": _ratio(seconds, "QuotaThrottle, 3 policies"),
    }
    note = (
        f"All admitted, {len(CLIENTS)} clients in turn. check_request and QuotaThrottle include finding the caller, "
        "the plan and the policies (warm snapshot), statistics, and, in the throttle, writing the headers. "
        "CPU: of the calling thread, which does not count waiting for the server or for others on this machine."
    )
    rows: list[tuple[Cell, ...]] = [
        (name, _ratio(seconds, name), each * 1e6, _ratio(cpu, name), cpu[name] * 1e6)
        for name, each in seconds.items()
    ]
    return Table("Beside a bare call of redis-py", ("what", "× bare", "µs", "× CPU", "CPU µs"), rows, note), figures


def _framework() -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for path, policies in (("/api/one/", "1 policy"), ("/api/search/", "3 policies")):
        requests = requests_to(path)
        for name, hit in (("check_request", checking(requests)), ("QuotaThrottle", throttling(requests))):
            for n in CLIENTS:  # whoever comes for the first time is looked up in the database
                hit(n)
            calls[f"{name}, {policies}"] = in_turn(hit)
    return calls


def _beside(url: str, size: Size, limits: int) -> tuple[Table, float]:
    """The other packages beside ours, and how many times our time the best of them takes."""
    requests = requests_to("/api/search/" if limits == 3 else "/api/one/")
    peers, missing = candidates(url, requests)
    ours = own_candidates(url, requests)
    everyone = {candidate.name: candidate for candidate in (*ours, *peers)}
    hits = {name: candidate.prepare(RATES[:limits]) for name, candidate in everyone.items()}
    calls: dict[str, Callable[[], object]] = {BARE: _with_turn(bare(url))}
    calls |= {name: in_turn(hit) for name, hit in hits.items()}
    seconds, cpu = interleave_by(_CLOCKS, calls, size.blocks, size.calls)
    rows: list[tuple[Cell, ...]] = []
    best, closest = float("inf"), "none"
    for name, candidate in everyone.items():
        told = hits[name](1)
        if len(told) != limits:
            raise RuntimeError(f"{name} decided by {len(told)} limits, not by {limits}")
        rival = _rival(candidate, ours)
        times = seconds[name] / seconds[rival.name]
        complete = all(None not in one for one in told)
        if candidate not in ours and complete and times < best:
            best, closest = times, name
        rows.append(
            (
                name,
                candidate.algorithm,
                times if candidate not in ours else "",
                _ratio(seconds, name),
                seconds[name] * 1e6,
                cpu[name] * 1e6,
                round_trips(url, hits[name]),
                _known(told),
                candidate.all_or_nothing if limits > 1 else "",
            )
        )
    rows += [(name, "", "", "", "", "", "", f"not measured: {why}", "") for name, why in missing.items()]
    columns = (
        "what",
        "algorithm",
        "× ours",
        "× bare",
        "µs",
        "CPU µs",
        "round trips",
        "remaining, reset",
        "all or nothing",
    )
    note = (
        "× ours: beside `Limiter.check` of the same algorithm, or beside QuotaThrottle where a request is taken. "
        "Each way reads out what it knows for the headers, and writes none but where it says so. A package without a "
        "way to judge several limits at once is asked for one after the other. All or nothing: a request that one "
        f"limit refuses is charged to none. Of those that know both for every limit, the closest is {closest}."
    )
    title = "One limit" if limits == 1 else f"{limits} limits"
    return Table(f"{title}, beside other packages", columns, rows, note), best


def _rival(candidate: Candidate, ours: list[Candidate]) -> Candidate:
    if candidate.takes_request:
        return ours[-1]
    return next(own for own in ours if own.algorithm == candidate.algorithm)


def _known(told: Told) -> str:
    words = []
    for word, values in zip(("remaining", "reset"), zip(*told, strict=True), strict=True):
        if None not in values:
            words.append(word)
        elif any(value is not None for value in values):
            words.append(f"{word} of one")
    return ", ".join(words) or "neither"


def round_trips(url: str, hit: Callable[[int], object], calls: int = 20) -> float:
    """How often one decision waits for the server, by the server's own count of what it read."""
    with redis.Redis.from_url(url) as client:
        before = client.info("stats")["total_reads_processed"]
        for n in CLIENTS[:calls]:
            hit(n)
        # The question itself is read as well.
        return round((client.info("stats")["total_reads_processed"] - before - 1) / calls, 1)


async def _awaited(url: str, size: Size) -> Table:
    client = redis.asyncio.Redis.from_url(url)
    sha = await client.script_load("return 1")
    limiter = new_limiter(url)
    calls: dict[str, Callable[[], Any]] = {"redis.asyncio: evalsha of `return 1`": lambda: client.evalsha(sha, 0)}
    for count in _COUNTS:
        buckets = Each(lambda n, rates=MORE_RATES[:count]: buckets_of(n, DEFAULT_ALGORITHM, rates))
        calls[f"Limiter.acheck, {_buckets(count)}"] = in_turn(lambda n, buckets=buckets: limiter.acheck(buckets[n]))
    note = ""
    try:
        from throttled.asyncio import RateLimiterType, Throttled
        from throttled.asyncio.store import RedisStore
    except ImportError as error:
        note = f"throttled-py is not measured: {error}."
    else:
        throttle = Throttled(using=RateLimiterType.TOKEN_BUCKET.value, quota="1000/m", store=RedisStore(server=url))
        calls["throttled-py: token_bucket, 1 limit"] = in_turn(lambda n: throttle.limit(f"async:{n}"))
    seconds = await ainterleave(calls, size.blocks, size.calls)
    await client.aclose()
    return Table("Awaited", ("what", "× bare", "µs"), compared(seconds, next(iter(calls))), note)


def _with_hiredis(quick: bool) -> list[Table]:
    """The first tables once more, in a process where redis-py finds hiredis."""
    code = (
        "from benchmarks.processes import set_django_up; set_django_up();"
        f"from benchmarks.one_decision import print_tables; print_tables({quick})"
    )
    environment = {**os.environ, "RATEQUOTA_BENCH_HIREDIS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return [Table("With hiredis", ("",), [], f"Not measured: {done.stderr.strip().splitlines()[-1]}")]
    return [
        Table(f"{title}, with hiredis", tuple(columns), [tuple(row) for row in rows])
        for title, columns, rows in json.loads(done.stdout)
    ]


def print_tables(quick: bool) -> None:
    """For another process: what was measured here, as JSON."""
    import hiredis  # noqa: F401 - where it is absent, that is what to say

    print(json.dumps([(table.title, table.columns, table.rows) for table in run(quick).tables[:3]]))


def _named(algorithm: str, count: int) -> str:
    return f"Limiter.check, {algorithm}, {_buckets(count)}"


def _buckets(count: int) -> str:
    return f"{count} bucket{'s' * (count > 1)}"


def _ratio(seconds: Mapping[str, float], name: str) -> float:
    return seconds[name] / seconds[BARE]


def _with_turn(call: Callable[[], object]) -> Callable[[], object]:
    """The same loop around the bare call as around the others."""
    return in_turn(lambda _: call())
