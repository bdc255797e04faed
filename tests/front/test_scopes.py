"""What may name an endpoint in code: the same at every entrance."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any

import pytest
from django.http import HttpResponse
from django.utils.functional import lazystr
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from django_ratequota import check_caller, check_request
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.ninja import QuotaThrottle as NinjaThrottle
from django_ratequota.throttling import QuotaThrottle, quota_scope, throttle_scope
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


class Plain(Enum):
    SEARCH = "search"


class Strings(StrEnum):
    SEARCH = "search"


class Mixed(str, Enum):  # noqa: UP042 - its str() is not its value
    SEARCH = "search"


def by_decorator(scope: Any) -> Any:
    request = request_from()
    ratequota(scope)(lambda request: HttpResponse())(request)
    return request.ratequota


class Limited(APIView):
    throttle_classes = [QuotaThrottle]

    def get(self, request: Any) -> Response:
        return Response()


def by_view(view: Any) -> Any:
    request = APIRequestFactory().get("/")
    view.as_view()(request)
    return request.ratequota


def by_ninja(scope: Any) -> Any:
    request = request_from()
    NinjaThrottle(scope).allow_request(request)
    return request.ratequota


ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "check_request": lambda scope: check_request(request_from(), scope),
    "check_caller": lambda scope: check_caller(ip=None, scope=scope),
    "ratequota": by_decorator,
    "throttle_scope": lambda scope: by_view(type("Search", (Limited,), {"throttle_scope": scope})),
    "@throttle_scope": lambda scope: by_view(throttle_scope(scope)(type("Search", (Limited,), {}))),
    "ninja": by_ninja,
}


@pytest.fixture(params=ENTRANCES.values(), ids=list(ENTRANCES))
def limit(request: Any) -> Any:
    return request.param


@pytest.mark.parametrize("scope", [Strings.SEARCH, Mixed.SEARCH, lazystr("search")], ids=["StrEnum", "str", "lazy"])
def test_texts_of_any_kind_name_the_endpoint(limit: Any, search: Endpoint, scope: Any) -> None:
    RatePolicy.objects.create(endpoint=search, rates="9/hour")
    [status] = limit(scope).statuses
    assert (status.bucket.endpoint_id, type(status.bucket.scope), status.remaining) == (search.pk, str, 8)


@pytest.mark.parametrize("scope", [Plain.SEARCH, b"search", 7, ("search",)], ids=repr)
def test_anything_else_is_an_error_that_says_what_to_write(limit: Any, scope: Any) -> None:
    """It was equal to no endpoint's name, so nothing was enforced."""
    with pytest.raises(TypeError, match="name of an endpoint, such as 'search', not ") as caught:
        limit(scope)
    assert ("write Plain.SEARCH.value" in str(caught.value)) is (scope is Plain.SEARCH)


def test_the_alias_works_where_the_class_has_a_scope(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="9/hour")

    class Reports(Limited):
        throttle_scope = "reports"

        @quota_scope("search")
        def get(self, request: Any) -> Response:
            return Response()

    [status] = by_view(Reports).statuses
    assert status.bucket.endpoint_id == search.pk
