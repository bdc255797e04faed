"""Part 3: whole HTTP requests under gunicorn and uvicorn, with and without a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from benchmarks import load
from benchmarks.measure import Cell, Result, Table
from benchmarks.serving import KINDS, ROOT, Cores, Served, cores_apart, serving, site
from benchmarks.site.policies import USERS
from benchmarks.site.variants import VARIANTS


@dataclass(frozen=True, slots=True)
class Candidate:
    """What one row of a table shows."""

    title: str
    variant: str
    path: str = "/items/"
    #: In whose name requests come, in turn; 0 = anonymous.
    users: int = USERS


@dataclass(frozen=True, slots=True)
class Turn:
    """One round's load on one row."""

    load: load.Load
    #: What the server's processes took for it.
    cpu_seconds: float

    @property
    def cpu_us(self) -> float:
        """Processor time of the server, in µs a request."""
        return self.cpu_seconds * 1e6 / self.load.requests


_NAMES = ("none", "floor", "ours", "throttle", "drf", "smart", "plus")
#: Blocks of rows; each row is compared with the first of its block.
_DRF = [[Candidate(f"DRF, {VARIANTS[name].title}", name) for name in _NAMES]]
_ANONYMOUS = [[Candidate(f"DRF, anonymous, {VARIANTS[name].title}", name, users=0) for name in ("none", "ours")]]
_PLAIN = [
    [
        Candidate(f"Django, {sort} view, {words}", variant, path, users=0)
        for words, variant, path in (("undecorated", "none", bare), ("@ratequota", "ours", limited))
    ]
    for sort, bare, limited in (("sync", "/plain/", "/limited/"), ("async", "/aplain/", "/alimited/"))
]


def run(quick: bool = False) -> Result:
    """All servers of a kind are up at once and are loaded in turn, a few seconds each."""
    url = os.environ["REDIS_URL"]
    figures: dict[str, float] = {}
    with site(url) as environment, cores_apart(url) as cores:
        tables = [_breakdown(environment, quick)]
        for kind, command in KINDS.items():
            if quick and "threads" in kind:
                continue
            table, loss = _measure(kind, command, environment, cores, quick)
            tables.append(table)
            # Of gunicorn's two kinds of workers, the one that loses more.
            figure = "asgi_loss_percent" if "uvicorn" in kind else "wsgi_loss_percent"
            figures[figure] = max(loss, figures.get(figure, loss))
    return Result(tables, figures)


def _breakdown(environment: dict[str, str], quick: bool) -> Table:
    """Where the time of a limited request goes, without any HTTP server."""
    words = [sys.executable, "-m", "benchmarks.breakdown", "2" if quick else "41"]
    done = subprocess.run(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    rows: list[tuple[Cell, ...]] = [tuple(row) for row in json.loads(done.stdout)]
    note = (
        "A DRF view called in process, anonymous, in blocks of 100 calls in turn; a dash marks a part of the row "
        "above. Parts add up to less than the whole: in a loop of its own, each has the processor's caches to itself."
    )
    return Table("Where the time goes", ("", "µs", "CPU µs"), rows, note)


def _measure(kind: str, command: str, environment: dict[str, str], cores: Cores, quick: bool) -> tuple[Table, float]:
    """The table of one kind of server, and the % of requests/s that a DRF view loses with our throttle."""
    blocks = _DRF + _ANONYMOUS + (_PLAIN if "uvicorn" in kind else _PLAIN[:1])
    if quick:
        blocks = [[row for row in _DRF[0] if row.variant in ("none", "ours")]]
    rows = [row for block in blocks for row in block]
    variants = {row.variant for row in rows}
    with serving(command, variants, environment, cores.servers) as servers:
        measured = _in_turn(rows, servers, rounds=1 if quick else 6, seconds=1 if quick else 3)
    cells: list[tuple[Cell, ...]] = []
    losses = {}
    for block in blocks:
        for row in block:
            turns, base = measured[row], measured[block[0]]
            ratio = median(mine.load.rate / other.load.rate for mine, other in zip(turns, base, strict=True))
            losses[row] = (1 - ratio) * 100
            difference = "" if row is block[0] else f"{(ratio - 1) * 100:+.1f} %"
            rate, p99 = median(turn.load.rate for turn in turns), median(turn.load.p99_us for turn in turns)
            cells.append((row.title, rate, difference, median(turn.cpu_us for turn in turns), p99 / 1000))
    note = (
        f"{cores} Load: {load.generator()}, {load.CONNECTIONS} connections, {USERS:,} users in turn. The difference "
        "is the median over the rounds, each row against the first of its group in the same round; the CPU time is "
        "the server's own, without Redis. No limit that asks Redis takes less than one bare EVALSHA."
    )
    table = Table(kind, ("", "requests/s", "difference", "CPU µs a request", "p99, ms"), cells, note)
    return table, next(losses[row] for row in rows if row.variant == "ours" and row.users)


def _in_turn(
    rows: Iterable[Candidate], servers: dict[str, Served], *, rounds: int, seconds: int
) -> dict[Candidate, list[Turn]]:
    """Load on each row's server, round after round; the first of several warms up and does not count."""
    rows = list(rows)
    measured: dict[Candidate, list[Turn]] = {row: [] for row in rows}
    for number in range(rounds):
        turn = number % len(rows)
        for row in rows[turn:] + rows[:turn]:
            server = servers[row.variant]
            before = server.cpu_seconds()
            done = load.put(server.port, row.path, seconds, users=row.users)
            measured[row].append(Turn(done, server.cpu_seconds() - before))
    return {row: turns[1:] or turns for row, turns in measured.items()}
