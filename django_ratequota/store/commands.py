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

    @classmethod
    def like(cls, pattern: ScriptPattern, keys: Sequence[str], sent: bytes) -> ScriptCall:
        """Return the call of the pattern with these keys; ``sent`` is what ``encoded`` returns for them."""
        call = super().__new__(cls, (*pattern.before, *keys, *pattern.args))
        call.script, call.packed = pattern.script, b"%b%b%b" % (pattern.head, sent, pattern.tail)
        return call

    @property
    def text(self) -> Command:
        """The command that loads and runs the script at once: between two commands it could be flushed again."""
        return ("EVAL", self.script.source, *self[2:])


class ScriptPattern:
    """What calls of a script share that differ in their last keys alone: it is encoded once."""

    def __init__(self, script: Script, keys: Sequence[str], more: int, args: Iterable[object]) -> None:
        """``keys`` are the first KEYS of each call, ``more`` is how many follow, and ``args`` are its ARGV."""
        self.script = script
        self.before = ("EVALSHA", script.sha, len(keys) + more, *keys)
        self.args = tuple(args)
        length = len(self.before) + more + len(self.args)
        self.head = b"*%d\r\n%b" % (length, encoded(self.before))
        self.tail = encoded(self.args)


def encoded(arguments: Iterable[object]) -> bytes:
    """Return arguments as a command has them on the wire."""
    texts = [str(argument).encode() for argument in arguments]
    return b"".join([b"$%d\r\n%b\r\n" % (len(text), text) for text in texts])
