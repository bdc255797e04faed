"""Fixtures of the tests of both replacements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.support import server


@pytest.fixture
def more_caches(settings: Any) -> Iterator[redis.Redis]:
    """Add a cache of each kind; returns a client of database 9 of the test server, emptied before and after."""
    other = server.url().rpartition("/")[0] + "/9"
    settings.CACHES = settings.CACHES | {
        "other": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": other},
        "djangos": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": other},
        "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
        "two": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": [other, server.url()],
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        },
        "down": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"},
    }
    with redis.Redis.from_url(other) as client:
        client.flushdb()
        yield client
        client.flushdb()
