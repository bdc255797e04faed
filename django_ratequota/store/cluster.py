"""Redis Cluster: each key lives on the master that owns its slot.

The cluster names the owners of its slots; its MOVED errors correct them. Each master has its own breaker: one that is
down degrades only the requests that need a counter in its slots, shared counters included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from redis.crc import key_slot

from ..exceptions import StoreError
from ..utils import forks
from .base import Pause, Send, Steps, Store
from .breaker import Breaker
from .commands import Command
from .server import Server

Address = tuple[str, int]

#: Commands, besides scripts, whose first argument is a key.
_KEYED = frozenset({"DEL", "HDEL", "HGETALL", "HMGET", "LRANGE", "LSET", "MGET", "SET", "ZRANGE", "ZREM"})
#: The part of a decision's remaining time that one command may take: a master that hangs leaves the others some.
SHARE = 0.8
#: Seconds between two reads of the slots' owners, while these are out of date.
_RELOAD_SECONDS = 0.25
#: Seconds to wait while a subject's keys are moving from one master to another.
_MOVING_SECONDS = 0.005
#: Redirections in a row, without a pause; a cluster at rest needs one at most.
_REDIRECTIONS = 8


class ClusterStore(Store):
    """All masters of a Redis Cluster."""

    clustered = True

    def __init__(
        self,
        addresses: list[Address],
        kind: type,
        kwargs: dict[str, Any],
        timeout: float,
        remap: Callable[[Address], Address] | None = None,
    ) -> None:
        """``addresses`` are of any nodes; ``kind`` and ``kwargs`` are redis-py's connection class and its options.

        ``remap`` maps an address that the cluster names to the one to connect to.
        """
        self.timeout = timeout
        self._kind, self._kwargs = kind, kwargs
        self._remap = remap
        self._lock = forks.lock()
        self._nodes: dict[Address, Server] = {}
        self.configured = [self._node(address) for address in addresses]
        self.exposed = any(node.exposed for node in self.configured)
        #: The owner of each slot; None until they are first read.
        self._slots: list[Server | None] | None = None
        self._stale = False
        self._reload_at = 0.0

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """The breaker of every master; of the configured nodes until the slots are first read."""
        return tuple(node.breaker for node in dict.fromkeys(self._slots or self.configured) if node is not None)

    def steps(self, command: Command, always: bool) -> Steps:
        """Send to the owner of the command's key, following redirections; without a key, to any master."""
        if self._slots is None or (self._stale and time.monotonic() >= self._reload_at):
            self._reload_at = time.monotonic() + _RELOAD_SECONDS
            yield from self._load_slots()
        slot = _slot(command)
        node, asking = self._owner(slot), False
        redirections = 0
        while True:
            try:
                return (yield Send(node, command, node.breaker, SHARE, asking))
            except StoreError as error:
                if not error.answered:
                    self._stale = True
                    raise
                if error.reason == "tryagain":
                    yield Pause(_MOVING_SECONDS)
                    node, asking, redirections = self._owner(slot), False, 0
                    continue
                if error.reason not in ("ask", "moved") or redirections == _REDIRECTIONS:
                    raise
                redirections += 1
                # "MOVED 3999 host:port", with or without its prefix; an empty host means the one that replied.
                host, _, port = str(error.__cause__).rpartition(" ")[2].rpartition(":")
                node = self._node_named((host or node.host, int(port)))
                asking = error.reason == "ask"
                if not asking:
                    self._stale = True
                    if self._slots is not None:
                        self._slots[slot] = node

    def close(self) -> None:
        """Close all idle connections of this process; the next command reconnects."""
        for node in (*self.configured, *self._nodes.values()):
            node.close()

    def survey_steps(self, command: Command, only: str = "") -> Steps:
        """Ask each master, or the one of this name."""
        yield from self._load_slots()
        replies = {}
        for node in dict.fromkeys(self._slots or ()):
            if node is not None and only in ("", node.name):
                replies[node.name] = yield Send(node, command)
        return replies

    def _owner(self, slot: int) -> Server:
        node = self._slots[slot] if self._slots else None
        if node is None:
            self._stale = True
            raise StoreError("uncovered", f"no master owns slot {slot}")
        return node

    def _node(self, address: Address) -> Server:
        with self._lock:
            node = self._nodes.get(address)
            if node is None:
                host, port = address
                node = self._nodes[address] = Server(self._kind, {**self._kwargs, "host": host, "port": port})
            return node

    def _node_named(self, address: Address) -> Server:
        """Return the node at an address that the cluster named; raises ``StoreError``."""
        if self._remap is not None:
            try:
                host, port = self._remap(address)
                address = str(host), int(port)
            except Exception as error:  # it is the project's function; it waits for nothing, and must fail no request
                raise StoreError("configuration", f"address_remap fails for {address}: {error!r}") from error
        return self._node(address)

    def _load_slots(self) -> Steps:
        """Read the slots' owners, asking first the nodes that did not fail last."""
        nodes = sorted(
            dict.fromkeys((*self._nodes.values(), *self.configured)), key=lambda node: bool(node.breaker.failures)
        )
        failure: StoreError | None = None
        for node in nodes:
            try:
                # Because a node may hang, time is left for the others and for the command itself.
                ranges = yield Send(node, ("CLUSTER", "SLOTS"), node.breaker, 0.5)
            except StoreError as error:
                failure = error
                continue
            if ranges:
                return self._set_slots(ranges, node.host)
        if self._slots is None:
            raise failure or StoreError("clusterdown", "no node names the owners of the slots")

    def _set_slots(self, ranges: list[Any], host: str) -> None:
        slots: list[Server | None] = [None] * 16384
        owners = set()
        for first, last, master, *_ in ranges:
            # Unknown (empty, None or "?") means the host that replied.
            name = host if master[0] in (None, b"", b"?") else master[0].decode()
            owner = self._node_named((name, int(master[1])))
            owners.add(owner)
            slots[first : last + 1] = [owner] * (last + 1 - first)
        self._slots, self._stale = slots, False
        with self._lock:
            gone = [self._nodes.pop(address) for address, node in list(self._nodes.items()) if node not in owners]
        for node in gone:
            if node not in self.configured:
                node.close()


def _slot(command: Command) -> int:
    """Return the slot of the command's key; without one, any."""
    if command[0] in ("EVALSHA", "EVAL"):
        key = command[3] if command[2] else None
    else:
        key = command[1] if command[0] in _KEYED else None
    return 0 if key is None else key_slot(key.encode())
