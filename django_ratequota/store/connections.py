"""The way of a thread's command to one server: a pooled connection, the command sent, its reply awaited and read.

A thread of its own makes connections, beside the decisions that need them. So a connection that misses its
decision's deadline serves the next one, and many callers at a cold start do not time each other out: they wait in a
queue and are served in order. A connection whose reply did not arrive whole is closed, and so is an idle one.
"""

from __future__ import annotations

import os
import select
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import redis

from ..utils import forks
from .base import Budget, ServerActivity
from .commands import Command, ScriptCall
from .pool import CONNECT_SECONDS, Idle, Pool

#: Most bytes that are read at once; redis-py's parser reads as many.
_READ_SIZE = 65_536
#: ``current.budget``: how long this thread's reads and writes may wait.
current = threading.local()


class Connections(Pool):
    """The connections of this process's threads."""

    def __init__(self, connect: Callable[[float], Any], activity: ServerActivity, limit: int) -> None:
        """``connect(seconds)`` makes a connection."""
        self._make = connect
        super().__init__(activity, limit)

    def send(self, command: Command, budget: Budget, asking: bool = False) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        connection, idle_since = self._take(budget)
        budget.left_at_send, sent_at = budget.left, time.monotonic()
        current.budget = budget
        try:
            reply = self._exchange(connection, command, asking)
        except BaseException as error:
            if isinstance(error, Exception):
                self._activity.distrust(idle_since)
            self._drop(connection)
            raise
        unused = self._put(connection, self._activity.replied(sent_at))
        if unused is not None:
            self._drop(unused)
        if isinstance(reply, redis.exceptions.ResponseError):
            raise reply
        return reply

    def _exchange(self, connection: Any, command: Command, asking: bool) -> Any:
        """Send the command and return its reply, be it an error."""
        try:
            if asking:  # holds for the one command that follows
                connection.send_packed_command(connection.pack_command("ASKING"))
                connection.read_response()
            connection.send_packed_command(pack(connection, command), check_health=False)
            return connection.read_reply()
        except redis.exceptions.ResponseError as error:
            if isinstance(error, redis.exceptions.NoScriptError) and isinstance(command, ScriptCall):
                return self._exchange(connection, command.text, asking)  # nothing ran
            return error

    def _take(self, budget: Budget) -> Idle:
        """Return a connection that is ready to send, and since when it has been idle."""
        if forks.pid != os.getpid():
            forks.check()
        while True:
            try:
                connection, idle_since = self.idle.pop()
            except IndexError:
                connection, idle_since = self._wait_for_one(budget)
            usable = False
            try:
                usable = idle_since > self._activity.stale_since and not connection.is_stale()
            except (redis.exceptions.RedisError, OSError):
                pass
            finally:
                if not usable:
                    self._drop(connection)
            if usable:
                return connection, idle_since

    def _wait_for_one(self, budget: Budget) -> Idle:
        """Wait in the queue for a connection, beginning connects meanwhile; raises the error of a connect."""
        waiter: Future[Idle] = Future()
        with self._lock:
            self.queue[waiter] = None  # before looking at idle ones, so that none that is returned goes unseen
            self._serve_queue()
        try:
            while not waiter.done():
                self._connect_if_needed(budget)
                budget.wait_in_queue(lambda seconds: wait([waiter], seconds), self._activity)
        except BaseException:
            with self._lock:
                self.queue.pop(waiter, None)
                if waiter.done() and waiter.exception() is None:  # it came meanwhile
                    self.idle.append(waiter.result())
                    self._serve_queue()
            raise
        if error := waiter.exception():
            raise error.with_traceback(None)
        budget.connected()
        return waiter.result()

    def _connect_if_needed(self, budget: Budget | None = None) -> None:
        """Connect in a thread; where the process can start no more threads, or ends, here and within the budget."""
        with self._lock:
            began_at = self.begin_connect()
        if began_at is None:
            return
        try:
            threading.Thread(target=self._connect, args=(began_at,), name="ratequota-connect", daemon=True).start()
        except RuntimeError:
            if budget is None:
                with self._lock:
                    self.connecting.remove(began_at)
                return
            self._connect(began_at, max(budget.left, 0.001))
            budget.left -= time.monotonic() - began_at

    def _connect(self, began_at: float | None, seconds: float = CONNECT_SECONDS) -> None:
        """Make a connection, and more while callers wait for them."""
        while began_at is not None:
            try:
                connection = self._make(seconds)
            except BaseException as error:
                with self._lock:
                    self.connect_failed(
                        error if isinstance(error, Exception) else RuntimeError(repr(error)), began_at
                    )
                return
            with self._lock:
                self.connected(connection, began_at)
                began_at = self.begin_connect()

    def _drop(self, connection: Any) -> None:
        try:
            connection.disconnect()
        finally:
            with self._lock:
                self.open -= 1
            self._connect_if_needed()

    def close(self) -> None:
        """Close all idle connections."""
        while True:
            try:
                connection, _ = self.idle.pop()
            except IndexError:
                return
            self._drop(connection)


class _PatientSocket:
    """A non-blocking socket whose reads and writes wait, all together, as long as the thread's budget allows.

    redis-py's timeout starts again with each step: a slow server took six of them on a new connection.
    """

    def __init__(self, sock: Any) -> None:
        sock.setblocking(False)
        self._sock = sock
        #: TLS may hold decrypted bytes that a poll does not report.
        self.encrypted = isinstance(sock, ssl.SSLSocket)
        self._waits = True
        #: Read already, and still to be parsed.
        self.unparsed = b""
        #: Waits some milliseconds for something to read.
        self.poll = _poll(sock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def settimeout(self, seconds: float | None) -> None:
        """Do not wait for 0; any other wait is up to the budget."""
        self._waits = seconds != 0

    def recv(self, size: int) -> bytes:
        if self.unparsed:
            data, self.unparsed = self.unparsed[:size], self.unparsed[size:]
            return data
        if self._waits and not self.encrypted:
            current.budget.wait(self.poll)
        while True:
            try:
                return self._sock.recv(size)  # type: ignore[no-any-return]
            except (BlockingIOError, ssl.SSLWantReadError):
                if not self._waits:
                    raise
                current.budget.wait(self.poll)
            except ssl.SSLWantWriteError:
                current.budget.wait(_poll(self._sock, write=True))

    def recv_into(self, buffer: bytearray) -> int:
        """For hiredis."""
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def sendall(self, data: Any) -> None:
        while True:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, ssl.SSLWantWriteError):
                current.budget.wait(_poll(self._sock, write=True))
            except ssl.SSLWantReadError:
                current.budget.wait(self.poll)
            else:
                if sent >= len(data):
                    return
                data = memoryview(data)[sent:]


class _Patient:
    """A connection of redis-py with such a socket."""

    _link: _PatientSocket

    def _connect(self) -> Any:
        self._link = _PatientSocket(super()._connect())  # type: ignore[misc]
        return self._link

    def read_reply(self) -> Any:
        """Return the reply: a script's is one short text that arrives whole; redis-py parses all others."""
        data = self._link.recv(_READ_SIZE)
        start = data.find(b"\r\n", 0, 8) + 2
        if data[:1] == b"$" and data[1 : start - 2] == b"%d" % (len(data) - start - 2) and data[-2:] == b"\r\n":
            return data[start:-2]
        self._link.unparsed = data
        return self.read_response()  # type: ignore[attr-defined]

    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent something without a command."""
        # With TLS, bytes that arrived may be no reply.
        return bool(self._link.poll(0)) and bool(not self._link.encrypted or self.can_read())  # type: ignore[attr-defined]


class PatientConnection(_Patient, redis.Connection):
    """By TCP."""


class PatientSSLConnection(_Patient, redis.SSLConnection):
    """By TLS."""


class PatientUnixConnection(_Patient, redis.UnixDomainSocketConnection):
    """By a Unix socket."""


def pack(connection: Any, command: Command) -> Any:
    """Return the command as it is encoded on the wire."""
    if not isinstance(command, ScriptCall):
        return connection.pack_command(*command)
    command.packed = command.packed or connection.pack_command(*command)
    return command.packed


def _poll(sock: Any, *, write: bool = False) -> Callable[[float], object]:
    """Return a function that waits some milliseconds until the socket can be read, or written."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLOUT if write else select.POLLIN)
        return poll.poll
    reads, writes = ([], [sock]) if write else ([sock], [])
    return lambda milliseconds: any(select.select(reads, writes, [], milliseconds / 1000))
