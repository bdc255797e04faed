"""Servers and networks that a test may break: each test has its own, and they end with it."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme

from django_ratequota import Limiter
from django_ratequota.signals import store_state_changed

from . import Address
from .asking import Ask, Begin, Way, awaiting, in_tasks, on_threads, plainly
from .cluster import Cluster
from .servers import Node, Pair, Sentinels
from .wire import Wire

#: They need a database server, which CI's second half brings.
collect_ignore = [] if os.environ.get("DATABASE_URL") else ["test_database.py", "test_saves_at_once.py"]


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    """Starts servers with these lines of configuration."""
    with ExitStack() as stack:
        yield lambda *lines, **options: stack.enter_context(Node(*lines, **options))


@pytest.fixture
def node(nodes: Callable[..., Node]) -> Node:
    """One server with its default configuration."""
    return nodes()


@pytest.fixture
def proxies() -> Iterator[Callable[[Node], Wire]]:
    """Puts proxies before servers."""
    with ExitStack() as stack:
        yield lambda node: stack.enter_context(Wire(node))


@pytest.fixture
def proxy(proxies: Callable[[Node], Wire], node: Node) -> Wire:
    """A proxy before ``node``."""
    return proxies(node)


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def server_context(authority: trustme.CA) -> ssl.SSLContext:
    """TLS of a server on the loopback that asks for no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def terminator(node: Node, server_context: ssl.SSLContext) -> Iterator[Wire]:
    """TLS in front of ``node``, whose password is "secret"."""
    node.command("CONFIG", "SET", "requirepass", "secret")
    with Wire(node, context=server_context) as wire:
        yield wire


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path) -> str:
    path = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with Pair() as pair:
        yield pair


@pytest.fixture
def sentinels() -> Iterator[Sentinels]:
    with Sentinels() as sentinels:
        yield sentinels


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(params=[plainly, awaiting], ids=["plain", "awaited"])
def way(request: pytest.FixtureRequest) -> Way:
    """How to check, for tests on threads, each of which needs its own loop."""
    return request.param


@pytest.fixture
def ask(way: Way) -> Iterator[Ask]:
    """Checks synchronously, or awaited."""
    with way() as ask:
        yield ask


@pytest.fixture(params=[on_threads, in_tasks], ids=["plain", "awaited"])
def begin(request: pytest.FixtureRequest) -> Iterator[Begin]:
    """Begins checks at once, on threads or as tasks."""
    with request.param() as begin:
        yield begin


@pytest.fixture
def limiters() -> Iterator[Callable[..., Limiter]]:
    """Makes limiters on a server or a proxy, by the options of a client, and closes them."""
    with ExitStack() as stack:

        def make(where: Address, timeout: float = 10, time_zone: Any = None, **options: Any) -> Limiter:
            client = stack.enter_context(where.client(**options))
            limiter = Limiter(client=client, prefix="rqtest", timeout=timeout, time_zone=time_zone)
            stack.callback(limiter.store.close)
            return limiter

        yield make


@pytest.fixture
def events() -> Iterator[list[tuple[str, str]]]:
    """The transitions of breakers that the signal reports: state and reason."""
    heard: list[tuple[str, str]] = []

    def receiver(*, state: str, reason: str, **_: Any) -> None:
        heard.append((state, reason))

    store_state_changed.connect(receiver)
    yield heard
    store_state_changed.disconnect(receiver)
