"""What a worker and Redis keep while clients invent another name for each request."""

from __future__ import annotations

import gc
import logging
from collections import deque
from itertools import islice
from typing import Any

import pytest
import redis
from django.test import Client

from django_ratequota.ledger.book import flush
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.utils.bounded_cache import BoundedCache

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "recording", "checkpointing"),
]

PATHS = "/plain/ /search/ /decorated/ /v1/items/{}/ /files{} /nowhere{} /quota/usage/".split()
IDENTIFIERS = {name: f"django_ratequota.identifiers.{name}" for name in ("network", "login_name", "login_pair")}


@pytest.fixture
def everything_counts(settings: Any) -> None:
    """Policies per each kind of name that clients may invent."""
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "ENFORCE_ALL": True,
        "COUNT_UNCHECKED": True,
        "TRUSTED_PROXIES": ["127.0.0.0/8"],
        "IDENTIFIERS": {"api_key": "tests.project.views.api_key", **IDENTIFIERS},
        "CALLER": ["api_key", "user", "ip"],
    }
    plan = Plan.objects.create(name="Free", slug="free", default_for="anonymous")
    RatePolicy.objects.create(plan=plan, rates="1/hour, 5/month")
    for counted_per in ("ip", "api_key", *IDENTIFIERS):
        RatePolicy.objects.create(counted_per=counted_per, rates="3/hour, 100/day sliding_window_log, 900/month")
    search = Endpoint.objects.create(name="search", routes="/plain/ /v1/*")
    RatePolicy.objects.create(endpoint=search, counted_per="ip", rates="1/day")


def flood(numbers: range) -> None:
    """Send two requests for each number, which is in all that a client may write."""
    for n in numbers:
        names = {"X-Api-Key": f"k{n}" if n % 2 else "", "X-Forwarded-For": f"2001:db8:{n:x}::1"}
        names |= {
            "Accept": f"x/y{n}, text/html",
            "Accept-Language": f"x-{n}",
            "User-Agent": f"u{n}",
            "Cookie": f"c={n}",
        }
        method, path = ("GET", "POST", f"M{n}")[n % 3], PATHS[n % len(PATHS)].format(n)
        for _ in range(2):
            body = {"username": f"user{n}"} if method == "POST" else ""
            client = Client(raise_request_exception=False, headers=names)
            client.generic(method, f"{path}?scope=s{n}", str(body), "application/json")


def is_bounded(found: Any) -> bool:
    """Whether it is a cache with a bound: ours, or that of an lru_cache, which has no such elements without one."""
    kinds = {type(one).__name__ for one in islice(found.values(), 1)} if isinstance(found, dict) else set()
    return isinstance(found, BoundedCache) or kinds == {"_lru_list_elem"}


@pytest.mark.usefixtures("everything_counts")
def test_filling_memory(redis_client: redis.Redis) -> None:
    """What waits to be written is written; what grows even so must be a cache with a bound."""

    def settle(numbers: range) -> None:
        flood(numbers)
        collector.flush()
        collector.clear()  # the next minute begins
        flush()

    logging.disable()  # the test runner keeps all lines
    settle(range(20))
    collections = [one for one in gc.get_objects() if issubclass(type(one), (dict, list, set, deque))]
    before = [(one, len(one)) for one in collections]
    settle(range(1000, 1150))
    logging.disable(logging.NOTSET)
    grown = [one for one, length in before if len(one) >= length + 90 and not is_bounded(one)]
    assert [f"{type(one)} {one!r:.200}" for one in grown] == []
    kept = list(redis_client.scan_iter("rqtest:*"))
    assert len(kept) > 150
    assert [key for key in kept if redis_client.pttl(key) == -1] == [b"rqtest:revision"], "all others expire"
