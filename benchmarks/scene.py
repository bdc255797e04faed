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
from django_ratequota import Bucket
from django_ratequota import Rate as OwnRate
from django_ratequota.models import Endpoint, Plan, RatePolicy

#: Units, the unit of time, and its seconds.
Rate = tuple[int, str, int]
Rates = tuple[Rate, ...]

#: The limits: no client comes near them.
RATES: Rates = ((10_000, "hour", 3600), (1_000, "minute", 60), (100_000, "day", 86_400))
MORE_RATES: Rates = (*RATES, (1_000, "second", 1), (1_000_000, "week", 604_800))
#: Each call is the next client's: a block of as many calls is one request of each.
CLIENTS = range(1, 101)


class Each(dict[Any, Any]):
    """Something for each client or rate, made when it is first asked for."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: Any) -> Any:
        self[key] = made = self._make(key)
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
    reading = Endpoint.objects.create(name="reading", routes="/api/search/", methods="GET")
    RatePolicy.objects.create(plan=plan, endpoint=one, rates="1000000000/hour")
    RatePolicy.objects.create(plan=plan, endpoint=search, rates="1000000000/hour")
    RatePolicy.objects.create(plan=plan, endpoint=reading, rates="1000000000/min")
    RatePolicy.objects.create(endpoint=search, counted_per="everyone", rates="1000000000/day")


def buckets_of(client: int, algorithm: str, rates: Rates) -> tuple[Bucket, ...]:
    """The rates as limits of the client."""
    texts = [f"{limit}/{unit} {algorithm}" for limit, unit, _ in rates]
    return tuple(Bucket(f"user:{client}", OwnRate.parse(text), scope="search") for text in texts)


def in_turn(hit: Callable[[int], object]) -> Callable[[], object]:
    """A function without arguments that asks for the next client each time."""
    following = cycle(CLIENTS).__next__
    return lambda: hit(following())
