"""``manage.py check``: each message by its id, against servers that say who they are."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from django_ratequota.checks import check_middleware, check_settings, check_store, server_version
from django_ratequota.limiter import default_limiter

OURS = "django_ratequota.middleware.RateQuotaMiddleware"
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"


class Introduction(socketserver.StreamRequestHandler):
    """Speaks RESP: introduces itself as told, and says yes to everything else."""

    server: Introducing

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:])))
                self.rfile.readline()
            if words[0] == b"HELLO":
                self.wfile.write(b"%2\r\n+server\r\n+redis\r\n+proto\r\n:3\r\n")
            elif words[0] == b"INFO":
                self.wfile.write(self.server.reply)
            else:
                self.wfile.write(b"+OK\r\n")


class Introducing(socketserver.ThreadingTCPServer):
    reply: bytes


@contextmanager
def introducing(reply: bytes) -> Iterator[str]:
    """The URL of a server that answers INFO with this reply."""
    with Introducing(("127.0.0.1", 0), Introduction) as fake:
        fake.reply = reply
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"redis://127.0.0.1:{fake.server_address[1]}/0"
        # Its handlers end with their connections.
        default_limiter().store.close()
        fake.shutdown()
        thread.join()


def told(messages: list[checks.CheckMessage]) -> list[str]:
    return [str(message.id).removeprefix("django_ratequota.") for message in messages]


# The checks of models ask the database what it can do.
@pytest.mark.django_db
def test_what_this_suite_runs_with_is_in_order() -> None:
    messages = [message for message in checks.run_checks() if "django_ratequota" in str(message.id)]
    assert messages == []


@pytest.mark.parametrize(
    ("raw", "ids"),
    [
        ({}, []),
        ({"TIMEOUT": "soon"}, ["E001"]),
        ({"TIMOUT": 1}, ["W001"]),
        ({"TIMEOUT": 0, "PREFIX": "", "HEADER": []}, ["E001", "E001", "W001"]),
        ({"CALLER": ["tenant"]}, ["E001"]),
        ([], ["E001"]),
    ],
)
def test_settings_are_checked(settings: Any, raw: Any, ids: list[str]) -> None:
    settings.RATEQUOTA = raw
    messages = check_settings()
    assert told(messages) == ids
    assert all(message.hint for message in messages)
    levels = {"E": checks.ERROR, "W": checks.WARNING}
    assert [message.level for message in messages] == [levels[name[0]] for name in ids]


def test_no_setting_at_all_is_fine(settings: Any) -> None:
    del settings.RATEQUOTA
    assert check_settings() == []


@pytest.mark.django_db
def test_manage_check_tells_it(settings: Any) -> None:
    settings.RATEQUOTA = {"TIMEOUT": "soon"}
    with pytest.raises(SystemCheckError, match=r"django_ratequota\.E001") as caught:
        call_command("check")
    assert "HINT: Write a number from 0.001 to 60." in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"CACHE": "local"}, "CACHES['local'] is LocMemCache, not django_redis.cache.RedisCache"),
        ({"CACHE": "nowhere"}, "CACHES has no alias 'nowhere'"),
        ({"CACHE": "schemeless"}, "must specify one of the following schemes"),
        ({"REDIS_URL": "http://127.0.0.1/"}, "REDIS_URL cannot be used: Redis URL must specify one of"),
        ({"REDIS_URL": "redis://127.0.0.1:port/"}, "REDIS_URL cannot be used"),
    ],
)
def test_no_redis_is_configured(settings: Any, raw: dict[str, str], message: str) -> None:
    schemeless = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "127.0.0.1:6379"}
    settings.CACHES = {**settings.CACHES, "schemeless": schemeless}
    settings.RATEQUOTA = raw
    [error] = check_store()
    assert (told([error]), error.level) == (["E002"], checks.ERROR)
    assert message in error.msg
    assert error.hint == "Set RATEQUOTA['CACHE'] to a django-redis alias, or RATEQUOTA['REDIS_URL'] to a Redis URL."


def test_an_unreachable_server_is_no_error_at_boot(settings: Any) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0"}
    assert check_store() == []


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
    with introducing(b"$%d\r\n%s\r\n" % (len(body), body)) as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        messages = check_store()
    assert told(messages) == (["E003"] if message else [])
    for error in messages:
        assert str(message) in error.msg
        assert error.hint == "Upgrade it to redis 7.0 or valkey 7.2, or later."


def test_a_server_that_tells_nobody_its_version_is_taken_as_it_is(settings: Any) -> None:
    with introducing(b"-NOPERM this user has no permissions to run the 'info' command\r\n") as url:
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5}
        assert check_store() == []


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (b"# Server\r\nredis_version:6.2.5\r\nexecutable:/opt/a:b\r\n", ("redis", "6.2.5")),
        (b"redis_version:7.2.4\r\nvalkey_version:9.1.2\r\n", ("valkey", "9.1.2")),
        ({"redis_version": "8.2.3"}, ("redis", "8.2.3")),
        ({"redis_version": 7.0}, ("redis", "7.0")),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.8"}, ("valkey", "8.1.8")),
        ({}, ("redis", "0")),
        (b"", ("redis", "0")),
    ],
)
def test_server_version(info: Any, expected: tuple[str, str]) -> None:
    assert server_version(info) == expected


@pytest.mark.parametrize(
    ("enforce_all", "middleware", "ids"),
    [
        (False, [], []),
        (False, [OURS, AUTHENTICATION], []),
        (True, [AUTHENTICATION, OURS], []),
        (True, [OURS], []),
        (True, [], ["W002"]),
        (True, [AUTHENTICATION], ["W002"]),
        (True, [OURS, AUTHENTICATION], ["W003"]),
    ],
)
def test_middleware(settings: Any, enforce_all: bool, middleware: list[str], ids: list[str]) -> None:
    settings.RATEQUOTA = {"ENFORCE_ALL": enforce_all}
    settings.MIDDLEWARE = middleware
    messages = check_middleware()
    assert told(messages) == ids
    assert all(message.hint and message.level == checks.WARNING for message in messages)
