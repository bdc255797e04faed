"""A connection to one server: a command is sent and its reply is read without waiting, and whoever runs it waits.

redis-py makes a connection in a thread, where it may wait. After that it belongs to no thread and to no event loop: a
thread polls its socket, a task has its loop watch it.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import redis

from .base import ServerActivity
from .commands import Command, ScriptCall

#: Most bytes that are read at once; more than a record of TLS, so that none is left where no poll reports it.
_READ_SIZE = 65_536


class _Incomplete(Exception):
    """The rest of a reply has not arrived yet."""


class Ready:
    """That a socket can be read, or written."""

    queued_for: ServerActivity | None = None

    def __init__(self, sock: Any, *, write: bool = False) -> None:
        self._number, self._write = sock.fileno(), write
        #: Waits for so many milliseconds at most; returns something true if it can.
        self.poll = _poll(self._number, write)

    async def apoll(self, milliseconds: float) -> object:
        """``poll``, awaited."""
        try:
            return await self._watch(milliseconds / 1000)
        except NotImplementedError:  # the default loop of Windows
            return await asyncio.to_thread(self.poll, milliseconds)

    async def _watch(self, seconds: float) -> object:
        loop = asyncio.get_running_loop()
        add, remove = (loop.add_writer, loop.remove_writer) if self._write else (loop.add_reader, loop.remove_reader)
        came = loop.create_future()
        timer = loop.call_later(seconds, _set, came, False)
        try:
            add(self._number, _set, came, True)
            return await came
        finally:
            remove(self._number)
            timer.cancel()


class Link:
    """redis-py's socket. Once the connection is made, redis-py finds there what it was fed, and nothing else."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock
        self.readable, self.writable = Ready(sock), Ready(sock, write=True)
        #: What redis-py is still to parse, the next part last.
        self.unread: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def feed(self, data: bytes) -> None:
        """Have redis-py parse it, the last line apart: that is only asked for if the reply ends there."""
        last = data.rfind(b"\n", 0, -1) + 1
        self.unread = [part for part in (data[last:], data[:last]) if part]

    def recv(self, size: int) -> bytes:
        if self.unread:
            return self.unread.pop()
        if self.sock.gettimeout() == 0:
            raise _Incomplete
        return self.sock.recv(size)  # type: ignore[no-any-return]

    def recv_into(self, buffer: bytearray) -> int:
        """For hiredis."""
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def send(self, data: bytes) -> tuple[bytes, Ready | None]:
        """Send what can be sent now; returns the rest, and what to wait for before that."""
        try:
            return data[self.sock.send(data) :], None
        except (BlockingIOError, ssl.SSLWantWriteError):
            return data, self.writable
        except ssl.SSLWantReadError:
            return data, self.readable

    def receive(self) -> tuple[bytes, Ready]:
        """Return what has arrived, and what to wait for before more of it."""
        try:
            data = self.sock.recv(_READ_SIZE)
        except (BlockingIOError, ssl.SSLWantReadError):
            return b"", self.readable
        except ssl.SSLWantWriteError:
            return b"", self.writable
        if not data:
            raise redis.ConnectionError("the server has closed the connection")
        return data, self.readable


class _Linked:
    """A connection of redis-py with such a socket."""

    link: Link

    def _connect(self) -> Any:
        self.link = Link(super()._connect())  # type: ignore[misc]
        return self.link

    def exchange(self: Any, command: Command, asking: bool = False) -> Generator[Ready, object, Any]:
        """Send the command and return its reply, be it an error; yields what to wait for.

        A script's reply is one short text that arrives whole; redis-py parses all others.
        """
        link, awaited = self.link, None
        if asking:  # holds for the one command that follows
            yield from self.exchange(("ASKING",))
        data = pack(self, command)
        while data:
            data, awaited = link.send(data)
            if awaited:
                yield awaited
        awaited, parsing = link.readable, False
        while True:
            yield awaited
            data, awaited = link.receive()
            start = data.find(b"\r\n", 0, 8) + 2
            if not parsing and data[:start] == b"$%d\r\n" % (len(data) - start - 2) and data[-2:] == b"\r\n":
                return data[start:-2]
            parsing = parsing or bool(data)
            link.feed(data)
            try:
                with suppress(_Incomplete):
                    return self.read_response(disconnect_on_error=False)
            except redis.exceptions.ResponseError as error:
                if isinstance(error, redis.exceptions.NoScriptError) and isinstance(command, ScriptCall):
                    return (yield from self.exchange(command.text, asking))  # nothing ran
                return error

    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent more than it was asked for; may raise ``OSError``."""
        link = self.link
        if link.unread or not link.readable.poll(0):
            return bool(link.unread)
        try:
            link.sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):  # what arrived was of TLS itself
            return False
        return True


class LinkedConnection(_Linked, redis.Connection):
    """By TCP."""


class LinkedSSLConnection(_Linked, redis.SSLConnection):
    """By TLS."""


class LinkedUnixConnection(_Linked, redis.UnixDomainSocketConnection):
    """By a Unix socket."""


def pack(connection: Any, command: Command) -> bytes:
    """Return the command as it is encoded on the wire."""
    if not isinstance(command, ScriptCall):
        return b"".join(connection.pack_command(*command))
    command.packed = command.packed or b"".join(connection.pack_command(*command))
    return command.packed


def _set(future: asyncio.Future[bool], came: bool) -> None:
    if not future.done():
        future.set_result(came)


def _poll(number: int, write: bool) -> Callable[[float], object]:
    """Return a function that waits some milliseconds until the socket of this number can be read, or written."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(number, select.POLLOUT if write else select.POLLIN)
        return poll.poll
    reads, writes = ([], [number]) if write else ([number], [])
    return lambda milliseconds: any(select.select(reads, writes, [], milliseconds / 1000))
