"""Load on one URL for some seconds: by wrk where it is on PATH, else by this module, in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

CONNECTIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What came of it."""

    requests: int
    seconds: float
    #: µs from a request to its whole answer.
    p99_us: float
    #: Requests answered with anything but 200, or not at all.
    failed: int

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds


def generator() -> str:
    """Who generates the load here."""
    return "wrk" if shutil.which("wrk") else "a Python client of our own (wrk is not on PATH)"


def put(port: int, path: str, seconds: int, *, users: int, status: int = 200) -> Load:
    """Load from ``CONNECTIONS`` clients at once, in the name of so many users in turn; 0 = anonymous.

    Raises ``RuntimeError`` when more than 1 % of the answers have another status than ``status``: then it is not what
    was to be measured. (On a starved machine one may fail to come in time.)
    """
    words = [sys.executable, "-m", "benchmarks.load", str(port), path, str(seconds)]
    if shutil.which("wrk"):
        script = str(Path(__file__).with_suffix(".lua"))
        words = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "--timeout", "30s", "-s", script]
        words.append(f"http://127.0.0.1:{port}{path}")
    environment = {**os.environ, "BENCH_USERS": str(users)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=seconds + 60)
    load = Load(**json.loads(done.stdout.splitlines()[-1]))
    unexpected = load.failed if status == 200 else load.requests - load.failed
    if unexpected > 1 + load.requests / 100 or not load.requests:
        raise RuntimeError(f"{path}: {unexpected} of {load.requests} answers were not {status}")
    return load


async def _generate(port: int, path: str, seconds: int, users: int) -> Load:
    names = [f"Authorization: Number {number}\r\n" for number in range(1, users + 1)] or [""]
    asked = [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{name}\r\n".encode() for name in names]
    took: list[float] = []
    failed = 0
    begun = time.monotonic()

    async def client(at: int) -> None:
        nonlocal failed
        reader = writer = None
        while time.monotonic() < begun + seconds:
            sent = time.monotonic()
            if reader is None or writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(asked[at % len(asked)])
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            took.append(time.monotonic() - sent)
            failed += not head.startswith(b"http/1.1 200 ")
            at += CONNECTIONS
            if b"connection: close" in head:
                writer.close()
                reader = writer = None
        if writer is not None:
            writer.close()

    await asyncio.gather(*map(client, range(CONNECTIONS)))
    took.sort()
    return Load(
        requests=len(took),
        seconds=time.monotonic() - begun,
        p99_us=took[int(len(took) * 0.99)] * 1e6,
        failed=failed,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("path")
    parser.add_argument("seconds", type=int)
    options = parser.parse_args()
    users = int(os.environ["BENCH_USERS"])
    print(json.dumps(asdict(asyncio.run(_generate(options.port, options.path, options.seconds, users)))))
