"""A burst of simultaneous requests, from a client who is refused already: none is admitted while Redis is up.

Each request connected for itself. Three hundred connections made at once timed out, and ``on_error: allow`` let 93 %
of the requests in. That they queue for a bounded number of connections is tested in faults/test_line.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from django_ratequota import acheck_request, check_request
from django_ratequota.models import RatePolicy
from django_ratequota.runtime import default_limiter
from tests.faults.servers import Node
from tests.faults.wire import Wire
from tests.project.views import request_from

BURST = 300


@pytest.fixture
def slow(settings: Any) -> Iterator[None]:
    """Four connections, and 20 ms an answer: the last of the burst waits for three times the timeout."""
    with Node() as node, Wire(node, round_trip=0.02) as wire:
        url = f"redis://127.0.0.1:{wire.port}"
        settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": url, "TIMEOUT": 0.5, "MAX_CONNECTIONS": 4}
        yield
        default_limiter().store.close()


def by_threads() -> list[bool]:
    with ThreadPoolExecutor(BURST) as threads:
        return list(threads.map(lambda _: check_request(request_from()).allowed, range(BURST)))


def by_tasks() -> list[bool]:
    async def run() -> list[bool]:
        decisions = await asyncio.gather(*(acheck_request(request_from()) for _ in range(BURST)))
        return [decision.allowed for decision in decisions]

    return asyncio.run(run())


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies", "slow")
@pytest.mark.parametrize("burst", [by_threads, by_tasks])
def test_300_parallel_requests(burst: Any) -> None:
    RatePolicy.objects.create(rates="1/3650day")
    assert [check_request(request_from()).allowed for _ in range(2)] == [True, False]
    assert not any(burst())
