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
from .base import Budget, is_alarm
from .commands import Command, ScriptCall
from .pool import CONNECT_SECONDS, Attempt, Idle, Pool

#: Most bytes that are read at once; redis-py's parser reads as many.
_READ_SIZE = 65_536


class Connections(Pool):
    """The connections of this process's threads."""

    def send(self, command: Command, budget: Budget, asking: bool = False) -> Any:
        """Send one command once and return its reply, within ``budget``; raises what redis-py raises."""
        connection, budget.idle_since = self._take(budget)
        budget.left_at_send, sent_at = budget.left, time.monotonic()
        connection.link.budget = budget
        try:
            reply = connection.exchange(command, asking)
        except BaseException:
            self._drop(connection)
            raise
        unused = self._put(connection, self._activity.replied(sent_at))
        if unused is not None:
            self._drop(unused)
        if isinstance(reply, redis.exceptions.ResponseError):
            raise reply
        return reply

    def _take(self, budget: Budget) -> Idle:
        """Return a connection that is ready to send, and since when it has been idle."""
        if forks.pid != os.getpid():
            forks.check()
        while True:
            try:
                connection, idle_since = self.idle.pop()
            except IndexError:
                connection, idle_since = self._wait_for_one(budget)
            try:
                if idle_since > self._activity.stale_since and not connection.is_stale():
                    return connection, idle_since
            except OSError as error:
                if is_alarm(error):
                    raise
            self._drop(connection)

    def _wait_for_one(self, budget: Budget) -> Idle:
        """Wait in the queue for a connection, beginning connects meanwhile; raises the error of a connect."""
        waiter: Future[Idle] = Future()
        try:
            with self._lock:
                self.queue[waiter] = None  # before looking at idle ones, so that none that is returned goes unseen
                self._serve_queue()
            while not waiter.done():
                self._connect_if_needed(budget)
                budget.wait_in_queue(lambda seconds: wait([waiter], seconds), self._activity)
        except BaseException:
            with self._lock:
                self._leave_queue(waiter)
            raise
        if error := waiter.exception():
            raise error.with_traceback(None)
        budget.connected()
        return waiter.result()

    def _connect_if_needed(self, budget: Budget | None = None) -> None:
        """Connect in a thread; where the process can start no more threads, or ends, here and within the budget."""
        with self._lock:
            attempt = self.begin_connect()
        if attempt is None:
            return
        try:
            threading.Thread(target=self._connect, args=(attempt,), name="ratequota-connect", daemon=True).start()
        except RuntimeError:
            if budget is not None:
                self._connect(attempt, max(budget.left, 0.001))
                budget.left -= time.monotonic() - attempt.began_at

    def _connect(self, attempt: Attempt | None, seconds: float = CONNECT_SECONDS) -> None:
        """Make a connection, and more while callers wait for them."""
        while attempt is not None:
            try:
                connection = self._make(seconds)
            except (redis.RedisError, OSError) as error:
                with self._lock:
                    self.connect_failed(error, attempt)
                return
            with self._lock:
                self.connected(connection, attempt)
                attempt = self.begin_connect()

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        self.open.discard(connection)
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
    """A non-blocking socket whose reads and writes wait, all together, as long as its budget allows.

    redis-py's timeout starts again with each step: a slow server took six of them on a new connection.
    """

    def __init__(self, sock: Any, budget: Budget) -> None:
        sock.setblocking(False)
        self._sock = sock
        #: How long reads and writes may wait; each command sets its own.
        self.budget = budget
        #: TLS may hold decrypted bytes that a poll does not report.
        self.encrypted = isinstance(sock, ssl.SSLSocket)
        #: Read already and still to be parsed, the next part last.
        self.unread: list[bytes] = []
        #: Waits some milliseconds for something to read.
        self.poll = _poll(sock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def settimeout(self, seconds: float | None) -> None:
        """Do nothing: any wait is up to the budget."""

    def receive(self, size: int = _READ_SIZE) -> bytes:
        """Return the bytes that have arrived."""
        if not self.encrypted:
            self.budget.wait(self.poll)
        while True:
            try:
                return self._sock.recv(size)  # type: ignore[no-any-return]
            except (BlockingIOError, ssl.SSLWantReadError):
                self.budget.wait(self.poll)
            except ssl.SSLWantWriteError:
                self.budget.wait(_poll(self._sock, write=True))

    def unreceive(self, data: bytes) -> None:
        """Keep bytes for ``recv``, the last line apart: redis-py asks for it only if its reply ends there."""
        last = data.rfind(b"\n", 0, -1) + 1
        self.unread = [part for part in (data[last:], data[:last]) if part]

    def recv(self, size: int) -> bytes:
        if not self.unread:
            self.unreceive(self.receive(size))
        return self.unread.pop() if self.unread else b""

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
                self.budget.wait(_poll(self._sock, write=True))
            except ssl.SSLWantReadError:
                self.budget.wait(self.poll)
            else:
                if sent >= len(data):
                    return
                data = memoryview(data)[sent:]


class _Patient:
    """A connection of redis-py with such a socket."""

    link: _PatientSocket

    def _connect(self) -> Any:
        budget = Budget(self.socket_timeout)  # type: ignore[attr-defined]
        self.link = _PatientSocket(super()._connect(), budget)  # type: ignore[misc]
        return self.link

    def exchange(self: Any, command: Command, asking: bool) -> Any:
        """Send the command and return its reply, be it an error.

        A script's reply is one short text that arrives whole; redis-py parses all others. It sends nothing itself,
        because it would make an error of its own of whatever a signal's handler raises meanwhile.
        """
        link = self.link
        try:
            if asking:  # holds for the one command that follows
                link.sendall(pack(self, ("ASKING",)))
                self.read_response()
            link.sendall(pack(self, command))
            data = link.receive()
            start = data.find(b"\r\n", 0, 8) + 2
            if data[:1] == b"$" and data[1 : start - 2] == b"%d" % (len(data) - start - 2) and data[-2:] == b"\r\n":
                return data[start:-2]
            link.unreceive(data)
            return self.read_response()
        except redis.exceptions.ResponseError as error:
            if isinstance(error, redis.exceptions.NoScriptError) and isinstance(command, ScriptCall):
                return self.exchange(command.text, asking)  # nothing ran
            return error

    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent more than it was asked for; may raise ``OSError``."""
        link = self.link
        if link.unread or not link.poll(0):
            return bool(link.unread)
        try:  # with TLS, bytes that arrived may be no reply
            return not link.encrypted or link._sock.recv(1) is not None
        except ssl.SSLWantReadError:
            return False


class PatientConnection(_Patient, redis.Connection):
    """By TCP."""


class PatientSSLConnection(_Patient, redis.SSLConnection):
    """By TLS."""


class PatientUnixConnection(_Patient, redis.UnixDomainSocketConnection):
    """By a Unix socket."""


def pack(connection: Any, command: Command) -> bytes:
    """Return the command as it is encoded on the wire."""
    if not isinstance(command, ScriptCall):
        return b"".join(connection.pack_command(*command))
    command.packed = command.packed or b"".join(connection.pack_command(*command))
    return command.packed


def _poll(sock: Any, *, write: bool = False) -> Callable[[float], object]:
    """Return a function that waits some milliseconds until the socket can be read, or written."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLOUT if write else select.POLLIN)
        return poll.poll
    reads, writes = ([], [sock]) if write else ([sock], [])
    return lambda milliseconds: any(select.select(reads, writes, [], milliseconds / 1000))
