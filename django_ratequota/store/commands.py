"""What is sent to Redis: commands, and those that run a script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


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


class ScriptCall(Command):
    """The command that runs a script by its SHA1; one that is sent again is packed once."""

    script: Script
    #: As it goes over the wire, once it has.
    packed: Any = None
    #: The part of what is left of a decision's time that it may take; a Cluster heeds it.
    share: float = 1.0

    def __new__(cls, script: Script, keys: Sequence[str], args: Iterable[object]) -> ScriptCall:
        """``keys`` and ``args`` are what the script finds in KEYS and ARGV."""
        run = super().__new__(cls, ("EVALSHA", script.sha, len(keys), *keys, *args))
        run.script = script
        return run

    def within(self, share: float) -> ScriptCall:
        """Return the same command with this ``share``."""
        run = tuple.__new__(ScriptCall, self)
        run.script, run.share = self.script, share
        return run

    @property
    def text(self) -> Command:
        """The command that loads the script and runs it in one go: in between, it could be flushed again."""
        return ("EVAL", self.script.source, *self[2:])
