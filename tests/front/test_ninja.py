"""Django Ninja: one throttle for all limits, on sync and async operations, shared by concurrent requests."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import AsyncClient
from django.urls import path
from ninja import NinjaAPI, Router
from ninja.errors import Throttled
from ninja.security import HttpBearer
from ninja.throttling import BaseThrottle

from django_ratequota import ninja
from django_ratequota.decorators import exempt, ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.ninja import QuotaThrottle
from django_ratequota.policies.requests.routes import find_route, known_scopes
from django_ratequota.policies.requests.view_facts import facts_of
from django_ratequota.throttling import throttle_scope
from tests.conftest import Get
from tests.project.views import Units, request_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies"),
    pytest.mark.urls("tests.front.test_ninja"),
]
DOWN = {"REDIS_URL": "redis://127.0.0.1:1/0", "STATISTICS_SECONDS": 0}


class Tokens(HttpBearer):
    """A token is a name; the user is what Ninja keeps as ``request.auth``."""

    def authenticate(self, request: Any, token: str) -> User | None:
        return User.objects.filter(username=token).first()


class Never(BaseThrottle):
    def allow_request(self, request: Any) -> bool:
        return False

    def wait(self) -> float:
        return 7201


def run(request: Any) -> Any:
    return {"ran": True}


async def arun(request: Any) -> Any:
    return {"ran": True}


async def acost(request: Any) -> int:
    return 4


def make_api(name: str, **options: Any) -> NinjaAPI:
    """An API with one operation of each kind on each level that takes throttles."""
    api = NinjaAPI(urls_namespace=name, docs_url=None, **options)
    shared = QuotaThrottle()
    search = QuotaThrottle(scope="search")
    for kind, function in (("", run), ("a", arun)):
        on_api, on_router = Router(), Router(throttle=[search])
        on_api.get(f"/{kind}plain")(function)
        on_api.get(f"/{kind}free", throttle=[])(function)
        on_api.get(f"/{kind}search", throttle=[search])(function)
        on_api.get(f"/{kind}costly", throttle=QuotaThrottle("search", cost=lambda request: 3))(function)
        on_api.get(f"/{kind}awaited", throttle=QuotaThrottle("search", cost=acost if kind else 4))(function)
        on_api.get(f"/{kind}enum", throttle=QuotaThrottle("search", cost=Units.THREE))(function)
        on_api.get(f"/{kind}wrong", throttle=QuotaThrottle("search", cost=lambda request: -3))(function)
        on_api.get(f"/{kind}twice", throttle=[search, QuotaThrottle("exports")])(function)
        on_api.get(f"/{kind}never", throttle=[search, Never()])(function)
        on_api.get(f"/{kind}token", auth=Tokens(), throttle=[search])(function)
        on_router.get("/search")(function)
        api.throttle = [shared]
        api.add_router("", on_api)
        api.add_router(f"/{kind}router", on_router)
    return api


api = make_api("plain")
problems = make_api("problems")
problems.add_exception_handler(Throttled, ninja.problem_details)
urlpatterns = [path("api/", api.urls), path("problems/", problems.urls)]

KINDS = pytest.mark.parametrize("kind", ["", "a"], ids=["sync", "async"])


@KINDS
@pytest.mark.parametrize("path", ["search", "router/search"])
def test_operations_and_routers_are_held_to_their_scope(get: Get, search: Endpoint, kind: str, path: str) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    admitted, refused = (get(f"/api/{kind}{path}") for _ in range(2))
    assert (admitted.status_code, admitted.json()) == (200, {"ran": True})
    assert admitted["RateLimit"] == '"search/hour";r=0;t=3600'
    assert (refused.status_code, refused.json()) == (429, {"detail": "Too many requests."})
    assert 3590 < int(refused["Retry-After"]) <= 3600
    assert refused["X-RateLimit-Remaining"] == "0"
    RatePolicy.objects.update(rates="blocked")
    blocked = get(f"/api/{kind}{path}")
    assert (blocked.status_code, "Retry-After" in blocked) == (429, False)


@KINDS
def test_an_apis_throttle_serves_all_its_operations(get: Get, kind: str) -> None:
    everywhere = Endpoint.objects.create(name="everywhere", routes=f"/api/{kind}plain")
    RatePolicy.objects.create(endpoint=everywhere, rates="1/hour")
    assert [get(f"/api/{kind}plain").status_code for _ in range(2)] == [200, 429]
    assert get(f"/api/{kind}free").status_code == 200


@KINDS
def test_refusals_have_their_headers_without_the_middleware(
    get: Get, settings: Any, search: Endpoint, kind: str
) -> None:
    settings.MIDDLEWARE = []
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    refused = [get(f"/api/{kind}search") for _ in range(2)][1]
    assert refused["RateLimit"].startswith('"search/hour";r=0;t=')
    assert refused["RateLimit"].endswith(f"={refused['Retry-After']}")


@KINDS
@pytest.mark.parametrize(("path", "left"), [("costly", "7"), ("awaited", "6"), ("enum", "7"), ("wrong", "8")])
def test_costs(get: Get, search: Endpoint, kind: str, path: str, left: str) -> None:
    Endpoint.objects.filter(pk=search.pk).update(cost=2)
    RatePolicy.objects.create(endpoint=search, rates="10/hour")
    assert get(f"/api/{kind}{path}")["X-RateLimit-Remaining"] == left


@KINDS
def test_the_user_of_a_token_is_the_caller(get: Get, search: Endpoint, kind: str) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    for name in ("alice", "bob"):
        User.objects.create_user(name)
        headers = {"Authorization": f"Bearer {name}"}
        assert [get(f"/api/{kind}token", headers=headers).status_code for _ in range(2)] == [200, 429]
    RatePolicy.objects.create(endpoint=search, rates="9/hour", user=User.objects.get(username="bob"))
    assert get(f"/api/{kind}token", headers={"Authorization": "Bearer bob"})["X-RateLimit-Limit"] == "9"
    assert get(f"/api/{kind}token", headers={"Authorization": "Bearer eve"}).status_code == 401


@KINDS
def test_a_policy_that_denies_without_a_store(get: Get, search: Endpoint, kind: str, settings: Any) -> None:
    RatePolicy.objects.create(endpoint=search, rates="9/hour", on_error="deny")
    settings.RATEQUOTA = DOWN
    refused = get(f"/api/{kind}search")
    assert (refused.status_code, refused["Retry-After"]) == (503, "1")
    assert refused.json() == {"detail": "Requests cannot be counted right now. Try again in 1 second."}


@KINDS
def test_refusals_may_be_problem_details(get: Get, search: Endpoint, kind: str, settings: Any) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour", on_error="deny")
    refused = [get(f"/problems/{kind}search", headers={"Accept": "text/html"}) for _ in range(2)][1]
    assert (refused.status_code, refused["Content-Type"]) == (429, "application/problem+json")
    assert refused.json()["retry_after"] == int(refused["Retry-After"])
    RatePolicy.objects.update(rates="9/hour")
    other = get(f"/problems/{kind}never")
    assert (other.status_code, other.json()) == (429, {"detail": "Too many requests."})
    settings.RATEQUOTA = DOWN
    unavailable = get(f"/problems/{kind}search")
    assert (unavailable.status_code, unavailable["Content-Type"]) == (503, "application/problem+json")


@KINDS
def test_what_one_of_two_has_refused_the_other_is_not_charged_for(get: Get, search: Endpoint, kind: str) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="exports"), rates="9/hour")
    answers = [get(f"/api/{kind}twice") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert QuotaThrottle("exports").allow_request(request := request_from(address="127.0.0.1"))
    assert request.ratequota.binding.remaining == 7


@KINDS
def test_other_throttles_still_apply(get: Get, search: Endpoint, kind: str) -> None:
    RatePolicy.objects.create(endpoint=search, rates="9/hour")
    refused = get(f"/api/{kind}never")
    assert (refused.status_code, refused["Retry-After"]) == (429, "7201")
    assert QuotaThrottle("search").allow_request(request := request_from(address="127.0.0.1"))
    # Ninja asks all throttles, as DRF does; an async operation's quotas come last, and not after a refusal.
    assert request.ratequota.binding.remaining == (8 if kind else 7)


@KINDS
def test_enforcing_every_view_leaves_operations_to_their_throttle(
    get: Get, search: Endpoint, kind: str, settings: Any
) -> None:
    """The middleware would charge the address, before Ninja's authentication identifies the caller."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    RatePolicy.objects.create(rates="1/hour")
    for name in ("alice", "bob"):
        User.objects.create_user(name)
        headers = {"Authorization": f"Bearer {name}"}
        assert [get(f"/api/{kind}token", headers=headers).status_code for _ in range(2)] == [200, 429]
    assert [get(f"/api/{kind}free").status_code for _ in range(2)] == [200, 429], "nobody but the middleware does"


def test_operators_find_the_scopes() -> None:
    found = {
        route: facts_of(view).scope("GET")
        for route, _, view in map(find_route, ["/api/search", "/api/twice", "/api/free"])
    }
    assert found == {"/api/search": "search", "/api/twice": None, "/api/free": None}
    assert list(known_scopes()) == ["search"]


# --- The event loop, and many at once. ---


def test_async_operations_never_ask_on_the_event_loop(search: Endpoint, settings: Any) -> None:
    """A store that does not answer holds up its own request, and nobody else on the loop."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        RatePolicy.objects.create(endpoint=search, rates="9/hour")
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 0.3, "STATISTICS_SECONDS": 0}
        order: list[str] = []

        async def request() -> None:
            order.append("asked")
            assert (await AsyncClient().get("/api/asearch")).status_code == 200
            order.append("answered")

        async def other() -> None:
            for _ in range(20):
                await asyncio.sleep(0)  # a turn of the loop, which comes only where nobody blocks it
            order.append("other")

        async def both() -> None:
            await asyncio.gather(request(), request(), other())

        asyncio.run(both())
    assert order == ["asked", "asked", "other", "answered", "answered"]


def test_a_shared_throttle_returns_each_request_its_own_wait(search: Endpoint) -> None:
    """Threads that meet between a refusal and the question how long to wait."""
    throttle = QuotaThrottle("search")
    users = [User.objects.create_user(f"user{number}") for number in range(4)]
    for number, user in enumerate(users, 1):
        RatePolicy.objects.create(endpoint=search, user=user, rates=f"1/{number}h")
        assert throttle.allow_request(request_from(user))
    requests = [request_from(user) for user in users]
    met, waits = threading.Barrier(len(users)), {}

    def ask(number: int) -> None:
        assert not throttle.allow_request(requests[number])
        met.wait(timeout=30)
        waits[number] = throttle.wait()

    threads = [threading.Thread(target=ask, args=[number]) for number in range(len(users))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [round(waits[number] / 3600) for number in range(len(users))] == [1, 2, 3, 4]


@pytest.mark.parametrize("decorator", [ratequota("search"), exempt, throttle_scope("search")])
def test_a_decorator_above_an_operation_is_an_error(decorator: Any) -> None:
    """Ninja calls the function that it was given, so the decorator did nothing."""
    api = NinjaAPI(urls_namespace="above")
    with pytest.raises(TypeError, match="below the operation's decorator"):

        @decorator
        @api.get("/above")
        def above(request: Any) -> str:
            return ""
