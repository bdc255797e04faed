"""``@exempt``: views that nothing limits, whatever would check them."""

from __future__ import annotations

from typing import Any

import pytest
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.test import Client
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from drf_spectacular.generators import SchemaGenerator
from ninja import NinjaAPI
from rest_framework.decorators import action, api_view
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_ratequota import check_request
from django_ratequota.checks.views import check_unlimited
from django_ratequota.decorators import exempt, ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.ninja import QuotaThrottle as NinjaThrottle
from django_ratequota.openapi import AutoSchema
from django_ratequota.operations.explain import ExplainQuery
from django_ratequota.policies.requests.view_facts import facts_of
from tests.conftest import Get
from tests.enforcement.test_check import CLOSED, database_down, monitored
from tests.project import views

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "everything_checks"),
    pytest.mark.urls(__name__),
]


def cost_of_a_counted_request(request: HttpRequest) -> int:
    raise AssertionError("it may query the database, or answer 400")


priced = ratequota(scope="search", cost=cost_of_a_counted_request)


def ran(*args: Any) -> HttpResponse:
    return JsonResponse({"ran": True})


async def aran(*args: Any) -> HttpResponse:
    return ran()


def rest(*args: Any) -> Response:
    return Response({"ran": True})


@exempt
def checking(request: HttpRequest) -> HttpResponse:
    return JsonResponse({"ran": check_request(request, scope="search").allowed})


@exempt
class Decorated(View):
    get = ran


class Inheriting(Decorated):
    pass


class Limited(Decorated):
    ratequota_exempt = False


@method_decorator(exempt, name="dispatch")
class ByDispatch(View):
    get = aran


class ByMethod(View):
    get, post = exempt(aran), aran


class ByMethodDecorator(View):
    get = method_decorator(exempt)(ran)


class Overriding(ByMethod):
    get = aran


@exempt
class Rest(APIView):
    throttle_scope = "search"
    get = rest


class RestByMethod(APIView):
    get, post = exempt(rest), rest


class Reports(ViewSet):
    list = rest

    @exempt
    @action(detail=False)
    def above(self, request: Any) -> Response:
        return rest()

    @action(detail=False)
    @exempt
    def below(self, request: Any) -> Response:
        return rest()


api = NinjaAPI(urls_namespace="exempt_views", throttle=[NinjaThrottle()])


@api.get("health")
@exempt
def operation(request: Any) -> Any:
    return {"ran": True}


@api.get("ahealth")
@exempt
async def aoperation(request: Any) -> Any:
    return {"ran": True}


@api.post("health")
def other_operation(request: Any) -> Any:
    return {"ran": True}


router = DefaultRouter()
router.register("reports", Reports, basename="report")

EXEMPT = {
    "function": exempt(views.plain),
    "afunction": exempt(views.aplain),
    "above-ratequota": exempt(priced(views.plain)),
    "below-ratequota": priced(exempt(views.aplain)),
    "checking": checking,
    "class": Decorated.as_view(),
    "inheriting": Inheriting.as_view(),
    "dispatch": ByDispatch.as_view(),
    "method": ByMethod.as_view(),
    "method-decorator": ByMethodDecorator.as_view(),
    "rest": Rest.as_view(),
    "rest-method": RestByMethod.as_view(),
    "above-api-view": exempt(api_view(["GET"])(rest)),
    "below-api-view": api_view(["GET"])(exempt(rest)),
    "wrapped-class": exempt(views.Search.as_view()),
}
LIMITED = {
    "plain": views.plain,
    "limited": Limited.as_view(),
    "overriding": Overriding.as_view(),
    "search": views.Search.as_view(),
}
urlpatterns = [
    *(path(f"{name}/", view) for name, view in {**EXEMPT, **LIMITED}.items()),
    path("api/", include(router.urls)),
    path("ninja/", api.urls),
]
PATHS = [*(f"/{name}/" for name in EXEMPT), "/api/reports/above/", "/api/reports/below/", "/ninja/health"]


@pytest.fixture
def blocked() -> None:
    search = Endpoint.objects.create(name="search", routes="/*")
    for endpoint in (None, search):
        RatePolicy.objects.create(endpoint=endpoint, counted_per="ip", rates="blocked")
        RatePolicy.objects.create(endpoint=endpoint, subject="ip:127.0.0.1", rates="blocked")


@pytest.mark.parametrize("url", [*PATHS, "/ninja/ahealth"])
def test_an_exempt_view_is_limited_by_nothing(blocked: None, get: Get, url: str) -> None:
    collector.clear()
    with monitored() as commands:
        response = get(url)
    assert (response.status_code, response.json()) == (200, {"ran": True})
    assert [name for name in response.headers if "ratelimit" in name.lower()] == []
    assert (commands, len(collector.pending)) == ([], 0)


def test_the_cost_of_an_exempt_view_is_not_computed(get: Get, caplog: pytest.LogCaptureFixture) -> None:
    assert get("/above-ratequota/").status_code == get("/below-ratequota/").status_code == 200
    assert [record for record in caplog.records if "cost" in record.message] == []


@pytest.mark.parametrize("url", [*(f"/{name}/" for name in LIMITED), "/api/reports/"])
def test_other_views_stay_limited(blocked: None, get: Get, url: str) -> None:
    assert get(url).status_code == 429


@pytest.mark.parametrize("url", ["/method/", "/rest-method/", "/ninja/health"])
def test_an_exempt_method_exempts_no_other(blocked: None, client: Client, url: str) -> None:
    assert [client.get(url).status_code, client.post(url).status_code] == [200, 429]
    assert client.head(url).status_code == (429 if "ninja" in url else 200), "Ninja answers HEAD with 405"


@pytest.mark.parametrize("url", ["/function/", "/rest/"])
def test_an_exempt_view_works_while_redis_and_the_database_are_down(settings: Any, get: Get, url: str) -> None:
    """As a health check must, also in a process that has read no policies."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, **CLOSED, "ON_ERROR": "deny"}
    with database_down():
        assert get("/plain/").status_code == 503
        assert get(url).status_code == 200


def test_the_decorated_function_stays_limited_elsewhere() -> None:
    assert facts_of(exempt(views.plain)).exemption is not None
    assert facts_of(views.plain).exemption is None


def test_a_view_that_is_not_hashable_can_be_exempt() -> None:
    class Callable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, request: Any) -> HttpResponse:
            return HttpResponse()

    view = Callable()
    assert facts_of(view).exemption is None
    view.ratequota_exempt = True  # type: ignore[attr-defined]
    assert facts_of(view).exemption is not None


def test_requests_without_a_resolved_route_know_the_class(blocked: None) -> None:
    """REST framework's request factory calls the view directly."""
    assert Rest.as_view()(APIRequestFactory().get("/")).status_code == 200
    assert Reports.as_view({"get": "above"})(APIRequestFactory().get("/")).status_code == 200
    assert Reports.as_view({"get": "list"})(APIRequestFactory().get("/")).status_code == 429
    assert views.Search.as_view()(APIRequestFactory().get("/")).status_code == 429


def test_the_schema_documents_no_refusals_of_exempt_views() -> None:
    class Schema(SchemaGenerator):
        def create_view(self, callback: Any, method: str, request: Any = None) -> Any:
            view = super().create_view(callback, method, request)
            view.schema = AutoSchema()
            return view

    paths = Schema().get_schema(request=None, public=True)["paths"]
    documented = {
        (path, method)
        for path, operations in paths.items()
        for method, operation in operations.items()
        if "429" in operation["responses"]
    }
    assert {("/search/", "get"), ("/rest-method/", "post"), ("/api/reports/", "get")} <= documented
    exempted = {"/rest/", "/rest-method/", "/below-api-view/", "/api/reports/above/", "/api/reports/below/"}
    assert exempted <= paths.keys()
    assert {(path, "get") for path in exempted}.isdisjoint(documented)


def test_what_is_no_view_is_an_error_that_says_so() -> None:
    with pytest.raises(TypeError, match="@exempt decorates views, which are functions or classes, not 'search'"):
        exempt("search")  # type: ignore[type-var]


def test_checks_do_not_ask_to_count_exempt_views() -> None:
    """W017 names views that may refuse a request before their check."""
    named = " ".join(map(str, check_unlimited()))
    assert "/search/" in named
    assert "/rest/" not in named


@pytest.mark.parametrize(
    ("path", "method", "exempted"),
    [("/rest/", "POST", True), ("/rest-method/", "GET", True), ("/method/", "POST", False)],
)
def test_explain_names_the_exemption(blocked: None, path: str, method: str, exempted: bool) -> None:
    explanation = ExplainQuery(ip="127.0.0.1", path=path, method=method).explain()
    reasons = {candidate.reason for candidate in explanation.candidates}
    assert explanation.decision.allowed is exempted
    assert explanation.exempt == ("@exempt decorates the view" if exempted else "")
    assert ("lost: @exempt decorates the view" in reasons) is exempted
    assert len(explanation.candidates) == 4
