"""A burst of simultaneous requests, from a client who is refused already: none is admitted while Redis is up.

Each request connected for itself. Three hundred connections made at once timed out, and ``on_error: allow`` let 93 %
of the requests in; a server with a small ``maxclients`` refused the rest.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as django_settings

from django_ratequota import acheck_request, check_request
from django_ratequota.models import RatePolicy
from django_ratequota.runtime import default_limiter
from django_ratequota.store.pool import MAX_CONNECTIONS
from tests.enforcement.test_propagation import Process
from tests.faults import poll
from tests.faults.servers import Node
from tests.faults.test_http_servers import UVICORN, serving
from tests.faults.wire import Wire
from tests.project.views import request_from
from tests.support.properties import thorough_after

ATTACKER = "127.0.0.1"
BURST = 300
SECONDS = 60.0
GUNICORN = f"gunicorn --bind 127.0.0.1:0 --workers 1 --threads {BURST} --no-control-socket"


@pytest.fixture
def node() -> Iterator[Node]:
    """A server of the test's own."""
    with Node() as node:
        yield node


def connected(node: Node) -> int:
    """How many connections the server has, the one that asks aside."""
    return len(node.command("CLIENT", "LIST").splitlines()) - 1


# --- In one process. ---


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
            wire.release()

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


# --- Over HTTP. ---


def ask_at_once(port: int, path: str) -> Counter[int]:
    """The statuses of as many answers: all clients are connected before one of them asks."""

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.readline()
        writer.close()
        return int(answer.split(b" ", 2)[1])

    async def run() -> Counter[int]:
        streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(BURST)]
        return Counter(await asyncio.wait_for(asyncio.gather(*(ask(*stream) for stream in streams)), SECONDS))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("command", "path"),
    [
        pytest.param(f"{GUNICORN} django.core.wsgi:get_wsgi_application()", "/decorated/", id="gunicorn"),
        pytest.param(
            f"{UVICORN} django.core.asgi:get_asgi_application",
            "/adecorated/",
            id="uvicorn",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_burst_over_http(command: str, path: str, node: Node, tmp_path: Path) -> None:
    """To a worker that has just started, and to the same one again."""
    environment = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    environment |= {
        "DJANGO_SETTINGS_MODULE": "tests.project.settings",
        "RATEQUOTA_TEST_DATABASE": f"sqlite:///{tmp_path / 'burst.sqlite3'}",
        "RATEQUOTA_TEST_REDIS_URL": node.url,
        "RATEQUOTA_TEST_TIMEOUT": "0.5",  # a machine that does other work too may keep Redis itself waiting
    }
    editor = Process(environment)
    try:
        editor.run("from django.core.management import call_command; call_command('migrate', verbosity=0)")
        editor.run("RatePolicy.objects.create(rates='1/3650day')")
        editor.run("from django_ratequota import check_request; from tests.project.views import request_from")
        assert editor.run(f"answer = check_request(request_from(address={ATTACKER!r})).allowed")
        with serving(command, environment, tmp_path / "log") as port:
            before = connected(node)
            for _ in range(2):
                assert ask_at_once(port, path) == {429: BURST}
                # Threads and one event loop: policies are read in a thread.
                assert connected(node) - before <= MAX_CONNECTIONS + 4
    finally:
        editor.close()
