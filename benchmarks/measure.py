"""Measuring side by side, and the shape of what a part hands back.

A part of the benchmark is a module with ``run(quick: bool = False) -> Result``; ``quick`` asks for a run of seconds,
whose figures only show that it works. Django is set up and a server is running: its URL is ``environ["REDIS_URL"]``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    """One table of RESULTS.md."""

    title: str
    columns: tuple[str, ...]
    #: As long as ``columns`` each; numbers are shown with three significant digits.
    rows: Sequence[tuple[Cell, ...]]
    #: What a reader must know to judge the figures, in a sentence or two.
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What one part measured."""

    tables: list[Table]
    #: What ``targets`` compares: name of the figure -> figure.
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds a call took, block by block."""

    wall: list[float] = field(default_factory=list)
    #: CPU of this process, its other threads included.
    client: list[float] = field(default_factory=list)
    #: CPU of the Redis server.
    server: list[float] = field(default_factory=list)

    def add(self, wall: float, client: float, server: float, calls: int) -> None:
        """Note a block of ``calls`` calls."""
        for seconds, each in zip((wall, client, server), (self.wall, self.client, self.server), strict=True):
            each.append(seconds / calls)

    @property
    def cpu(self) -> list[float]:
        """CPU of both."""
        return [client + server for client, server in zip(self.client, self.server, strict=True)]

    def times(self, base: Spent) -> float:
        """How many times the CPU of ``base`` it took: the median of the ratios within each block."""
        return median(mine / other for mine, other in zip(self.cpu, base.cpu, strict=True))

    def us(self) -> tuple[float, float, float]:
        """Medians in µs: CPU of both, of it the server's, and wall time."""
        cpu, server, wall = (1e6 * median(each) for each in (self.cpu, self.server, self.wall))
        return cpu, server, wall


#: Cells are padded to this width at most.
_WIDEST = 80
#: The columns of ``Spent.us``.
US = ("CPU µs", "of it Redis", "wall µs")


def interleave(
    calls: Mapping[str, Callable[[], object]],
    blocks: int,
    times: int,
    server: Callable[[], float] = float,
    clocks: tuple[Callable[[], float], Callable[[], float]] = (time.perf_counter, time.process_time),
) -> dict[str, Spent]:
    """Call everything in blocks, a number of times in a row in each; ``server`` returns the server's CPU seconds.

    A machine's speed drifts by 2-4x within minutes, so figures compare only when measured in turn. Each block begins
    with another callable, so that none always follows the same one. One more block warms up and is not recorded.
    """
    spent = {name: Spent() for name in calls}
    for block in range(blocks + 1):
        for name in turned(list(calls), block):
            call = calls[name]
            before = server(), *(clock() for clock in clocks)
            for _ in range(times):
                call()
            wall, client = (clock() - begin for clock, begin in zip(clocks, before[1:], strict=True))
            used = server() - before[0]
            if block:
                spent[name].add(wall, client, used, times)
    return spent


def turned(names: list[str], by: int) -> list[str]:
    """The names, another one first each time."""
    by %= max(1, len(names))
    return names[by:] + names[:by]


def markdown(table: Table) -> str:
    """The table as Markdown, its numbers aligned right, as a section of a part of the appendix."""
    rows = [[_shown(cell) for cell in row] for row in table.rows]
    numeric = [
        all(not isinstance(row[column], str) or row[column] in ("", "-") for row in table.rows)
        for column in range(len(table.columns))
    ]
    widths = [min(_WIDEST, max(3, *(len(line[at]) for line in (table.columns, *rows)))) for at in range(len(numeric))]
    rule = ["-" * (width - right) + ":" * right for width, right in zip(widths, numeric, strict=True)]
    lines = [
        [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in aligned]
        for aligned in (zip(line, widths, numeric, strict=True) for line in (table.columns, rule, *rows))
    ]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(part for part in (table.title and f"#### {table.title}", text, table.note) if part)


def _shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    if isinstance(cell, int) or abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.3g}" if abs(cell) < 1 else f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.1f}"
