"""``warm`` before the first request: that loads no policies and opens no connection."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_ratequota import acheck_request, awarm, check_request, warm
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.runtime import process
from tests.enforcement.test_check import CLOSED, database_down, monitored
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def new_process(alice: User, search: Endpoint) -> None:
    """No connection and no policy in memory; the user has a policy."""
    RatePolicy.objects.create(rates="100/hour")
    RatePolicy.objects.create(user=alice, endpoint=search, rates="50/hour")
    process.limiter.forget()
    process.policies.forget()


@pytest.mark.parametrize("awaited", [False, True])
def test_the_first_request_queries_nothing_and_connects_nowhere(
    new_process: None, alice: User, redis_client: redis.Redis, awaited: bool
) -> None:
    seen: list[int] = []

    def look() -> None:
        seen.extend((int(redis_client.info("stats")["total_connections_received"]), len(captured)))

    async def in_one_loop() -> None:
        await awarm()
        look()
        await acheck_request(request_from(alice), "search")

    with CaptureQueriesContext(connections["default"]) as captured, monitored() as commands:
        if awaited:
            async_to_sync(in_one_loop)()
        else:
            warm()
            look()
            check_request(request_from(alice), "search")
        look()
    assert seen[2:] == seen[:2]
    assert (commands[-3:], commands.count("EVALSHA")) == (["INFO", "EVALSHA", "INFO"], 2)


def test_a_worker_starts_without_redis(
    new_process: None, settings: Any, caplog: pytest.LogCaptureFixture, django_assert_num_queries: Any
) -> None:
    for broken in (CLOSED, {"REDIS_URL": "", "CACHE": "missing"}):
        process.policies.forget()
        settings.RATEQUOTA = broken
        warm()
        assert "not connected to Redis before the first request" in caplog.text
        with django_assert_num_queries(0):
            assert check_request(request_from(), "search").degraded
        caplog.clear()


def test_a_worker_starts_without_the_database(new_process: None, caplog: pytest.LogCaptureFixture) -> None:
    with database_down():
        warm()
    assert "the policies cannot be read: the database is gone" in caplog.text
    warm()
    assert process.policies.current() is not None


def test_garbage_collection_is_paused_while_policies_are_read(
    new_process: None, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    reload, seen = process.policies.reload, []

    def look(*arguments: Any) -> Any:
        seen.append(gc.isenabled())
        return reload(*arguments)

    monkeypatch.setattr(process.policies, "reload", look)
    warm()
    assert (seen, gc.isenabled()) == ([False], True)
    with database_down():
        warm()
    assert gc.isenabled()
