"""The EVALSHA that QuotaThrottle sends for the same user, on redis-py, and nothing else."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import redis
from django.conf import settings
from rest_framework.throttling import BaseThrottle


class SameEvalsha(BaseThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        client, arguments = _prepared()
        return bool(client.evalsha(*arguments[request.user.pk - 1]))


@cache
def _prepared() -> tuple[redis.Redis, list[Any]]:
    client = redis.Redis(connection_pool=redis.ConnectionPool.from_url(settings.REDIS_URL))
    return client, json.loads(Path(os.environ["BENCH_EVALSHA"]).read_text())
