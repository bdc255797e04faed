"""``@ratequota`` on every kind of plain Django view, under WSGI and under ASGI."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.exceptions import PermissionDenied
from django.http import HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views import View

from django_ratequota import check_request
from django_ratequota.decorators import ratequota
from django_ratequota.exceptions import InvalidCost
from django_ratequota.models import Endpoint, RatePolicy
from tests.conftest import Get
from tests.project import views
from tests.project.views import request_from

EVERY_KIND = ["/decorated/", "/adecorated/", "/class/", "/aclass/", "/astacked/", "/amethod/"]

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.mark.parametrize("path", EVERY_KIND)
def test_every_kind_of_view_is_held_to_its_scope(get: Get, search: Endpoint, path: str) -> None:
    RatePolicy.objects.create(endpoint=search, rates="2/hour")
    for left in ("1", "0"):
        admitted = get(path)
        assert (admitted.status_code, admitted.json()) == (200, {"ran": True})
        assert admitted["X-RateLimit-Remaining"] == left
        assert admitted["RateLimit-Policy"] == '"search/hour";q=2;w=3600'
    refused = get(path)
    assert refused.status_code == 429
    assert refused["Content-Type"] == "application/problem+json"
    assert refused.json()["violated-policies"] == ["search/hour"]
    assert refused.json()["retry_after"] == int(refused["Retry-After"])
    assert 1700 < int(refused["Retry-After"]) <= 1800
    assert refused["X-RateLimit-Remaining"] == "0"


@pytest.mark.parametrize("path", EVERY_KIND)
def test_headers_do_not_need_the_middleware(get: Get, settings: Any, path: str) -> None:
    settings.MIDDLEWARE = []
    RatePolicy.objects.create(rates="1/hour")
    assert [get(path)["X-RateLimit-Limit"] for _ in range(2)] == ["1", "1"]


def test_without_a_scope_the_route_and_all_endpoints_count(get: Get, search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="b", routes="/bare/"), rates="5/hour")
    RatePolicy.objects.create(rates="9/hour")
    assert get("/bare/")["RateLimit-Policy"] == '"all/hour";q=9;w=3600, "b/hour";q=5;w=3600'


@pytest.mark.parametrize("path", ["/deciding/", "/adeciding/"])
def test_a_view_that_is_not_blocked_decides_for_itself(get: Get, search: Endpoint, path: str) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    assert get(path).json() == {"allowed": True}
    late = get(path)
    assert (late.status_code, late.json()) == (200, {"allowed": False})
    assert late["X-RateLimit-Remaining"] == "0"
    assert int(late["Retry-After"]) > 0


def test_headers_tell_of_the_last_check() -> None:
    @ratequota("search")
    def view(request: Any) -> HttpResponse:
        check_request(request, None, 3)
        return HttpResponse()

    RatePolicy.objects.create(rates="10/hour")
    assert view(request_from())["X-RateLimit-Remaining"] == "7"


def of_request(request: Any) -> Any:
    asked = request.GET["units"]
    if asked == "forbidden":
        raise PermissionDenied
    return int(asked)


async def aof_request(request: Any) -> Any:
    return of_request(request)


@pytest.fixture(params=[(views.plain, of_request), (views.aplain, of_request), (views.aplain, aof_request)])
def computed(request: Any, settings: Any) -> Any:
    """GET of a view whose cost is a function of the request: sync, async with a sync function, both async."""
    view, cost = request.param
    urls = ModuleType("computed_urls")
    vars(urls)["urlpatterns"] = [path("computed/", ratequota("search", cost=cost)(view))]
    settings.ROOT_URLCONF = urls
    client = AsyncClient() if view is views.aplain else Client()
    get = async_to_sync(client.get) if view is views.aplain else client.get
    return lambda units: get("/computed/", {"units": units})


def test_the_cost_may_be_a_function_of_the_request(search: Endpoint, computed: Any) -> None:
    RatePolicy.objects.create(endpoint=search, rates="7/hour")
    assert [computed(units).status_code for units in (3, 5, 0, 4, 1)] == [200, 429, 200, 200, 429]


def test_a_function_that_cannot_compute_with_a_value_is_an_invalid_request(
    search: Endpoint, computed: Any, caplog: Any
) -> None:
    Endpoint.objects.filter(pk=search.pk).update(cost=2)
    RatePolicy.objects.create(endpoint=search, rates="7/hour")
    for units, left in (("many", "5"), ("-1", "3")):
        response = computed(units)
        assert (response.status_code, response["X-RateLimit-Remaining"]) == (400, left)
    assert "cost of @ratequota('search') raised ValueError: invalid literal" in caplog.text
    RatePolicy.objects.update(rates="blocked")
    assert computed("many").status_code == 429


def test_a_function_that_answers_the_client_is_counted_and_refunded_by_its_answer(
    search: Endpoint, computed: Any, caplog: Any
) -> None:
    RatePolicy.objects.create(endpoint=search, rates="2/hour")
    assert [computed("forbidden").status_code for _ in range(3)] == [403, 403, 429]
    Endpoint.objects.filter(pk=search.pk).update(charged_statuses="2xx")
    RatePolicy.objects.update(rates="4/hour")
    assert [computed("forbidden").status_code for _ in range(3)] == [403, 403, 403]
    assert "the endpoint's cost counts" not in caplog.text


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (TypeError, r"cost is a number of units or a function of \(request\), not <", {"cost": lambda: 3}),
        (TypeError, r"a function of \(request\), not <", {"cost": lambda request, view: 3}),
        *[(InvalidCost, "a whole number", {"cost": cost}) for cost in (-1, 1.5, True, float("nan"), 10**30, "3")],
    ],
)
def test_a_mistake_is_an_error_when_decorating(error: Any, text: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        ratequota(**options)


@pytest.mark.parametrize("awaited", [False, True])
def test_decorating_a_method_directly_raises_a_helpful_error(awaited: bool) -> None:
    async def aget(self: Any, request: Any) -> HttpResponse: ...

    def get(self: Any, request: Any) -> HttpResponse: ...

    class Meth(View):
        pass

    Meth.get = ratequota(aget if awaited else get)  # type: ignore[attr-defined]
    run = async_to_sync(Meth().get) if awaited else Meth().get  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"get was called with 'Meth'.* @method_decorator\(ratequota\(\.\.\.\)\)"):
        run(request_from())


def test_the_view_keeps_its_name_its_kind_and_its_arguments() -> None:
    @ratequota
    def view(request: Any) -> HttpResponse:
        """What it does."""

    @ratequota(scope="search")
    async def aview(request: Any) -> HttpResponse:
        """What it does."""

    @ratequota(scope="search", cost=0)
    def routed(request: Any, first: str, *, second: int) -> HttpResponse:
        return HttpResponse(f"{first} {second}")

    assert routed(request_from(), "a", second=2).content == b"a 2"
    assert (view.__name__, view.__doc__, iscoroutinefunction(view)) == ("view", "What it does.", False)
    assert (aview.__name__, aview.__doc__, iscoroutinefunction(aview)) == ("aview", "What it does.", True)
