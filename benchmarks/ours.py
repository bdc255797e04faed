"""This package's ways to decide, and the calls of redis-py that they are measured against."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import TypeVar

import redis

from benchmarks.peers import Candidate, Hit, Told
from benchmarks.scene import CLIENTS, Each, Rates, Requests, buckets_of
from benchmarks.server import recorded
from django_ratequota import Decision, Limiter, check_request
from django_ratequota.enforcement.earlier_checks import CHECKS
from django_ratequota.engine.rates import ALGORITHMS, DEFAULT_ALGORITHM
from django_ratequota.engine.scripts import DECIDE
from django_ratequota.headers import _SENT
from django_ratequota.throttling import _DECISION, QuotaThrottle

OURS = "django-ratequota"
Made = TypeVar("Made")


def bare(url: str) -> Callable[[], object]:
    """What any script costs at least: redis-py as anybody would use it, and a script that does nothing."""
    client = redis.Redis.from_url(url)
    sha = client.script_load("return 1")
    return lambda: client.evalsha(sha, 0)


def evalsha_arguments(url: str, hit: Callable[[int], object], clients: range = CLIENTS) -> list[list[str]]:
    """The arguments of the EVALSHA that ``hit`` sends for each client: hash, number of keys, keys, arguments."""
    with recorded(url) as commands:
        for n in clients:
            hit(n)
    deciding = [b"EVALSHA", DECIDE.sha.encode()]
    sent = [[word.decode() for word in words[1:]] for words in commands if words[:2] == deciding]
    if len(sent) != len(clients):
        raise RuntimeError(f"{len(sent)} decisions were sent for {len(clients)} requests")
    return sent


def same_evalsha(url: str, hit: Callable[[int], object]) -> Callable[[int], object]:
    """A function that sends what ``hit`` sends for a client, through redis-py's own client and pool."""
    client, sent = redis.Redis.from_url(url), evalsha_arguments(url, hit)
    return lambda n: client.evalsha(*sent[n - CLIENTS.start])  # type: ignore[arg-type]


def new_limiter(url: str) -> Limiter:
    """The engine on connections of its own."""
    return Limiter(client=redis.Redis.from_url(url), timeout=5.0)


def engine(limiter: Limiter, algorithm: str, rates: Rates, clients: range = CLIENTS) -> Callable[[int], Decision]:
    """A function that decides about a client's limits by ``Limiter.check``."""
    buckets = Each(lambda n: buckets_of(n, algorithm, rates))
    for n in clients:
        _ = buckets[n]
    limiter.check(buckets[clients.start])  # loads the script
    return lambda n: limiter.check(buckets[n])


def checking(requests: Requests) -> Callable[[int], Decision]:
    """A function that decides about a client's request by ``check_request``."""
    plain, scope = requests.plain, requests.view.throttle_scope

    def check(n: int) -> Decision:
        request = plain[n]
        # A request that was charged is not charged again.
        vars(request).pop(CHECKS, None)
        return check_request(request, scope)

    return warmed(check)


def throttling(requests: Requests) -> Callable[[int], QuotaThrottle]:
    """A function that asks a throttle about a client's request, which writes the headers."""
    plain, rest, view = requests.plain, requests.rest, copy(requests.view)

    def throttle(n: int) -> QuotaThrottle:
        vars(plain[n]).pop(CHECKS, None)
        vars(plain[n]).pop(_SENT, None)
        vars(rest[n]).pop(_DECISION, None)
        view.headers = {}  # of this response: what an earlier one says would be added to
        asked = QuotaThrottle()
        asked.allow_request(rest[n], view)
        return asked

    return warmed(throttle)


def warmed(hit: Callable[[int], Made]) -> Callable[[int], Made]:
    """The same function, after each client's first request, which looks the client up in the database."""
    for n in CLIENTS:
        hit(n)
    return hit


def own_candidates(url: str, requests: Requests) -> list[Candidate]:
    """All of them; the last is the one to compare those with that take a request."""

    def prepare(rates: Rates) -> Hit:
        throttle = throttling(requests)
        return lambda n: _told(throttle(n).decision)

    name = "QuotaThrottle, headers written"
    throttle = Candidate(
        OURS, name, DEFAULT_ALGORITHM, prepare, all_or_nothing="yes", takes_request=True, writes_headers=True
    )
    return [*engines(url), throttle]


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
