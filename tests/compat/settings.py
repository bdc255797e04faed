"""Django settings of the other libraries' tests: their caches on a Redis that is this run's own, as they flush it."""

from __future__ import annotations

from tests.project.settings import *  # noqa: F403
from tests.project.settings import CACHES

REST_FRAMEWORK: dict[str, object] = {}
# As projects have it, but for the deadline: the machine may stall.
RATEQUOTA = {"PREFIX": "rqtest", "TIMEOUT": 5.0}
_UNREACHABLE = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
CACHES = {
    "default": CACHES["default"],
    "connection-errors": _UNREACHABLE,
    "connection-errors-redis": _UNREACHABLE | {"OPTIONS": {"IGNORE_EXCEPTIONS": True}},
    "instant-expiration": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
}
