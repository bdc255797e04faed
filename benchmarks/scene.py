"""What the parts decide about: some clients, their requests, and the policies that hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest
from django.test import RequestFactory
from django.urls import resolve
from rest_framework.request import Request

from benchmarks.urls import Search
from django_ratequota import Bucket, Rate
from django_ratequota.models import Endpoint, Plan, RatePolicy

#: The limits, (units, unit of time, its seconds): no client comes near them.
RATES = ((10_000, "hour", 3600), (1_000, "minute", 60), (100_000, "day", 86_400))
#: Each call is the next client's: a block of as many calls is one request of each.
CLIENTS = range(1, 101)


class Each(dict[int, Any]):
    """Something for each client, by number, made when it is first asked for."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, n: int) -> Any:
        self[n] = made = self._make(n)
        return made


@dataclass(frozen=True, slots=True)
class Requests:
    """One request of each client, as views get it."""

    path: str
    plain: Each
    rest: Each
    view: Any


def requests_to(path: str) -> Requests:
    """Requests by users who are signed in, resolved to the view of ``path``."""
    match = resolve(path)

    def plain(n: int) -> HttpRequest:
        request = RequestFactory().get(path, headers={"Accept": "application/json"}, REMOTE_ADDR="203.0.113.7")
        request.user = User(pk=n, username=f"user{n}")
        request.resolver_match = match
        return request

    def rest(n: int) -> Request:
        http = requests.plain[n]
        request = Request(http)
        request.user = http.user
        return request

    view = Search()
    view.headers = {}
    view.throttle_scope = match.url_name
    requests = Requests(path, Each(plain), Each(rest), view)
    return requests


def write_policies() -> None:
    """One policy at ``/api/one/``, three at ``/api/search/``: per user by plan twice, and one shared by everyone."""
    if Plan.objects.exists():
        return
    plan = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    one = Endpoint.objects.create(name="one")
    search = Endpoint.objects.create(name="search")
    reading = Endpoint.objects.create(name="reading", routes="/api/search/", methods=["GET"])
    RatePolicy.objects.create(plan=plan, endpoint=one, rates="1000/min")
    RatePolicy.objects.create(plan=plan, endpoint=search, rates="1000/min")
    RatePolicy.objects.create(plan=plan, endpoint=reading, rates="10000/hour")
    RatePolicy.objects.create(endpoint=search, counted_per="everyone", rates="1000000000/day")


def buckets_of(client: int, algorithm: str, count: int) -> tuple[Bucket, ...]:
    """As many limits of the client as asked for, up to five: the three of ``RATES``, and two more."""
    rates = [f"{limit}/{unit}" for limit, unit, _ in RATES] + ["1000/s", "1000000/week"]
    return tuple(
        Bucket(f"user:{client}", Rate.parse(f"{rate} {algorithm}"), scope="search") for rate in rates[:count]
    )


def in_turn(hit: Callable[[int], object]) -> Callable[[], object]:
    """A function without arguments that asks for the next client each time."""
    following = cycle(CLIENTS).__next__
    return lambda: hit(following())
