"""Where the time of a decision goes: the same question, asked from further and further away from the socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import redis

from benchmarks.measure import Cell, Result, Table, interleave_by
from benchmarks.memory import recorded
from benchmarks.ours import bare, checking, engine, new_limiter
from benchmarks.scene import CLIENTS, RATES, in_turn, requests_to, write_policies
from django_ratequota.engine.rates import DEFAULT_ALGORITHM

_CLOCKS = (time.perf_counter, time.thread_time)


def run(quick: bool = False) -> Result:
    """One bucket and three, from the bare socket to ``check_request``."""
    url = os.environ["REDIS_URL"]
    write_policies()
    client = redis.Redis.from_url(url)
    nothing = client.script_load("return 1")
    with recorded() as sent:
        client.evalsha(nothing, 0)
    calls: dict[str, Callable[[], object]] = {
        "socket: `return 1`": _by_socket(url, b"".join(sent)),
        "redis-py: evalsha of `return 1`": bare(url),
    }
    for count in (1, 3):
        check = engine(new_limiter(url), DEFAULT_ALGORITHM, RATES[:count])
        check(1)
        with recorded() as sent:
            check(1)
        command = b"".join(sent)
        buckets = f"{count} bucket{'s' * (count > 1)}"
        calls[f"socket: the script, {buckets}"] = _by_socket(url, command)
        calls[f"redis-py's connection: the script, {buckets}"] = _by_connection(client, command)
        calls[f"Limiter.check, {buckets}"] = in_turn(check)
    request = checking(requests_to("/api/search/"))
    for n in CLIENTS:
        request(n)
    calls["check_request, 3 policies"] = in_turn(request)
    wall, cpu = interleave_by(_CLOCKS, calls, *((3, 20) if quick else (60, 100)))
    base = wall["redis-py: evalsha of `return 1`"]
    rows: list[tuple[Cell, ...]] = [
        (name, seconds / base, seconds * 1e6, cpu[name] * 1e6, (seconds - cpu[name]) * 1e6)
        for name, seconds in wall.items()
    ]
    note = (
        "The bytes that `Limiter.check` sends, ready made, on a socket and on a connection of redis-py; then the "
        "verb itself, and a request. Waiting: what is not CPU of the calling thread, so the server, and the machine."
    )
    columns = ("what", "× bare", "µs", "CPU µs", "waiting µs")
    return Result([Table("From the socket to the request", columns, rows, note)])


def _by_socket(url: str, command: bytes) -> Callable[[], object]:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname or "localhost", parts.port or 6379))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def call() -> bytes:
        connection.sendall(command)
        return connection.recv(65_536)  # so short a reply comes in one piece

    return call


def _by_connection(client: redis.Redis, command: bytes) -> Callable[[], object]:
    connection = client.connection_pool.get_connection()

    def call() -> object:
        connection.send_packed_command([command])
        return connection.read_response()

    return call
