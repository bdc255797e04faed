"""Sockets for this process's threads, whose reads and writes wait as long as the decision's budget allows."""

from __future__ import annotations

import select
import ssl
import threading
from collections.abc import Callable
from typing import Any

from .budget import Budget

#: The budget of this thread's current command.
_current = threading.local()


def set_thread_budget(budget: Budget) -> None:
    """Let this thread's reads and writes wait as long as ``budget`` allows."""
    _current.budget = budget


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
        self._poll: Any = None
        if hasattr(select, "poll"):
            self._poll = select.poll()
            self._poll.register(sock, select.POLLIN)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def settimeout(self, seconds: float | None) -> None:
        """Do not wait for 0; any other wait is up to the budget."""
        self._waits = seconds != 0

    def readable(self, seconds: float) -> bool:
        """Wait until there is something to read, ``seconds`` at most."""
        if self._poll is not None:
            return bool(self._poll.poll(seconds * 1000))
        return bool(select.select([self._sock], [], [], seconds)[0])

    def _writable(self, seconds: float) -> bool:
        if self._poll is None:
            return bool(select.select([], [self._sock], [], seconds)[1])
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        return bool(poll.poll(seconds * 1000))

    def recv(self, *args: Any) -> Any:
        return self._read(self._sock.recv, *args)

    def recv_into(self, *args: Any) -> Any:
        return self._read(self._sock.recv_into, *args)

    def sendall(self, data: Any) -> None:
        sent = self._send(data)
        if sent < len(data):
            view = memoryview(data)
            while sent < len(view):
                sent += self._send(view[sent:])

    def _send(self, data: Any) -> int:
        while True:
            try:
                return int(self._sock.send(data))
            except (BlockingIOError, ssl.SSLWantWriteError):
                _current.budget.wait(self._writable)
            except ssl.SSLWantReadError:
                _current.budget.wait(self.readable)

    def _read(self, read: Callable[..., Any], *args: Any) -> Any:
        if self._waits and not self.encrypted:
            _current.budget.wait(self.readable)
        while True:
            try:
                return read(*args)
            except (BlockingIOError, ssl.SSLWantReadError):
                if not self._waits:
                    raise
                _current.budget.wait(self.readable)
            except ssl.SSLWantWriteError:
                _current.budget.wait(self._writable)


def patient(plain: type) -> type:
    """Return a subclass of redis-py's connection class that uses such a socket."""

    class Patient(plain):  # type: ignore[misc]
        def _connect(self) -> Any:
            self._link = _PatientSocket(super()._connect())
            return self._link

        def is_stale(self) -> bool:
            """Whether the server has closed it, or sent something without a command."""
            # With TLS, bytes that arrived may be no reply.
            return self._link.readable(0) and bool(not self._link.encrypted or self.can_read())

    Patient.__name__ = plain.__name__
    return Patient
