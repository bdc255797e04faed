"""A network to break: a loopback TCP proxy in front of a server, with knobs that turn while it runs."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from io import BufferedReader
from typing import Self

from . import Address

#: What clients send of their own accord when they connect; never counted as a request.
_GREETINGS = frozenset({b"HELLO", b"CLIENT", b"AUTH", b"SELECT", b"PING"})


class Proxy(Address):
    """Passes bytes between its clients and the server behind it; two threads per connection.

    It tells requests apart, greetings (HELLO, CLIENT, AUTH, SELECT, PING) aside. Of clients that await each reply
    before the next request, as redis-py's do, it so knows which reply answers which.
    """

    def __init__(self, host: str, port: int) -> None:
        #: Seconds added before each reply.
        self.delay = 0.0
        #: Seconds between the bytes of a reply; 0 = all at once.
        self.trickle = 0.0
        #: How many of the next requests are passed on before the cuts below apply.
        self.spare = 0
        #: How many of the next requests never reach the server: the connection is closed instead.
        self.cut_before_request_is_passed_on = 0
        #: How many of the next requests are executed and then never answered: the connection is closed instead.
        self.cut_after_execution = 0
        #: Connections accepted so far.
        self.accepted = 0
        #: Requests so far without logins; cut ones included.
        self.requests = 0
        self._target = (host, port)
        self._lock = threading.Lock()
        self._thawed, self._closed = threading.Event(), threading.Event()
        self._thawed.set()
        self._links: list[_Link] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def open(self) -> int:
        """Connections that are open now."""
        with self._lock:
            return sum(not link.ended for link in self._links)

    def freeze(self) -> None:
        """Accept connections and requests, but forward no bytes in either direction from now on."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Forward the held bytes, and all later ones."""
        self._thawed.set()

    def retarget(self, host: str, port: int) -> None:
        """Forward new connections there; open ones stay."""
        self._target = (host, port)

    def hang_up(self) -> None:
        """Close the connections that are open."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def close(self) -> None:
        """Close everything and end every thread."""
        self._closed.set()
        self._thawed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(timeout=30)
        self.hang_up()
        for link in self._links:
            link.join()
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.accepted += 1
                self._links = [link for link in self._links if not link.finished]
                self._links.append(_Link(self, connection))

    def _fate(self) -> str:
        """The fate of the next request: "cut", "swallow" its reply, or "pass"."""
        with self._lock:
            self.requests += 1
            if self.spare > 0:
                self.spare -= 1
                return "pass"
            if self.cut_before_request_is_passed_on > 0:
                self.cut_before_request_is_passed_on -= 1
                return "cut"
            if self.cut_after_execution > 0:
                self.cut_after_execution -= 1
                return "swallow"
            return "pass"


class _Link:
    """One connection and its other half, with a thread each way."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self._proxy, self._client = proxy, client
        self._server: socket.socket | None = None
        self._swallow = False
        self.ended = False
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._requests)]
        self._threads[0].start()

    def close(self) -> None:
        """Wake both threads, which then close their sockets."""
        with self._lock:
            self.ended = True
            for half in (self._client, self._server):
                if half is not None:
                    with suppress(OSError):
                        half.shutdown(socket.SHUT_RDWR)

    @property
    def finished(self) -> bool:
        """Whether its threads have ended."""
        return self.ended and not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=30)
            assert not thread.is_alive()

    def _requests(self) -> None:
        back: threading.Thread | None = None
        try:
            with self._client.makefile("rb") as stream:
                self._proxy._thawed.wait()
                server = socket.create_connection(self._proxy._target, timeout=10)
                server.settimeout(None)
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._server = server
                    if self.ended:
                        return
                back = threading.Thread(target=self._replies, args=(server,))
                back.start()
                while frame := _frame(stream):
                    self._proxy._thawed.wait()
                    fate = "pass" if frame[0] in _GREETINGS else self._proxy._fate()
                    if fate == "cut":
                        return
                    self._swallow = fate == "swallow"
                    server.sendall(frame[1])
        except (OSError, ValueError):
            pass
        finally:
            self.close()
            if back is not None:
                back.join()
            self._client.close()
            if self._server is not None:
                self._server.close()

    def _replies(self, server: socket.socket) -> None:
        proxy = self._proxy
        try:
            while chunk := server.recv(65_536):
                if proxy.delay:
                    proxy._closed.wait(proxy.delay)
                proxy._thawed.wait()
                if self._swallow:
                    return
                if proxy.trickle:
                    for at in range(len(chunk)):
                        self._client.sendall(chunk[at : at + 1])
                        proxy._closed.wait(proxy.trickle)
                else:
                    self._client.sendall(chunk)
        except OSError:
            pass
        finally:
            self.close()


def _frame(stream: BufferedReader) -> tuple[bytes, bytes] | None:
    """The next request as its name and its bytes; None at the end."""
    header = stream.readline()
    if not header.startswith(b"*"):
        return (header.split(b" ")[0].strip().upper(), header) if header else None
    parts, name = [header], b""
    for number in range(int(header[1:])):
        length = stream.readline()
        value = stream.read(int(length[1:]) + 2)
        parts += [length, value]
        if number == 0:
            name = value[:-2].upper()
    return name, b"".join(parts)
