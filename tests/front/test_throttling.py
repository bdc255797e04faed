"""Django REST framework: one throttle for all limits, through its own exception handling."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client
from django.utils.functional import lazystr
from rest_framework.exceptions import Throttled
from rest_framework.test import APIRequestFactory
from rest_framework.throttling import BaseThrottle

from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.testing import Clock, override_policies
from django_ratequota.throttling import QuotaThrottle
from tests.project.views import Search, Units

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

OURS = "django_ratequota.middleware.RateQuotaMiddleware"


@pytest.fixture
def search() -> Endpoint:
    return Endpoint.objects.create(name="search", cost=2)


@pytest.fixture(params=[True, False], ids=["with the middleware", "without"])
def middleware(request: Any, settings: Any) -> None:
    """The throttle must do without the middleware, too."""
    if not request.param:
        settings.MIDDLEWARE = [name for name in settings.MIDDLEWARE if name != OURS]


@pytest.mark.usefixtures("middleware")
@pytest.mark.parametrize("path", ["/search/", "/api-search/"])
def test_a_view_is_held_to_its_scope(client: Client, search: Endpoint, path: str) -> None:
    RatePolicy.objects.create(endpoint=search, rates="5/hour")
    RatePolicy.objects.create(rates="100/hour")
    admitted = client.get(path)
    assert (admitted.status_code, admitted.json()) == (200, {"ran": True})
    assert admitted["RateLimit-Policy"] == '"all/hour";q=100;w=3600, "search/hour";q=5;w=3600'
    assert admitted["RateLimit"] == '"all/hour";r=98;t=36, "search/hour";r=3;t=720'
    assert (admitted["X-RateLimit-Limit"], admitted["X-RateLimit-Remaining"]) == ("5", "3")
    assert "Retry-After" not in admitted
    client.get(path)
    refused = client.get(path)
    assert refused.status_code == 429
    assert refused["Content-Type"] == "application/json"
    wait = int(refused["Retry-After"])
    assert 700 < wait <= 720
    assert refused.json() == {"detail": "Too many requests. Try again in 12 minutes."}
    assert f'"search/hour";r=1;t={wait}' in refused["RateLimit"]
    assert refused["X-RateLimit-Remaining"] == "1"


@pytest.mark.usefixtures("middleware")
def test_a_block_gives_no_hope(client: Client, search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="blocked")
    response = client.get("/search/")
    assert response.status_code == 429
    assert response.json() == {"detail": "Requests are blocked."}
    assert "Retry-After" not in response
    assert "RateLimit" not in response


def own(self: Any, request: Any, wait: float) -> None:
    raise Throttled(wait, "Slow down.")


class Lenient(QuotaThrottle):
    """A project's own, which takes no refusal."""

    def allow_request(self, request: Any, view: Any) -> bool:
        return super().allow_request(request, view) or True


@pytest.mark.parametrize(
    ("attributes", "answer"),
    [
        ({"throttled": own}, {"detail": "Slow down. Expected available in 3600 seconds."}),
        ({"throttle_classes": [Lenient]}, {"ran": True}),
    ],
)
def test_what_a_project_says_itself_stays(attributes: Any, answer: Any) -> None:
    with override_policies({"search": "1/hour"}, clock=Clock(datetime(2026, 1, 1, tzinfo=UTC))):
        view = type("Own", (Search,), attributes).as_view()
        view(APIRequestFactory().get("/"))
        assert view(APIRequestFactory().get("/")).data == answer


class Closed(BaseThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        return False

    def wait(self) -> float:
        return 7200


def test_the_longest_wait_of_all_throttles_is_sent() -> None:
    with override_policies({"search": "1/hour"}):
        view = type("Two", (Search,), {"throttle_classes": [QuotaThrottle, Closed]}).as_view()
        assert [view(APIRequestFactory().get("/"))["Retry-After"] for _ in range(2)] == ["7200"] * 2


@pytest.mark.usefixtures("middleware")
def test_a_policy_that_denies_without_a_store_is_a_503(client: Client, settings: Any, search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="9/hour", on_error="deny")
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "STATISTICS_SECONDS": 0}
    response = client.get("/search/")
    assert (response.status_code, response["Retry-After"]) == (503, "1")
    assert response.json() == {"detail": "Requests cannot be counted right now. Try again in 1 second."}
    assert "RateLimit" not in response
    assert client.get("/api/reports/").status_code == 200


def of_request_and_view(request: Any, view: Any) -> int:
    assert isinstance(view, Search)
    return int(request.query_params["units"])


def method(self: Any, request: Any, view: Any) -> int:
    assert self is view
    return of_request_and_view(request, view)


def method_of_request(self: Any, request: Any) -> int:
    return of_request_and_view(request, self)


def class_method_of_request(cls: Any, request: Any) -> int:
    return of_request_and_view(request, cls())


class Callable:
    def __call__(self, request: Any, view: Any) -> int:
        return of_request_and_view(request, view)


def priced(cost: Any, scope: Any = "search") -> Any:
    """The response of a view with this cost, where 10/hour is the limit of all endpoints."""
    RatePolicy.objects.create(rates="10/hour")
    view = type("Priced", (Search,), {"throttle_cost": cost, "throttle_scope": scope}).as_view()
    return view(APIRequestFactory().get("/", {"units": "7"}))


def remaining(cost: Any, scope: Any = "search") -> int:
    """What is left after a request that is served."""
    response = priced(cost, scope)
    assert response.status_code == 200
    return int(response.headers["X-RateLimit-Remaining"])


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (None, 8),
        (5, 5),
        (Units.FIVE, 5),
        (lambda request, view: Units.FIVE, 5),
        (0, 10),
        (method, 3),
        (method_of_request, 3),
        (of_request_and_view, 3),
        (staticmethod(of_request_and_view), 3),
        (lambda request, view: 7, 3),
        (classmethod(class_method_of_request), 3),
        (staticmethod(functools.partial(of_request_and_view)), 3),
        (Callable(), 3),
    ],
)
def test_throttle_cost(search: Endpoint, caplog: Any, cost: Any, expected: int) -> None:
    assert remaining(cost) == expected
    assert "throttle_cost" not in caplog.text


@pytest.mark.parametrize("cost", [-1, 1.5, "5", True, float("nan"), lambda request, view: None])
def test_a_throttle_cost_that_is_no_number_of_units_is_an_invalid_request(
    search: Endpoint, caplog: Any, cost: Any
) -> None:
    response = priced(cost)
    assert (response.status_code, response.headers["X-RateLimit-Remaining"]) == (400, "8")
    assert response.data["detail"].code == "parse_error"
    assert "throttle_cost of Priced raised InvalidCost: a cost is a whole number" in caplog.text


def test_a_refusal_outweighs_an_invalid_cost(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    assert priced("5").status_code == 429


@pytest.mark.parametrize(("scope", "expected"), [(lazystr("search"), 8), ("", 9), (None, 9), ("unknown", 9)])
def test_throttle_scope(search: Endpoint, scope: Any, expected: int) -> None:
    assert remaining(None, scope) == expected


def test_a_throttle_without_a_request_has_no_wait() -> None:
    assert QuotaThrottle().wait() is None
