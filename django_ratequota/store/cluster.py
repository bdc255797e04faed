"""Redis Cluster: each key lives on the master that owns its slot.

Slots are learned from the cluster itself and corrected by its MOVED answers. Each master has a breaker of its own:
one that is down degrades the requests that need a counter in its slots, the shared ones included, and no others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis.exceptions
from redis.crc import key_slot

from ..exceptions import StoreError
from ..utils.locks import ForkSafeLock
from .base import FAILURES, SeveralServers, Steps, routed_key
from .breaker import Breaker
from .commands import Command, ScriptCall
from .server import Pause, Send, Server

Address = tuple[str, int]

#: Seconds between two looks at who owns what, while something is amiss.
_LOOK_SECONDS = 0.25
#: Seconds to wait while the keys of a subject are on their way from one master to another.
_MOVING_SECONDS = 0.005
#: Redirections of one command; a cluster at rest needs one at most.
_REDIRECTIONS = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    server: Server
    breaker: Breaker


class ClusterStore(SeveralServers):
    """All masters of a Redis Cluster."""

    clustered = True

    def __init__(
        self,
        addresses: list[Address],
        kind: type,
        kwargs: dict[str, Any],
        timeout: float,
        failures: int = FAILURES,
        remap: Callable[[Address], Address] | None = None,
    ) -> None:
        """``addresses`` are of any nodes; ``kind`` and ``kwargs`` say how to connect to each.

        ``remap`` turns an address that the cluster names into the one to connect to.
        """
        self.timeout = timeout
        self._kind, self._kwargs = kind, kwargs
        self._most, self._remap = failures, remap
        self._lock = ForkSafeLock()
        self._nodes: dict[Address, _Node] = {}
        self._start = [self._node(address) for address in addresses]
        #: The owner of each slot; None before the first look.
        self._slots: list[_Node | None] | None = None
        self._stale = False
        self._look_at = 0.0

    @property
    def breakers(self) -> tuple[Breaker, ...]:
        """Of every master; of the nodes that were configured, before the first look."""
        return tuple(node.breaker for node in dict.fromkeys(self._slots or self._start) if node is not None)

    @property
    def exposed(self) -> bool:
        """Whether nodes are reached by a network without a password or a client certificate."""
        return any(node.server.trusting and node.server.remote for node in self._start)

    def steps(self, command: Command, always: bool) -> Steps:
        """Send to the owner of the command's key, wherever that has moved; without a key, to any master."""
        if self._slots is None or (self._stale and self._may_look()):
            yield from self._look(always)
        key = routed_key(command)
        slot = 0 if key is None else key_slot(key.encode())
        node, asking = self._owner(slot), False
        redirections, share = 0, command.share if isinstance(command, ScriptCall) else 1.0
        while True:
            try:
                with node.breaker.guard(always):
                    return (yield Send(node.server, command, share, asking))
            except StoreError as error:
                if not error.answered:
                    self._stale = True
                    raise
                if error.reason == "tryagain":
                    yield Pause(_MOVING_SECONDS)
                    node, asking = self._owner(slot), False
                    continue
                to = error.__cause__
                if not isinstance(to, redis.exceptions.AskError) or redirections == _REDIRECTIONS:
                    raise
                redirections += 1
                # An empty host means the one that answered.
                node = self._named((to.host or node.server.host, int(to.port)))
                asking = error.reason == "ask"
                if not asking:
                    self._stale = True
                    if self._slots is not None:
                        self._slots[slot] = node

    def close(self) -> None:
        """Drop every idle connection of this process's threads; the next command connects anew."""
        for node in (*self._start, *self._nodes.values()):
            node.server.close()

    def _survey_steps(self, command: Command) -> Steps:
        yield from self._look(always=True)
        replies = {}
        for node in dict.fromkeys(self._slots or ()):
            if node is not None:
                replies[node.server.name] = yield Send(node.server, command)
        return replies

    def _owner(self, slot: int) -> _Node:
        node = self._slots[slot] if self._slots else None
        if node is None:
            self._stale = True
            raise StoreError("uncovered", f"no master owns slot {slot}")
        return node

    def _node(self, address: Address) -> _Node:
        with self._lock:
            node = self._nodes.get(address)
            if node is None:
                host, port = address
                server = Server(self._kind, {**self._kwargs, "host": host, "port": port})
                breaker = Breaker(server.name, self._most, surplus_at=lambda: server.activity.surplus_at)
                node = self._nodes[address] = _Node(server, breaker)
            return node

    def _named(self, address: Address) -> _Node:
        """The node at an address that the cluster named; raises ``StoreError``."""
        if self._remap is not None:
            try:
                host, port = self._remap(address)
                address = str(host), int(port)
            except Exception as error:  # the project's own function; a request must not fail by it
                raise StoreError("configuration", f"address_remap fails for {address}: {error!r}") from error
        return self._node(address)

    def _may_look(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if now < self._look_at:
                return False
            self._look_at = now + _LOOK_SECONDS
            return True

    def _look(self, always: bool) -> Steps:
        """Ask who owns what: those first that answered last time."""
        nodes = sorted(dict.fromkeys((*self._nodes.values(), *self._start)), key=lambda node: node.breaker.failing)
        trouble: StoreError | None = None
        for node in nodes:
            try:
                with node.breaker.guard(always):
                    # One that hangs must leave time for the others, and for the command itself.
                    ranges = yield Send(node.server, ("CLUSTER", "SLOTS"), 0.5)
            except StoreError as error:
                trouble = error
                continue
            if ranges:
                return self._learn(ranges, node.server.host)
        if self._slots is None:
            raise trouble or StoreError("clusterdown", "no node knows who owns what")

    def _learn(self, ranges: list[Any], host: str) -> None:
        slots: list[_Node | None] = [None] * 16384
        owners = set()
        for first, last, master, *_ in ranges:
            name = master[0].decode() if isinstance(master[0], bytes) else master[0]
            # Unknown (empty, None or "?") means the host that was asked.
            owner = self._named((name if name and name != "?" else host, int(master[1])))
            owners.add(owner)
            slots[first : last + 1] = [owner] * (last + 1 - first)
        self._slots, self._stale = slots, False
        with self._lock:
            gone = [self._nodes.pop(address) for address, node in list(self._nodes.items()) if node not in owners]
        for node in gone:
            if node not in self._start:
                node.server.retire()
