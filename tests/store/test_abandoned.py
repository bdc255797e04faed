"""Tasks whose loop is closed while they wait: the collector ends them, at any moment and in any thread."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import redis

from django_ratequota.store.server import Server, ServerStore

PING = ("PING",)
#: Such a task is reported when it is collected, and so is the socket of its connection.
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def store(redis_client: redis.Redis) -> Iterator[ServerStore]:
    """A store with one connection, which is idle."""
    options = redis_client.connection_pool.connection_kwargs
    server = Server(redis.Connection, {"host": options["host"], "port": options["port"], "max_connections": 1})
    store = ServerStore(server, 5)
    store.execute(PING)
    gc.collect()
    gc.disable()
    yield store
    gc.enable()
    store.close()


def abandon(store: ServerStore, count: int = 1) -> list[Any]:
    """Close a loop while that many tasks wait, the first for its reply, the others in the queue; returns them."""
    loop, tasks = asyncio.new_event_loop(), list[Any]()

    async def main() -> None:
        tasks.extend(asyncio.ensure_future(store.aexecute(PING)) for _ in range(count))
        await asyncio.sleep(0)  # they begin
        raise SystemExit  # which ends the loop at once

    with suppress(SystemExit):
        loop.run_until_complete(main())
    loop.close()
    return tasks


def test_they_are_collected_in_a_thread_that_holds_the_lock(
    store: ServerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock was taken again: after a few such tasks the whole process stood still."""
    pool = store.server.pool
    begin_connect = pool.begin_connect

    def collecting() -> Any:
        gc.collect()  # as any allocation may
        return begin_connect()

    abandon(store, 3)
    monkeypatch.setattr(pool, "begin_connect", collecting)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(store.execute, PING) for _ in range(4)]
        assert [each.result(30) for each in asked] == [b"PONG"] * 4


def test_a_connection_that_is_collected_is_not_idle_again(store: ServerStore) -> None:
    """It was closed, and another file of the process might have its number."""
    pool = store.server.pool
    held = [pool.idle.pop()[0]]
    loop = asyncio.new_event_loop()

    async def ask() -> None:
        task = asyncio.current_task()  # a cycle, so that it is collected together with the connection
        await store.aexecute(PING)
        assert task

    async def queue() -> None:
        tasks.append(asyncio.ensure_future(ask()))
        await asyncio.sleep(0)  # it waits in the queue
        pool._put(held.pop(), time.monotonic())  # and is handed the connection
        raise SystemExit  # which ends the loop at once

    tasks: list[Any] = []
    with suppress(SystemExit):
        loop.run_until_complete(queue())
    loop.close()
    tasks.clear()
    gc.collect()
    others = [socket.socketpair() for _ in range(4)]
    assert [store.execute(PING) for _ in range(3)] == [b"PONG"] * 3
    for pair in others:
        for each in pair:
            each.close()


def test_no_connection_is_for_a_task_whose_loop_is_closed(store: ServerStore) -> None:
    """Threads were left without any, and the breaker opened."""
    tasks = abandon(store, 3)
    tasks[0] = None  # the one that has the connection
    gc.collect()
    assert [store.execute(PING) for _ in range(3)] == [b"PONG"] * 3
    assert not store.breaker.failures
