"""A flood of new clients in a process of its own, by ``site``'s settings; prints one line of JSON for ``refused``."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import django
import redis

KNOWN = 100


def main() -> None:
    """Ask for known clients, then for so many new ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flood", description=__doc__)
    parser.add_argument("kind", choices=("addresses", "users", "refused"))
    parser.add_argument("count", type=int)
    options = parser.parse_args()
    django.setup()
    ask = _asking(options.kind)
    for number in range(KNOWN):
        ask(number)
    requests = 2 if options.kind == "refused" else 1
    known_us = _us_each(ask, [*range(KNOWN)] * 5) / requests
    resident, redis_bytes = [_resident()], _redis_bytes()
    took = []
    third = options.count // 3
    for first in range(KNOWN, KNOWN + 3 * third, third):
        took.append(_us_each(ask, range(first, first + third)))
        resident.append(_resident())
    told = {
        "known_us": known_us,
        "new_us": sum(took) / len(took) / requests,
        "resident": [after - before for before, after in pairwise(resident)],
        "redis_bytes": _redis_bytes() - redis_bytes,
    }
    print(json.dumps(told))


def _asking(kind: str) -> Callable[[int], object]:
    """A function that makes client number n ask; where it is to be refused, twice."""
    from django.contrib.auth.models import AnonymousUser, User
    from django.test import RequestFactory

    from django_ratequota import check_request

    make = RequestFactory().get

    # Of an endpoint limited per day: its counters are there when the memory is looked at.
    def ask(n: int) -> None:
        address = f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}"
        for _ in range(2 if kind == "refused" else 1):
            request = make("/refused/", REMOTE_ADDR="10.0.0.1" if kind == "users" else address)
            request.user = User(pk=n + 1) if kind == "users" else AnonymousUser()
            check_request(request, "refused")

    return ask


def _us_each(ask: Callable[[int], object], numbers: list[int] | range) -> float:
    begun = time.perf_counter()
    for number in numbers:
        ask(number)
    return (time.perf_counter() - begun) * 1e6 / len(numbers)


def _resident() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _redis_bytes() -> int:
    with redis.Redis.from_url(os.environ["BENCH_REDIS_URL"]) as client:
        return int(client.info("memory")["used_memory_dataset"])


if __name__ == "__main__":
    main()
