"""A burst of simultaneous requests, from a client who is refused already: none is admitted while Redis is up.

Each request connected for itself. Three hundred connections made at once timed out, and ``on_error: allow`` let 93 %
of the requests in; a server with a small ``maxclients`` refused the rest.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.conf import settings as django_settings

from django_ratequota import acheck_request, check_request
from django_ratequota.models import RatePolicy
from django_ratequota.runtime import default_limiter
from django_ratequota.store.pool import MAX_CONNECTIONS
from tests.faults import poll
from tests.faults.servers import Node
from tests.faults.wire import Wire
from tests.project.views import request_from
from tests.support.properties import thorough_after

ATTACKER = "127.0.0.1"
BURST = 300
SECONDS = 60.0


@pytest.fixture
def node() -> Iterator[Node]:
    """A server of the test's own."""
    with Node() as node:
        yield node


def connected(node: Node) -> int:
    """How many connections the server has, the one that asks aside."""
    return len(node.command("CLIENT", "LIST").splitlines()) - 1


@pytest.fixture
def refused(settings: Any, node: Node) -> Iterator[None]:
    """The attacker's one request of ten years is used up."""
    settings.RATEQUOTA = {**django_settings.RATEQUOTA, "REDIS_URL": node.url}
    RatePolicy.objects.create(rates="1/3650day")
    assert [check_request(request_from(address=ATTACKER)).allowed for _ in range(2)] == [True, False]
    yield
    default_limiter().store.close()


def by_threads(while_asking: Callable[[], None]) -> Counter[bool]:
    def ask() -> bool:
        return check_request(request_from(address=ATTACKER)).allowed

    with ThreadPoolExecutor(BURST) as threads:
        asking = [threads.submit(ask) for _ in range(BURST)]
        while_asking()
        return Counter(one.result() for one in asking)


def by_tasks(while_asking: Callable[[], None]) -> Counter[bool]:
    async def ask() -> bool:
        return (await acheck_request(request_from(address=ATTACKER))).allowed

    async def run() -> Counter[bool]:
        asking = [asyncio.create_task(ask()) for _ in range(BURST)]
        await asyncio.to_thread(while_asking)
        return Counter(await asyncio.gather(*asking))

    return asyncio.run(run())


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies", "refused")
@pytest.mark.parametrize("burst", [by_threads, by_tasks])
def test_a_burst_opens_no_more_connections_than_the_bound(settings: Any, node: Node, burst: Any) -> None:
    """Nothing is answered before all that may be sent is sent: each of 300 had a connection of its own."""
    with Wire(node) as wire:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": f"redis://127.0.0.1:{wire.port}", "TIMEOUT": SECONDS}
        check_request(request_from(address="192.0.2.1"))  # policies and revision are known
        default_limiter().store.close()
        poll(lambda: not wire.pipes, SECONDS, "cold")
        wire.hold()

        def release() -> None:
            poll(lambda: wire.asked >= MAX_CONNECTIONS, SECONDS, "as many ask as may")
            wire.thaw()

        assert burst(release) == {False: BURST}
        assert len(wire.pipes) <= MAX_CONNECTIONS
        default_limiter().store.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies", "refused")
@pytest.mark.parametrize("burst", thorough_after(1, [by_threads, by_tasks]))
def test_waiting_for_a_connection_admits_no_refused_client(settings: Any, node: Node, burst: Any) -> None:
    """With four connections, and 20 ms an answer, the last of 300 waits for three times the timeout."""
    timeout = 0.5
    with Wire(node, round_trip=0.02) as wire:
        settings.RATEQUOTA = {
            **settings.RATEQUOTA,
            "REDIS_URL": f"redis://127.0.0.1:{wire.port}",
            "TIMEOUT": timeout,
            "MAX_CONNECTIONS": 4,
        }
        check_request(request_from(address="192.0.2.1"))
        assert burst(lambda: None) == {False: BURST}
        default_limiter().store.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies", "refused")
@pytest.mark.parametrize("burst", [by_threads, by_tasks])
def test_a_small_maxclients_admits_no_refused_client(settings: Any, node: Node, burst: Any) -> None:
    """Other clients hold all but a few of ``maxclients``: requests that could not connect were admitted."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TIMEOUT": 1.0}
    check_request(request_from(address="192.0.2.1"))
    node.command("CONFIG", "SET", "maxclients", connected(node) + 6)
    assert burst(lambda: None) == {False: BURST}
