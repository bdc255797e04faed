"""Composes ``lua/*.lua`` into the scripts that Redis runs."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

from ..store.commands import Script
from .rates import ALGORITHMS


def _compose(*parts: tuple[str, str, str], flags: str = "") -> Script:
    """Join files, each given as (name, opening, closing); the opening goes in front of the file's first line,
    the closing behind its last.

    ``flags`` go behind the ``#!lua`` that the first file begins with.
    """
    source: list[str] = []
    lines: list[tuple[str, int]] = []
    folder = files("django_ratequota") / "lua"
    for name, opening, closing in parts:
        body = (opening + (folder / name).read_text().rstrip()).splitlines()
        lines += [(name, number) for number in range(1, len(body) + 1)]
        source += body
        source[-1] += closing
    source[0] += flags
    text = "\n".join(source) + "\n"
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), tuple(lines))


# algorithm(name) is one function, and each file a branch of it.
_CHUNKS = [
    (
        f"{name}.lua",
        "local function algorithm(name) " * (name == ALGORITHMS[0]) + f"if name == '{name}' then ",
        " end" + " end" * (name == ALGORITHMS[-1]),
    )
    for name in ALGORITHMS
]

#: Judges any number of buckets: check, peek, charge, refund, acquire.
DECIDE = _compose(("prelude.lua", "", ""), *_CHUNKS, ("driver.lua", "", ""))
#: Judges a sequence of attempts by the same algorithms in memory: reads no key and writes none, so it runs on a
#: server that is full, too.
REPLAY = _compose(
    ("prelude.lua", "", ""),
    ("memory.lua", "", ""),
    *_CHUNKS,
    ("replay.lua", "", ""),
    flags=" flags=no-writes",
)
#: Gives the policies a new revision.
PUBLISH = _compose(("publish.lua", "", ""))
#: Keeps what a process reports about itself.
REPORT = _compose(("report.lua", "", ""))
#: Adds what a process has noted to the statistics.
COLLECT = _compose(("collect.lua", "", ""))
#: Says which commands the server keeps from the caller.
DENIED = _compose(("denied.lua", "", ""))
#: What the scripts call, and what is sent beside them.
COMMANDS = sorted(
    {
        *re.findall(r"\bp?call\('([A-Z]+)'", DECIDE.source + PUBLISH.source + REPORT.source + COLLECT.source),
        *("DEL", "HGETALL", "HMGET", "LRANGE", "MGET", "SET", "ZRANGE"),
    }
)
