"""TLS: certificates are checked, credentials kept, and the deadline holds within the handshake too."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator

import pytest
from django.test import override_settings

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.exceptions import StoreError

from .servers import Node
from .wire import Wire

BUCKET = Bucket("user:1", Rate.parse("10/3650day"))


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
def test_no_tls_there(node: Node, ask: Callable[..., Decision], awaited: bool) -> None:
    with pytest.raises(StoreError) as caught:
        ask(f"rediss://127.0.0.1:{node.port}/0", awaited, 0.5)
    assert caught.value.reason in ("connection", "timeout")


def test_a_hang_behind_tls(terminator: Wire, trusted: str, ask: Callable[..., Decision]) -> None:
    """Plain only: a loop that ends at once leaves asyncio's TLS no time to close the connection to a hanging peer."""
    url = f"rediss://:secret@127.0.0.1:{terminator.port}/0?ssl_ca_certs={trusted}"
    assert ask(url, False, 0.5).allowed
    terminator.hold()
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
