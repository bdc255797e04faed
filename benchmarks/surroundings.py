"""What a reader must know to judge the figures: when, on which machine, with which versions, and how."""

from __future__ import annotations

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks import server

PEERS = (
    "django-ratelimit",
    "django-smart-ratelimit",
    "drf-ratelimit-plus",
    "limits",
    "throttled-py",
    "pyrate-limiter",
)
_OURS = ("django", "djangorestframework", "redis", "django-redis")

INTRODUCTION = """\
Costs are CPU time of the client's process plus CPU time of Redis, because wall time says more about the machine than
about the code. Ratios compare runs that took turns against one server, and they change little between machines.
`make bench` measures them again."""

_HOW = """\
Candidates take turns in short blocks, within one process and against one server. A ratio is the median of the blocks'
ratios. Compare ratios only: the speed of machines such as this one drifts by 2-4x within minutes, so times in µs are
those of one day, above all wall times."""


def describe(url: str) -> str:
    """Machine, versions and method, in Markdown."""
    packages = ", ".join(f"{name} {_installed(name)}" for name in (*_OURS, "hiredis"))
    peers = ", ".join(f"{name} {_installed(name)}" for name in PEERS)
    lines = (
        f"{datetime.now(UTC):%Y-%m-%d}, {machine()}; client and server share them",
        f"Python {platform.python_version()}, {packages}; server: {server.version(url)}, loopback, no persistence",
        f"Beside: {peers}",
    )
    return "\n".join(f"- {line}" for line in lines) + f"\n\n{_HOW}"


def machine() -> str:
    """The processor and its cores."""
    return f"{_processor()}, {os.cpu_count()} cores"


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
