"""The world: the package in the servers and workers that projects run, through forks, signals, kills and clocks.

Run by ``make world``. Each scene asserts the same four things, see ``scene``.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from tests.faults import Address


def address_of(url: str) -> Address:
    """Where the server with this URL listens."""
    parts = urlsplit(url)
    return Address(parts.hostname or "127.0.0.1", parts.port or 6379)
