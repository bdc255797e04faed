"""Commands as they are sent to Redis, and the command that runs a script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: its source, its SHA1 (by which EVALSHA calls it) and the origin of each line."""

    source: str
    sha: str
    #: (file name, number of its lines) of each file that ``source`` consists of, in order.
    files: tuple[tuple[str, int], ...]

    @property
    def lines(self) -> tuple[tuple[str, int], ...]:
        """(file name, line in it) of each line of ``source``, in order."""
        return tuple((name, number) for name, count in self.files for number in range(1, count + 1))

    def locate(self, message: str) -> str:
        """Return the server's error message with ``user_script:LINE`` replaced by file and line."""

        def place(match: re.Match[str]) -> str:
            line, lines = int(match[1]), self.lines
            return "{}:{}".format(*lines[line - 1]) if 0 < line <= len(lines) else match[0]

        return re.sub(r"user_script:(\d+)", place, message)


#: A command's name and its arguments.
Command = tuple[Any, ...]


class ScriptCall(Command):
    """The command that runs a script by its SHA1; it is encoded once, however often it is sent."""

    script: Script
    #: The encoded command; None until it is first sent.
    packed: Any = None
    #: The share of a decision's remaining time that it may take; only a Cluster's store applies it.
    share: float

    def __new__(
        cls, script: Script, keys: Sequence[str], args: Iterable[object], *, share: float = 1.0
    ) -> ScriptCall:
        """``keys`` and ``args`` are the script's KEYS and ARGV."""
        call = super().__new__(cls, ("EVALSHA", script.sha, len(keys), *keys, *args))
        call.script, call.share = script, share
        return call

    @property
    def text(self) -> Command:
        """The command that loads and runs the script at once: between two commands it could be flushed again."""
        return ("EVAL", self.script.source, *self[2:])
