"""A service under Redis Sentinel: a thread that connects to it first asks the sentinels for its master.

So they cost no decision its time. A master that fails loses its connections, and the next ones lead to the new one.
"""

from __future__ import annotations

import time
from typing import Any

import redis

from .base import ServerActivity
from .handshake import Handshake

#: Seconds that each step of asking a sentinel may take: connecting, TLS, each command.
_SECONDS = 0.5


class Sentinels:
    """The sentinels that watch one service."""

    def __init__(self, sentinels: list[Handshake], service: str) -> None:
        self.service = service
        self._sentinels = sentinels
        self._master: tuple[str, int] | None = None

    @property
    def remote(self) -> bool:
        """Whether one of them is reached through a network."""
        return any(sentinel.remote for sentinel in self._sentinels)

    def connect(self, handshake: Handshake, activity: ServerActivity, seconds: float) -> Any:
        """Return a connection to the master; the other arguments, and what it raises, are those of the handshake."""
        master = self._find_master(min(seconds, _SECONDS))
        if master != self._master:  # connections that are idle lead to another one
            self._master = master
            activity.distrust(time.monotonic())
        return handshake.connect(seconds, *master)

    def _find_master(self, seconds: float) -> tuple[str, int]:
        problem = "none knows it"
        for sentinel in self._sentinels:
            try:
                address = sentinel.ask(seconds, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
            except (redis.RedisError, OSError) as error:
                problem = str(error)
                continue
            if address:
                # The one that replied is asked first next time, before any dead one.
                self._sentinels = [sentinel, *(other for other in self._sentinels if other is not sentinel)]
                return address[0].decode(), int(address[1])
        raise redis.ConnectionError(f"no sentinel names the master of {self.service!r}: {problem}")
