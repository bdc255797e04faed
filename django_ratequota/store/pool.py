"""What the pools of connections to one server share: how many are made at a time, and what is known of the server."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from .commands import Command, ScriptCall

#: Connections to one server, open or being made, that a process has for its threads, and each event loop has.
MAX_CONNECTIONS = 64
#: Seconds after which a connection that nobody used is closed, and how many stay.
IDLE_SECONDS, KEPT = 10.0, 4
#: Connections that are made at a time; as many as are open, where these are more. So their number doubles at most.
_AT_ONCE = 4
#: Seconds after which an attempt no longer holds up others, and the most attempts of that age.
_SLOW_SECONDS, _MOST_SLOW = 1.0, 16
#: Seconds between a failed attempt and the next, where other connections are open.
PAUSE_SECONDS = 0.05


class Liveness:
    """What this process knows of one server, in monotonic seconds."""

    __slots__ = ("answered_at", "asked_at", "begun_at", "connected_at", "lost_at", "spare_at")

    def __init__(self) -> None:
        #: When the last answer to a command was read, and when that command had been sent; 0 = never.
        self.answered_at = self.asked_at = 0.0
        #: When a connection last came about, when it had been begun, and when one came about that nobody waited for
        #: any more. A server that hangs, or a proxy before it, may still answer a login.
        self.connected_at = self.begun_at = self.spare_at = 0.0
        #: Connections idle since then, or longer, are not used again: one as old turned out to be dead.
        self.lost_at = 0.0

    @property
    def alive_at(self) -> float:
        """When the last answer was read, that of a login too."""
        return max(self.answered_at, self.connected_at)

    def lives_since(self, instant: float, *, logins: bool) -> bool:
        """Whether the server has answered something sent since then, where ``logins`` count or not.

        An answer read since then may be from before: this process may have been late to read it.
        """
        return self.asked_at > instant or (logins and self.begun_at > instant)

    def answered(self, asked: float) -> float:
        """Note that a command is answered that was sent then; returns the time."""
        if asked > self.asked_at:  # each decision comes by: ``max`` costs a call
            self.asked_at = asked
        self.answered_at = now = time.monotonic()
        return now

    def connected(self, begun: float, *, spare: bool) -> None:
        """Note that a connection came about that was begun then; ``spare`` = nobody waits for it any more."""
        self.begun_at = max(self.begun_at, begun)
        self.connected_at = time.monotonic()
        if spare:
            self.spare_at = self.connected_at

    def lost(self, since: float) -> None:
        """Distrust each connection that has been idle since ``since`` or longer."""
        self.lost_at = max(self.lost_at, since)


class Attempts:
    """How many connections of a pool are open, and which are being made; never more than ``most`` together."""

    def __init__(self, most: int = MAX_CONNECTIONS) -> None:
        self.most = most
        self.open = 0
        self._begun: list[float] = []
        self._failed_at = 0.0

    def begin(self, waiting: int) -> float | None:
        """When an attempt begins that is wanted for one of ``waiting`` callers; None where none should."""
        if not waiting or self.open + len(self._begun) >= self.most:
            return None
        now = time.monotonic()
        slow = sum(begun < now - _SLOW_SECONDS for begun in self._begun)
        at_once = max(_AT_ONCE, self.open)
        if self.open and self._failed_at:  # the server may be full: then those that are open have to do
            if now < self._failed_at + PAUSE_SECONDS:
                return None
            at_once = 1
        if slow == _MOST_SLOW or len(self._begun) - slow >= min(waiting, at_once):
            return None
        self._begun.append(now)
        return now

    def succeeded(self, begun: float) -> None:
        self._begun.remove(begun)
        self._failed_at = 0.0
        self.open += 1

    def failed(self, begun: float) -> bool:
        """Note that it failed; returns whether no other is open or being made, which callers could wait for."""
        self._begun.remove(begun)
        self._failed_at = time.monotonic()
        return not self.open and not self._begun

    def left(self, begun: float) -> None:
        """Note that it was not tried after all."""
        self._begun.remove(begun)


def unused(idle: deque[tuple[Any, float]]) -> Iterator[Any]:
    """Take the connections out of ``idle`` that nobody has used for ``IDLE_SECONDS``, but for the last few.

    ``idle`` has (connection, since when it is idle), the longest idle first.
    """
    until = time.monotonic() - IDLE_SECONDS
    try:
        while len(idle) > KEPT and idle[0][1] < until:
            yield idle.popleft()[0]
    except IndexError:  # other threads were faster
        pass


def packed(connection: Any, command: Command) -> Any:
    """The command as it goes over the wire; a script's is worked out once."""
    if not isinstance(command, ScriptCall):
        return connection.pack_command(*command)
    command.packed = command.packed or connection.pack_command(*command)
    return command.packed
