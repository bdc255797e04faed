"""Whole HTTP requests under gunicorn and uvicorn, of a view as real ones are and of a trivial one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from urllib.request import Request, urlopen

from benchmarks import load
from benchmarks.measure import Cell, Result, Table, turned
from benchmarks.ours import evalsha_arguments
from benchmarks.server import cpu_clock
from benchmarks.serving import KINDS, Cores, Served, cores_apart, serving, site
from benchmarks.site.policies import USERS
from benchmarks.site.variants import VARIANTS

#: Title, and rounds of load, a second each: in longer ones the machine changes more between two servers.
_VIEWS = {"/listing/": ("one query, 60 rows", 15), "/trivial/": ("trivial", 7)}
#: What a load came to, and the CPU µs a request of the site's processes and of Redis.
Turn = tuple[load.Load, float, float]


def run(quick: bool = False) -> Result:
    """All servers of a kind are up at once and are loaded in turn, a second each."""
    url = os.environ["REDIS_URL"]
    figures: dict[str, float] = {}
    tables = []
    with site(url) as environment, cores_apart(url) as cores, cpu_clock(url) as redis_cpu:
        for kind, command in KINDS.items():
            with serving(command, VARIANTS, environment, cores.servers) as servers:
                sent = evalsha_arguments(url, _asking(servers["ours"]), range(1, USERS + 1))
                Path(environment["BENCH_EVALSHA"]).write_text(json.dumps(sent))
                for path, (title, rounds) in _VIEWS.items():
                    turns = _in_turn(path, servers, redis_cpu, 1 if quick else rounds)
                    more = {name: _more_percent(turns[name], turns["none"]) for name in turns}
                    tables.append(_table(f"{kind}: {title}", turns, more, cores))
                    if path == "/listing/":
                        _keep(figures, more, turns)
    return Result(tables, figures)


def _keep(figures: dict[str, float], more: dict[str, float], turns: dict[str, list[Turn]]) -> None:
    """The figures of the kind of server where ours costs most."""
    if more["ours"] > figures.get("view_percent", 0):
        figures["view_percent"], figures["view_same_percent"] = more["ours"], more["same"]
        figures["view_drf_percent"] = more["drf"]
        figures["view_ms"] = median(_cpu_us(turn) for turn in turns["none"]) / 1e3


def _asking(served: Served) -> Callable[[int], None]:
    def ask(user: int) -> None:
        request = Request(f"http://127.0.0.1:{served.port}/trivial/", headers={"Authorization": f"Number {user}"})
        with urlopen(request) as answer:
            answer.read()

    ask(1)  # reads the policies and loads the script
    return ask


def _in_turn(
    path: str, servers: dict[str, Served], redis_cpu: Callable[[], float], rounds: int
) -> dict[str, list[Turn]]:
    """Load on each server, round after round; the first of several warms up."""
    turns: dict[str, list[Turn]] = {name: [] for name in servers}
    for number in range(rounds):
        for name in turned(list(servers), number):
            before = servers[name].cpu_seconds(), redis_cpu()
            done = load.put(servers[name].port, path, 1, users=USERS)
            took = servers[name].cpu_seconds() - before[0], redis_cpu() - before[1]
            turns[name].append((done, *[1e6 * each / done.requests for each in took]))
    return {name: each[1:] or each for name, each in turns.items()}


def _cpu_us(turn: Turn) -> float:
    return turn[1] + turn[2]


def _more_percent(turns: list[Turn], base: list[Turn]) -> float:
    """How much more CPU, in the median of the rounds."""
    return 100 * (median(_cpu_us(mine) / _cpu_us(other) for mine, other in zip(turns, base, strict=True)) - 1)


def _table(title: str, turns: dict[str, list[Turn]], more: dict[str, float], cores: Cores) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, of_name in turns.items():
        loads, site_us, redis_us = zip(*of_name, strict=True)
        cpu = median(map(_cpu_us, of_name))
        rate, p99 = median(each.rate for each in loads), median(each.p99_us for each in loads)
        difference = "" if name == "none" else f"{more[name]:+.1f} %"
        rows.append((VARIANTS[name].title, cpu, difference, median(site_us), median(redis_us), rate, p99 / 1000))
    note = (
        f"{cores} Load: {load.CONNECTIONS} connections, {USERS} users in turn. CPU is that of the site's "
        "processes and of Redis; the difference is the median of the rounds."
    )
    columns = ("", "CPU µs a request", "more", "site's", "Redis'", "requests/s", "p99, ms")
    return Table(title, columns, rows, note)
