"""TLS: certificates are checked, credentials kept, and the deadline holds within the handshake too."""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trustme
from django.test import override_settings

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.exceptions import StoreError

from .servers import Node

BUCKET = Bucket("user:1", Rate.parse("10/3650day"))


class Terminator:
    """Takes TLS off in front of a server; a thread a connection."""

    def __init__(self, node: Node, context: ssl.SSLContext) -> None:
        self._node, self._context = node, context
        self._flowing = threading.Event()
        self._flowing.set()
        self._clients: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def freeze(self) -> None:
        """Hold replies back."""
        self._flowing.clear()

    def close(self) -> None:
        self._flowing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(30)  # it adds to both lists until then
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                # The thread has a descriptor of its own: shutting this one down ends its waits.
                self._clients.append(client.dup())
                self._threads.append(threading.Thread(target=self._serve, args=(client, self._clients[-1])))
                self._threads[-1].start()

    def _serve(self, client: socket.socket, handle: socket.socket) -> None:
        with (
            handle,
            suppress(OSError),  # a client that turns away, or the end of the test
            self._context.wrap_socket(client, server_side=True) as tls,
            socket.create_connection(self._node.address) as server,
        ):
            while True:
                ready, _, _ = ([tls], [], []) if tls.pending() else select.select([tls, server], [], [])
                source, target = (tls, server) if tls in ready else (server, tls)
                data = source.recv(65_536)
                if not data:
                    return
                if source is server:
                    self._flowing.wait()
                target.sendall(data)


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
