"""System checks of Redis over the network: whether it asks for a password."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from django.core import checks

from django_ratequota.checks.store import check_exposed
from tests.checks import ids


def alias(location: Any, **options: Any) -> dict[str, Any]:
    return {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location, "OPTIONS": options}


SENTINELS = [("10.0.0.7", 26379), ("10.0.0.8", 26379)]
SENTINEL_OPTIONS = {
    "CLIENT_CLASS": "django_redis.client.SentinelClient",
    "CONNECTION_POOL_CLASS": "redis.sentinel.SentinelConnectionPool",
    "SENTINELS": SENTINELS,
}


@pytest.mark.parametrize(
    ("location", "warned"),
    [
        # on this machine
        ("redis://localhost:6379/0", False),
        ("redis://[::1]:6379/0", False),
        ("unix:///run/redis.sock", False),
        # over the network
        ("redis://redis.example:6379/0", True),
        ("redis://[2001:db8::7]:6379/0", True),
        ("rediss://redis.example:6379/0", True),
        ("redis://:secret@redis.example/0", False),
        ("redis://redis.example/0?password=secret", False),
        ("rediss://redis.example/0?ssl_certfile=/etc/me.pem&ssl_keyfile=/etc/me.key", False),
        # with Sentinel: the master's password counts, not that of the sentinels
        ("redis+sentinel://localhost:26379/main", False),
        ("redis+sentinel://localhost:26379,10.0.0.8:26379/main", True),
        ("redis+sentinel://:secret@10.0.0.7:26379/main", False),
        ("valkey+sentinel://10.0.0.7:26379/main", True),
        ("rediss+sentinel://10.0.0.7:26379/main?sentinel_password=other", True),
        # a Cluster
        ({"REDIS_URL": "redis://10.0.0.7:7000", "CLUSTER": True}, True),
        ({"REDIS_URL": "redis://:secret@10.0.0.7:7000", "CLUSTER": True}, False),
        # an alias of django-redis, which keeps one pool per location: the locations differ
        (alias("redis://a.example/0"), True),
        (alias("redis://:secret@b.example/0"), False),
        (alias("redis://c.example/0", PASSWORD="secret"), False),
        (alias("redis://d.example/0", CONNECTION_POOL_KWARGS={"username": "alice", "password": "secret"}), False),
        (alias("redis://main-a/0", **SENTINEL_OPTIONS), True),
        (alias("redis://main-b/0", **SENTINEL_OPTIONS, PASSWORD="secret"), False),
        (alias("redis://main-c/0", **{**SENTINEL_OPTIONS, "SENTINELS": [("localhost", 26379)]}), False),
    ],
    ids=str,
)
def test_a_server_on_the_network_without_a_password_is_a_warning(
    settings: Any, monkeypatch: Any, location: Any, warned: bool
) -> None:
    def connect(*_: Any, **__: Any) -> None:
        pytest.fail("the check connected")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    if isinstance(location, str):
        settings.RATEQUOTA = {"REDIS_URL": location}
    elif "REDIS_URL" in location:
        settings.RATEQUOTA = location
    else:
        # Caches first: setting them closes the open ones, for which django-redis 6 may create a client.
        settings.CACHES = {**settings.CACHES, "limits": location}
        if "SENTINELS" in location["OPTIONS"]:
            settings.DJANGO_REDIS_CONNECTION_FACTORY = "django_redis.pool.SentinelConnectionFactory"
        settings.RATEQUOTA = {"CACHE": "limits"}
    assert ids(check_exposed()) == (["W005"] if warned else [])


@pytest.mark.parametrize("deploy", [False, True])
def test_the_password_is_checked_only_with_deploy(settings: Any, deploy: bool) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://redis.invalid/0"}
    messages = checks.run_checks(include_deployment_checks=deploy)
    ours = [message for message in messages if "django_ratequota" in str(message.id)]
    assert ids(ours) == (["W008", "W005"] if deploy else ["W008"])


@pytest.mark.parametrize("raw", [{"CACHE": "nowhere"}, {"REDIS_URL": "http://a.example"}, {"TIMEOUT": "soon"}, []])
def test_without_a_usable_redis_nothing_is_exposed(settings: Any, raw: Any) -> None:
    settings.CACHES = {**settings.CACHES, "default": settings.CACHES["local"]}
    settings.RATEQUOTA = raw
    assert check_exposed() == []
