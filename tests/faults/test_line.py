"""Connections are bounded: more callers wait in a queue, in order, and no counter drifts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import redis

from django_ratequota.exceptions import StoreError
from django_ratequota.store import pool as pools
from django_ratequota.store.base import Awaited, Budget
from django_ratequota.store.pool import MIN_IDLE
from django_ratequota.store.server import Server, ServerStore
from django_ratequota.utils.sansio import drive
from tests.support.properties import thorough_after

from . import Address, poll
from .servers import Node
from .wire import Wire

Make = Callable[..., Server]
PATIENT = 60.0


@pytest.fixture
def server_of() -> Iterator[Make]:
    """Makes servers with a bound, and closes them."""
    made: list[Server] = []

    def make(where: Address, most: int) -> Server:
        options = {"host": where.host, "port": where.port, "max_connections": most}
        made.append(Server(redis.Connection, options))
        return made[-1]

    yield make
    for server in made:
        server.close()


def settled(pool: Any, most: int) -> bool:
    """Whether no caller waits, no connect is under way, and each open connection is idle."""
    assert 0 <= len(pool.open) <= most
    return not pool.queue and not pool.connecting and len(pool.open) == len(pool.idle)


class Threads:
    """Callers of one server, in threads."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pool: Any = server.pool
        self._threads = ThreadPoolExecutor(100)

    async def __aenter__(self) -> Threads:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._threads.shutdown)

    def ask(self, *command: Any, seconds: float = PATIENT) -> Awaitable[Any]:
        store = ServerStore(self.server, seconds)
        return asyncio.get_running_loop().run_in_executor(self._threads, store.execute, command)


class Tasks:
    """Callers of one server, in the tasks of one event loop."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pool: Any = server.pool

    async def __aenter__(self) -> Tasks:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def ask(self, *command: Any, seconds: float = PATIENT) -> Awaitable[Any]:
        return asyncio.create_task(ServerStore(self.server, seconds).aexecute(command))


BOTH = pytest.mark.parametrize("kind", [Threads, Tasks])


async def until(condition: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(poll, condition, 30, what)


def connected(node: Node) -> int:
    """The number of the server's connections, without the one that counts them."""
    with node.client(single_connection_client=True) as client:
        return len(client.client_list()) - 1


@BOTH
def test_there_are_never_more_than_the_bound(node: Node, server_of: Make, kind: Any) -> None:
    """A connection was opened for each caller of a burst."""

    async def run() -> None:
        with Wire(node) as wire:
            wire.hold()
            async with kind(server_of(wire, 5)) as callers:
                asking = [callers.ask("PING") for _ in range(40)]
                await until(lambda: wire.asked == 5 and len(callers.pool.queue) == 35, "five ask, the others wait")
                assert connected(node) == 5
                wire.thaw()
                assert await asyncio.gather(*asking) == [b"PONG"] * 40
                assert connected(node) == 5
                await until(lambda: settled(callers.pool, 5), "all is idle")

    asyncio.run(run())


@BOTH
def test_callers_are_served_in_order(node: Node, server_of: Make, kind: Any) -> None:
    async def run() -> None:
        with Wire(node) as wire:
            wire.hold()
            async with kind(server_of(wire, 1)) as callers:
                asking = []
                for number in range(20):
                    asking.append(callers.ask("RPUSH", "order", number))
                    await until(lambda: wire.asked + len(callers.pool.queue) == len(asking), "it waits in the queue")
                wire.thaw()
                assert await asyncio.gather(*asking) == list(range(1, 21))
        assert [int(one) for one in node.command("LRANGE", "order", 0, -1)] == list(range(20))

    asyncio.run(run())


@BOTH
def test_a_caller_that_times_out_leaves_the_queue(node: Node, server_of: Make, kind: Any) -> None:
    async def run() -> None:
        with Wire(node) as wire:
            wire.hold()
            async with kind(server_of(wire, 1)) as callers:
                first = callers.ask("PING")
                await until(lambda: wire.asked, "one has the connection")
                with pytest.raises(StoreError):
                    await callers.ask("PING", seconds=0.02)
                assert not callers.pool.queue
                last = callers.ask("PING")
                await until(lambda: callers.pool.queue, "another waits in the queue")
                wire.thaw()
                assert await asyncio.gather(first, last) == [b"PONG"] * 2
                await until(lambda: settled(callers.pool, 1), "all is idle")

    asyncio.run(run())


def test_a_connection_for_a_caller_that_gives_up_meanwhile_goes_to_the_next_one(node: Node, server_of: Make) -> None:
    class AtThatMoment(Budget):
        def wait(self, awaited: Awaited) -> None:
            waiting.set()
            awaited.poll(30_000)
            raise KeyboardInterrupt

    server, waiting = server_of(node, 1), threading.Event()
    pool: Any = server.pool
    connection, since = drive(pool._take(Budget(PATIENT)), Budget(PATIENT).wait)
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(pool.send, ("PING",), AtThatMoment(PATIENT), False)
        assert waiting.wait(30)
        pool._put(connection, since)
        assert isinstance(asking.exception(), KeyboardInterrupt)
    assert ServerStore(server, PATIENT).execute(("PING",)) == b"PONG"
    assert settled(pool, 1)


@BOTH
def test_a_closed_connection_is_replaced_for_a_waiting_caller(node: Node, server_of: Make, kind: Any) -> None:
    """At once: a waiting thread looks itself only every eighth of its time, which is longer than this test waits."""

    async def run() -> None:
        with node.client(single_connection_client=True) as admin:
            admin.execute_command("CLIENT", "PAUSE", 600_000, "WRITE")
            async with kind(server_of(node, 1)) as callers:
                first = callers.ask("SET", "key", 1, seconds=3600)
                await until(lambda: callers.pool.open and not callers.pool.idle, "it has the connection")
                second = callers.ask("SET", "key", 2, seconds=3600)
                await until(lambda: callers.pool.queue, "another waits in the queue")
                admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                admin.execute_command("CLIENT", "UNPAUSE")
                with pytest.raises(StoreError):
                    await first
                assert await asyncio.wait_for(second, 60) == b"OK"

    asyncio.run(run())


@BOTH
def test_more_requests_than_maxclients(nodes: Callable[..., Node], server_of: Make, kind: Any) -> None:
    """``maxclients``: callers that could not connect failed, although others were served."""
    node = nodes("maxclients 3")

    async def run() -> None:
        async with kind(server_of(node, 50)) as callers:
            assert await asyncio.gather(*(callers.ask("PING") for _ in range(90))) == [b"PONG"] * 90

    asyncio.run(run())


@BOTH
def test_idle_connections_are_closed(node: Node, server_of: Make, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """714 connections of each process stayed open for ever."""

    async def run() -> None:
        with Wire(node) as wire:
            wire.hold()
            async with kind(server_of(wire, 30)) as callers:
                asking = [callers.ask("PING") for _ in range(60)]
                await until(lambda: wire.asked == 30, "thirty ask")
                wire.thaw()
                await asyncio.gather(*asking)
                assert len(callers.pool.open) == 30, "recently used ones stay"
                with monkeypatch.context() as patch:
                    patch.setattr(pools, "IDLE_SECONDS", 0.0)
                    for _ in range(30):
                        await callers.ask("PING")
                    await until(lambda: connected(node) == MIN_IDLE, "few are left")
                with node.client(single_connection_client=True) as client:
                    before = client.info("stats")["total_connections_received"]
                    for _ in range(20):
                        await callers.ask("PING")
                    assert client.info("stats")["total_connections_received"] == before
                assert settled(callers.pool, 30)

    asyncio.run(run())


def test_a_forked_child_has_its_own_bound(node: Node, server_of: Make) -> None:
    server = server_of(node, 1)
    assert ServerStore(server, PATIENT).execute(("PING",)) == b"PONG"
    idle = server.pool.idle
    server.pool.reset()  # as after a fork
    assert ServerStore(server, PATIENT).execute(("PING",)) == b"PONG"
    idle[0][0].disconnect()


# --- Any event, in any order. ---

CALLERS, TIMES, MOST = 24, 60, 5


@BOTH
@pytest.mark.parametrize("seed", thorough_after(1, range(3)))
def test_no_count_drifts(node: Node, server_of: Make, kind: Any, seed: int) -> None:
    """Callers that time out or are cancelled at any moment, closed connections, a full server."""
    rng, outcomes = Random(seed), set()

    async def one(callers: Any, caller: int) -> None:
        for number in range(TIMES):
            seconds, mine = rng.choice((PATIENT, 0.0003, 0.002)), f"{caller} {number}".encode()
            asking = callers.ask("ECHO", mine, seconds=seconds)
            if kind is Tasks and rng.random() < 0.4:
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)  # a few turns of the loop: it is cancelled at any point
                asking.cancel()
            try:
                assert await asking == mine
                outcomes.add("answered")
            except StoreError as error:
                outcomes.add(f"{error.reason} after {seconds} s")
            except asyncio.CancelledError:
                pass

    async def disturb(admin: redis.Redis) -> None:
        while True:
            admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            admin.config_set("maxclients", rng.choice((1, 3, 100)))
            await asyncio.sleep(rng.random() * 0.02)  # callers connect and ask meanwhile

    async def run() -> None:
        with node.client(single_connection_client=True) as admin:
            async with kind(server_of(node, MOST)) as callers:
                disturbing = asyncio.create_task(disturb(admin))
                try:
                    await asyncio.wait_for(asyncio.gather(*(one(callers, caller) for caller in range(CALLERS))), 120)
                finally:
                    disturbing.cancel()
                    with suppress(asyncio.CancelledError):
                        await disturbing
                    admin.config_set("maxclients", 100)
                assert f"timeout after {PATIENT} s" not in outcomes, "none waits for a connection that nobody makes"
                assert outcomes > {"answered", f"connection after {PATIENT} s"}
                await until(lambda: settled(callers.pool, MOST), "all is idle")
                answers = await asyncio.gather(*(callers.ask("PING") for _ in range(CALLERS)))
                assert answers == [b"PONG"] * CALLERS
                await until(lambda: settled(callers.pool, MOST), "all is idle")
                await until(lambda: len(admin.client_list()) - 1 <= len(callers.pool.open), "none is lost")

    asyncio.run(run())
