"""What a client costs in Redis' memory, its key names included, beside the other packages."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import redis

from benchmarks.measure import Cell, Result, Table
from benchmarks.ours import engines
from benchmarks.peers import Candidate, candidates
from benchmarks.scene import RATES, Rates, requests_to
from benchmarks.server import packed, recorded
from django_ratequota.engine.rates import ALGORITHMS, DEFAULT_ALGORITHM

#: Clients are numbered from here on: all numbers are as long, and none is part of a command by chance.
_FIRST = 7_290_000
_REQUESTS = 3
#: So low that what three requests leave behind stays a while: an almost full bucket is forgotten within seconds.
_RATES: Rates = ((100, "day", 86_400),)
_ENTRIES = 1_000
_AT_ONCE = 200
_REPEATED = ("SmartRateLimitThrottle", "check_batch, fixed_window")


def run(quick: bool = False) -> Result:
    """Bytes for each client by each candidate, and of each entry of the logs."""
    url, clients = os.environ["REDIS_URL"], 2_000 if quick else 25_000
    peers, missing = candidates(url, requests_to("/api/one/"))
    # These store what other ways of the same package do.
    peers = [peer for peer in peers if peer.way not in _REPEATED and not peer.way.endswith(", hit")]
    rows: list[tuple[Cell, ...]] = []
    entries: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {}
    with redis.Redis.from_url(url) as client:
        for algorithm in ALGORITHMS:
            ours, *others = [each for each in (*engines(url), *peers) if each.algorithm == algorithm]
            measured = {each.name: _per_client(client, url, each, clients) for each in (ours, *others)}
            for name, (size, keys) in measured.items():
                rows.append((name, algorithm, size / measured[ours.name][0] if name != ours.name else "", size, keys))
            if others:
                best = min(measured[each.name][0] for each in others)
                figures[f"bytes_{algorithm}"] = measured[ours.name][0] / best
            if algorithm == DEFAULT_ALGORITHM:
                figures["bytes"], figures["bytes_peer"] = measured[ours.name][0], best
            if algorithm == "sliding_window_log":
                entries = [(each.name, _per_entry(client, each)) for each in (ours, *others)]
                figures["log_entry_bytes"] = float(entries[0][1])
        client.flushdb()
    rows += [(name, "", "", "", f"not measured: {why}") for name, why in missing.items()]
    note = (
        f"By the server's used_memory after {clients:,} clients made {_REQUESTS} requests each under one limit of a "
        "day, divided by the clients: values, key names, expiry and hash tables. From a client's second window on, "
        "the sliding window counters of other packages keep two keys; ours stays at one."
    )
    per_client = Table("Bytes of a client", ("what", "algorithm", "× ours", "bytes", "keys"), rows, note)
    log_note = f"MEMORY USAGE of one client's keys after {_ENTRIES:,} requests, divided by these."
    return Result([per_client, Table("Bytes of a log's entry", ("what", "bytes"), entries, log_note)], figures)


def _per_client(client: redis.Redis, url: str, candidate: Candidate, clients: int) -> tuple[float, float]:
    """(bytes, keys) of one client."""
    hit = candidate.prepare(_RATES)
    hit(1)  # loads what scripts there are
    client.flushdb()
    with recorded(url) as sent:
        for _ in range(_REQUESTS):
            hit(_FIRST)
    keys = list(client.scan_iter())
    client.flushdb()
    before = _settled(client)
    _replay(url, b"".join(map(packed, sent)), keys[0], clients)
    size = _settled(client) - before
    if client.dbsize() != len(keys) * clients:
        raise RuntimeError(f"{candidate.name}: {client.dbsize()} keys of {clients} clients, not {len(keys)} of each")
    return size / clients, len(keys)


def _replay(url: str, commands: bytes, key: bytes, clients: int) -> None:
    """Send what the first client sent once more for each, under the client's own number, or digest as long."""
    parts = urlsplit(url)
    digest = re.search(rb"[0-9a-f]{32,}", key)
    own = digest[0] if digest else b"%d" % _FIRST
    form = b"%%0%dx" % len(own) if digest else b"%d"
    done = b"*2\r\n$4\r\nECHO\r\n$4\r\ndone\r\n"
    with socket.create_connection((parts.hostname or "localhost", parts.port or 6379)) as connection:
        replies = connection.makefile("rb")
        for first in range(_FIRST, _FIRST + clients, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, _FIRST + clients))
            connection.sendall(b"".join(commands.replace(own, form % n) for n in numbers) + done)
            while replies.readline() != b"done\r\n":
                pass


def _settled(client: redis.Redis) -> int:
    """The server's memory, connections aside, once it has done what it does in the background."""
    used = -1
    while abs(used - (now := _used(client))) > 1024:
        used = now
        time.sleep(0.05)
    return now


def _used(client: redis.Redis) -> int:
    told = client.info("memory")
    return int(told["used_memory"]) - int(told["mem_clients_normal"])


def _per_entry(client: redis.Redis, candidate: Candidate) -> float:
    hit: Callable[[int], object] = candidate.prepare(RATES[:1])
    client.flushdb()
    for _ in range(_ENTRIES):
        hit(_FIRST)
    return sum(client.memory_usage(key, samples=0) or 0 for key in client.scan_iter()) / _ENTRIES
