"""Commands as they are sent to Redis, and the command that runs a script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: its source, and its SHA1, by which EVALSHA calls it."""

    source: str
    sha: str


#: A command's name and its arguments.
Command = tuple[Any, ...]


class ScriptCall(Command):
    """The command that runs a script by its SHA1; it is encoded once, however often it is sent."""

    script: Script
    #: The encoded command; empty until it is first sent.
    packed = b""

    def __new__(cls, script: Script, keys: Sequence[str], args: Iterable[object]) -> ScriptCall:
        """``keys`` and ``args`` are the script's KEYS and ARGV."""
        call = super().__new__(cls, ("EVALSHA", script.sha, len(keys), *keys, *args))
        call.script = script
        return call

    @property
    def text(self) -> Command:
        """The command that loads and runs the script at once: between two commands it could be flushed again."""
        return ("EVAL", self.script.source, *self[2:])
