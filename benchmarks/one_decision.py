"""One decision, beside the same EVALSHA sent through redis-py and beside other packages that do the same job."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count as count_from
from typing import Any

import redis
import redis.asyncio

from benchmarks.measure import US, Cell, Result, Spent, Table, interleave
from benchmarks.ours import (
    bare,
    checking,
    engine,
    evalsha_arguments,
    new_limiter,
    own_candidates,
    same_evalsha,
    throttling,
)
from benchmarks.peers import Candidate, Told, candidates
from benchmarks.scene import CLIENTS, RATES, Each, buckets_of, in_turn, requests_to, write_policies
from benchmarks.server import cpu_clock
from django_ratequota.engine.rates import DEFAULT_ALGORITHM

#: Decisions awaited by one call of a measured function.
_AWAITED = 50


@dataclass(frozen=True, slots=True)
class Size:
    """The number of blocks, and of each candidate's calls in a block."""

    blocks: int
    calls: int


def run(quick: bool = False) -> Result:
    """All tables of the part."""
    url = os.environ["REDIS_URL"]
    size = Size(3, _AWAITED) if quick else Size(30, len(CLIENTS))
    write_policies()
    result = _beside_evalsha(url, size)
    tables = [*result.tables, _with_hiredis(quick)]
    figures = dict(result.figures)
    for limits in (1, 3):
        beside = _beside_peers(url, size, limits)
        tables += beside.tables
        figures |= beside.figures
    return Result([*tables, _awaited(url, size)], figures)


def _beside_evalsha(url: str, size: Size) -> Result:
    limiter = new_limiter(url)
    nothing = bare(url)
    calls: dict[str, Callable[[], object]] = {"redis-py: `return 1`": in_turn(lambda _: nothing())}
    bases: dict[str, str] = {}

    def add(base: str, hits: Mapping[str, Callable[[int], object]]) -> None:
        """What the first of them sends, through redis-py, and then themselves."""
        calls[base] = in_turn(same_evalsha(url, next(iter(hits.values()))))
        for name, hit in hits.items():
            calls[name] = in_turn(hit)
            bases[name] = base

    for count in (1, 3):
        add(
            f"redis-py: the EVALSHA of {_check(count)}",
            {_check(count): engine(limiter, DEFAULT_ALGORITHM, RATES[:count])},
        )
    strangers = engine(limiter, DEFAULT_ALGORITHM, RATES[:1], range(CLIENTS.stop, 100 * CLIENTS.stop))
    following = count_from(CLIENTS.stop).__next__
    new_client = f"{_check(1)}, clients not seen before"
    calls[new_client] = lambda: strangers(following())
    bases[new_client] = f"redis-py: the EVALSHA of {_check(1)}"
    for path, policies in (("/api/one/", "1 policy"), ("/api/search/", "3 policies")):
        requests = requests_to(path)
        name = f"check_request, {policies}"
        throttle = f"QuotaThrottle with headers, {policies}"
        add(f"redis-py: the EVALSHA of {name}", {name: checking(requests), throttle: throttling(requests)})
    with cpu_clock(url) as server:
        spent = interleave(calls, size.blocks, size.calls, server)
    times = {name: spent[name].times(spent[base]) for name, base in bases.items()}
    figures = {
        "check_1": times[_check(1)],
        "check_3": times[_check(3)],
        "check_request_3": times["check_request, 3 policies"],
        "throttle_3": times["QuotaThrottle with headers, 3 policies"],
    }
    note = (
        f"All admitted, {len(CLIENTS)} clients in turn, {DEFAULT_ALGORITHM}. The same EVALSHA has the script, keys "
        "and arguments of the rows below it. For `check_request` they include the key of the policies' revision. "
        "`check_request` and QuotaThrottle also find the caller, the plan and the policies, and note statistics. "
        "QuotaThrottle also writes the headers."
    )
    rows: list[tuple[Cell, ...]] = [(name, times.get(name, ""), *each.us()) for name, each in spent.items()]
    return Result([Table("Beside the same EVALSHA", ("what", "× the same EVALSHA", *US), rows, note)], figures)


def _beside_peers(url: str, size: Size, limits: int) -> Result:
    """The other packages beside ours, and how many times our CPU the closest of them take."""
    requests = requests_to("/api/search/" if limits == 3 else "/api/one/")
    peers, missing = candidates(url, requests)
    ours = own_candidates(url, requests)
    everyone = {candidate.name: candidate for candidate in (*ours, *peers)}
    hits = {name: candidate.prepare(RATES[:limits]) for name, candidate in everyone.items()}
    with cpu_clock(url) as server:
        spent = interleave({name: in_turn(hit) for name, hit in hits.items()}, size.blocks, size.calls, server)
    rows: list[tuple[Cell, ...]] = []
    times: dict[str, float] = {}
    complete = set[str]()
    for name, candidate in everyone.items():
        told = hits[name](1)
        if len(told) != limits:
            raise RuntimeError(f"{name} decided by {len(told)} limits, not by {limits}")
        if candidate not in ours:
            times[name] = spent[name].times(spent[_rival(candidate, ours).name])
            if all(None not in one for one in told):
                complete.add(name)
        trips = _round_trips(url, hits[name])
        answers = f"{_known(told)}{', headers' if candidate.writes_headers else ''}"
        charged = candidate.all_or_nothing if limits > 1 else ""
        rows.append((name, candidate.algorithm, times.get(name, ""), *spent[name].us(), trips, answers, charged))
    rows += [(name, "", "", "", "", "", "", f"not measured: {why}", "") for name, why in missing.items()]
    note = (
        "× ours: beside QuotaThrottle with headers where a request is taken, else beside `Limiter.check` of the same "
        "algorithm. Tells: the values for headers, read in each call. Packages without a call for several limits "
        "check them one after the other. All or nothing: a request that one limit refuses is charged to none."
    )
    columns = ("what", "algorithm", "× ours", *US, "round trips", "tells", "all or nothing")
    title = "One limit" if limits == 1 else f"{limits} limits"
    with_headers = {name: each for name, each in times.items() if everyone[name].writes_headers}
    figures = _least(f"peers_{limits}_any", times)
    figures |= _least(f"peers_{limits}", {name: times[name] for name in complete})
    figures |= _least(f"peers_{limits}_headers", with_headers)
    figures |= _least(f"peers_{limits}_drf", {name: each for name, each in times.items() if name.startswith("DRF:")})
    closest = [f"{name} ({each:.2f} ×)" for name, each in sorted(times.items(), key=lambda item: item[1])[:3]]
    note += f" The closest are {', '.join(closest)}."
    return Result([Table(f"{title}, beside other packages", columns, rows, note)], figures)


def _least(figure: str, times: Mapping[str, float]) -> dict[str, float]:
    return {figure: min(times.values())} if times else {}


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


def _round_trips(url: str, hit: Callable[[int], object], calls: int = 20) -> float:
    """How often one decision waits for the server, by the server's own count of what it read."""
    with redis.Redis.from_url(url) as client:
        before = client.info("stats")["total_reads_processed"]
        for n in CLIENTS[:calls]:
            hit(n)
        # The question itself is read as well.
        return round((client.info("stats")["total_reads_processed"] - before - 1) / calls, 1)


def _awaited(url: str, size: Size) -> Table:
    """The same on an event loop, beside redis-py's asynchronous client."""
    loop = asyncio.new_event_loop()
    client = redis.asyncio.Redis.from_url(url)
    limiter = new_limiter(url)
    hits: dict[str, Callable[[int], Any]] = {}
    for count in (1, 3):
        sent = evalsha_arguments(url, engine(new_limiter(url), DEFAULT_ALGORITHM, RATES[:count]))
        buckets = Each(lambda n, rates=RATES[:count]: buckets_of(n, DEFAULT_ALGORITHM, rates))
        hits[f"redis.asyncio: the EVALSHA of {_check(count)}"] = lambda n, sent=sent: client.evalsha(*sent[n - 1])
        hits[_check(count).replace("check", "acheck")] = lambda n, buckets=buckets: limiter.acheck(buckets[n])

    async def repeated(hit: Callable[[int], Any]) -> None:
        for n in range(1, _AWAITED + 1):
            await hit(n)

    calls = {name: lambda hit=hit: loop.run_until_complete(repeated(hit)) for name, hit in hits.items()}
    with cpu_clock(url) as server:
        spent = interleave(calls, size.blocks, size.calls // _AWAITED, server)
    loop.run_until_complete(client.aclose())
    loop.close()
    rows: list[tuple[Cell, ...]] = []
    base = Spent()
    for name, each in spent.items():
        base = each if name.startswith("redis") else base
        rows.append((name, "" if each is base else each.times(base), *[us / _AWAITED for us in each.us()]))
    return Table("Awaited", ("what", "× the same EVALSHA", *US), rows)


def _with_hiredis(quick: bool) -> Table:
    """The first table once more, in a process where redis-py finds hiredis."""
    code = (
        "from benchmarks.processes import set_django_up; set_django_up();"
        f"from benchmarks.one_decision import print_table; print_table({quick})"
    )
    environment = {**os.environ, "RATEQUOTA_BENCH_HIREDIS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return Table("With hiredis", ("",), [], f"Not measured: {done.stderr.strip().splitlines()[-1]}")
    columns, rows = json.loads(done.stdout)
    return Table("Beside the same EVALSHA, with hiredis", tuple(columns), [tuple(row) for row in rows])


def print_table(quick: bool) -> None:
    """For another process: what was measured here, as JSON."""
    import hiredis  # noqa: F401 - where it is absent, that is what to say

    write_policies()
    [table] = _beside_evalsha(os.environ["REDIS_URL"], Size(3, _AWAITED) if quick else Size(30, len(CLIENTS))).tables
    print(json.dumps((table.columns, table.rows)))


def _check(count: int) -> str:
    return f"Limiter.check, {count} bucket{'s' * (count > 1)}"
