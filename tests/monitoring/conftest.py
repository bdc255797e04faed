"""Fixtures of the tests of statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from django_ratequota.models import Endpoint
from django_ratequota.monitoring import collector as collecting
from django_ratequota.monitoring.collector import collector


@pytest.fixture
def recording(settings: Any, monkeypatch: Any, redis_client: redis.Redis) -> Iterator[None]:
    """Record decisions, and send them when the test calls ``flush``."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}
    monkeypatch.setattr(collecting._background, "keep", lambda: None)
    monkeypatch.setattr(collecting, "_CHUNK_SECONDS", 0.0)
    collector.clear()
    yield
    collector.clear()


@pytest.fixture
def search() -> Endpoint:
    return Endpoint.objects.create(name="search")
