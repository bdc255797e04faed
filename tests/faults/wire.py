"""A long or forgetful network: a loopback TCP relay that delays bytes both ways, and may forget its connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import threading
from typing import Any, Self

from . import Address


class Wire(Address):
    """Relays bytes, of whatever protocol, between its clients and the server behind it; one thread."""

    def __init__(self, target: Address, round_trip: float = 0.0, context: ssl.SSLContext | None = None) -> None:
        """``round_trip`` is in seconds; a new connection takes one before its first byte, as TCP's handshake does.

        With ``context`` its clients speak TLS.
        """
        self.round_trip = round_trip
        self.target = target
        self.pipes: set[_Pipe] = set()
        self._held = False
        #: Requests that came in on forgotten connections.
        self.unheard = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self._server = self._run(self.loop.create_server(lambda: _Pipe(self), "127.0.0.1", 0, ssl=context))
        self.host, self.port = self._server.sockets[0].getsockname()

    @property
    def asked(self) -> int:
        """Connections with a request whose reply has not come back; their first one aside."""
        return sum(pipe.asked and not pipe.forgotten for pipe in list(self.pipes))

    def hold(self) -> None:
        """Hold replies back, except the first one of each connection."""
        self._held = True

    def release(self) -> None:
        """Forward the held bytes, and all later ones."""

        async def release() -> None:
            self._held = False
            for pipe in self.pipes:
                pipe.release()

        self._run(release())

    @property
    def held(self) -> bool:
        return self._held

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
            for pipe in list(self.pipes):
                pipe.abort()
            while self.pipes:  # noqa: ASYNC110 - the loop tells each pipe that it is closed
                await asyncio.sleep(0)

        self._run(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=30)
        self.loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)


class _Pipe(asyncio.Protocol):
    """One connection: this is the client's end of it."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.asked = self.forgotten = self.resets = False
        self._greeted = self._lost = False
        #: What the client sent before the server was connected, and replies that are held back.
        self._early: list[bytes] = []
        self._held: list[bytes] = []
        self._server: asyncio.Transport | None = None
        self._connecting: asyncio.Task[Any] | None = None

    def connection_made(self, transport: Any) -> None:
        self._client: asyncio.Transport = transport
        self._wire.pipes.add(self)
        self._connecting = self._wire.loop.create_task(self._connect())

    async def _connect(self) -> None:
        await asyncio.sleep(self._wire.round_trip)
        target = self._wire.target
        self._server, _ = await self._wire.loop.create_connection(lambda: _Replies(self), target.host, target.port)
        if self._lost:
            self._server.abort()
        for chunk in self._early:
            self._server.write(chunk)

    def data_received(self, data: bytes) -> None:
        self.asked = self._greeted
        if not self.forgotten:
            self._wire.loop.call_later(self._wire.round_trip / 2, self._to_server, data)
            return
        self._wire.unheard += 1
        if self.resets:
            client_socket = self._client.get_extra_info("socket")
            client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self.abort()
        if self._connecting is not None and not self._connecting.done():
            self._connecting.cancel()
        self._wire.pipes.discard(self)

    def abort(self) -> None:
        self._client.abort()
        if self._server is not None:
            self._server.abort()

    def replied(self, data: bytes) -> None:
        if self._wire.held and self._greeted:
            self._held.append(data)
            return
        self._greeted, self.asked = True, False
        if not self.forgotten:
            self._wire.loop.call_later(self._wire.round_trip / 2, self._client.write, data)

    def release(self) -> None:
        for data in self._held:
            self.replied(data)
        self._held.clear()

    def server_lost(self) -> None:
        if not self.forgotten:
            self.abort()

    def _to_server(self, data: bytes) -> None:
        if self._server is None:
            self._early.append(data)
        elif not self.forgotten:
            self._server.write(data)


class _Replies(asyncio.Protocol):
    """The server's end of a connection."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def data_received(self, data: bytes) -> None:
        self._pipe.replied(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._pipe.server_lost()
