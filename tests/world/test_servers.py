"""Requests to real servers that fork, thread and await: uWSGI, gunicorn, uvicorn, hypercorn, daphne, granian."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import poll
from tests.faults.servers import free_port

from .scene import Scene
from .servers import BIN, SECONDS, Clients, running, wait_until_it_listens

#: Clients at once; the first part of their requests, all admitted; and the limit that all share.
CLIENTS, FIRST, ROOM = 8, 5, 200

# uWSGI forks in C, and tells Python only with --py-call-uwsgi-fork-hooks.
UWSGI = "uwsgi --http-socket 127.0.0.1:{port} --module tests.world.wsgi --master --processes 2 --die-on-term "
UWSGI += f"--need-app --virtualenv {sys.prefix} --enable-threads"
GUNICORN = "gunicorn --bind 127.0.0.1:{port} --workers 2 --no-control-socket"
ASGI = "tests.world.asgi:application"
SERVERS = {
    "uwsgi": (UWSGI, "/view/", 2),
    "uwsgi, warm before the fork": (UWSGI, "/view/", 2),
    "uwsgi, threads": (f"{UWSGI} --threads 4", "/view/", 2),
    "uwsgi, workers that are replaced": (f"{UWSGI} --max-requests 60 --min-worker-lifetime 0", "/view/", 2),
    "gunicorn gthread": (f"{GUNICORN} --threads 4 tests.world.wsgi", "/view/", 2),
    "gunicorn gevent": (f"{GUNICORN} --worker-class gevent tests.world.wsgi", "/view/", 2),
    "gunicorn --preload, warm before the fork": (f"{GUNICORN} --threads 4 --preload tests.world.wsgi", "/view/", 2),
    "uvicorn": ("uvicorn --port {port} --workers 2 --lifespan off " + ASGI, "/aview/", 2),
    "uvicorn, a sync view": ("uvicorn --port {port} --workers 2 --lifespan off " + ASGI, "/view/", 2),
    "hypercorn": ("hypercorn --bind 127.0.0.1:{port} --workers 2 " + ASGI, "/aview/", 2),
    "daphne": ("daphne --bind 127.0.0.1 --port {port} " + ASGI, "/aview/", 1),
    "granian": ("granian --interface asginl --port {port} --workers 2 " + ASGI, "/aview/", 2),
    "granian, wsgi": (
        "granian --interface wsgi --port {port} --workers 2 --blocking-threads 4 tests.world.wsgi:application",
        "/view/",
        2,
    ),
}


def _are_replaced(output: Path) -> bool:
    """Whether uWSGI's master is at no replacement: told to end meanwhile, it forks a worker that nothing ends."""
    text = output.read_text()
    return text.count("killed successfully") == text.count("Respawned uWSGI worker")


@pytest.mark.parametrize("name", SERVERS)
def test_what_callers_are_told_and_charged(
    name: str, scenes: Callable[[int], Scene], environment: dict[str, str], tmp_path: Path
) -> None:
    """Two workers of uWSGI were one writer: 20 of 40 requests were in the ledger, for good."""
    scene, port, output = scenes(ROOM), free_port(), tmp_path / "output"
    command, path, workers = SERVERS[name]
    command = f"{BIN}/{command.format(port=port)}"
    if "warm" in name:
        environment = {**environment, "WORLD_WARM": "1"}
    with running(command.split(), environment, output) as server:
        wait_until_it_listens(server, port, output)
        clients = Clients(port, path, scene.log, CLIENTS)
        first = clients.ask(FIRST)
        assert [answer.admitted for answer in first] == [True] * CLIENTS * FIRST
        scene.holds(lambda: clients.ask_all(scene.log.processes()))
        assert len(scene.log.processes()) >= workers, "each worker has answered"
        more = clients.ask(ROOM // CLIENTS)
        admitted = sum(answer.admitted for answer in scene.log.answers())
        assert (admitted, any(not answer.admitted for answer in more)) == (ROOM, True)
        scene.holds(lambda: clients.ask_all(scene.log.processes()))
        poll(lambda: _are_replaced(output), SECONDS, "each worker that has ended is replaced")
    assert scene.is_written(scene.log.answers()), "after the end of the server"
    assert "Traceback" not in output.read_text()
