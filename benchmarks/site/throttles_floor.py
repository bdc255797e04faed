"""The least that any limit in Redis costs: one bare EVALSHA a request, on redis-py, and nothing else."""

from __future__ import annotations

from functools import cache
from typing import Any

import redis
from django.conf import settings
from rest_framework.throttling import BaseThrottle


class OneCall(BaseThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        client, sha = _prepared()
        return bool(client.evalsha(sha, 1, "bench:floor"))


@cache
def _prepared() -> tuple[redis.Redis, str]:
    client = redis.Redis(connection_pool=redis.ConnectionPool.from_url(settings.REDIS_URL))
    return client, str(client.script_load("return 1"))
