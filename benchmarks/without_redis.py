"""What happens while Redis is down: what a request is answered, and what the decision costs.

Redis ends, so that connecting fails at once, or it hangs (SIGSTOP), so that nothing comes back in time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from statistics import median
from typing import Any

import redis
from django.test import override_settings

from benchmarks import server
from benchmarks.measure import Cell, Result, Table, interleave
from benchmarks.scene import requests_to

#: Seconds.
TIMEOUT, WAITING = 0.1, 0.01


def run(quick: bool = False) -> Result:
    """Requests under each ``on_error``, with Redis and without."""
    rows: list[tuple[Cell, ...]] = []
    figures: dict[str, float] = {}
    _write_policies()
    for how, sent in _STATES.items():
        for on_error in _ON_ERROR:
            # A server and so a breaker of its own for each.
            with server.running() as url, override_settings(RATEQUOTA={"REDIS_URL": url, "TIMEOUT": TIMEOUT}):
                ask = _asking(on_error)
                with _stopped(url, sent):
                    answer, slowest_ms, waiting, cpu = _measured(ask, quick)
            if answer.split(",")[0] != ("503" if sent and on_error == "deny" else "200"):
                raise RuntimeError(f"Redis {how}, on_error is {on_error}: a request was answered {answer}")
            rows.append((f"{how}, {on_error}", answer, slowest_ms, waiting, cpu))
            if sent:
                figures["down_slowest_ms"] = max(slowest_ms, figures.get("down_slowest_ms", 0))
                figures["down_waiting"] = max(waiting, figures.get("down_waiting", 0))
                figures["down_us"] = max(cpu, figures.get("down_us", 0))
            else:
                figures["up_us"] = max(cpu, figures.get("up_us", 0))
    note = (
        "A DRF view with QuotaThrottle and one policy, called in process. Slowest: of the first ten requests. "
        f"Waiting: how many of these take over {WAITING * 1000:g} ms. CPU: of the process, for a later request with "
        f"its view. After three failures, one request a second tries Redis. TIMEOUT is {TIMEOUT * 1000:g} ms."
    )
    columns = ("Redis, `on_error`", "answered", "slowest ms", "waiting", "CPU µs")
    return Result([Table("Requests", columns, rows, note)], figures)


@contextmanager
def _stopped(url: str, sent: signal.Signals | None) -> Iterator[None]:
    with redis.Redis.from_url(url) as client:
        process = int(client.info("server")["process_id"])
    if sent:
        os.kill(process, sent)
    try:
        yield
    finally:
        if sent == signal.SIGSTOP:
            os.kill(process, signal.SIGCONT)


_ON_ERROR = ("allow", "deny", "local")
_STATES = {"works": None, "has ended": signal.SIGKILL, "hangs": signal.SIGSTOP}


def _write_policies() -> None:
    from django_ratequota.models import Endpoint, RatePolicy

    for on_error in _ON_ERROR:
        endpoint = Endpoint.objects.create(name=on_error)
        RatePolicy.objects.create(endpoint=endpoint, rates="1000000000/min", on_error=on_error)


def _asking(on_error: str) -> Callable[[], Any]:
    """A function that makes the next client's request of a view limited by the policy, and returns the response."""
    from benchmarks.urls import Search
    from django_ratequota.throttling import QuotaThrottle

    view = Search.as_view(throttle_classes=[QuotaThrottle], throttle_scope=on_error)
    requests, numbers = requests_to("/api/search/"), count(1)

    def ask() -> Any:
        return view(requests.plain[next(numbers)])

    ask()
    return ask


def _measured(ask: Callable[[], Any], quick: bool) -> tuple[str, float, int, float]:
    """What is answered, ms of the slowest of ten requests, how many of them waited, and µs of CPU of later ones."""
    took = []
    for _ in range(10):
        begun = time.perf_counter()
        response = ask()
        took.append(time.perf_counter() - begun)
    retry = f", Retry-After: {response.headers['Retry-After']}" if "Retry-After" in response.headers else ""
    spent = interleave({"it": ask}, *((3, 20) if quick else (11, 200)))["it"]
    waiting = sum(each > WAITING for each in took)
    return f"{response.status_code}{retry}", 1e3 * max(took), waiting, 1e6 * median(spent.client)
