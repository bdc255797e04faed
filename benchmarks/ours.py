"""This package's ways to decide, and the call that they are measured against."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import redis

from benchmarks.peers import Candidate, Hit, Told
from benchmarks.scene import CLIENTS, Each, Rates, Requests, buckets_of
from django_ratequota import Decision, Limiter, check_request
from django_ratequota.enforcement.earlier_checks import CHECKS
from django_ratequota.engine.rates import ALGORITHMS, DEFAULT_ALGORITHM
from django_ratequota.throttling import _DECISION, QuotaThrottle

OURS = "django-ratequota"


def bare(url: str) -> Callable[[], object]:
    """What any script costs at least: redis-py as anybody would use it, and a script that does nothing."""
    client = redis.Redis.from_url(url)
    sha = client.script_load("return 1")
    return lambda: client.evalsha(sha, 0)


def new_limiter(url: str) -> Limiter:
    """The engine on connections of its own."""
    return Limiter(client=redis.Redis.from_url(url), timeout=5.0)


def engine(limiter: Limiter, algorithm: str, rates: Rates, clients: range = CLIENTS) -> Callable[[int], Decision]:
    """A function that decides about a client's limits by ``Limiter.check``."""
    buckets = Each(lambda n: buckets_of(n, algorithm, rates))
    for n in clients:
        _ = buckets[n]
    return lambda n: limiter.check(buckets[n])


def checking(requests: Requests) -> Callable[[int], Decision]:
    """A function that decides about a client's request by ``check_request``."""
    plain, scope = requests.plain, requests.view.throttle_scope

    def check(n: int) -> Decision:
        request = plain[n]
        # A request that was charged is not charged again.
        vars(request).pop(CHECKS, None)
        return check_request(request, scope)

    return check


def throttling(requests: Requests, headers: bool = True) -> Callable[[int], QuotaThrottle]:
    """A function that asks a throttle about a client's request; ``headers``: the view has some to write to."""
    plain, rest, view = requests.plain, requests.rest, copy(requests.view)
    view.headers = {} if headers else None

    def throttle(n: int) -> QuotaThrottle:
        vars(plain[n]).pop(CHECKS, None)
        vars(rest[n]).pop(_DECISION, None)
        asked = QuotaThrottle()
        asked.allow_request(rest[n], view)
        return asked

    return throttle


def own_candidates(url: str, requests: Requests) -> list[Candidate]:
    """All of them; the last is the one to compare those with that take a request."""

    def way(headers: bool) -> Callable[[Rates], Hit]:
        def prepare(rates: Rates) -> Hit:
            throttle = throttling(requests, headers)
            for n in CLIENTS:
                throttle(n)
            return lambda n: _told(throttle(n).decision)

        return prepare

    return [
        *engines(url),
        *[
            Candidate(OURS, name, DEFAULT_ALGORITHM, way(headers), all_or_nothing="yes", takes_request=True)
            for name, headers in (("QuotaThrottle, headers written", True), ("QuotaThrottle", False))
        ],
    ]


def engines(url: str) -> list[Candidate]:
    """``Limiter.check`` by each algorithm."""
    limiter = new_limiter(url)

    def way(algorithm: str) -> Callable[[Rates], Hit]:
        def prepare(rates: Rates) -> Hit:
            check = engine(limiter, algorithm, rates)
            return lambda n: _told(check(n))

        return prepare

    return [Candidate(OURS, f"Limiter.check, {a}", a, way(a), all_or_nothing="yes") for a in ALGORITHMS]


def _told(decision: Decision | None) -> Told:
    assert decision is not None
    return [(status.remaining, status.reset_after) for status in decision.statuses]
