"""Servers of the measured project (``site``), each a process of its own: gunicorn or uvicorn, one variant each."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import redis

ROOT = Path(__file__).parent.parent
_GUNICORN = "gunicorn --bind 127.0.0.1:0 --workers 1 --no-control-socket"
_UVICORN = "uvicorn --port 0 --no-access-log --lifespan off"

#: How the project is served: title -> command line.
KINDS = {
    "gunicorn, one sync worker": f"{_GUNICORN} benchmarks.site.wsgi",
    "gunicorn, one worker of 4 threads": f"{_GUNICORN} --threads 4 --keep-alive 75 benchmarks.site.wsgi",
    "uvicorn": f"{_UVICORN} --timeout-keep-alive 75 benchmarks.site.asgi:application",
}
_PATIENCE = 60.0


@contextmanager
def site(redis_url: str) -> Iterator[dict[str, str]]:
    """The environment that servers of the project run in: a database of their own with the three policies."""
    with tempfile.TemporaryDirectory(prefix="ratequota-bench-") as folder:
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "benchmarks.site.settings",
            "BENCH_REDIS_URL": redis_url,
            "BENCH_DATABASE": str(Path(folder) / "site.sqlite3"),
            "BENCH_EVALSHA": str(Path(folder) / "evalsha.json"),
        }
        subprocess.run([sys.executable, "-m", "benchmarks.site.policies"], cwd=ROOT, env=environment, check=True)
        yield environment


@dataclass(frozen=True, slots=True)
class Served:
    """A server that answers."""

    port: int
    #: Of its first process, and of the group that its workers belong to.
    group: int

    def cpu_seconds(self) -> float:
        """Processor time that it and its workers took so far; 0 where the system does not tell it in /proc."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if int(fields[2]) == self.group:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(
    command: str, variants: Iterable[str], environment: dict[str, str], cores: frozenset[int] = frozenset()
) -> Iterator[dict[str, Served]]:
    """One server for each variant, all up at once, on these cores; ends them whatever happens."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ratequota-bench-")))
        started = {}
        for variant in variants:
            log = folder / variant
            process = stack.enter_context(_process(command, {**environment, "BENCH_VARIANT": variant}, log, cores))
            started[variant] = (process, log)
        yield {variant: Served(_port(process, log), process.pid) for variant, (process, log) in started.items()}


@contextmanager
def _process(
    command: str, environment: dict[str, str], log: Path, cores: frozenset[int]
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output, _on(0, cores):
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split()],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
        if found:
            # It listens before it has loaded the project; the answer comes when it has.
            try:
                urlopen(f"{found[0]}/absent/", timeout=_PATIENCE).close()
            except HTTPError as answer:
                answer.close()
            return int(found[1])
        time.sleep(0.02)
    raise RuntimeError(f"a server does not listen: {log.read_text()}")


@dataclass(frozen=True, slots=True)
class Cores:
    """Where things run."""

    #: Of the servers, and of everything else; the same where there is only one, or where it cannot be chosen.
    servers: frozenset[int]
    rest: frozenset[int]

    def __str__(self) -> str:
        if self.servers == self.rest:
            return "Server, load and Redis share all cores."
        return "The server has one core to itself; load and Redis share the rest."


@contextmanager
def cores_apart(redis_url: str) -> Iterator[Cores]:
    """Keep Redis, this process and what it starts off the first core, which is the servers'."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        yield Cores(frozenset(), frozenset())
        return
    all_cores = frozenset(os.sched_getaffinity(0))
    first = frozenset({min(all_cores)})
    with redis.Redis.from_url(redis_url) as client:
        server = int(client.info("server")["process_id"])
    with _on(server, all_cores - first), _on(0, all_cores - first):
        yield Cores(first, all_cores - first)


@contextmanager
def _on(process: int, cores: frozenset[int]) -> Iterator[None]:
    """The process (0 = this thread, and what it starts) runs on these cores; none = wherever it does."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(process)
    os.sched_setaffinity(process, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(process, before)
