"""One Redis server: connections of our own to it, without retries and within a time, sync and async.

Every failure is raised as ``StoreError``; see ``errors`` for its reasons.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from ipaddress import ip_address
from typing import Any, NamedTuple

import redis

from ..exceptions import StoreError
from ..utils.locks import ForkSafeLock
from .activity import ServerActivity
from .budget import Budget
from .commands import Command
from .connections import Connections
from .errors import store_error
from .handshake import Handshake
from .loop_connections import LoopConnections
from .pool_size import MAX_CONNECTIONS

#: Event loops that do not run, and may run again, whose connections are kept; the newest.
_MOST_IDLE_LOOPS = 32


class Server:
    """One server and this process's connections to it."""

    def __init__(self, kind: type, kwargs: dict[str, Any]) -> None:
        """``kind`` is redis-py's class of connections, ``kwargs`` what they are made with.

        ``max_connections`` among them is how many there are at most: for threads, and for each event loop.
        Raises ``ConfigurationError`` for classes other than redis-py's own TCP, TLS and Unix sockets.
        """
        self._handshake = Handshake(kind, kwargs)
        self._path = str(kwargs.get("path") or "")
        self.host = str(kwargs.get("host", "localhost"))
        #: host:port, or the path of the socket.
        self.name = self._path or f"{self.host}:{kwargs.get('port', 6379)}"
        #: Whether it asks for nothing that proves who we are.
        self.trusting = not any(kwargs.get(key) for key in ("password", "credential_provider", "ssl_certfile"))
        self.activity = ServerActivity()
        self._most = int(kwargs.get("max_connections", MAX_CONNECTIONS))
        self._connections = Connections(self._handshake, self.activity, self._most)
        # An asyncio connection belongs to the loop it was made in; each running loop has its own.
        self._loops: dict[asyncio.AbstractEventLoop, LoopConnections] = {}
        self._lock = ForkSafeLock()

    @property
    def remote(self) -> bool:
        """Whether it is reached by a network: neither a Unix socket nor this machine's loopback."""
        if self._path or self.host == "localhost":
            return False
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:  # a name
            return True

    def send(self, command: Command, budget: Budget, asking: bool = False) -> Any:
        """Send one command once and return its reply within ``budget``, connecting included.

        ``asking`` sends ASKING before it (Cluster). Raises ``StoreError``.
        """
        try:
            return self._connections.send(command, budget, asking)
        except Exception as error:  # whatever redis-py raises, a request must not fail by it
            raise self._failed(error, command) from error

    async def asend(self, command: Command, budget: Budget, asking: bool = False) -> Any:
        """``send``, awaited."""
        try:
            connections = await self._of_this_loop()
            return await connections.send(command, budget, asking)
        except Exception as error:  # whatever redis-py raises, a request must not fail by it
            raise self._failed(error, command) from error

    def _failed(self, error: Exception, command: Command) -> StoreError:
        if isinstance(error, redis.exceptions.ReadOnlyError):
            # Demoted with the connections kept: new ones may lead to the new master.
            self.close()
        return store_error(error, command)

    async def _of_this_loop(self) -> LoopConnections:
        loop = asyncio.get_running_loop()
        known = self._loops.get(loop)
        if known is None:
            known = LoopConnections(self._handshake, self.activity, partial(self._forget, loop), self._most)
            with self._lock:
                self._forget_ended_loops()
                self._loops[loop] = known
            await anext(known.closer)
        return known

    def _forget(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loops.pop(loop, None)

    def _forget_ended_loops(self) -> None:
        """Let go of loops that ended without closing their connections, and so of these."""
        idle = [loop for loop in self._loops if not loop.is_running()]
        for at, loop in enumerate(idle):
            if loop.is_closed() or at < len(idle) - _MOST_IDLE_LOOPS:
                del self._loops[loop]

    def close(self) -> None:
        """Use no connection again that is open now; those of threads are closed at once."""
        self.activity.distrust(time.monotonic())
        self._connections.close()

    def retire(self) -> None:
        """Close what is idle for good, in the loops that are running too: nobody sends here any more."""
        self.close()
        with self._lock:
            loops = list(self._loops.items())
        for loop, known in loops:
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(known.closer.aclose(), loop)


class Send(NamedTuple):
    """One command on its way to one server; what a store's steps yield."""

    server: Server
    command: Command
    #: The part of what is left of the decision's budget that this may use.
    share: float = 1.0
    asking: bool = False


class Pause(NamedTuple):
    """A wait of so many seconds before the next step."""

    seconds: float


def server_info(reply: bytes) -> dict[str, str]:
    """Return the fields of a reply to INFO."""
    return dict(line.split(":", 1) for line in reply.decode().splitlines() if ":" in line)


def server_version(info: dict[str, str]) -> tuple[str, str]:
    """Return ("valkey" or "redis", version); Valkey also reports itself as Redis 7.2.4."""
    if info.get("valkey_version"):
        return "valkey", info["valkey_version"]
    return "redis", info.get("redis_version", "0")
