"""A cluster to break: three primaries, each with a replica, formed by plain commands."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from redis.exceptions import RedisError

from . import poll
from .servers import PATIENCE, REPLICATION, Node

SLOTS = 16_384


class Cluster:
    """Three primaries and three replicas, all slots served. Takes about 2 to 4 s.

    ``nodes[0:3]`` begin as the primaries, ``nodes[3:6]`` as their replicas, in that order. A node that is silent for
    ``node_timeout_ms`` is failing; its replica takes over about 1 to 2 s later.
    """

    def __init__(self, *lines: str, node_timeout_ms: int = 1000) -> None:
        """``lines`` are of every node's configuration file."""
        self._lines = (
            *REPLICATION,
            "cluster-enabled yes",
            f"cluster-node-timeout {node_timeout_ms}",
            "cluster-allow-replica-migration no",
            # However long a busy machine took: else a replica whose first election failed gives up for good.
            "cluster-replica-validity-factor 0",
            *lines,
        )
        self.nodes: list[Node] = []
        #: Each node's name in the cluster, same order and length as nodes.
        self.ids: list[str] = []
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The URL of a node that answers."""
        return self._any().url

    def slot(self, key: str) -> int:
        return int(self._any().command("CLUSTER", "KEYSLOT", key))

    def owner(self, key: str) -> Node:
        """The primary that serves the key, as a node that answers sees it now."""
        slot = self.slot(key)
        for first, last, primary, *_ in self._slots(self._any()):
            if first <= slot <= last:
                return self._at(int(primary[1]))
        raise AssertionError(f"nobody serves slot {slot}")

    def replica_of(self, primary: Node) -> Node:
        """The replica that began with this node, or whose replica this node was."""
        return self.nodes[(self.nodes.index(primary) + 3) % 6]

    def begin_move(self, slot: int, source: Node, target: Node) -> None:
        """From here on the source answers ASK for keys of the slot that it does not have."""
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", self._id(source))
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", self._id(target))

    def move_keys(self, slot: int, source: Node, target: Node) -> int:
        """Move the slot's keys; returns how many there were."""
        moved = 0
        while keys := source.command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            source.command("MIGRATE", target.host, target.port, "", 0, 10_000, "KEYS", *keys)
            moved += len(keys)
        return moved

    def end_move(self, slot: int, source: Node, target: Node) -> None:
        """From here on the source replies MOVED. The target is set first, so that the slot always has an owner."""
        others = [node for node in self.primaries() if node not in (source, target)]
        for node in (target, source, *others):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", self._id(target))

    def move_slot(self, slot: int, source: Node, target: Node) -> int:
        """Move a slot with its keys while it serves; returns how many keys there were."""
        self.begin_move(slot, source, target)
        moved = self.move_keys(slot, source, target)
        self.end_move(slot, source, target)
        return moved

    def primaries(self) -> list[Node]:
        """The nodes that answer and see themselves as primaries."""
        return [node for node in self.nodes if _role(node) == "master"]

    def well(self) -> bool:
        """Whether every node sees all slots served and each replica is linked to its primary."""
        for node in self.nodes:
            info, about = node.info("replication"), node.command("CLUSTER", "INFO")
            if "cluster_state:ok" not in about or f"cluster_known_nodes:{len(self.nodes)}" not in about:
                return False
            if info["role"] == "slave" and info["master_link_status"] != "up":
                return False
            if sum(last - first + 1 for first, last, *_ in self._slots(node)) != SLOTS:
                return False
        return len(self.primaries()) == 3

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.nodes = [stack.enter_context(Node(*self._lines, "cluster-port {other}")) for _ in range(6)]
            self.ids = [node.command("CLUSTER", "MYID") for node in self.nodes]
            self._form()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _form(self) -> None:
        for number, node in enumerate(self.nodes):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for number, node in enumerate(self.nodes[:3]):
            bounds = SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1
            node.command("CLUSTER", "ADDSLOTSRANGE", *bounds)
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    bus = other.command("CONFIG", "GET", "cluster-port")["cluster-port"]
                    node.command("CLUSTER", "MEET", other.host, other.port, bus)
        poll(lambda: all(map(self._knows_all, self.nodes)), PATIENCE, "every node knows all others")
        for primary, replica in zip(self.nodes[:3], self.nodes[3:], strict=True):
            replica.command("CLUSTER", "REPLICATE", self._id(primary))
        poll(self.well, PATIENCE, "the cluster serves all slots, with replicas")

    def _knows_all(self, node: Node) -> bool:
        lines = [line.split() for line in node.command("CLUSTER", "NODES").splitlines()]
        return {words[0] for words in lines if "handshake" not in words[2]} == set(self.ids)

    def _slots(self, node: Node) -> list[Any]:
        return list(node.command("CLUSTER", "SLOTS"))

    def _any(self) -> Node:
        return next(node for node in self.nodes if _role(node))

    def _at(self, port: int) -> Node:
        return next(node for node in self.nodes if node.port == port)

    def _id(self, node: Node) -> str:
        return self.ids[self.nodes.index(node)]


def _role(node: Node) -> str:
    """The node's own view of its role; "" when it does not answer."""
    try:
        with node.client(socket_timeout=1) as client:
            return str(client.info("replication")["role"])
    except RedisError:
        return ""
