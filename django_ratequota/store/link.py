"""A connection to one server: it sends a command and reads the reply, and its caller waits between these steps.

redis-py makes a connection in a thread, where it may wait. After that it belongs to no thread and to no event loop: a
thread polls its socket, a task has its loop watch it.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Callable, Generator
from io import BytesIO
from typing import Any

import redis

from .base import ServerActivity
from .commands import Command, ScriptCall

#: Most bytes that are read at once; more than a record of TLS, so that none is left where no poll reports it.
_READ_SIZE = 65_536


class Ready:
    """That a socket can be read, or written."""

    queued_for: ServerActivity | None = None

    def __init__(self, sock: Any, *, write: bool = False) -> None:
        self._number, self._write = sock.fileno(), write
        #: Waits some milliseconds at most; returns something true if it can.
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
        timer = loop.call_later(seconds, resolve, came)
        try:
            add(self._number, resolve, came)
            return await came
        finally:
            remove(self._number)
            timer.cancel()


class Link:
    """redis-py's socket. Once the connection is made, redis-py reads the replies there that it is fed."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock
        self.readable, self.writable = Ready(sock), Ready(sock, write=True)
        #: Whether the server has sent more than it was asked for.
        self.surplus = False
        self._fed: BytesIO | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def feed(self, reply: bytes) -> None:
        """Have redis-py parse a whole reply."""
        self._fed = BytesIO(reply)

    def recv(self, size: int) -> bytes:
        return (self._fed.read if self._fed else self.sock.recv)(size)

    def recv_into(self, buffer: bytearray) -> int:
        """For hiredis."""
        return (self._fed.readinto if self._fed else self.sock.recv_into)(buffer)

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
        yield link.readable
        data, awaited = link.receive()
        start = data.find(b"\r\n", 0, 8) + 2
        if data[:start] == b"$%d\r\n" % (len(data) - start - 2) and data[-2:] == b"\r\n":
            return data[start:-2]
        arrived, end = bytearray(data), end_of_reply()
        next(end)
        while not (size := end.send(arrived)):
            yield awaited
            data, awaited = link.receive()
            arrived += data
        link.surplus = size < len(arrived)
        link.feed(bytes(arrived[:size]))
        try:
            return self.read_response(disconnect_on_error=False)
        except redis.exceptions.ResponseError as error:
            if isinstance(error, redis.exceptions.NoScriptError) and isinstance(command, ScriptCall):
                return (yield from self.exchange(command.text, asking))  # nothing ran
            return error
        finally:
            link.feed(b"")  # a long reply would be kept with the connection

    def is_stale(self) -> bool:
        """Whether the server has closed it, or sent more than it was asked for; may raise ``OSError``."""
        link = self.link
        if link.surplus or not link.readable.poll(0):
            return link.surplus
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


def end_of_reply() -> Generator[int, bytearray, None]:
    """Take what has arrived of a reply, again whenever there is more of it; yield its length, 0 until all is there.

    redis-py's parser begins with the first element again each time, which takes seconds for a long list.
    """
    arrived = yield 0
    at, missing = 0, 1
    while missing:
        while (line_end := arrived.find(b"\r\n", at)) < 0:
            arrived = yield 0
        kind, line, at = arrived[at : at + 1], arrived[at + 1 : line_end], line_end + 2
        missing -= 1
        if kind == b"*":
            missing += max(int(line), 0)
        elif kind == b"$" and line != b"-1":
            at += int(line) + 2
            while len(arrived) < at:
                arrived = yield 0
    yield at


def resolve(future: asyncio.Future[bool]) -> None:
    """End the wait for it, if nothing else has."""
    if not future.done():
        future.set_result(True)


def _poll(number: int, write: bool) -> Callable[[float], object]:
    """Return a function that waits some milliseconds until the socket of this number can be read, or written."""
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(number, select.POLLOUT if write else select.POLLIN)
        return poll.poll
    reads, writes = ([], [number]) if write else ([number], [])
    return lambda milliseconds: any(select.select(reads, writes, [], milliseconds / 1000))
