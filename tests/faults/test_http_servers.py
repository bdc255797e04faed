"""Sixty-four clients at once against gunicorn and uvicorn: exactly the limit is admitted, also amid an edit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from threading import Barrier, Event, Lock
from typing import Any

import pytest
import redis

from tests.enforcement.test_propagation import Process
from tests.faults import poll
from tests.support.properties import thorough_after

ROOT = Path(__file__).parent.parent.parent
CLIENTS = 64
SECONDS = 60.0

GUNICORN = "gunicorn --bind 127.0.0.1:0 --workers 2 --threads 8 --keep-alive 75 --no-control-socket"
UVICORN = "uvicorn --port 0 --timeout-keep-alive 75 --lifespan off --factory"
SERVERS = [
    pytest.param(f"{GUNICORN} django.core.wsgi:get_wsgi_application()", "/decorated/", id="gunicorn"),
    pytest.param(f"{UVICORN} django.core.asgi:get_asgi_application", "/adecorated/", id="uvicorn, an async view"),
    pytest.param(
        f"{GUNICORN} --preload tests.faults.test_http_servers:preloaded()", "/search/", id="gunicorn --preload"
    ),
    pytest.param(f"{UVICORN} django.core.asgi:get_asgi_application", "/search/", id="uvicorn, a sync view"),
]


def preloaded() -> Any:
    """A WSGI application that decided before its workers are forked: policies in memory, a connection open."""
    from django.core.wsgi import get_wsgi_application

    application = get_wsgi_application()
    from django.db import connections

    from django_ratequota import check_request
    from tests.project.views import request_from

    assert check_request(request_from(address="198.51.100.1"), scope="search").statuses
    connections.close_all()
    return application


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A client's response."""

    #: When it began to ask, on the test's own clock.
    at: float
    status: int
    limit: str | None
    retry_after: str | None


#: Kills the process group of its argument when standard input closes: when the tests end, in whatever way.
GUARD = "import os, signal, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), signal.SIGKILL)"


@contextmanager
def serving(command: str, environment: dict[str, str], log: Path) -> Iterator[int]:
    """Yield the port of a server with this command line; it and its workers are gone afterwards.

    They are gone as well if the tests are killed, which runs no ``finally``.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split()],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield _port(process, log)
        process.terminate()
        assert process.wait(timeout=SECONDS) in (0, -signal.SIGTERM), log.read_text()
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        guard.kill()  # before its input closes: the id may belong to another process by then
        guard.communicate()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    def found() -> re.Match[str] | None:
        return re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())

    poll(lambda: found() or process.poll() is not None, SECONDS, "the server listens")
    listening = found()
    assert listening, f"the server ended: {log.read_text()}"
    return int(listening[1])


class Clients:
    """Sixty-four clients, each on a connection of its own that it keeps."""

    def __init__(self, port: int, path: str) -> None:
        self._port, self._path = port, path
        self.answers: list[Answer] = []
        self._lock = Lock()
        self._begin = Barrier(CLIENTS)

    def ask(self, times: int, halfway: Callable[[], object] = lambda: None) -> list[Answer]:
        """Each client sends this many requests, no more than half of them before ``halfway`` has returned.

        ``halfway`` is called once the first answers are in, and meanwhile the clients go on.
        """
        self.answers = []
        done = Event()
        with ThreadPoolExecutor(CLIENTS) as threads:
            clients = [threads.submit(self._client, times, done) for _ in range(CLIENTS)]
            try:
                self._wait_for_answers(CLIENTS, clients)
                halfway()
            finally:
                done.set()
            for client in clients:
                client.result()
        return self.answers

    def _client(self, times: int, done: Event) -> None:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        try:
            self._begin.wait(timeout=SECONDS)
            for number in range(times):
                if number == times // 2:
                    assert done.wait(timeout=SECONDS)
                at = time.monotonic()
                connection.request("GET", self._path)
                response = connection.getresponse()
                response.read()
                answer = Answer(
                    at=at,
                    status=response.status,
                    limit=response.headers["X-RateLimit-Limit"],
                    retry_after=response.headers["Retry-After"],
                )
                with self._lock:
                    self.answers.append(answer)
        finally:
            connection.close()

    def _wait_for_answers(self, count: int, clients: list[Future[None]]) -> None:
        def waited() -> bool:
            failed = any(client.done() and client.exception() for client in clients)  # ask raises it
            return failed or len(self.answers) >= count

        poll(waited, SECONDS, "the first answers")


def admitted(answers: list[Answer], asked: int) -> int:
    """How many were admitted; all others were refused with a Retry-After."""
    assert len(answers) == asked * CLIENTS
    assert {answer.status for answer in answers} <= {200, 429}
    refused = [answer for answer in answers if answer.status == 429]
    assert all(int(answer.retry_after or 0) > 0 for answer in refused)
    assert not any(answer.retry_after for answer in answers if answer.status == 200)
    return len(answers) - len(refused)


@pytest.fixture
def environment(tmp_path: Path, redis_client: redis.Redis) -> dict[str, str]:
    """The environment of server and editor: a database in a file."""
    inherited = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    file = tmp_path / "served.sqlite3"
    return inherited | {
        "DJANGO_SETTINGS_MODULE": "tests.project.settings",
        "RATEQUOTA_TEST_DATABASE": f"sqlite:///{file}",
    }


@pytest.fixture
def editor(environment: dict[str, str]) -> Iterator[Process]:
    """A process that edits policies, as an admin does in a worker of its own."""
    process = Process(environment)
    try:
        process.run("from django.core.management import call_command; call_command('migrate', verbosity=0)")
        process.run("Endpoint.objects.create(name='search')")
        yield process
    finally:
        process.close()


@pytest.mark.parametrize(("command", "path"), thorough_after(2, SERVERS))
def test_exactly_the_limit_is_admitted(
    command: str, path: str, editor: Process, environment: dict[str, str], tmp_path: Path
) -> None:
    editor.run("p = RatePolicy.objects.create(endpoint=Endpoint.objects.get(), rates='100/3650day')")
    with serving(command, environment, tmp_path / "log") as port:
        clients = Clients(port, path)
        assert admitted(clients.ask(4), 4) == 100
        assert admitted(clients.ask(2), 2) == 0

        # Lowered, then raised, while the clients ask; another period is another counter.
        for days, before, after in ((3649, 2000, 400), (3648, 100, 400)):
            editor.run(f"p.rates = '{before}/{days}day'; p.save()")
            published: list[float] = []

            def edit(days: int = days, after: int = after, published: list[float] = published) -> None:
                editor.run(f"p.rates = '{after}/{days}day'; p.save()")
                published.append(time.monotonic())

            # 320 of 640 requests at the most are made before the edit is published.
            answers = clients.ask(10, edit)
            assert admitted(answers, 10) == 400
            assert {answer.limit for answer in answers} == {str(before), str(after)}
            assert {answer.limit for answer in answers if answer.at > published[0]} == {str(after)}
    assert "Traceback" not in (tmp_path / "log").read_text()
