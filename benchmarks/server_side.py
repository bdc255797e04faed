"""What a decision costs the server: its CPU, and so how many decisions one core of Redis makes a second.

50 connections send one command at a time, as a site's workers do: pipelined commands would share reads and writes.
The commands are those of ``Limiter.check``, each by the next of 1,000 clients, who begin a block without counters.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from typing import Any
from urllib.parse import urlsplit

import redis

from benchmarks.measure import Cell, Result, Table, interleave
from benchmarks.ours import evalsha_arguments, new_limiter
from benchmarks.scene import MORE_RATES, Rates, buckets_of
from benchmarks.server import cpu_clock, packed
from django_ratequota.engine.rates import DEFAULT_ALGORITHM

_CONNECTIONS, _CLIENTS = 50, range(1, 1001)
#: Rates that a block comes nowhere near.
_RATES: Rates = tuple((100_000, unit, seconds) for _, unit, seconds in MORE_RATES)
_SLOWEST = "sliding_window_log"


def run(quick: bool = False) -> Result:
    """The table, and decisions a second of the default algorithm."""
    url = os.environ["REDIS_URL"]
    rounds, blocks = (10, 2) if quick else (200, 7)
    with ExitStack() as stack:
        client = stack.enter_context(redis.Redis.from_url(url))
        server = stack.enter_context(cpu_clock(url))
        parts = urlsplit(url)
        address = parts.hostname or "localhost", parts.port or 6379
        sockets = [stack.enter_context(socket.create_connection(address)) for _ in range(_CONNECTIONS)]
        calls: dict[str, Callable[[], object]] = {
            name: _sending(client, sockets, commands, rounds) for name, commands in _cases(client, url).items()
        }
        spent = interleave(calls, blocks, 1, server)
        client.flushdb()
    us = {name: each.us()[1] / (rounds * _CONNECTIONS) for name, each in spent.items()}
    rows: list[tuple[Cell, ...]] = [
        (name, each, each / us["`return 1`"], round(1e6 / each)) for name, each in us.items()
    ]
    note = (
        f"{_CONNECTIONS} connections; all admitted but the cost that never fits. CPU includes reading the command "
        "and writing the reply. Redis runs scripts on one core, which makes 1,000,000 / CPU decisions a second."
    )
    figures = {f"decisions_{count}": 1e6 / us[_name(DEFAULT_ALGORITHM, count)] for count in (1, 3)}
    return Result(
        [Table("Decisions on the server", ("", "Redis CPU µs", "× `return 1`", "a second and core"), rows, note)],
        figures,
    )


def _cases(client: redis.Redis, url: str) -> dict[str, list[bytes]]:
    """What each case sends, one command a client."""
    nothing = str(client.script_load("return 1"))
    cases = {"`return 1`": [packed(["EVALSHA", nothing, "0"])]}
    limiter = new_limiter(url)

    def decisions(algorithm: str, count: int, cost: int = 1) -> list[list[str]]:
        def check(n: int) -> Any:
            return limiter.check(buckets_of(n, algorithm, _RATES[:count]), cost)

        check(0)  # loads the script
        return evalsha_arguments(url, check, _CLIENTS)

    for algorithm in (DEFAULT_ALGORITHM, _SLOWEST):
        for count in (1, 3, 5):
            cases[_name(algorithm, count)] = [packed(["EVALSHA", *sent]) for sent in decisions(algorithm, count)]
    name = _name(DEFAULT_ALGORITHM, 3)
    sent_3 = decisions(DEFAULT_ALGORITHM, 3, cost=200_000)
    cases[f"{name}, a cost that never fits"] = [packed(["EVALSHA", *sent]) for sent in sent_3]
    # What the arguments alone cost: sent, read by the server and given to a script that looks at none.
    ignored = str(client.script_load("#!lua\nreturn 1"))
    cases["`return 1`, the arguments of 3 limits"] = [packed(["EVALSHA", ignored, *sent[1:]]) for sent in sent_3]
    return cases


def _sending(
    client: redis.Redis, sockets: list[socket.socket], commands: list[bytes], rounds: int
) -> Callable[[], None]:
    following = cycle(commands).__next__

    def send() -> None:
        client.flushdb()
        length = 0
        for _ in range(rounds):
            for connection in sockets:
                connection.sendall(following())
            for connection in sockets:
                missing = length
                while missing > 0 or not length:
                    received = len(connection.recv(65_536))
                    length = length or received  # so short a reply comes in one piece, and all are as long
                    missing -= received
                    if not received:
                        raise RuntimeError("the server has closed a connection")

    return send


def _name(algorithm: str, count: int) -> str:
    return f"{algorithm}, {count} limit{'s' * (count > 1)}"
