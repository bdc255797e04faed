"""A cached response is served to other clients: it must not show them the first client's limits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, permutations
from typing import Any

import pytest
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.utils.decorators import method_decorator
from django.views.decorators.cache import cache_control, cache_page, never_cache
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota import check_request
from django_ratequota.decorators import ratequota
from django_ratequota.headers import add_headers
from django_ratequota.models import Endpoint, RatePolicy
from tests.conftest import Get
from tests.project.settings import MIDDLEWARE
from tests.project.views import request_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "pages"),
    pytest.mark.urls(__name__),
]

ALICE, BOB = "203.0.113.1", "203.0.113.2"
RATES = {"RateLimit", "RateLimit-Policy", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"}
_runs = count()


def page(request: HttpRequest) -> HttpResponse:
    """Says which run of the view wrote it."""
    return HttpResponse(str(next(_runs)))


async def apage(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(next(_runs)))


class Api(APIView):
    def get(self, request: Any) -> Response:
        return Response({"run": next(_runs)})


@method_decorator(cache_page(60, cache="local"), name="dispatch")
class CachedApi(Api):
    pass


class CachedMethod(Api):
    @method_decorator(cache_page(60, cache="local"))
    def get(self, request: Any) -> Response:
        return super().get(request)


class PublicAgain(Api):
    """Checks the request once more than its throttle does."""

    def get(self, request: Any) -> Response:
        check_request(request, "more", 2)
        return Response({}, headers={"Cache-Control": "public, max-age=60"})


class More(PublicAgain):
    throttle_scope = "more"


class Forwarding(Api):
    """Lets another view with a throttle of its own answer."""

    def get(self, request: Any) -> Any:
        return More.as_view()(request._request)


urlpatterns = [
    path("api/public-again/", PublicAgain.as_view()),
    path("api/forwarding/", Forwarding.as_view()),
    path("outside/", cache_page(60, cache="local")(ratequota(page))),
    path("inside/", ratequota(cache_page(60, cache="local")(page))),
    path("api/outside/", cache_page(60, cache="local")(Api.as_view())),
    path("api/dispatch/", CachedApi.as_view()),
    path("api/method/", CachedMethod.as_view()),
    path("plain/", page),
    path("decorated/", ratequota(page)),
    path("adecorated/", ratequota(apage)),
    path("api/plain/", Api.as_view()),
    path("never/", ratequota(never_cache(page))),
    path("no-cache/", ratequota(cache_control(no_cache=True)(page))),
    path("missing/", ratequota(lambda request: HttpResponse(status=404))),
    path("deciding/", ratequota(block=False)(page)),
    path("public/", cache_control(public=True, max_age=60)(ratequota(page))),
    path("api/public/", cache_control(public=True, max_age=60)(Api.as_view())),
]


@pytest.fixture
def pages(settings: Any) -> Iterator[None]:
    settings.CACHE_MIDDLEWARE_ALIAS = "local"
    caches["local"].clear()
    RatePolicy.objects.create(rates="100/hour", counted_per="ip")
    yield
    caches["local"].clear()


def rates(response: Any) -> set[str]:
    return RATES & {name for name in RATES if name in response}


def kept(url: str) -> list[Any]:
    """What Alice gets, and what Bob gets of it."""
    responses = [Client().get(url, REMOTE_ADDR=who) for who in (ALICE, BOB)]
    assert [response.status_code for response in responses] == [200, 200]
    assert responses[0].content == responses[1].content, "the second is out of the cache"
    return responses


def without(*ends: str) -> list[str]:
    return [name for name in MIDDLEWARE if not name.endswith(ends)]


@pytest.mark.parametrize("middleware", [True, False], ids=["with the middleware", "without"])
@pytest.mark.parametrize("url", ["/outside/", "/inside/", "/api/outside/", "/api/dispatch/"])
def test_a_cached_page(settings: Any, url: str, middleware: bool) -> None:
    """Bob saw Alice's numbers."""
    if not middleware:
        settings.MIDDLEWARE = without("RateQuotaMiddleware")
    alice, bob = kept(url)
    assert rates(bob) == set()
    assert rates(alice) == set(), "so that proxies, which are told that they may keep it, have nothing to give away"


@pytest.mark.parametrize("url", ["/api/public-again/", "/api/forwarding/"])
def test_a_view_that_checks_again(url: str) -> None:
    """Its headers were from the throttle's check, and not recognized after the view's own check."""
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="more"), rates="9/hour", counted_per="ip")
    response = Client().get(url, REMOTE_ADDR=ALICE)
    assert (response.status_code, rates(response)) == (200, set())


def test_a_cached_method_of_a_throttled_view(settings: Any) -> None:
    """Each request is counted then, and the numbers are its own; but proxies may store the page."""
    alice, bob = kept("/api/method/")
    assert rates(alice) == rates(bob) == set()
    settings.MIDDLEWARE = without("RateQuotaMiddleware")
    bob = Client().get("/api/method/", REMOTE_ADDR=BOB)
    assert (bob.content, bob["X-RateLimit-Remaining"]) == (alice.content, "98")


UPDATE = "django.middleware.cache.UpdateCacheMiddleware"
FETCH = "django.middleware.cache.FetchFromCacheMiddleware"
QUOTA = "django_ratequota.middleware.RateQuotaMiddleware"


def site(order: tuple[str, ...]) -> list[str]:
    """Django's cache for the whole site, and ours, in this order, around the others."""
    others = without("RateQuotaMiddleware")
    return [*order[:-1], *others, order[-1]]


@pytest.mark.parametrize("enforce_all", [False, True], ids=["", "ENFORCE_ALL"])
@pytest.mark.parametrize("order", list(permutations([UPDATE, QUOTA, FETCH])))
@pytest.mark.parametrize("url", ["/plain/", "/decorated/", "/api/plain/"])
def test_a_cached_site(settings: Any, url: str, order: tuple[str, ...], enforce_all: bool) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": enforce_all}
    settings.MIDDLEWARE = site(order)
    for response in [Client().get(url, REMOTE_ADDR=who) for who in (ALICE, BOB, ALICE)]:
        assert (response.status_code, rates(response)) == (200, set())


@pytest.mark.parametrize("order", [(UPDATE, QUOTA, FETCH), (QUOTA, UPDATE, FETCH)])
def test_what_such_a_site_does_not_keep_has_them(settings: Any, order: tuple[str, ...]) -> None:
    settings.MIDDLEWARE = site(order)
    for url in ("/never/", "/no-cache/", "/missing/"):
        assert rates(Client().get(url, REMOTE_ADDR=ALICE)) == RATES
    assert rates(Client().post("/decorated/", REMOTE_ADDR=ALICE)) == RATES
    RatePolicy.objects.update(rates="blocked")
    refused = [Client().get("/decorated/", REMOTE_ADDR=who) for who in (ALICE, BOB)]
    assert [response.status_code for response in refused] == [429, 429]


def test_what_shared_caches_may_keep_has_none() -> None:
    """A CDN in front gave every client the first one's. With credentials the view has to allow it (RFC 9111, 3.5)."""
    decision = check_request(request_from(address=ALICE))
    past = "Wed, 21 Oct 2015 07:28:00 GMT"
    for control, others, has, has_for_credentials in (
        ("public", {}, False, False),
        ("s-maxage=60", {}, False, False),
        ("max-age=60", {}, False, True),
        ("max-age=60, must-revalidate", {}, False, False),
        ("private, max-age=60", {}, True, True),
        ('private="set-cookie, x-user", max-age=60', {}, False, True),
        ('no-cache="set-cookie"', {"Last-Modified": past}, False, True),
        ("max-age=" + "9" * 5000, {}, False, True),
        ("max-age=0, stale-while-revalidate=60", {}, False, True),
        ("max-age=0", {"Last-Modified": past}, True, True),
        ("max-age=00", {}, True, True),
        ("no-cache", {"Expires": past}, True, True),
        ("no-store", {"Expires": past}, True, True),
        ("", {"Expires": past}, False, True),
        ("", {"Last-Modified": past}, False, True),
        ("no-store", {"CDN-Cache-Control": "max-age=60"}, False, False),
        ("private", {"Surrogate-Control": "max-age=60"}, False, False),
        ("", {"X-Accel-Expires": "60"}, False, False),
        ("private", {"CDN-Cache-Control": "no-store"}, True, True),
        ("max-age=60", {"CDN-Cache-Control": "no-store"}, False, True),
        ("", {}, True, True),
    ):
        for headers, expected in (({}, has), ({"Authorization": "Bearer x"}, has_for_credentials)):
            response = HttpResponse(headers={"Cache-Control": control, **others} if control else others)
            add_headers(response, decision, request_from(headers=headers))
            assert rates(response) == (RATES if expected else set()), (control, others, headers)


def test_a_header_of_the_view_s_own_stays() -> None:
    request, response = request_from(address=ALICE), HttpResponse(headers={"X-RateLimit-Limit": "of a partner"})
    decision = check_request(request)
    add_headers(response, decision, request)
    response["Cache-Control"] = "public"
    add_headers(response, decision, request)
    assert (rates(response), response["X-RateLimit-Limit"]) == ({"X-RateLimit-Limit"}, "of a partner")


@pytest.mark.parametrize("media_type", ["text/html", "application/json"])
@pytest.mark.parametrize("down", [False, True], ids=["429", "503"])
@pytest.mark.parametrize("url", ["/decorated/", "/adecorated/", "/api/plain/", "/plain/", "/public/", "/api/public/"])
def test_a_cached_refusal(settings: Any, get: Get, url: str, down: bool, media_type: str) -> None:
    """Some CDNs cache errors for a while unless a header forbids it, and Django's decorators say that they may."""
    settings.MIDDLEWARE = site((UPDATE, QUOTA, FETCH))
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True, "ON_ERROR": "deny"}
    if down:
        settings.RATEQUOTA |= {"REDIS_URL": "redis://127.0.0.1:1/0"}
    else:
        RatePolicy.objects.update(rates="blocked")
    response = get(url, headers={"Accept": media_type})
    assert response.status_code == (503 if down else 429)
    assert "no-store" in response["Cache-Control"].split(", ")
    assert "Accept" in response["Vary"].split(", ")


def test_a_page_that_says_itself_that_its_reader_is_refused_is_not_kept(settings: Any) -> None:
    settings.MIDDLEWARE = site((UPDATE, QUOTA, FETCH))
    RatePolicy.objects.update(rates="1/hour")
    client = Client()
    client.post("/deciding/", REMOTE_ADDR=ALICE)
    refused = client.get("/deciding/", REMOTE_ADDR=ALICE)
    assert (refused.status_code, refused["X-RateLimit-Remaining"], refused["Cache-Control"]) == (200, "0", "no-store")
    assert client.get("/deciding/", REMOTE_ADDR=BOB).content != refused.content
