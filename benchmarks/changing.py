"""What a change of policies does to a process under load: whose entries go, and how long requests wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

#: Users that make requests, and threads that make theirs.
WARM, THREADS = 1_000, 4


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
                    del request.ratequota
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
    from django_ratequota.snapshot import policies

    reloads: list[float] = []
    reload = policies.reload

    def timed(revision: int) -> Any:
        begun, before = time.perf_counter(), policies.current()
        snapshot = reload(revision)
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
