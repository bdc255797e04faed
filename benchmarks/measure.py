"""Measuring side by side, and the shape of what a part hands back.

A part of the benchmark is a module with ``run(quick: bool = False) -> Result``; ``quick`` asks for a run of seconds,
whose figures only show that it works. Django is set up and a server is running: its URL is ``environ["REDIS_URL"]``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
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


def interleave(
    calls: Mapping[str, Callable[[], object]],
    blocks: int,
    times: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds per call: in each of so many blocks, every callable runs so many times in a row.

    These machines drift by 2-4x within minutes, so figures compare only when measured in turn. Each block begins
    with another callable, so that none always follows the same one. One more block warms up and does not count.
    """
    return interleave_by((clock,), calls, blocks, times)[0]


def interleave_by(
    clocks: Sequence[Callable[[], float]], calls: Mapping[str, Callable[[], object]], blocks: int, times: int
) -> list[dict[str, float]]:
    """``interleave`` by several clocks at once: what it returns, for each."""
    spent: list[dict[str, list[float]]] = [{name: [] for name in calls} for _ in clocks]
    for block in range(blocks + 1):
        for name in _turned(list(calls), block):
            call = calls[name]
            begun = [clock() for clock in clocks]
            for _ in range(times):
                call()
            for clock, begin, by_name in zip(clocks, begun, spent, strict=True):
                by_name[name].append((clock() - begin) / times)
    return [{name: median(seconds[1:]) for name, seconds in by_name.items()} for by_name in spent]


async def ainterleave(
    calls: Mapping[str, Callable[[], Awaitable[object]]], blocks: int, times: int
) -> dict[str, float]:
    """``interleave`` for coroutine functions, on the running loop."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(blocks + 1):
        for name in _turned(list(calls), block):
            call = calls[name]
            begun = time.perf_counter()
            for _ in range(times):
                await call()
            spent[name].append((time.perf_counter() - begun) / times)
    return {name: median(seconds[1:]) for name, seconds in spent.items()}


def compared(seconds: Mapping[str, float], base: str) -> list[tuple[Cell, ...]]:
    """Rows of (name, times ``base``, µs), in the order measured."""
    return [(name, each / seconds[base], each * 1e6) for name, each in seconds.items()]


def markdown(table: Table) -> str:
    """The table as Markdown, its numbers aligned right."""
    rows = [[_shown(cell) for cell in row] for row in table.rows]
    numeric = [
        all(not isinstance(row[column], str) or row[column] in ("", "-") for row in table.rows)
        for column in range(len(table.columns))
    ]
    widths = [max(3, *(len(line[at]) for line in (table.columns, *rows))) for at in range(len(numeric))]
    rule = ["-" * (width - right) + ":" * right for width, right in zip(widths, numeric, strict=True)]
    lines = [
        [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in aligned]
        for aligned in (zip(line, widths, numeric, strict=True) for line in (table.columns, rule, *rows))
    ]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(part for part in (f"### {table.title}", text, table.note) if part)


def _turned(names: list[str], by: int) -> list[str]:
    by %= max(1, len(names))
    return names[by:] + names[:by]


def _shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell.replace("|", "\\|")
    if isinstance(cell, int) or abs(cell) >= 100:
        return f"{cell:,.0f}"
    return f"{cell:.3g}" if abs(cell) < 1 else f"{cell:.2f}" if abs(cell) < 10 else f"{cell:.1f}"
