"""Part 1: one decision, beside a bare call of redis-py and beside other packages that do the same job."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from benchmarks.measure import Cell, Result, Table, ainterleave, compared, interleave_by
from benchmarks.peers import Candidate, Hit, Told, candidates
from benchmarks.scene import (
    CLIENTS,
    MORE_RATES,
    RATES,
    Each,
    Rates,
    Requests,
    buckets_of,
    in_turn,
    requests_to,
    write_policies,
)
from django_ratequota import Decision, Limiter, check_request
from django_ratequota.rates import ALGORITHMS, DEFAULT_ALGORITHM
from django_ratequota.throttling import QuotaThrottle

BARE = "redis-py: evalsha of `return 1`"
OURS = "django-ratequota"
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
    size = Size(3, 20) if quick else Size(24, len(CLIENTS))
    write_policies()
    engine, figures = _engine(url, size)
    one, best_1 = _beside(url, size, 1)
    three, best_3 = _beside(url, size, 3)
    figures |= {"peers_1": best_1, "peers_3": best_3}
    tables = [engine, one, three, asyncio.run(_awaited(url, size))]
    if not os.environ.get("RATEQUOTA_BENCH_HIREDIS"):
        tables += _with_hiredis(quick)
    return Result(tables, figures)


def bare(url: str) -> Callable[[], object]:
    """What any script costs at least: redis-py as anybody would use it, and a script that does nothing."""
    client = redis.Redis.from_url(url)
    sha = client.script_load("return 1")
    return lambda: client.evalsha(sha, 0)


def _engine(url: str, size: Size) -> tuple[Table, dict[str, float]]:
    limiter = _limiter(url)
    calls: dict[str, Callable[[], object]] = {BARE: _with_turn(bare(url))}
    for algorithm in ALGORITHMS:
        for count in _COUNTS:
            calls[_named(algorithm, count)] = in_turn(engine(limiter, algorithm, MORE_RATES[:count]))
    calls |= _framework()
    seconds, cpu = interleave_by(_CLOCKS, calls, size.blocks, size.calls)
    figures = {
        "check_1": _ratio(seconds, _named(DEFAULT_ALGORITHM, 1)),
        "check_3": _ratio(seconds, _named(DEFAULT_ALGORITHM, 3)),
        "check_1_slowest": max(_ratio(seconds, _named(algorithm, 1)) for algorithm in ALGORITHMS),
        "check_3_slowest": max(_ratio(seconds, _named(algorithm, 3)) for algorithm in ALGORITHMS),
        "check_request_3": _ratio(seconds, "check_request, 3 policies"),
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
        for name, hit in (("check_request", checking(requests)), ("QuotaThrottle", _throttling(requests))):
            for n in CLIENTS:  # whoever comes for the first time is looked up in the database
                hit(n)
            calls[f"{name}, {policies}"] = in_turn(hit)
    return calls


def engine(limiter: Limiter, algorithm: str, rates: Rates) -> Callable[[int], Decision]:
    """A function that decides about a client's limits by ``Limiter.check``."""
    buckets = Each(lambda n: buckets_of(n, algorithm, rates))
    for n in CLIENTS:
        _ = buckets[n]
    return lambda n: limiter.check(buckets[n])


def checking(requests: Requests) -> Callable[[int], Decision]:
    """A function that decides about a client's request by ``check_request``."""
    plain, scope = requests.plain, requests.view.throttle_scope

    def check(n: int) -> Decision:
        request = plain[n]
        # A request that was charged is not charged again.
        vars(request).pop("ratequota", None)
        return check_request(request, scope)

    return check


def _throttling(requests: Requests, headers: bool = True) -> Callable[[int], QuotaThrottle]:
    plain, rest, view = requests.plain, requests.rest, copy(requests.view)
    view.headers = {} if headers else None

    def throttle(n: int) -> QuotaThrottle:
        vars(plain[n]).pop("ratequota", None)
        asked = QuotaThrottle()
        asked.allow_request(rest[n], view)
        return asked

    return throttle


def _beside(url: str, size: Size, limits: int) -> tuple[Table, float]:
    """The other packages beside ours, and how many times our time the best of them takes."""
    requests = requests_to("/api/search/" if limits == 3 else "/api/one/")
    peers, missing = candidates(url, requests)
    ours = _ours(url, requests)
    everyone = {candidate.name: candidate for candidate in (*ours, *peers)}
    hits = {name: candidate.prepare(RATES[:limits]) for name, candidate in everyone.items()}
    calls: dict[str, Callable[[], object]] = {BARE: _with_turn(bare(url))}
    calls |= {name: in_turn(hit) for name, hit in hits.items()}
    seconds, cpu = interleave_by(_CLOCKS, calls, size.blocks, size.calls)
    rows: list[tuple[Cell, ...]] = []
    best = float("inf")
    for name, candidate in everyone.items():
        told = hits[name](1)
        rival = _rival(candidate, ours)
        times = seconds[name] / seconds[rival.name]
        complete = all(None not in one for one in told)
        if candidate not in ours and complete:
            best = min(best, times)
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
        "limit refuses is charged to none."
    )
    title = "One limit" if limits == 1 else f"{limits} limits"
    return Table(f"{title}, beside other packages", columns, rows, note), best


def _ours(url: str, requests: Requests) -> list[Candidate]:
    def way(headers: bool) -> Callable[[Rates], Hit]:
        def prepare(rates: Rates) -> Hit:
            throttle = _throttling(requests, headers)
            for n in CLIENTS:
                throttle(n)
            return lambda n: _told(throttle(n).decision)

        return prepare

    return [
        *engines(url),
        *[
            Candidate(OURS, name, DEFAULT_ALGORITHM, way(headers), all_or_nothing="yes", takes_request=True)
            for name, headers in (("QuotaThrottle, headers written", True), ("QuotaThrottle", False))
        ],
    ]


def engines(url: str) -> list[Candidate]:
    """``Limiter.check`` by each algorithm."""
    limiter = _limiter(url)

    def way(algorithm: str) -> Callable[[Rates], Hit]:
        def prepare(rates: Rates) -> Hit:
            check = engine(limiter, algorithm, rates)
            return lambda n: _told(check(n))

        return prepare

    return [Candidate(OURS, f"Limiter.check, {a}", a, way(a), all_or_nothing="yes") for a in ALGORITHMS]


def _told(decision: Decision | None) -> Told:
    assert decision is not None
    return [(status.remaining, status.reset_after) for status in decision.statuses]


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
    limiter = _limiter(url)
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


def _limiter(url: str) -> Limiter:
    return Limiter(client=redis.Redis.from_url(url), timeout=5.0)


def _named(algorithm: str, count: int) -> str:
    return f"Limiter.check, {algorithm}, {_buckets(count)}"


def _buckets(count: int) -> str:
    return f"{count} bucket{'s' * (count > 1)}"


def _ratio(seconds: Mapping[str, float], name: str) -> float:
    return seconds[name] / seconds[BARE]


def _with_turn(call: Callable[[], object]) -> Callable[[], object]:
    """The same loop around the bare call as around the others."""
    return in_turn(lambda _: call())
