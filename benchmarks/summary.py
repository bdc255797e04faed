"""The five rows that RESULTS.md begins with: what a user asks before adding the package."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.measure import Cell, Table

#: Question and answer; an answer appears when all its figures were measured.
ROWS = (
    (
        "How much slower is a real view?",
        "Three limits add {view_percent:.0f} % to the CPU time of a view that takes {view_ms:.1f} ms (one query, 60 "
        "rows). Sending the same `EVALSHA` by hand adds {view_same_percent:.0f} %, and three of DRF's own throttles "
        "add {view_drf_percent:.0f} %.",
    ),
    (
        "What do more limits cost?",
        "Any number of limits is one command and one round trip. For three limits, DRF's own throttles take "
        "{peers_3_drf:.1f} times our CPU time. The closest package that reports remaining units and reset times "
        "takes {peers_3:.1f} times.",
    ),
    (
        "How many decisions can Redis make?",
        "{decisions_1:,.0f} per second and core with one limit each, {decisions_3:,.0f} with three.",
    ),
    (
        "How much memory does Redis need?",
        "{bytes:.0f} bytes per client and limit, so {bytes:.0f} MB for a million clients. The closest package needs "
        "{bytes_peer:.0f} bytes for the same algorithm.",
    ),
    (
        "What happens without Redis?",
        "You choose for each policy: allow (200), deny (503 with Retry-After) or count in the worker (200). If Redis "
        "hangs, the first {down_waiting:.0f} requests of a worker wait up to {down_slowest_ms:.0f} ms, and then one "
        "request a second does. All others take {down_us:.0f} µs of CPU time with their view, compared to "
        "{up_us:.0f} µs with Redis.",
    ),
)


def summarize(figures: Mapping[str, float]) -> Table:
    """The rows whose figures there are."""
    rows: list[tuple[Cell, ...]] = []
    for question, answer in ROWS:
        try:
            rows.append((question, answer.format_map(figures)))
        except KeyError:  # the part was not asked for, or failed, which the report says
            continue
    return Table("", ("question", "answer"), rows)
