"""This process's connections to one server, for its threads.

Connections are made beside the decisions that need them, by a thread of their own, a few at a time. So one that
misses its decision's deadline serves the next, and many cold callers do not time each other out. A connection whose
reply did not arrive whole is dropped.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from typing import Any

import redis

from .attempts import Attempts, Liveness, packed
from .budget import Budget
from .handshake import CONNECT_SECONDS, Handshake
from .scripts import Command, Run
from .sockets import spend


class Connections:
    """Those of this process's threads."""

    def __init__(self, handshake: Handshake, liveness: Liveness) -> None:
        self._handshake, self._liveness = handshake, liveness
        self.leave()
        _all.add(self)

    def leave(self) -> None:
        """Forget everything, which another process uses."""
        #: (connection, since when it is idle), the longest idle first.
        self._idle: deque[tuple[Any, float]] = deque()
        self._attempts = Attempts()
        self._waiting = 0
        self._changed = threading.Condition(threading.Lock())

    def send(self, command: Command, budget: Budget, asking: bool) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        connection, since = self._take(budget)
        budget.at_hand, asked = budget.left, time.monotonic()
        spend(budget)
        try:
            try:
                reply = self._exchange(connection, command, asking)
            except redis.exceptions.NoScriptError:
                if not isinstance(command, Run):
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
                self._await_one(budget)
                continue
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

    def _await_one(self, budget: Budget) -> None:
        """Wait until a connection is idle, and see to it that enough are made; raises why none could be."""
        attempts, failures = self._attempts, self._attempts.failures
        with self._changed:
            self._waiting += 1
        try:
            while not self._idle:
                if attempts.failures != failures and not attempts.open and attempts.error is not None:
                    raise attempts.error.with_traceback(None)
                self._make(budget)
                with self._changed:
                    if not self._idle:
                        budget.wait_in_line(self._changed.wait, self._liveness)
            budget.connected()
        finally:
            with self._changed:
                self._waiting -= 1

    def _make(self, budget: Budget) -> None:
        with self._changed:
            begun = self._begin()
        if begun is None:
            return
        try:
            threading.Thread(target=self._attempt, args=(begun,), name="ratequota-connect", daemon=True).start()
        except RuntimeError:  # the process has no more threads, or ends
            self._attempt(begun, max(budget.left, 0.001))
            budget.left -= time.monotonic() - begun

    def _attempt(self, begun: float | None, seconds: float = CONNECT_SECONDS) -> None:
        """Make a connection, and go on while callers wait for more."""
        changed, attempts = self._changed, self._attempts
        while begun is not None:
            try:
                connection = self._handshake.connect(seconds)
            except BaseException as error:
                with changed:
                    attempts.failed(begun, error if isinstance(error, Exception) else RuntimeError(repr(error)))
                    changed.notify_all()
                return
            with changed:
                attempts.succeeded(begun)
                self._liveness.connected(begun, spare=self._waiting <= len(self._idle))
                self._idle.append((connection, begun))
                changed.notify()
                begun = self._begin()

    def _begin(self) -> float | None:
        # Who waits may not have woken up yet to take what is idle.
        return self._attempts.begin(self._waiting - len(self._idle))

    def _give_back(self, connection: Any, asked: float) -> None:
        self._idle.append((connection, self._liveness.answered(asked)))
        if self._waiting:
            with self._changed:
                self._changed.notify()

    def _drop(self, connection: Any) -> None:
        with self._changed:
            self._attempts.open -= 1
        connection.disconnect()

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
