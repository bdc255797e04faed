"""What one warm request takes: files and functions entered, calls made, bytes sent; all but the clock."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import path, resolve, reverse
from rest_framework.request import Request
from rest_framework.test import force_authenticate
from rest_framework.views import APIView

import django_ratequota
from django_ratequota import check_request
from django_ratequota.middleware import RateQuotaMiddleware
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.runtime import default_limiter
from django_ratequota.throttling import QuotaThrottle
from tests.project import urls
from tests.project.views import request_from
from tests.support import server
from tests.support.pages import form_of

PACKAGE = str(Path(django_ratequota.__file__).parent)
EXPLAIN = "/admin/django_ratequota/ratepolicy/explain/"


@pytest.fixture
def recorded_calls() -> Any:
    """Return the calls of a function into the package, in their order, as (file, function)."""

    def of(function: Any) -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []

        def note(frame: FrameType, event: str, _argument: Any) -> None:
            code = frame.f_code
            # Comprehensions are calls up to Python 3.11 only. Other tests may have put a scene of ``testing`` between
            # the process and its objects.
            own = code.co_filename.startswith(PACKAGE) and "/testing/" not in code.co_filename
            if event == "call" and own and not code.co_name.startswith("<"):
                calls.append((code.co_filename, code.co_qualname))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(before)
        return calls

    return of


@pytest.mark.django_db(transaction=True)
def test_a_warm_request_enters_few_files_and_functions(
    settings: Any, redis_client: Any, fresh_policies: None, recording: None, recorded_calls: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": server.url(), "TIMEOUT": 5.0}
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="1000/min")
    RatePolicy.objects.create(rates="100000/hour", counted_per="everyone")
    user, match = User.objects.create(username="alice"), resolve("/search/")

    def view(request: Any) -> HttpResponse:
        response: HttpResponse = match.func(request)
        return response

    middleware = RateQuotaMiddleware(view)

    def ask() -> None:
        request: Any = RequestFactory().get("/search/")
        request.user, request.resolver_match = user, match
        force_authenticate(request, user)
        response = middleware(request)
        assert (response.status_code, response["RateLimit"].count("r=")) == (200, 2)

    for _ in range(3):
        ask()
    calls = recorded_calls(ask)
    files = [file for file, _function in calls]
    found = {
        "files": len(set(files)),
        "functions": len(set(calls)),
        "calls": len(calls),
        "moves between files": sum(one != other for one, other in pairwise(files)),
    }
    bounds = {"files": 27, "functions": 85, "calls": 105, "moves between files": 66}
    assert {name: found[name] for name in bounds if found[name] > bounds[name]} == {}, sorted(set(calls))


@pytest.mark.django_db(transaction=True)
def test_the_life_of_a_slot_takes_few_calls(
    settings: Any, fresh_policies: None, recording: None, recorded_calls: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": server.url(), "TIMEOUT": 5.0}
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="2 concurrent")
    user, limiter = User.objects.create(username="alice"), default_limiter()

    def hold() -> None:
        request = request_from(user)
        decision = check_request(request, "search")
        assert [len(limiter.slots(status.bucket)) for status in decision.statuses] == [1]
        request.close()

    def life() -> None:
        request = request_from(user)
        assert check_request(request, "search").slots is not None
        request.close()

    for _ in range(3):
        hold()
    files = [file for file, _function in recorded_calls(life)]
    found = {"calls": len(files), "moves between files": sum(one != other for one, other in pairwise(files))}
    bounds = {"calls": 140, "moves between files": 92}
    assert {name: found[name] for name in bounds if found[name] > bounds[name]} == {}


@pytest.mark.django_db(transaction=True)
def test_a_durable_count_takes_a_request_few_calls_more(
    alice: User, fresh_policies: None, checkpointing: None, recorded_calls: Any
) -> None:
    RatePolicy.objects.create(rates="1000/month")
    found = {}
    for durable in (False, True):
        RatePolicy.objects.update(durable=durable)
        for _ in range(3):
            check_request(request_from(alice))
        request = request_from(alice)
        found[durable] = len(recorded_calls(lambda request=request: check_request(request)))
    assert 0 < found[True] - found[False] <= 10


def calls_of(function: Callable[[], object], prepare: Callable[[], object]) -> int:
    """Return how many calls, of Python and of C, the function takes: the fewest of some runs.

    A connection that was idle for a while is checked before it is used, which takes a few more.
    """
    counts: list[int] = []

    def count(frame: FrameType, event: str, _argument: Any) -> None:
        # Other tests may have put a scene of ``testing`` between the process and its objects.
        if event in ("call", "c_call") and "/testing/" not in frame.f_code.co_filename:
            counts[-1] += 1

    before = sys.getprofile()
    for _ in range(5):
        prepare()
        counts.append(-1)  # the call that ends counting
        sys.setprofile(count)
        try:
            function()
        finally:
            sys.setprofile(before)
    return min(counts)


@pytest.fixture
def three_policies(settings: Any, fresh_policies: None, recording: None) -> User:
    """The policies of a request to ``/search/``, recorded; returns its user."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": server.url(), "TIMEOUT": 5.0}
    search = Endpoint.objects.create(name="search")
    plan = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    RatePolicy.objects.create(plan=plan, rates="1000000/hour")
    RatePolicy.objects.create(plan=plan, endpoint=search, rates="1000000/min")
    RatePolicy.objects.create(endpoint=search, rates="1000000/day", counted_per="everyone")
    return User.objects.create(username="alice")


@pytest.mark.django_db(transaction=True)
def test_a_decision_takes_few_calls(three_policies: User) -> None:
    http = request_from(three_policies, resolver_match=resolve("/search/"))
    request, view = Request(http), APIView()
    request.user, view.throttle_scope = three_policies, "search"
    buckets = tuple(status.bucket for status in check_request(http, "search").statuses)
    check, throttle = partial(default_limiter().check, buckets), QuotaThrottle()

    def as_new() -> None:
        """Forget what the checks of this request have left."""
        view.headers = {}
        for made in (vars(http), vars(request)):
            for name in [name for name in made if "ratequota" in name]:
                del made[name]

    asks = {
        "check": check,
        "check_request": partial(check_request, http, "search"),
        "QuotaThrottle": partial(throttle.allow_request, request, view),
    }
    found = {name: calls_of(ask, as_new) for name, ask in asks.items()}
    assert view.headers["RateLimit"].count("r=") == len(buckets) == 3
    bounds = {"check": 138, "check_request": 215, "QuotaThrottle": 240}
    assert {name: found[name] for name in bounds if found[name] > bounds[name]} == {}


@pytest.mark.django_db(transaction=True)
def test_a_caller_among_many_costs_no_more(three_policies: User) -> None:
    """One who was not among the last 2,048 cost 1.1 to 1.8 times as much, and one not among 8,192 up to 3.5 times."""
    users = User.objects.bulk_create([User(username=f"user{number}") for number in range(2100)])

    def calls(user: User) -> int:
        return calls_of(partial(check_request, request_from(user), "search", again=True), lambda: None)

    few, callers = calls(three_policies), iter([request_from(user) for user in users])
    new = [calls_of(lambda: check_request(next(callers), "search"), lambda: None) for _ in range(5)]
    assert max(new) <= 1.4 * few
    for request in callers:
        check_request(request, "search")
    assert calls(users[0]) <= few


@pytest.mark.django_db(transaction=True)
def test_a_decision_is_one_command_of_few_bytes(three_policies: User, redis_client: redis.Redis) -> None:
    requests = [request_from(three_policies) for _ in range(40)]
    check_request(request_from(three_policies), "search")

    def ask(requests: list[Any]) -> None:
        assert all(check_request(request, "search").allowed for request in requests)

    def traffic(requests: list[Any]) -> list[int]:
        """Return the bytes that the server read and wrote for the requests and one INFO."""
        before = redis_client.info("stats")
        ask(requests)
        after = redis_client.info("stats")
        return [after[name] - before[name] for name in ("total_net_input_bytes", "total_net_output_bytes")]

    own = traffic([])
    sent, received = [(one - info) / 20 for one, info in zip(traffic(requests[:20]), own, strict=True)]
    # Not the server's count of reads: connections of earlier tests, closed by the garbage collector, are reads to it.
    transfers: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call" and isinstance(getattr(argument, "__self__", None), socket.socket):
            transfers[argument.__name__] += 1

    with redis_client.monitor() as monitor:
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            ask(requests[20:])
        finally:
            sys.setprofile(before)
        redis_client.echo("asked")
        seen = []
        while (command := monitor.next_command())["command"] != "ECHO asked":
            if command["client_type"] != "lua" and "rqtest" in command["command"]:
                seen.append(command["command"].split()[0])
    assert seen == ["EVALSHA"] * 20
    assert (transfers["send"], transfers["recv"]) == (20, 20), transfers
    assert sent <= 600
    assert received <= 180


@pytest.fixture
def many_views(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    many = ModuleType("many")
    made: list[Any] = [
        path(f"api/v{n}/<int:pk>/", lambda request, pk: HttpResponse(), name=f"v{n}") for n in range(3000)
    ]
    many.urlpatterns = [*urls.urlpatterns, *made]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "many", many)
    settings.ROOT_URLCONF = "many"


@pytest.mark.django_db(transaction=True)
def test_pages_do_not_read_the_urlconf_again(
    many_views: None, fresh_policies: None, recorded_calls: Any, admin_client: Client
) -> None:
    """A save took 3,800 calls and Explain 7,000, most of them to read 3,000 views."""
    endpoint = Endpoint.objects.create(name="search", routes="/api/v7/*")
    policy = RatePolicy.objects.create(endpoint=endpoint, rates="10/min")
    alice = User.objects.create(username="alice")
    change = reverse("admin:django_ratequota_ratepolicy_change", args=[policy.pk])
    rates = iter(range(20, 30))

    def save() -> None:
        filled = {**form_of(admin_client.get(change)), "rates": f"{next(rates)}/min"}
        saves = partial(admin_client.post, change, filled)
        found.setdefault("save", []).append(len(recorded_calls(lambda: answers.append(saves().status_code))))

    def explain() -> None:
        asks = partial(
            admin_client.get, "/admin/django_ratequota/ratepolicy/explain/", {"user": alice.pk, "endpoint": "search"}
        )
        found.setdefault("explain", []).append(len(recorded_calls(lambda: answers.append(asks().status_code))))

    answers: list[int] = []
    found: dict[str, list[int]] = {}
    for _ in range(2):  # the first one reads it
        save()
        explain()
    assert answers == [302, 200] * 2
    bounds = {"save": 500, "explain": 700}
    assert {page: calls for page, calls in found.items() if calls[-1] > bounds[page]} == {}
