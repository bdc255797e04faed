"""``8 concurrent`` behind real servers: never more than eight requests run, and no slot is left after them."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import redis

from django_ratequota import Bucket, Limiter, Rate, check_caller, check_request
from django_ratequota.engine.slots import unreleased
from django_ratequota.models import Endpoint, RatePolicy
from tests.enforcement.test_propagation import Process
from tests.project.views import request_from
from tests.support.properties import scaled

from . import poll
from .running import GO_ON, PIDS, RUNNING, SEEN
from .servers import Node
from .test_http_servers import CLIENTS, SECONDS, Clients, admitted, editor, environment, serving
from .wire import Wire

__all__ = ["editor", "environment"]

GUNICORN = (
    "gunicorn --bind 127.0.0.1:0 --workers 2 --threads 16 --keep-alive 75 --no-control-socket --worker-class gthread "
    "tests.faults.running:wsgi()"
)
UVICORN = "uvicorn --port 0 --timeout-keep-alive 75 --lifespan off --factory tests.faults.running:asgi"
SERVERS = [
    pytest.param(GUNICORN, "/run/", id="gunicorn, a sync view"),
    pytest.param(GUNICORN, "/stream/", id="gunicorn, a stream"),
    pytest.param(UVICORN, "/arun/", id="uvicorn, an async view"),
    pytest.param(UVICORN, "/run/", id="uvicorn, a sync view"),
    pytest.param(UVICORN, "/astream/", id="uvicorn, a stream"),
]


class Slots:
    """What is held at the endpoint, and what ran."""

    def __init__(self, client: redis.Redis, endpoint_id: int, store: redis.Redis | None = None) -> None:
        self.client, self._limiter = client, Limiter(client=store or client, prefix="rqtest", timeout=5)
        rate = Rate.parse("8 concurrent")
        self._bucket = Bucket("everyone", rate, endpoint_id=endpoint_id, counted_per="everyone")

    def held(self) -> int:
        return len(self._limiter.slots(self._bucket))

    def running(self) -> int:
        return int(self.client.get(RUNNING) or 0)

    def most(self) -> int:
        return max(map(int, self.client.lrange(SEEN, 0, -1)))

    def wait_until_free(self) -> None:
        poll(lambda: self.held() == 0, SECONDS, "no slot is held")

    def close(self) -> None:
        self._limiter.store.close()


@pytest.fixture
def limit(editor: Process) -> Callable[[int], None]:
    def set_limit(number: int) -> None:
        editor.run(
            "RatePolicy.objects.create(endpoint=Endpoint.objects.get(), counted_per='everyone', "
            f"rates='{number} concurrent')"
        )

    return set_limit


@pytest.fixture
def slots(editor: Process, redis_client: redis.Redis) -> Iterator[Slots]:
    found = Slots(redis_client, editor.run("answer = Endpoint.objects.get().pk"))
    yield found
    found.close()


def changed(environment: dict[str, str], **settings: Any) -> dict[str, str]:
    """The environment of a server with these settings."""
    return {**environment, "RATEQUOTA_TEST_CHANGES": json.dumps(settings)}


@pytest.mark.parametrize(("command", "path"), SERVERS)
def test_eight_run_at_once_and_no_more(
    command: str, path: str, limit: Any, slots: Slots, environment: dict[str, str], tmp_path: Path
) -> None:
    limit(8)
    with serving(command, environment, tmp_path / "log") as port:
        answers = Clients(port, path).ask(scaled(20))
        assert admitted(answers, scaled(20)) > 0
        assert {answer.retry_after for answer in answers} == {None, "1"}
        assert (slots.most(), slots.running()) == (8, 0)
        slots.wait_until_free()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_polite_clients_are_never_refused(
    limit: Any, slots: Slots, environment: dict[str, str], tmp_path: Path
) -> None:
    """A client's next request found the slot of its last one held: released later, 61 of 1,200 were refused."""
    limit(64)
    with serving(UVICORN, environment, tmp_path / "log") as port:
        assert admitted(Clients(port, "/arun/").ask(scaled(40)), scaled(40)) == 64 * scaled(40)
        slots.wait_until_free()


def ask_and_leave(port: int, path: str, until: Callable[[bytes], object] = bytes) -> bytes:
    """Send a request, read until something has come, and hang up."""
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 2)  # pipelined
        came = b""
        while not until(came):
            came += client.recv(65536)
        return came


@pytest.mark.parametrize(
    ("command", "path"),
    [
        *((UVICORN, path) for path in ("/astream/?long=1", "/stream/", "/arun/", "/abroken/")),
        *((GUNICORN, path) for path in ("/run/", "/stream/")),
    ],
)
def test_clients_that_leave_leave_no_slot(
    command: str, path: str, limit: Any, slots: Slots, environment: dict[str, str], tmp_path: Path
) -> None:
    limit(8)
    with serving(command, environment, tmp_path / "log") as port:
        for _ in range(scaled(200)):
            ask_and_leave(port, path)
        slots.wait_until_free()
        assert b" 200 OK" in ask_and_leave(port, "/run/")
        slots.wait_until_free()


def test_a_sync_view_whose_client_has_left_holds_its_slot_while_it_runs(
    limit: Any, slots: Slots, environment: dict[str, str], tmp_path: Path
) -> None:
    limit(8)
    with serving(UVICORN, environment, tmp_path / "log") as port:
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as client:
            client.sendall(b"GET /slow/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            poll(lambda: slots.running() == 1, SECONDS, "the view runs")
        answers = Clients(port, "/arun/").ask(2)  # time for the server to notice, and for a slot to get lost
        assert admitted(answers, 2) > 0
        assert slots.running() == 1
        assert slots.held() >= 1
        slots.client.set(GO_ON, 1)
        slots.wait_until_free()
        assert slots.running() == 0


def test_the_slots_of_killed_workers_are_free_when_their_leases_end(
    limit: Any, slots: Slots, environment: dict[str, str], tmp_path: Path
) -> None:
    limit(8)
    with serving(GUNICORN, changed(environment, CONCURRENCY_TTL=2), tmp_path / "log") as port:
        clients = [threading.Thread(target=_ask, args=[port], daemon=True) for _ in range(8)]
        for client in clients:
            client.start()
        poll(lambda: slots.held() == 8, SECONDS, "all slots are held")
        first = slots.client.smembers(PIDS)
        for pid in first:
            os.kill(int(pid), signal.SIGKILL)
        slots.client.set(GO_ON, 1)
        poll(lambda: slots.held() == 0, 20, "the leases of two seconds have ended, and not by default after a minute")
        poll(lambda: _ask(port) == 200, SECONDS, "another worker serves")
        for client in clients:
            client.join(SECONDS)


@pytest.mark.parametrize("fault", ["frozen", "killed"])
def test_eight_run_at_once_although_redis_is_away_for_two_seconds(
    fault: str,
    nodes: Callable[..., Node],
    editor: Process,
    redis_client: redis.Redis,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    """Four that hold their slots all the time, and many that begin and end meanwhile."""
    node, lease = nodes("appendonly yes", "appendfsync always"), 30.0
    endpoint_id = editor.run(
        "place = Endpoint.objects.get(); RatePolicy.objects.create(endpoint=place, counted_per='everyone', "
        "rates='8 concurrent', on_error='deny'); answer = place.pk"
    )
    with node.client() as client:
        slots = Slots(redis_client, endpoint_id, client)
    changes = changed(environment, REDIS_URL=node.url, TIMEOUT=0.5, CONCURRENCY_TTL=lease)
    with serving(GUNICORN, changes, tmp_path / "log") as port, ThreadPoolExecutor(CLIENTS + 4) as threads:
        slow = [threads.submit(_ask, port) for _ in range(4)]
        poll(lambda: slots.running() == 4, SECONDS, "four hold their slots")
        with asking(port, threads) as statuses:
            poll(lambda: statuses.count(200) >= 100, SECONDS, "requests are admitted")
            left_at, before = time.monotonic(), statuses.count(503)
            node.freeze() if fault == "frozen" else node.kill()
            poll(lambda: time.monotonic() >= left_at + 2, SECONDS, "it is away for two seconds")
            poll(lambda: statuses.count(503) >= before + 100, SECONDS, "requests are refused without it")
            node.thaw() if fault == "frozen" else node.start()
            before = statuses.count(200)
            poll(lambda: statuses.count(200) >= before + 100, SECONDS, "requests are admitted again")
        assert (slots.most(), slots.running(), set(statuses)) == (8, 4, {200, 429, 503})
        poll(lambda: slots.held() == 4, lease / 2, "those that ended meanwhile are released, before their leases end")
        slots.client.set(GO_ON, 1)
        assert [one.result() for one in slow] == [200] * 4
        poll(lambda: slots.held() == 0, lease / 2, "no slot is held")
    slots.close()
    assert "Traceback" not in (tmp_path / "log").read_text()


@contextmanager
def asking(port: int, threads: ThreadPoolExecutor) -> Iterator[list[int]]:
    """Clients that send one request after the other until the block ends; yields the statuses of their responses."""
    statuses: list[int] = []
    enough = threading.Event()

    def ask() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        try:
            while not enough.is_set():
                connection.request("GET", "/run/")
                response = connection.getresponse()
                response.read()
                statuses.append(response.status)
        finally:
            connection.close()

    clients = [threads.submit(ask) for _ in range(CLIENTS)]
    try:
        yield statuses
    finally:
        enough.set()
    for client in clients:
        client.result()


def _ask(port: int) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/slow/")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


# --- A network that loses replies. ---


@pytest.fixture
def lossy(settings: Any, proxy: Wire, fresh_policies: None) -> Iterator[Wire]:
    """A policy of one slot for a process that reaches Redis through the proxy."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": proxy.url}
    endpoint = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=endpoint, counted_per="everyone", rates="1 concurrent, 100/hour")
    with check_caller(scope="search") as first:
        assert first.allowed
    yield proxy
    unreleased.clear()


def _is_free() -> bool:
    with check_caller(scope="search") as decision:
        return decision.allowed and not decision.degraded


@pytest.mark.django_db(transaction=True)
def test_a_slot_whose_check_had_no_reply_is_released(lossy: Wire) -> None:
    lossy.cut_after_execution = 1
    with check_caller(scope="search") as decision:
        assert decision.error == "connection"
        assert not check_caller(scope="search").allowed
    assert _is_free()


@pytest.mark.django_db(transaction=True)
def test_a_later_refusal_releases_a_slot_whose_check_had_no_reply(lossy: Wire) -> None:
    request = request_from()
    lossy.cut_after_execution = 1
    assert check_request(request, "search").error == "connection"
    assert not check_request(request, "search", 1000).allowed
    assert _is_free()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("knob", ["cut_after_execution", "cut_before_request_is_passed_on"])
def test_a_slot_whose_release_had_no_reply_is_released_later(lossy: Wire, knob: str) -> None:
    with check_caller(scope="search"):
        setattr(lossy, knob, 1)
    poll(_is_free, SECONDS, "the thread has released it")
