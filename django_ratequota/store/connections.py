"""This process's connections to one server, for its threads.

Connections are made beside the decisions that need them, by a thread of their own, a few at a time, and up to a
number. So one that misses its decision's deadline serves the next, and many cold callers do not time each other out:
they stand in line, and are served in order. A connection whose reply did not arrive whole is dropped, and so is one
that nobody has used for a while.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from typing import Any

import redis

from .budget import Budget
from .commands import Command, ScriptCall
from .handshake import CONNECT_SECONDS, Handshake
from .pool import IDLE_SECONDS, MAX_CONNECTIONS, Attempts, Liveness, packed, unused
from .sockets import spend


class _Place:
    """A thread's place in line for a connection."""

    __slots__ = ("_turn", "found")

    def __init__(self) -> None:
        #: (connection, since when it is idle), or why there is none; None while it waits.
        self.found: tuple[Any, float] | Exception | None = None
        self._turn = threading.Lock()
        self._turn.acquire()

    def give(self, found: tuple[Any, float] | Exception) -> None:
        self.found = found
        self._turn.release()

    def wait(self, seconds: float) -> bool:
        return self._turn.acquire(timeout=seconds)


class Connections:
    """Those of this process's threads."""

    def __init__(self, handshake: Handshake, liveness: Liveness, most: int = MAX_CONNECTIONS) -> None:
        self._handshake, self._liveness, self._most = handshake, liveness, most
        self.leave()
        _all.add(self)

    def leave(self) -> None:
        """Forget everything, which another process uses."""
        #: (connection, since when it is idle), the longest idle first.
        self._idle: deque[tuple[Any, float]] = deque()
        self._attempts = Attempts(self._most)
        #: Callers in line, in order.
        self._line: OrderedDict[_Place, None] = OrderedDict()
        self._lock = threading.Lock()
        #: When unused connections are closed next, and the time from which a caller who gives one back looks at what
        #: there is to do: at once while others are in line.
        self._close_at = self._look_at = 0.0

    def send(self, command: Command, budget: Budget, asking: bool) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        connection, since = self._take(budget)
        budget.at_hand, asked = budget.left, time.monotonic()
        spend(budget)
        try:
            try:
                reply = self._exchange(connection, command, asking)
            except redis.exceptions.NoScriptError:
                if not isinstance(command, ScriptCall):
                    raise
                reply = self._exchange(connection, command.text, asking)  # nothing ran
        except redis.exceptions.ResponseError:
            self._give_back(connection, asked)
            raise
        except BaseException as error:
            if isinstance(error, Exception):
                self._liveness.lost(since)
            self._drop(connection)
            raise
        self._give_back(connection, asked)
        return reply

    def _exchange(self, connection: Any, command: Command, asking: bool) -> Any:
        if asking:  # holds for the one command that follows
            connection.send_packed_command(connection.pack_command("ASKING"))
            connection.read_response()
        connection.send_packed_command(packed(connection, command), check_health=False)
        return connection.read_response()

    def _take(self, budget: Budget) -> tuple[Any, float]:
        """A connection that is ready to send, and since when it has been idle."""
        while True:
            try:
                connection, since = self._idle.pop()
            except IndexError:
                connection, since = self._await_one(budget)
            usable = False
            try:
                usable = since > self._liveness.lost_at and not connection.is_stale()
            except (redis.exceptions.RedisError, OSError):
                pass
            finally:
                if not usable:
                    self._drop(connection)
            if usable:
                return connection, since

    def _await_one(self, budget: Budget) -> tuple[Any, float]:
        """Stand in line for a connection, and see to it that enough are made; raises why none could be."""
        place = _Place()
        with self._lock:
            self._line[place] = None
            self._look_at = 0.0  # before the look at what is idle: none is given back unseen in between
            self._hand_over()
        try:
            while place.found is None:
                self._make(budget)
                budget.wait_in_line(place.wait, self._liveness)
        except BaseException:
            with self._lock:
                self._line.pop(place, None)
                if isinstance(place.found, tuple):  # meanwhile
                    self._idle.append(place.found)
                    self._hand_over()
            raise
        if isinstance(place.found, Exception):
            raise place.found.with_traceback(None)
        budget.connected()
        return place.found

    def _hand_over(self) -> None:
        """Give what is idle to those in line; with the lock."""
        while self._line:
            try:
                found = self._idle.pop()
            except IndexError:
                break
            self._line.popitem(last=False)[0].give(found)
        if not self._line:
            self._look_at = self._close_at

    def _make(self, budget: Budget) -> None:
        with self._lock:
            begun = self._attempts.begin(len(self._line))
        if begun is not None and not self._start(begun):
            self._attempt(begun, max(budget.left, 0.001))
            budget.left -= time.monotonic() - begun

    def _start(self, begun: float) -> bool:
        """Make a connection in a thread; returns False where the process has no more threads, or ends."""
        try:
            threading.Thread(target=self._attempt, args=(begun,), name="ratequota-connect", daemon=True).start()
        except RuntimeError:
            return False
        return True

    def _attempt(self, begun: float | None, seconds: float = CONNECT_SECONDS) -> None:
        """Make a connection, and go on while callers wait for more."""
        attempts = self._attempts
        while begun is not None:
            try:
                connection = self._handshake.connect(seconds)
            except BaseException as error:
                failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
                with self._lock:
                    hopeless = attempts.failed(begun)
                    while hopeless and self._line:
                        self._line.popitem(last=False)[0].give(failure)
                return
            with self._lock:
                attempts.succeeded(begun)
                self._liveness.connected(begun, spare=not self._line)
                self._idle.append((connection, begun))
                self._hand_over()
                begun = attempts.begin(len(self._line))

    def _give_back(self, connection: Any, asked: float) -> None:
        now = self._liveness.answered(asked)
        self._idle.append((connection, now))
        if now > self._look_at:
            self._look(now)

    def _look(self, now: float) -> None:
        """Serve the line, and close what nobody uses."""
        with self._lock:
            due = now > self._close_at
            if due:
                self._close_at = now + IDLE_SECONDS
            self._hand_over()
        for unneeded in unused(self._idle) if due else ():
            self._drop(unneeded)

    def _drop(self, connection: Any) -> None:
        try:
            connection.disconnect()
        finally:
            with self._lock:
                self._attempts.open -= 1
                begun = self._attempts.begin(len(self._line))
            if begun is not None and not self._start(begun):
                with self._lock:
                    self._attempts.left(begun)

    def close(self) -> None:
        """Drop what is idle."""
        while True:
            try:
                connection, _ = self._idle.pop()
            except IndexError:
                return
            self._drop(connection)


_all: weakref.WeakSet[Connections] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for connections in _all:
        connections.leave()


os.register_at_fork(after_in_child=_leave_to_parent)
