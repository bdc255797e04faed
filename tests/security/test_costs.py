"""Costs that clients influence: those that cannot be computed, and those that ask for more than any limit."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import PermissionDenied, SuspiciousOperation
from django.core.exceptions import ValidationError as InvalidForm
from django.http import Http404, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from hypothesis import example, given
from hypothesis import strategies as st
from ninja import NinjaAPI
from ninja.errors import HttpError
from rest_framework.exceptions import ValidationError
from rest_framework.parsers import BaseParser, JSONParser
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota import check_request
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.ninja import QuotaThrottle as NinjaThrottle
from tests.enforcement.test_check import left
from tests.project.views import request_from
from tests.support.properties import examples

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies"),
    pytest.mark.urls(__name__),
]

#: What a cost raises for the body ``{"raise": name}``.
ERRORS: dict[str, Exception] = {
    "KeyError": KeyError("items"),
    "Http404": Http404(),
    "PermissionDenied": PermissionDenied(),
    "SuspiciousOperation": SuspiciousOperation(),
    "ValidationError": ValidationError(),
    "InvalidForm": InvalidForm("no"),
    "HttpError": HttpError(422, "no"),
}


def of_items(request: Any, view: Any = None) -> int:
    data = request.data if hasattr(request, "data") else json.loads(request.body)
    if data and "raise" in data:
        raise ERRORS[data["raise"]]
    return len(data["items"])


class Broken(BaseParser):
    """A parser that fails by itself."""

    media_type = "text/plain"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        raise RecursionError


class Batch(APIView):
    throttle_scope = "batch"
    throttle_cost = of_items
    parser_classes = [JSONParser, Broken]

    def post(self, request: Any) -> Response:
        return Response({"got": request.data})


class Declared(Batch):
    """A property returns the cost."""

    @property
    def throttle_cost(self) -> int:  # type: ignore[override]
        return of_items(self.request)


def of_units(request: Any, view: Any = None) -> Any:
    """As many units as the client asks for, in any form that JSON has."""
    return json.loads(request.GET["units"])


@ratequota("batch", cost=of_units)
def priced(request: Any) -> HttpResponse:
    return HttpResponse()


@ratequota("batch", cost=of_units)
async def apriced(request: Any) -> HttpResponse:
    return HttpResponse()


class Priced(Batch):
    throttle_cost = of_units

    def get(self, request: Any) -> Response:
        return Response({})


api = NinjaAPI(urls_namespace="costs", docs_url=None, throttle=[NinjaThrottle("batch", cost=of_items)])


@api.post("/sync")
def operation(request: Any) -> Any:
    return {"got": json.loads(request.body)}


@api.post("/async")
async def aoperation(request: Any) -> Any:
    return {"got": json.loads(request.body)}


@api.get("/priced", throttle=[NinjaThrottle("batch", cost=of_units)])
def priced_operation(request: Any) -> Any:
    return {}


@api.get("/apriced", throttle=[NinjaThrottle("batch", cost=of_units)])
async def apriced_operation(request: Any) -> Any:
    return {}


urlpatterns = [
    path("priced/", priced),
    path("apriced/", apriced),
    path("rest/priced/", Priced.as_view()),
    path("batch/", Batch.as_view()),
    path("declared/", Declared.as_view()),
    path("ninja/", api.urls),
]
PATHS = ["/batch/", "/declared/", "/ninja/sync", "/ninja/async"]
PRICED = ["/priced/", "/apriced/", "/rest/priced/", "/ninja/priced", "/ninja/apriced"]


@pytest.fixture
def batch() -> Endpoint:
    return Endpoint.objects.create(name="batch", cost=2)


def post(path: str, body: Any, content_type: str = "application/json") -> Any:
    text = body if isinstance(body, str) else json.dumps(body)
    if path.endswith("async"):
        client = AsyncClient(raise_request_exception=False)
        return async_to_sync(client.post)(path, text, content_type=content_type)
    return Client(raise_request_exception=False).post(path, text, content_type=content_type)


def free() -> list[int]:
    return left(check_request(request_from(address="127.0.0.1"), "batch", 0))


@pytest.mark.parametrize("path", PATHS)
def test_a_cost_of_a_value_that_is_missing_counts_as_the_endpoint_s_and_is_refused(
    batch: Endpoint, path: str, caplog: Any
) -> None:
    RatePolicy.objects.create(endpoint=batch, rates="6/hour")
    answers = [post(path, {}) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [400, 400, 400, 429, 429]
    logged = [one for one in caplog.records if one.name == "django_ratequota" and one.levelno == logging.ERROR]
    assert len(logged) == 1, "once a minute"
    assert "raised KeyError: 'items'; the request is answered 400" in logged[0].getMessage()
    assert logged[0].exc_info


@pytest.mark.parametrize("path", ["/batch/", "/declared/"])
def test_a_body_without_a_cost(batch: Endpoint, path: str, caplog: Any) -> None:
    """The view must not be left with the empty body that REST framework puts in place of one that it cannot parse."""
    RatePolicy.objects.create(endpoint=batch, rates="6/hour")
    answers = [post(path, '{"items": [') for _ in range(5)]
    assert [answer.status_code for answer in answers] == [400, 400, 400, 429, 429]
    assert "JSON parse error" in answers[0].json()["detail"]
    assert answers[0]["X-RateLimit-Remaining"] == "4"
    assert "django_ratequota" not in {one.name for one in caplog.records}


@pytest.mark.parametrize(
    ("body", "content_type", "status"), [("x", "text/plain", 500), ("x", "image/png", 415)], ids=["parser", "type"]
)
def test_a_body_that_cannot_be_read_is_counted_and_answered(
    batch: Endpoint, body: str, content_type: str, status: int
) -> None:
    RatePolicy.objects.create(endpoint=batch, rates="4/hour")
    answers = [post("/batch/", body, content_type).status_code for _ in range(3)]
    assert answers == [status, status, 429]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("Http404", 404),
        ("PermissionDenied", 403),
        ("SuspiciousOperation", 400),
        ("ValidationError", 400),
        ("InvalidForm", 400),
    ],
)
def test_what_a_cost_answers_is_counted_and_answered(
    batch: Endpoint, path: str, error: str, status: int, caplog: Any
) -> None:
    if "ninja" in path:
        error, status = ("Http404", 404) if error == "Http404" else ("HttpError", 422)
    RatePolicy.objects.create(endpoint=batch, rates="4/hour")
    assert [post(path, {"raise": error}).status_code for _ in range(3)] == [status, status, 429]
    assert "the endpoint's cost counts" not in caplog.text


def ask(path: str, units: Any) -> tuple[int, int]:
    """Ask for that many units; returns the response's status, and what the limit has left."""
    client = AsyncClient(raise_request_exception=False) if "/a" in path else Client(raise_request_exception=False)
    get = async_to_sync(client.get) if "/a" in path else client.get
    response = get(path, {"units": str(units)})
    return response.status_code, int(response["X-RateLimit-Remaining"])


@pytest.mark.parametrize("path", PRICED)
@given(units=st.lists(st.integers(0, 20) | st.integers(0, 10**30), min_size=2, max_size=3).map(sorted))
@example(units=[1, 10**12 + 1, 10**400])
@examples(100)
def test_a_cost_beyond_all_limits(batch: Endpoint, path: str, units: list[int]) -> None:
    """99999999999999 was admitted at the endpoint's cost, where 100 was refused."""
    RatePolicy.objects.get_or_create(endpoint=batch, rates="1000000000/3650day fixed_window")
    status, left = ask(path, 0)
    prices = []
    for asked in units:
        before = left
        status, left = ask(path, asked)
        prices.append({200: before - left, 429: math.inf}[status])
    assert prices == sorted(prices)
    assert all(price in (asked, math.inf) for price, asked in zip(prices, units, strict=True))


@pytest.mark.parametrize("path", PRICED)
@pytest.mark.parametrize("units", ["NaN", "-1", "1e999", "2.5", '"99999"', "true", "null", "[1]", "9" * 5000])
def test_a_cost_that_is_no_number_of_units(batch: Endpoint, path: str, units: str, caplog: Any) -> None:
    RatePolicy.objects.create(endpoint=batch, rates="4/hour")
    assert [ask(path, units) for _ in range(3)] == [(400, 2), (400, 0), (429, 0)]
    logged = [one.getMessage() for one in caplog.records if one.name == "django_ratequota"]
    assert len(logged) == 1, "once a minute"
    assert logged[0].endswith("; the request is answered 400")
