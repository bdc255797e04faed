"""A network to break: a loopback TCP relay that delays, holds, loses and forgets bytes."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import Any, Self

from . import Address

#: What clients send of their own accord when they connect; never counted as a request.
GREETINGS = frozenset({b"HELLO", b"CLIENT", b"AUTH", b"SELECT", b"PING"})


class Wire(Address):
    """Relays bytes, of whatever protocol, between its clients and the server behind it; one thread.

    Of clients that await each reply before the next request, as redis-py's do, it tells requests apart.
    """

    def __init__(self, target: Address, round_trip: float = 0.0, context: ssl.SSLContext | None = None) -> None:
        """``round_trip`` is in seconds; a new connection takes one before its first byte, as TCP's handshake does.

        With ``context`` its clients speak TLS.
        """
        self.round_trip = round_trip
        #: Where new connections go.
        self.target = target
        #: Seconds added before each reply, and between its bytes.
        self.delay = self.trickle = 0.0
        #: How many of the next requests are passed on before the cuts below apply.
        self.spare = 0
        #: How many of the next requests never reach the server: the connection is closed instead.
        self.cut_before_request_is_passed_on = 0
        #: How many of the next requests are executed and then never answered: the connection is closed instead.
        self.cut_after_execution = 0
        #: Requests so far without greetings; cut ones included.
        self.requests = 0
        #: Requests that came in on forgotten connections.
        self.unheard = 0
        #: Connections that are open now.
        self.pipes: set[_Pipe] = set()
        #: Whether replies are held back, and requests too.
        self.held = self.frozen = False
        self.loop: Any = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._server = self._run(self.loop.create_server(lambda: _Pipe(self), "127.0.0.1", 0, ssl=context))
        self.host, self.port = self._server.sockets[0].getsockname()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def asked(self) -> int:
        """Connections with a request whose reply has not come back; their first one aside."""
        return sum(pipe.asked and not pipe.forgotten for pipe in list(self.pipes))

    def hold(self) -> None:
        """Hold replies back, except the first one of each connection."""
        self.held = True

    def freeze(self) -> None:
        """Accept connections and requests, but forward no bytes in either direction from now on."""
        self.frozen = True

    def thaw(self) -> None:
        """Forward the held bytes, and all later ones."""

        async def thaw() -> None:
            self.held = self.frozen = False
            for pipe in list(self.pipes):
                pipe.thaw()

        self._run(thaw())

    def hang_up(self, *, goodbye: bool = False) -> None:
        """Close the connections that are open; with ``goodbye`` as TLS does it, not by ending TCP alone."""

        async def hang_up() -> None:
            ending = set(self.pipes)
            for pipe in ending:
                if goodbye:
                    pipe.client.close()
                else:
                    pipe.abort()
            while not goodbye and not ending.isdisjoint(self.pipes):  # noqa: ASYNC110 - the loop tells each pipe
                await asyncio.sleep(0)  # a turn of the loop

        self._run(hang_up())

    def interject(self, data: bytes) -> None:
        """Send ``data`` to every client, as a reply that none of them asked for."""

        async def interject() -> None:
            for pipe in list(self.pipes):
                pipe.client.write(data)

        self._run(interject())

    def forget(self, *, reset: bool) -> None:
        """Forward nothing more on open connections: silently, or with a reset at the next byte."""

        async def forget() -> None:
            for pipe in self.pipes:
                pipe.forgotten, pipe.resets = True, reset

        self._run(forget())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        async def close() -> None:
            self._server.close()
            await asyncio.sleep(0)  # a turn of the loop: what was accepted begins
            under_way = asyncio.all_tasks() - {asyncio.current_task()}
            for task in under_way:  # handshakes of TLS, whose connections are no pipes yet
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            for transport in list(self.loop._transports.values()):  # also of connections that are no pipes
                transport.abort()
            while self.pipes:  # noqa: ASYNC110 - the loop tells each pipe that it is closed
                await asyncio.sleep(0)  # a turn of the loop

        self._run(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=30)
        self.loop.close()

    def fate(self, request: bytes) -> str:
        """The fate of the next request: "cut", "swallow" its reply, or "pass"."""
        words = request.upper().split(b"\r\n", 3)
        if not GREETINGS.isdisjoint(words[2:3]):
            return "pass"
        self.requests += 1
        if self.spare > 0:
            self.spare -= 1
        elif self.cut_before_request_is_passed_on > 0:
            self.cut_before_request_is_passed_on -= 1
            return "cut"
        elif self.cut_after_execution > 0:
            self.cut_after_execution -= 1
            return "swallow"
        return "pass"

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)


class _Pipe(asyncio.Protocol):
    """One connection: this is the client's end of it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.asked = self.forgotten = self.resets = False
        self._greeted = self._lost = self._awaits_reply = False
        self._fate = "pass"
        #: What the client sent before the server was connected or while the wire is frozen, and replies held back.
        self._early: list[bytes] = []
        self._held: list[bytes] = []
        self._server: asyncio.Transport | None = None
        self._connecting: asyncio.Task[Any] | None = None

    def connection_made(self, transport: Any) -> None:
        self.client: asyncio.Transport = transport
        self._wire.pipes.add(self)
        self._connecting = self._wire.loop.create_task(self._connect())

    async def _connect(self) -> None:
        await asyncio.sleep(self._wire.round_trip)  # a connection takes one, as a reply does
        target = self._wire.target
        with suppress(OSError):
            self._server, _ = await self._wire.loop.create_connection(
                lambda: _Replies(self), target.host, target.port
            )
        if self._lost or self._server is None:
            self.abort()
        elif not self._wire.frozen:
            self._flush()

    def data_received(self, data: bytes) -> None:
        self.asked = self._greeted
        if self.forgotten:
            self._wire.unheard += 1
            if self.resets:
                client_socket = self.client.get_extra_info("socket")
                client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.abort()
            return
        if not self._awaits_reply:
            self._awaits_reply, self._fate = True, self._wire.fate(data)
        if self._fate == "cut":
            self.abort()
        else:
            self._wire.loop.call_later(self._wire.round_trip / 2, self._to_server, data)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self.abort()
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
        self._wire.pipes.discard(self)

    def abort(self) -> None:
        self.client.abort()
        if self._server is not None:
            self._server.abort()

    def replied(self, data: bytes) -> None:
        wire = self._wire
        if wire.frozen or (wire.held and self._greeted):
            self._held.append(data)
            return
        self._greeted, self.asked, self._awaits_reply = True, False, False
        if self._fate == "swallow":
            self.abort()
        elif not self.forgotten:
            chunks = [data[at : at + 1] for at in range(len(data))] if wire.trickle else [data]
            for number, chunk in enumerate(chunks):
                after = wire.round_trip / 2 + wire.delay + number * wire.trickle
                wire.loop.call_later(after, self.client.write, chunk)

    def thaw(self) -> None:
        held, self._held = self._held, []
        for data in held:
            self.replied(data)
        if self._server is not None:
            self._flush()

    def server_lost(self) -> None:
        if not self.forgotten:
            self.abort()

    def _to_server(self, data: bytes) -> None:
        self._early.append(data)
        if self._server is not None and not self._wire.frozen and not self.forgotten:
            self._flush()

    def _flush(self) -> None:
        early, self._early = self._early, []
        for data in early:
            self._server.write(data)  # type: ignore[union-attr]  # it is connected


class _Replies(asyncio.Protocol):
    """The server's end of a connection."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def data_received(self, data: bytes) -> None:
        self._pipe.replied(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._pipe.server_lost()
