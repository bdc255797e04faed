"""Servers that answer with an error: each kind has its label, changes nothing, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import redis

from django_ratequota import Limiter
from tests.support.properties import thorough_after

from . import poll
from .asking import Ask, failure, one_of_each
from .servers import PATIENCE, REPLICATION, Node, follow

Nodes = Callable[..., Node]
Trouble = Callable[[Node, Nodes], AbstractContextManager[None]]

LIMIT = 100
#: What the server of each test is configured with, for trouble that cannot be made later.
LINES = (
    *REPLICATION,
    "dbfilename taken.rdb",
    "rdbcompression no",
    "loading-process-events-interval-bytes 1024",
    "busy-reply-threshold 10",
)


# --- Server states: how to enter and leave them. ---


@contextmanager
def oom(node: Node, nodes: Nodes) -> Iterator[None]:
    node.command("CONFIG", "SET", "maxmemory", 1)
    yield
    node.command("CONFIG", "SET", "maxmemory", 0)


@contextmanager
def busy(node: Node, nodes: Nodes) -> Iterator[None]:
    """Another client's script does not end."""
    ends: list[str] = []

    def loop() -> None:
        with node.client(socket_timeout=PATIENCE) as client:
            try:
                client.eval("while true do end", 0)
            except redis.ResponseError as error:
                ends.append(str(error))

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        poll(lambda: answers(node, "BUSY"), PATIENCE, "the server is busy")
        yield
    finally:
        node.command("SCRIPT", "KILL")
        thread.join(PATIENCE)
    assert len(ends) == 1


@contextmanager
def loading(node: Node, nodes: Nodes) -> Iterator[None]:
    """It restarts with a dataset that takes 30 s to load, unless told to hurry; after each key it replies."""
    with node.client() as client, client.pipeline(transaction=False) as pipeline:
        for number in range(3000):
            pipeline.set(f"other:{number}", "x" * 1024)
        pipeline.execute()
        client.save()
    node.kill()
    node.change("key-load-delay 10000")
    node.start(wait=False)
    poll(lambda: answers(node, "LOADING"), PATIENCE, "the server loads")
    yield
    node.command("CONFIG", "SET", "key-load-delay", 0)
    poll(lambda: node.command("PING"), PATIENCE, "the server has loaded")


@contextmanager
def misconf(node: Node, nodes: Nodes) -> Iterator[None]:
    """It cannot save: a directory has the file's name, which root cannot overwrite either."""
    (node.directory / "taken.rdb").mkdir()
    save(node, "err")
    yield
    (node.directory / "taken.rdb").rmdir()
    save(node, "ok")


def save(node: Node, status: str) -> None:
    node.command("CONFIG", "SET", "save", "3600 1")
    node.command("BGSAVE")
    poll(lambda: node.info("persistence")["rdb_last_bgsave_status"] == status, PATIENCE, f"saving ends with {status}")


@contextmanager
def noreplicas(node: Node, nodes: Nodes) -> Iterator[None]:
    """The only replica leaves."""
    replica = nodes(*REPLICATION)
    follow(replica, node)
    node.command("CONFIG", "SET", "min-replicas-to-write", 1)
    assert node.info("replication")["min_slaves_good_slaves"] == 1
    replica.command("REPLICAOF", "NO", "ONE")
    poll(lambda: node.info("replication")["min_slaves_good_slaves"] == 0, PATIENCE, "the replica is gone")
    yield
    follow(replica, node)


@contextmanager
def noperm(node: Node, nodes: Nodes) -> Iterator[None]:
    """A permission is taken away from our user."""
    node.command("ACL", "SETUSER", "default", "-evalsha")
    yield
    node.command("ACL", "SETUSER", "default", "+evalsha")


def answers(node: Node, prefix: str) -> bool:
    """Whether the server replies with that error."""
    with node.client() as client:
        try:
            client.ping()
        except redis.BusyLoadingError:
            return prefix == "LOADING"
        except redis.ResponseError as error:
            return str(error).startswith(prefix)
    return False


def dumps(node: Node) -> dict[bytes, bytes]:
    """The stored value of each counter."""
    with node.client() as client:
        return {key: client.dump(key) for key in client.scan_iter("rqtest:*", count=1000)}


@pytest.mark.parametrize("trouble", thorough_after(3, [oom, busy, noperm, loading, misconf, noreplicas]))
def test_each_state_has_its_reason_and_changes_no_counter(
    nodes: Nodes, limiters: Callable[..., Limiter], ask: Ask, trouble: Trouble
) -> None:
    node = nodes(*LINES)
    limiter, buckets = limiters(node), one_of_each(LIMIT)
    for _ in range(3):
        assert ask(limiter, buckets).allowed
    before = dumps(node)
    assert len(before) == len(buckets)
    with trouble(node, nodes):
        # Two in a row leave the breaker closed. New keys, and keys that exist, some of them lists.
        assert failure(ask, limiters(node), one_of_each(LIMIT)) == trouble.__name__
        fresh = limiters(node)
        assert [failure(ask, fresh, some) for some in (buckets, buckets[:1])] == [trouble.__name__] * 2
    assert dumps(node) == before
    decision = ask(fresh, buckets)
    assert decision.allowed
    assert [status.remaining for status in decision.statuses] == [LIMIT - 4] * len(buckets)
