"""How connections are made: whatever the client is configured with, in few round trips, a few at a time."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from django_ratequota import Limiter
from django_ratequota.exceptions import StoreError
from django_ratequota.store import pool as pools
from django_ratequota.store.base import ServerActivity
from django_ratequota.store.factory import store_from_url
from django_ratequota.store.pool import Attempt, Pool, Turn
from tests.support.properties import thorough_after

from . import Address, poll
from .asking import ENDLESS, Ask, Way, awaiting, failure, plainly
from .servers import Node
from .wire import Wire

ROOT = Path(__file__).parent.parent.parent

Make = Callable[..., Limiter]


# --- Options. ---


def test_tls_by_option(terminator: Wire, trusted: str, limiters: Make, ask: Ask) -> None:
    """``redis.Redis(ssl=True)`` was a TypeError on every async call."""
    assert ask(limiters(terminator, ssl=True, ssl_ca_certs=trusted, password="secret"), [ENDLESS]).allowed
    assert failure(ask, limiters(terminator, ssl=True, password="secret"), [ENDLESS]) == "connection", "whose is it?"
    assert ask(limiters(terminator, ssl=True, ssl_cert_reqs="none", password="secret"), [ENDLESS]).allowed


def test_tls_by_a_url_of_valkey(terminator: Wire, trusted: str) -> None:
    store = store_from_url(f"valkeys://:secret@127.0.0.1:{terminator.port}?ssl_ca_certs={trusted}", 5)
    assert store.execute(("PING",)) == b"PONG"
    store.close()


def test_a_tls_connection_is_reused(terminator: Wire, trusted: str, limiters: Make, ask: Ask) -> None:
    """Although the server sends tickets for later sessions, which are bytes that are no reply."""
    limiter = limiters(terminator, ssl=True, ssl_ca_certs=trusted, password="secret")
    ask(limiter, [ENDLESS])
    [pipe] = terminator.pipes
    for _ in range(3):
        ask(limiter, [ENDLESS])
    assert terminator.pipes == {pipe}


def test_a_certificate_of_the_client(
    node: Node, authority: trustme.CA, trusted: str, tmp_path: Path, limiters: Make, ask: Ask
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(context)
    own = authority.issue_cert("client@example.com")
    own.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "own.pem"))
    with Wire(node, context=context) as wire:
        options = {"ssl": True, "ssl_ca_certs": trusted}
        pem = str(tmp_path / "own.pem")
        assert ask(limiters(wire, ssl_certfile=pem, ssl_keyfile=pem, **options), [ENDLESS]).allowed
        assert failure(ask, limiters(wire, **options), [ENDLESS]) == "connection"


def test_a_folder_of_authorities(terminator: Wire, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ssl_ca_path`` was a TypeError on every async call by redis-py 6.0."""
    looked: list[Any] = []
    load = ssl.SSLContext.load_verify_locations

    def note(self: ssl.SSLContext, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        looked.append(capath)
        load(self, cafile, capath, cadata)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", note)
    with redis.Redis.from_url(f"rediss://:secret@127.0.0.1:{terminator.port}/0?ssl_ca_path={tmp_path}") as client:
        limiter = Limiter(client=client, prefix="rqtest", timeout=5)
        with pytest.raises(StoreError, match="certificate"):
            ask(limiter, [ENDLESS])
    assert str(tmp_path) in looked


def test_no_tls_there(node: Node, limiters: Make, ask: Ask) -> None:
    assert failure(ask, limiters(node, 0.5, ssl=True), [ENDLESS]) in ("connection", "timeout")


@pytest.mark.parametrize(
    ("where", "way"), [("behind TLS", plainly), ("in the handshake", plainly), ("in the handshake", awaiting)]
)
def test_a_hang_with_tls(terminator: Wire, trusted: str, limiters: Make, where: str, way: Way) -> None:
    """Behind TLS plain only: a loop that ends at once has no time to close a TLS connection to a hanging peer."""
    with socket.create_server(("127.0.0.1", 0)) as silent, way() as ask:
        target = terminator if where == "behind TLS" else Address(*silent.getsockname())
        limiter = limiters(target, 0.5, ssl=True, ssl_ca_certs=trusted, password="secret")
        if target is terminator:
            assert ask(limiter, [ENDLESS]).allowed
            terminator.hold()
        begun = time.monotonic()
        assert failure(ask, limiter, [ENDLESS]) == "timeout"
        assert time.monotonic() - begun < 0.5 * 4


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": 3},
        {"protocol": 2, "client_name": "worker"},
        {"db": "2", "username": "default", "password": "secret", "socket_keepalive": True},
    ],
)
def test_a_client_s_options(node: Node, limiters: Make, ask: Ask, options: dict[str, Any]) -> None:
    if "password" in options:
        node.command("CONFIG", "SET", "requirepass", "secret")
    assert ask(limiters(node, **options), [ENDLESS]).allowed


class Listener(Address):
    """Replies OK to each command of one connection until ``replies`` are used up, then hangs up."""

    def __init__(self, replies: int) -> None:
        self.replies, self.seen = replies, list[list[bytes]]()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._socket.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection, self._socket:
            while len(self.seen) < self.replies:
                self.seen.append(connection.recv(65_536).split(b"\r\n")[2::2])
                connection.sendall(b"+OK\r\n")
            connection.recv(65_536)  # the decision

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()


LOGIN = [[b"AUTH", b"secret"], [b"CLIENT", b"SETNAME", b"far"], [b"SELECT", b"4"]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"password": "secret", "db": 4, "client_name": "far"}, LOGIN), ({}, [[b"PING"]])],
    ids=["login", "none"],
)
def test_a_login_sends_only_what_it_must(
    limiters: Make, ask: Ask, options: dict[str, Any], expected: list[list[bytes]]
) -> None:
    """redis-py's own also sends HELLO, and CLIENT SETINFO twice, and waits for each reply."""
    with Listener(len(expected)) as listener:
        limiter = limiters(listener, **options)
        assert failure(ask, limiter, [ENDLESS]) == "connection", "it hangs up once it has logged in, and been asked"
        limiter.store.close()
    assert listener.seen == expected


# --- Credentials. ---


class Provider(redis.CredentialProvider):
    """A service that hands out tokens while ``go`` is set."""

    def __init__(self, error: str = "") -> None:
        self.asked, self._error = 0, error
        self.go = threading.Event()
        self.go.set()

    def get_credentials(self) -> tuple[str, str]:
        self.asked += 1
        self.go.wait(30)
        if self._error:
            raise LookupError(self._error)
        return "default", "secret"


def test_slow_credentials_break_no_deadline_and_arrive(node: Node, limiters: Make, ask: Ask) -> None:
    """Credentials used up the time of each decision, so nothing was ever decided."""
    node.command("CONFIG", "SET", "requirepass", "secret")
    provider = Provider()
    provider.go.clear()
    limiter = limiters(node, timeout=0.1, credential_provider=provider)
    begun = time.monotonic()
    assert failure(ask, limiter, [ENDLESS]) == "timeout"
    assert time.monotonic() - begun < 20, "the deadline, not the provider"
    provider.go.set()
    poll(lambda: failure(ask, limiter, [ENDLESS]) == "", 10, "a decision")
    assert provider.asked == 1


def test_credentials_that_fail_are_no_connection(node: Node, limiters: Make, ask: Ask) -> None:
    limiter = limiters(node, credential_provider=Provider(error="no token today"))
    with pytest.raises(StoreError, match="no token today") as caught:
        ask(limiter, [ENDLESS])
    assert caught.value.reason == "connection"


# --- A few connects at a time. ---


class Opened:
    """A connection."""


class Connects:
    """A pool's connects that are under way, and its open connections."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.under_way, self.open = pool, list[Attempt](), list[Opened]()

    def begin(self, waiting: int) -> bool:
        self.pool.queue.extend(Turn(ServerActivity()) for _ in range(waiting))
        attempt = self.pool.begin_connect()
        self.pool.queue.clear()
        self.under_way += [attempt] if attempt else []
        return attempt is not None

    def succeed(self) -> None:
        self.open.append(Opened())
        self.pool.connected(self.open[-1], self.under_way.pop(0))

    def fail(self, error: Exception) -> None:
        self.pool.connect_failed(error, self.under_way.pop(0))


def test_the_number_of_connects_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(pools, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    connects = Connects(Pool(Opened, ServerActivity(), 64))

    def begun() -> int:
        return sum(connects.begin(50) for _ in range(50))

    assert connects.begin(1)
    assert not connects.begin(1), "one waits, one is being made"
    assert begun() == 3
    for expected in (4, 8):
        for _ in range(4):
            connects.succeed()
        assert begun() == expected, "as many as are open"
    now += 1.5  # these hang
    assert begun() == 8, "others are not held up"
    now += 1.5
    assert begun() == 0, "but not without end"


def test_failed_connects_and_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts no more connections does not get a thousand connects per second."""
    now, full = 1000.0, ConnectionError("full")
    monkeypatch.setattr(pools, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    connects, waiter = Connects(Pool(Opened, ServerActivity(), 3)), Turn(ServerActivity())
    assert [connects.begin(50) for _ in range(4)] == [True] * 3 + [False], "open and under way are bounded"
    connects.pool.queue.append(waiter)
    for hopeless in (False, False, True):  # the first may be refused by a full server, and the last accepted
        assert waiter.came is None
        connects.fail(full)
        assert waiter.came is (full if hopeless else None)
    assert connects.begin(1), "nothing is open: the next caller tries"
    connects.succeed()
    assert connects.begin(1)
    connects.fail(full)
    assert not connects.begin(50)
    now += 0.06
    assert connects.begin(50)
    assert not connects.begin(50), "one at a time, until one succeeds"


def test_tasks_in_line_do_not_wait_for_a_connection_that_is_gone(node: Node, limiters: Make) -> None:
    """Their own connect failed as the server was full; the open connection ended, and no caller connected again."""
    limiter = limiters(node, timeout=20)

    async def run(admin: redis.Redis) -> float:
        await limiter.acheck([ENDLESS])
        admin.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        admin.config_set("maxclients", 2)
        asking = asyncio.create_task(limiter.acheck([ENDLESS]))
        await asyncio.sleep(0)  # it takes the connection
        waiting = asyncio.create_task(limiter.acheck([ENDLESS]))
        pool = limiter.store.server.pool
        # Later there would be no connection that it could wait for, and it would rightly fail.
        await asyncio.to_thread(poll, lambda: pool.failed_at, 10, "its attempt failed")
        admin.config_set("maxclients", 100)
        admin.execute_command("CLIENT", "KILL", "SKIPME", "yes")
        admin.client_unpause()
        begun = time.monotonic()
        with pytest.raises(StoreError):
            await asking
        assert (await waiting).allowed
        return time.monotonic() - begun

    with node.client(single_connection_client=True) as admin:
        assert asyncio.run(run(admin)) < 10


@pytest.mark.parametrize("what", ["nobody listens", "no such host"])
def test_waiting_callers_get_the_connect_s_error_at_once(ask: Ask, what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    host = "127.0.0.1" if what == "nobody listens" else "no-such-host.invalid"
    with redis.Redis(host=host, port=port) as client:
        limiter = Limiter(client=client, prefix="rqtest", timeout=60)
        begun = time.monotonic()
        assert failure(ask, limiter, [ENDLESS]) == "connection"
        assert time.monotonic() - begun < 30


def test_where_no_thread_can_be_started(node: Node, limiters: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert limiters(node).check([ENDLESS]).allowed


def test_one_caller_opens_one_connection(node: Node, limiters: Make, ask: Ask) -> None:
    """More connections were opened while the caller had not woken up yet."""
    with node.client() as client:
        before = client.info("stats")["total_connections_received"]
        for _ in range(20):
            limiter = limiters(node)
            ask(limiter, [ENDLESS])
            limiter.store.close()
        assert client.info("stats")["total_connections_received"] == before + 20


# --- What a login proves about the server. ---


@pytest.mark.parametrize("callers", thorough_after(1, [8, 1]))
def test_a_server_that_replies_only_to_logins_opens_the_breaker(
    node: Node, limiters: Make, ask: Ask, callers: int
) -> None:
    """Paused, as before a planned failover: each login counted as a reply, and no breaker ever opened."""
    limiter = limiters(node, timeout=0.1)
    assert failure(ask, limiter, [ENDLESS]) == ""
    node.command("CLIENT", "PAUSE", 60_000, "WRITE")
    ended = threading.Event()

    def others() -> None:
        while not ended.is_set():
            with suppress(StoreError):
                limiter.check([ENDLESS])

    threads = [threading.Thread(target=others) for _ in range(callers - 1)]
    for thread in threads:
        thread.start()
    try:
        poll(lambda: failure(ask, limiter, [ENDLESS]) and limiter.store.breakers[0].open, 3, "the breaker opens")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        node.command("CLIENT", "UNPAUSE")
    poll(lambda: failure(ask, limiter, [ENDLESS]) == "", 3, "decisions again")


def no_function(connection: object) -> None:
    raise LookupError("its own")


@pytest.mark.parametrize(
    "options",
    [{"db": 99}, {"client_name": "of two words"}, {"redis_connect_func": no_function}],
    ids=["db", "name", "function"],
)
def test_a_refused_login_opens_the_breaker(node: Node, limiters: Make, ask: Ask, options: dict[str, Any]) -> None:
    """The error counted as a reply to one command, while every request opened a new connection."""
    limiter = limiters(node, **options)
    assert [failure(ask, limiter, [ENDLESS]) for _ in range(4)] == ["connection"] * 4
    assert limiter.store.breakers[0].open


# --- Event loops that end. ---

LOOPS = """
import asyncio, gc, sys
import redis
from django_ratequota import Bucket, Limiter, Rate

with redis.Redis(port=int(sys.argv[1])) as client:
    limiter = Limiter(client=client, timeout=5)
    for _ in range(200):
        loop = asyncio.new_event_loop()
        assert loop.run_until_complete(limiter.acheck([Bucket("user:1", Rate.parse("1000/day"))])).allowed
        if sys.argv[2] == "closed":
            loop.close()
        del loop
    gc.collect()
    print(len(client.client_list()))
"""


@pytest.mark.parametrize(("end", "most"), [("closed", 8), ("left", 40)])
def test_two_hundred_loops_that_shut_nothing_down(node: Node, end: str, most: int) -> None:
    """As before ``asyncio.run``, and in some test runners: 200 sockets and loops stayed for good."""
    found = subprocess.run(
        [sys.executable, "-c", LOOPS, str(node.port), end],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (int(found.stdout) <= most, found.stderr) == (True, ""), "nothing is printed at the exit"
