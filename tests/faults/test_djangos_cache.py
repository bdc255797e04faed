"""Aliases of Django's own Redis cache: its server, login, TLS and options, on connections of our own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from django.test import override_settings

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.checks.store import check_store
from django_ratequota.exceptions import StoreError
from django_ratequota.runtime import default_limiter

from .servers import Node
from .wire import Wire

BUCKET = Bucket("user:1", Rate.parse("10/3650day"))
Ask = Callable[..., list[int]]


@pytest.fixture(params=["plain", "awaited"])
def ask(request: Any) -> Iterator[Ask]:
    """Two decisions by the server of an alias with this location and these options; returns what remains."""
    limiters: list[Limiter] = []

    def run(location: Any, **options: Any) -> list[int]:
        alias = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": location, "OPTIONS": options}
        raw = {"PREFIX": "rqtest", "TIMEOUT": 5, "CACHE": "limits"}
        with override_settings(CACHES={"default": {**alias, "KEY_PREFIX": "shop"}, "limits": alias}, RATEQUOTA=raw):
            limiters.append(Limiter())
            assert check_store() == []
        return [decide(limiters[-1]).statuses[0].remaining for _ in range(2)]

    def decide(limiter: Limiter) -> Decision:
        return limiter.check([BUCKET]) if request.param == "plain" else asyncio.run(limiter.acheck([BUCKET]))

    yield run
    for limiter in limiters:
        limiter.store.close()


def keys(node: Node, database: int = 0, **login: Any) -> list[bytes]:
    with redis.Redis(host=node.host, port=node.port, db=database, **login) as client:
        return list(client.scan_iter())


def test_database_and_password_of_the_options(node: Node, ask: Ask) -> None:
    node.command("CONFIG", "SET", "requirepass", "secret")
    assert ask(f"redis://{node.host}:{node.port}", db=3, password="secret") == [9, 8]
    assert len(keys(node, 3, password="secret")) == 1
    assert keys(node, 0, password="secret") == []


def test_user_and_password_of_the_url(node: Node, ask: Ask) -> None:
    node.command("ACL", "SETUSER", "limits", "on", ">sec/ret", "~*", "&*", "+@all")
    node.command("ACL", "SETUSER", "default", "off")
    assert ask(f"redis://limits:sec%2Fret@{node.host}:{node.port}/2") == [9, 8]


@pytest.mark.parametrize("separator", [None, ",", ";"])
def test_the_first_of_several_servers_is_the_primary(node: Node, ask: Ask, separator: str | None) -> None:
    servers = [node.url, "redis://127.0.0.1:1/0"]
    assert ask(separator.join(servers) if separator else servers) == [9, 8]


def test_a_unix_socket(nodes: Callable[..., Node], tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "s"
    nodes(f"unixsocket {path}")
    assert ask(f"unix://{path}?db=1") == [9, 8]


def test_pool_class_parser_and_timeouts_of_the_cache_do_not_matter(node: Node, ask: Ask) -> None:
    options = {"pool_class": "redis.BlockingConnectionPool", "socket_timeout": 9, "retry_on_timeout": True}
    assert ask(node.url, parser_class="redis._parsers._RESP2Parser", **options) == [9, 8]


def test_tls_with_a_certificate_to_verify(terminator: Wire, trusted: str, ask: Ask) -> None:
    assert ask(f"rediss://:secret@127.0.0.1:{terminator.port}", ssl_ca_certs=trusted) == [9, 8]


def test_tls_without_verification(terminator: Wire, ask: Ask) -> None:
    assert ask(f"rediss://127.0.0.1:{terminator.port}", password="secret", ssl_cert_reqs="none") == [9, 8]


@pytest.mark.parametrize(
    ("location", "text"),
    [
        ("127.0.0.1:6379", r"CACHES\['default'\] cannot be used: LOCATION: Redis URL must specify one of"),
        ("redis://user:12#34@host", r"CACHES\['default'\] cannot be used: LOCATION: .* in a password write"),
        ("", r"CACHES\['default'\] cannot be used"),
        ([], r"CACHES\['default'\] cannot be used"),
    ],
)
def test_a_location_that_cannot_be_used_is_an_error_without_its_password(location: Any, text: str) -> None:
    alias = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": location}
    with override_settings(CACHES={"default": alias}, RATEQUOTA={}):
        [error] = check_store()
        assert error.id == "django_ratequota.E002"
        assert "34" not in error.msg
        with pytest.raises(StoreError, match=text) as caught:
            default_limiter()
        assert caught.value.reason == "configuration"
