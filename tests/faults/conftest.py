"""Servers and networks that a test may break: each test has its own, and they end with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from .cluster import Cluster
from .proxy import Proxy
from .servers import Node, Pair, Sentinels


#: It breaks PostgreSQL, which CI's second half brings.
collect_ignore = [] if os.environ.get("DATABASE_URL") else ["test_database.py"]


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    """Starts servers with the given lines of configuration."""
    with ExitStack() as stack:
        yield lambda *lines: stack.enter_context(Node(*lines))


@pytest.fixture
def node(nodes: Callable[..., Node]) -> Node:
    """One server as it comes."""
    return nodes()


@pytest.fixture
def proxies() -> Iterator[Callable[[Node], Proxy]]:
    """Puts proxies before servers."""
    with ExitStack() as stack:
        yield lambda node: stack.enter_context(Proxy(node.host, node.port))


@pytest.fixture
def proxy(proxies: Callable[[Node], Proxy], node: Node) -> Proxy:
    """A proxy before ``node``."""
    return proxies(node)


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
