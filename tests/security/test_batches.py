"""A batch that checks each item: five hundred of them were one charge."""

from __future__ import annotations

from typing import Any

import pytest
from django.http import HttpRequest, JsonResponse
from django.test import Client
from django.urls import path

from django_ratequota import check_request
from django_ratequota.decorators import ratequota
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.models import Endpoint, RatePolicy
from tests.conftest import Check
from tests.enforcement.test_check import left
from tests.project.views import request_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies"),
    pytest.mark.urls(__name__),
]


def run(request: HttpRequest) -> JsonResponse:
    """As many items as the client asks for."""
    items = [check_request(request, "items", again=True).allowed for _ in range(int(request.GET["items"]))]
    return JsonResponse({"done": items.count(True)})


urlpatterns = [path("batch/", run), path("decorated/", ratequota("door")(run))]


@pytest.fixture
def items() -> Endpoint:
    return Endpoint.objects.create(name="items")


def free(scope: str = "items") -> list[int]:
    return left(check_request(request_from(address="127.0.0.1"), scope, 0))


@pytest.mark.parametrize("path", ["/batch/", "/decorated/"])
@pytest.mark.parametrize("everywhere", [False, True], ids=["", "ENFORCE_ALL"])
def test_500_items_in_one_request(settings: Any, items: Endpoint, path: str, everywhere: bool) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": everywhere}
    RatePolicy.objects.create(endpoint=items, rates="100/3650day", algorithm="fixed_window")
    response = Client().get(path, {"items": 500})
    assert response.json() == {"done": 100}
    assert response["X-RateLimit-Remaining"] == "0", "the headers tell how it stands after the last item"
    assert "Retry-After" in response
    assert Client().get(path, {"items": 1}).json() == {"done": 0}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_item_that_is_refused_gives_nothing_back(check: Check, items: Endpoint, algorithm: str) -> None:
    """Items that were admitted are done: a client could ask for one too many, and have all of them for nothing."""
    RatePolicy.objects.create(rates="50/3650day", algorithm=algorithm)
    RatePolicy.objects.create(endpoint=items, rates="20/3650day", algorithm=algorithm)
    request = request_from(address="127.0.0.1")
    check(request, None, 5)
    done = [check(request, "items", 8, again=True).allowed for _ in range(4)]
    assert done == [True, True, False, False]
    assert free() == [50 - 5 - 16, 20 - 16]


def test_a_later_check_gives_back_its_own_and_no_items(check: Check, items: Endpoint) -> None:
    RatePolicy.objects.create(rates="50/hour")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="closed"), rates="blocked")
    request = request_from(address="127.0.0.1")
    check(request, None, 5)
    check(request, "items", 7, again=True)
    check(request, "items", 7, again=True)
    assert not check(request, "closed", 1).allowed
    assert free() == [50 - 14]


def test_a_later_check_deducts_what_checks_before_paid_and_no_items(check: Check, items: Endpoint) -> None:
    RatePolicy.objects.create(rates="50/hour")
    request = request_from(address="127.0.0.1")
    check(request, "items", 7, again=True)
    assert left(check(request, None, 5)) == [38]
    assert left(check(request, "items", 7, again=True)) == [31]
    assert left(check(request, None, 6)) == [30]
    assert left(check(request, "items", 60, again=True)) == [30]
    assert left(check(request, None, 8)) == [28]
