"""Load on one URL for some seconds, by a process of its own.

python -m benchmarks.load PORT PATH SECONDS USERS
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

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


def put(port: int, path: str, seconds: int, *, users: int) -> Load:
    """Load from ``CONNECTIONS`` clients at once, as this number of users in turn.

    Raises ``RuntimeError`` when more than 1 % of the answers are not 200: then it is not what was to be measured. (On
    a starved machine one may fail to come in time.)
    """
    words = [sys.executable, "-m", "benchmarks.load", *map(str, (port, path, seconds, users))]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=seconds + 60)
    load = Load(**json.loads(done.stdout.splitlines()[-1]))
    if load.failed > 1 + load.requests / 100 or not load.requests:
        raise RuntimeError(f"{path}: {load.failed} of {load.requests} answers were not 200")
    return load


async def _generate(port: int, path: str, seconds: int, users: int) -> Load:
    asked = [
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Number {number}\r\n\r\n".encode()
        for number in range(1, users + 1)
    ]
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
    port, path, seconds, users = sys.argv[1:]
    print(json.dumps(asdict(asyncio.run(_generate(int(port), path, int(seconds), int(users))))))
