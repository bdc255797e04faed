"""What a change of policies does to a process under load: whose entries go, and how long requests wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

#: Users that make requests, and threads that make theirs.
WARM, THREADS = 1_000, 4
#: Saves a second of another process, and requests a second meanwhile.
SAVES, REQUESTS = 400, 200


def request_of(user_id: int | None, address: str = "203.0.113.7") -> Any:
    """A request of the user, or of nobody, to the endpoint that all policies are about."""
    from django.contrib.auth.models import AnonymousUser, User
    from django.http import HttpRequest
    from django.urls import resolve

    from benchmarks.population import ROUTE

    request = HttpRequest()
    request.method, request.path, request.META = "GET", ROUTE, {"REMOTE_ADDR": address}
    request.user = AnonymousUser() if user_id is None else User(pk=user_id)
    request.resolver_match = resolve(ROUTE)
    return request


class _Load:
    """Threads that ask for decisions, each for other users, and when each request began and ended."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=[number]) for number in range(THREADS)]

    def __enter__(self) -> _Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        from django.db import connection

        from django_ratequota import check_request

        requests = [request_of(user_id) for user_id in range(1 + number, WARM + 1, THREADS)]
        try:
            while not self._ended.is_set():
                for request in requests:
                    begun = time.perf_counter()
                    check_request(request, scope="search")
                    self.times.append((begun, time.perf_counter()))
                    del request.ratequota, request.ratequota_checks
        finally:
            connection.close()

    def rate(self, since: float, until: float) -> float:
        """Requests a second that ended in the time."""
        return sum(since <= end < until for _, end in list(self.times)) / (until - since)

    def slowest(self, since: float) -> float:
        """Seconds of the slowest request that ended later."""
        return max((end - begun for begun, end in list(self.times) if end >= since), default=0.0)


def under_change(seconds: float) -> list[Any]:
    """Rows (change, entries dropped, of, ms to reload, requests/s before, after, ms of the slowest then)."""
    from django_ratequota.models import RatePolicy
    from django_ratequota.policies.cache import policies

    reloads: list[float] = []
    reload = policies.reload

    def timed(revision: int, instead_of: int | None = None) -> Any:
        begun, before = time.perf_counter(), policies.current()
        snapshot = reload(revision, instead_of)
        if snapshot is not before:
            reloads.append(time.perf_counter() - begun)
        return snapshot

    kinds: dict[str, Callable[[], Any]] = {
        "one user's override": lambda: RatePolicy.objects.create(user_id=WARM // 2 + 1, rates="3000000/min"),
        "a plan's policy": lambda: RatePolicy.objects.filter(endpoint__name="e1").update(rates="5/min"),
    }
    rows = []
    policies.reload = timed  # type: ignore[method-assign]
    with _Load() as load:
        for kind, change in kinds.items():
            time.sleep(seconds)
            before = {user_id: policies.user(str(user_id)) for user_id in range(1, WARM + 1)}
            reloads.clear()
            begun = time.perf_counter()
            change()
            time.sleep(seconds)
            dropped = sum(policies.user(str(user_id)) is not entry for user_id, entry in before.items())
            rates = load.rate(begun - seconds, begun), load.rate(begun, begun + min(1.0, seconds))
            rows.append((kind, dropped, len(before), 1e3 * max(reloads), *rates, 1e3 * load.slowest(begun)))
    policies.reload = reload  # type: ignore[method-assign]
    return rows


def edits(times: int) -> list[float]:
    """Median ms that this process needs after a save of one policy and after an update of a hundred."""
    from django_ratequota.models import RatePolicy
    from django_ratequota.policies.cache import policies
    from django_ratequota.runtime import default_limiter

    subjects = RatePolicy.objects.filter(endpoint__isnull=True).exclude(subject="").order_by("pk")
    found = []
    for rows in (1, 100):
        pks, spent = list(subjects.values_list("pk", flat=True)[:rows]), []
        for number in range(times):
            RatePolicy.objects.filter(pk__in=pks).update(rates=f"{100 + number}/min")
            revision = default_limiter().stored_revision()
            begun = time.perf_counter()
            policies.reload(revision)
            spent.append(1e3 * (time.perf_counter() - begun))
        found.append(median(spent))
    return found


def burst(seconds: float, url: str) -> tuple[float, float, float]:
    """(ms of the 99th percentile of requests while all is quiet, and while another process saves, saves a second)."""
    _latencies(min(1.0, seconds))
    quiet = _latencies(seconds)
    with _saving(url) as reached:
        busy = _latencies(seconds)
    return (*(1e3 * quantiles(spent, n=100)[98] for spent in (quiet, busy)), reached[0])


def _latencies(seconds: float) -> list[float]:
    """Seconds of each request of one thread, at a steady pace."""
    from django_ratequota import check_request

    requests = [request_of(user_id) for user_id in range(1, 101)]
    spent: list[float] = []
    begun = time.perf_counter()
    while (at := len(spent)) < seconds * REQUESTS:
        time.sleep(max(0.0, begun + at / REQUESTS - time.perf_counter()))
        request = requests[at % len(requests)]
        asked = time.perf_counter()
        check_request(request, scope="search")
        spent.append(time.perf_counter() - asked)
        del request.ratequota, request.ratequota_checks
    return spent


@contextmanager
def _saving(url: str) -> Iterator[list[float]]:
    """Another process saves meanwhile; afterwards the list holds how often a second it did."""
    environment = {**os.environ, "DATABASE_URL": url}
    command = [sys.executable, "-m", "benchmarks.saving", str(SAVES)]
    reached: list[float] = []
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "editing\n"
            yield reached
        finally:
            process.stdin.close()
        reached.append(float(process.stdout.readline()))
