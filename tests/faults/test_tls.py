"""TLS: certificates are checked, credentials kept, and the deadline holds within the handshake too."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
from django.test import override_settings

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.exceptions import StoreError

from .servers import Node

BUCKET = Bucket("user:1", Rate.parse("10/3650day"))


class Terminator:
    """Takes TLS off in front of a server, on an event loop in a thread of its own."""

    def __init__(self, node: Node, context: ssl.SSLContext) -> None:
        self._node = node
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context))
        self.port = self._server.sockets[0].getsockname()[1]
        #: Set while replies pass.
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def freeze(self) -> None:
        """Hold replies back."""
        self._loop.call_soon_threadsafe(self.flowing.clear)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        back_reader, back_writer = await asyncio.open_connection(*self._node.address)
        replies = asyncio.create_task(self._pump(back_reader, writer, self.flowing))
        try:
            always = asyncio.Event()
            always.set()
            await self._pump(reader, back_writer, always)
        except asyncio.CancelledError:  # the test is over
            pass
        finally:
            replies.cancel()
            await asyncio.gather(replies, return_exceptions=True)
            for one in (writer, back_writer):
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        try:
            while data := await reader.read(65_536):
                await flowing.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def terminator(node: Node, authority: trustme.CA) -> Iterator[Terminator]:
    node.command("CONFIG", "SET", "requirepass", "secret")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    terminator = Terminator(node, context)
    yield terminator
    terminator.close()


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture
def ask() -> Iterator[Callable[..., Decision]]:
    """One decision by the server at a URL, plain or awaited, within a time."""
    limiters: dict[tuple[str, float], Limiter] = {}

    def run(url: str, awaited: bool, timeout: float = 5.0) -> Decision:
        limiter = limiters.get((url, timeout))
        if limiter is None:
            with override_settings(RATEQUOTA={"PREFIX": "rqtest", "REDIS_URL": url, "TIMEOUT": timeout}):
                limiter = limiters[url, timeout] = Limiter()
        return asyncio.run(limiter.acheck([BUCKET])) if awaited else limiter.check([BUCKET])

    yield run
    for limiter in limiters.values():
        limiter.store.close()


BOTH = pytest.mark.parametrize("awaited", [False, True], ids=["plain", "awaited"])


@BOTH
def test_a_server_that_proves_who_it_is(
    terminator: Terminator, trusted: str, ask: Callable[..., Decision], awaited: bool
) -> None:
    url = f"rediss://:secret@127.0.0.1:{terminator.port}/0?ssl_ca_certs={trusted}"
    assert [ask(url, awaited).statuses[0].remaining for _ in range(3)] == [9, 8, 7]


@BOTH
def test_one_that_does_not(terminator: Terminator, ask: Callable[..., Decision], awaited: bool) -> None:
    with pytest.raises(StoreError) as caught:
        ask(f"rediss://:secret@127.0.0.1:{terminator.port}/0", awaited)
    assert caught.value.reason == "connection"
    assert "certificate verify failed" in str(caught.value).lower()


@BOTH
def test_no_tls_there(node: Node, ask: Callable[..., Decision], awaited: bool) -> None:
    with pytest.raises(StoreError) as caught:
        ask(f"rediss://127.0.0.1:{node.port}/0", awaited, 0.5)
    assert caught.value.reason in ("connection", "timeout")


def test_a_hang_behind_tls(terminator: Terminator, trusted: str, ask: Callable[..., Decision]) -> None:
    """Plain only: a loop that ends at once leaves asyncio's TLS no time to say goodbye to a peer that hangs."""
    url = f"rediss://:secret@127.0.0.1:{terminator.port}/0?ssl_ca_certs={trusted}"
    assert ask(url, False, 0.5).allowed
    terminator.freeze()
    begun = time.monotonic()
    with pytest.raises(StoreError) as caught:
        ask(url, False, 0.5)
    took = time.monotonic() - begun
    print(f"\n{took * 1000:.0f} ms of 500")
    assert caught.value.reason == "timeout"
    assert took < 0.5 * 4


@BOTH
def test_a_hang_in_the_handshake(ask: Callable[..., Decision], awaited: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(StoreError) as caught:
            ask(f"rediss://127.0.0.1:{silent.getsockname()[1]}/0", awaited, 0.5)
        took = time.monotonic() - begun
    assert caught.value.reason == "timeout"
    assert took < 0.5 * 4
