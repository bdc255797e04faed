"""``@ratequota`` and views of REST framework: one check of the caller whom the view authenticates."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from rest_framework.decorators import action, api_view, authentication_classes, throttle_classes
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_ratequota import check_request
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.throttling import QuotaThrottle, throttle_scope
from tests.conftest import Get
from tests.enforcement.test_check import left, monitored
from tests.project.views import NameAuthentication, request_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "alice"),
    pytest.mark.urls(__name__),
]

ALICE = {"Authorization": "Name alice"}


def units(request: Any) -> int:
    if (asked := request.GET.get("units")) == "invalid":
        raise ValidationError("How many?")
    return int(asked or 2)


def answer(request: Any) -> Response:
    decision = request.ratequota
    return Response({"allowed": decision.allowed}, status=int(request.query_params.get("status", 200)))


def method(self: Any, request: Any) -> Response:
    return answer(request)


def function(*, above: bool, throttled: bool, **options: Any) -> Any:
    """A function view with ``@ratequota`` above or below ``@api_view``, with or without a QuotaThrottle."""
    quota = ratequota("search", **options)

    def run(request: Any) -> Response:
        if request.query_params.get("status") == "400":
            raise ValidationError("no")
        return answer(request)

    inner = run if above else quota(run)
    throttles = throttle_classes([QuotaThrottle] if throttled else [])
    view = api_view(["GET", "POST"])(throttles(authentication_classes([NameAuthentication])(inner)))
    return quota(view) if above else view


class Rest(APIView):
    authentication_classes = [NameAuthentication]
    throttle_classes = [QuotaThrottle]
    throttle_scope: str | None = "other"

    get = method_decorator(ratequota("search", cost=units))(method)
    post = method


class Unthrottled(Rest):
    throttle_classes = []


class Bare(APIView):
    authentication_classes = [NameAuthentication]
    throttle_classes = []
    get = method


class Listing(ViewSet):
    authentication_classes = [NameAuthentication]
    list = method


@method_decorator(ratequota("search", cost=units), name="list")
class Things(Listing):
    @action(detail=False)
    @method_decorator([never_cache, ratequota("search", cost=units)])
    def below(self, request: Any) -> Response:
        return answer(request)

    @method_decorator(ratequota("search", cost=units))
    @action(detail=False)
    def above(self, request: Any) -> Response:
        return answer(request)


router = SimpleRouter()
router.register("things", Things, basename="thing")

urlpatterns = [
    path("above/", function(above=True, throttled=True, cost=units)),
    path("above-bare/", function(above=True, throttled=False, cost=units)),
    path("below/", function(above=False, throttled=True, cost=units)),
    path("below-bare/", function(above=False, throttled=False, cost=units)),
    path("around/", ratequota("search", cost=units)(Bare.as_view())),
    path("method/", Rest.as_view()),
    path("method-bare/", Unthrottled.as_view()),
    path("around-viewset/", ratequota("search", cost=units)(never_cache(Listing.as_view({"get": "list"})))),
    path("api/", include(router.urls)),
    path("deciding/", function(above=False, throttled=True, block=False)),
    path("deciding-bare/", function(above=False, throttled=False, block=False)),
]
PATHS = [
    *("/above/", "/above-bare/", "/below/", "/below-bare/", "/around/", "/method/", "/method-bare/"),
    *("/around-viewset/", "/api/things/", "/api/things/below/", "/api/things/above/"),
]
#: Without a QuotaThrottle the decorator checks the request itself, once REST framework has authenticated the caller.
BARE = ["/below-bare/", "/method-bare/"]


@pytest.mark.parametrize("path", PATHS)
def test_one_check_of_the_authenticated_caller(
    get: Get, search: Endpoint, alice: User, heard: list[Any], path: str
) -> None:
    """The address was counted, too; each limit was sent twice; a refusal was an admission for all endpoints first."""
    RatePolicy.objects.create(rates="9/hour")
    RatePolicy.objects.create(endpoint=search, rates="5/hour")
    check()  # reads the policies
    with monitored() as commands:
        answers = [get(path, headers=ALICE) for _ in range(2)]
    assert commands.count("EVALSHA") == 2
    assert [response.status_code for response in answers] == [200, 200]
    assert answers[1]["RateLimit-Policy"] == '"all/hour";q=9;w=3600, "search/hour";q=5;w=3600'
    assert answers[1]["RateLimit"].startswith('"all/hour";r=5;t=')
    assert ', "search/hour";r=1;t=' in answers[1]["RateLimit"]
    last = get(path, headers=ALICE)
    assert (last.status_code, last["RateLimit-Policy"]) == (429, answers[1]["RateLimit-Policy"])
    assert last["RateLimit"].startswith('"all/hour";r=5;t=')
    problem = "application/problem+json" if path in BARE else "application/json"
    assert (last["Content-Type"], len(heard)) == (problem, 1)
    assert get(path).status_code == 200, "nobody else"
    assert left(check(alice)) == [5, 1]


def check(user: Any = None) -> Any:
    return check_request(request_from(user, address="127.0.0.1"), "search", 0)


@pytest.mark.parametrize("count_unchecked", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_enforcing_all_views_checks_once(
    search: Endpoint, alice: User, settings: Any, path: str, count_unchecked: bool
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True, "COUNT_UNCHECKED": count_unchecked}
    RatePolicy.objects.create(rates="9/hour", counted_per="ip" if count_unchecked else "caller")
    RatePolicy.objects.create(endpoint=search, rates="5/hour")
    response = Client().get(path, headers=ALICE)
    assert [item.partition("r=")[2][0] for item in response["RateLimit"].split(", ")] == ["7", "3"]
    assert left(check(alice)) == [7, 3]


@pytest.mark.parametrize("path", PATHS)
def test_wrong_keys_count_at_the_scope(search: Endpoint, settings: Any, path: str, monkeypatch: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": True}

    def fail(self: Any, request: Any) -> Any:
        raise ValidationError

    monkeypatch.setattr(NameAuthentication, "authenticate", fail)
    RatePolicy.objects.create(endpoint=search, rates="2/hour", counted_per="ip")
    assert [Client().get(path, headers=ALICE).status_code for _ in range(3)] == [400, 400, 429]


@pytest.mark.parametrize("path", PATHS)
def test_a_cost_that_answers_the_client_is_computed_once(search: Endpoint, path: str, caplog: Any) -> None:
    RatePolicy.objects.create(endpoint=search, rates="3/hour")
    client = Client(raise_request_exception=False)
    statuses = [client.get(f"{path}?units={units}").status_code for units in ("4", "invalid", "none")]
    assert statuses == [429, 400, 400]
    assert left(check()) == [1]
    assert caplog.text.count("raised ValueError: invalid literal") == 1


@pytest.mark.parametrize("path", ["/above/", "/above-bare/", "/below/", "/below-bare/"])
def test_refunds_follow_the_response_and_not_the_exception(search: Endpoint, path: str) -> None:
    """Below ``@api_view`` a ValidationError was taken for a 500."""
    Endpoint.objects.filter(pk=search.pk).update(charged_statuses="400")
    RatePolicy.objects.create(endpoint=search, rates="6/hour")
    assert [Client().get(f"{path}?status={status}").status_code for status in (400, 204)] == [400, 204]
    assert left(check()) == [4]


def test_other_methods_of_a_class_keep_its_scope(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="other"), rates="9/hour")
    RatePolicy.objects.create(endpoint=search, rates="5/hour")
    assert Client().post("/method/")["RateLimit-Policy"] == '"other/hour";q=9;w=3600'
    assert Client().get("/method/")["RateLimit-Policy"] == '"search/hour";q=5;w=3600'


@pytest.mark.parametrize("path", ["/deciding/", "/deciding-bare/"])
def test_a_view_that_is_not_blocked_decides_for_itself(get: Get, search: Endpoint, path: str) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    assert [get(path).json() for _ in range(2)] == [{"allowed": True}, {"allowed": False}]
    late = get(path)
    assert (late.status_code, late["X-RateLimit-Remaining"]) == (200, "0")
    assert int(late["Retry-After"]) > 0
    assert get(f"{path}?status=400").status_code == 400


# --- Several throttles are one. ---


class StaffFree(QuotaThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        return request.user.is_staff or super().allow_request(request, view)


@pytest.mark.parametrize(
    "classes", [[QuotaThrottle, QuotaThrottle], [QuotaThrottle, StaffFree], [StaffFree, QuotaThrottle, StaffFree]]
)
def test_several_quota_throttles_make_one_check(search: Endpoint, heard: list[Any], classes: Any) -> None:
    computed: list[Any] = []

    def count(request: Any, view: Any) -> int:
        computed.append(request)
        return len(computed)

    throttled = throttle_scope("search", cost=count)(type("View", (Bare,), {"throttle_classes": classes}))
    view = throttled.as_view()
    RatePolicy.objects.create(endpoint=search, rates="3/hour")
    check()  # reads the policies
    with monitored() as commands:
        answers = [view(request_from(address="127.0.0.1")) for _ in range(3)]
    assert [response.status_code for response in answers] == [200, 200, 429]
    assert (len(computed), commands.count("EVALSHA")) == (3, 3)
    assert answers[1].headers["X-RateLimit-Remaining"] == "0"
    assert len(heard) == 1, "two of them sent it twice"


def test_each_view_of_a_request_makes_its_own_check(search: Endpoint) -> None:
    """A view may ask the throttles of another about its own request."""
    RatePolicy.objects.create(endpoint=search, rates="blocked")
    request = Request(request_from())
    assert QuotaThrottle().allow_request(request, Bare())
    assert not QuotaThrottle().allow_request(request, Bare(throttle_scope="search"))
    assert not QuotaThrottle().allow_request(Request(request_from()), Bare(throttle_scope="search"))


def test_each_of_two_decorators_makes_its_own_check(search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="blocked")
    both = ratequota("reports")(ratequota("search")(answer))
    assert api_view(["GET"])(throttle_classes([QuotaThrottle])(both))(request_from()).status_code == 429


# --- Errors when decorating. ---


def test_views_that_cannot_be_decorated_are_an_error() -> None:
    class Choosing(Bare):
        def get_throttles(self) -> list[Any]:
            return []

    for view, block, text in (
        (Bare, True, r"not classes such as Bare: write @method_decorator\(ratequota\(\.\.\.\), "),
        (Bare.as_view(), False, r"@ratequota\(block=False\) goes below @api_view"),
        (Choosing.as_view(), True, "Choosing chooses its throttles in get_throttles: return QuotaThrottle"),
    ):
        with pytest.raises(TypeError, match=text):
            ratequota("search", block=block)(view)


def test_an_async_cost_is_an_error_at_a_sync_view() -> None:
    async def cost(request: Any) -> int: ...

    for view in (answer, Bare.as_view()):
        with pytest.raises(TypeError, match=r"cost is async and .* is not: write a function without"):
            ratequota("search", cost=cost)(view)
