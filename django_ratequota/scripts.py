"""Composes ``lua/*.lua`` into the scripts that Redis runs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from .rates import ALGORITHMS


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: its source, its SHA1 (the name EVALSHA knows it by) and where each line comes from."""

    source: str
    sha: str
    #: (file name, line in it) of each line of ``source``, in order.
    lines: tuple[tuple[str, int], ...]

    def locate(self, message: str) -> str:
        """The server's error message with ``user_script:LINE`` turned into file and line."""

        def place(match: re.Match[str]) -> str:
            line = int(match[1])
            return "{}:{}".format(*self.lines[line - 1]) if 0 < line <= len(self.lines) else match[0]

        return re.sub(r"user_script:(\d+)", place, message)


#: Its name and its arguments, as they go to Redis.
Command = tuple[Any, ...]


class Run(Command):
    """The command that runs a script by its SHA1; one that is sent again is packed once."""

    script: Script
    #: As it goes over the wire, once it has.
    packed: Any = None
    #: The part of what is left of a decision's time that it may take; a Cluster heeds it.
    share: float = 1.0

    def __new__(cls, script: Script, keys: Sequence[str], args: Iterable[object]) -> Run:
        """``keys`` and ``args`` are what the script finds in KEYS and ARGV."""
        run = super().__new__(cls, ("EVALSHA", script.sha, len(keys), *keys, *args))
        run.script = script
        return run

    def within(self, share: float) -> Run:
        """Return the same command with this ``share``."""
        run = tuple.__new__(Run, self)
        run.script, run.share = self.script, share
        return run

    @property
    def text(self) -> Command:
        """The command that loads the script and runs it in one go: in between, it could be flushed again."""
        return ("EVAL", self.script.source, *self[2:])


def _compose(*parts: tuple[str, str, str], flags: str = "") -> Script:
    """Join files, each given as (name, opening, closing); the opening goes in front of the file's first line,
    the closing behind its last.

    ``flags`` go behind the ``#!lua`` that the first file begins with.
    """
    source: list[str] = []
    lines: list[tuple[str, int]] = []
    folder = files(__package__) / "lua"
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
