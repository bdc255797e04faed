"""Charges that depend on the response's status: which stay, which are refunded, and that none is bypassed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.checks import run_checks
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation, ValidationError
from django.core.management import call_command
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.decorators import method_decorator
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota import check_request
from django_ratequota.checks.database import check_outcome
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, PolicyChange, RatePolicy
from django_ratequota.testing import Policy, override_policies, remaining
from tests.project.views import request_from

Ask = Callable[..., int]

MIDDLEWARE = "django_ratequota.middleware.RateQuotaMiddleware"
ERRORS = {
    "404": Http404,
    "403": PermissionDenied,
    "400": SuspiciousOperation,
    "4000": BadRequest,
    "500": LookupError,
    # That of an API; it means nothing to Django outside of one.
    "5000": AuthenticationFailed,
}


def answer(request: HttpRequest) -> HttpResponse:
    """Return the response, stream or error that the client requests."""
    status, error = request.GET.get("status", "200"), request.GET.get("error")
    if error:
        raise ERRORS[error]("as asked")
    if "stream" in request.GET:
        return StreamingHttpResponse(iter([b"a", b"b"]), status=int(status))
    return HttpResponse("answered", status=int(status))


async def aanswer(request: HttpRequest) -> HttpResponse:
    return answer(request)


class Login(APIView):
    throttle_scope = "login"
    authentication_classes: list[Any] = []

    def get(self, request: Any) -> Response:
        if request.GET.get("error"):
            raise AuthenticationFailed
        return Response({}, status=int(request.GET.get("status", "200")))


class DecoratedMethod(Login):
    throttle_classes: list[Any] = []

    @method_decorator(ratequota("login"))
    def get(self, request: Any) -> Response:
        return super().get(request)


@ratequota("login", block=False)
def deciding(request: Any) -> HttpResponse:
    return HttpResponse(status=200 if request.ratequota.allowed else 401)


@ratequota("login", block=False)
def refunding(request: Any) -> HttpResponse:
    request.ratequota.refund(1)
    return answer(request)


def checking(request: Any) -> HttpResponse:
    check_request(request, "login", 2)
    check_request(request, "search")
    return answer(request)


def as_json(view: Any) -> Any:
    """A decorator of other packages: makes a response of what the view returns."""
    return lambda request: JsonResponse(view(request))


urlpatterns = [
    path("json/", as_json(ratequota("login")(lambda request: {"user": 1}))),
    path("plain/", answer),
    path("aplain/", aanswer),
    path("decorated/", ratequota("login")(answer)),
    path("adecorated/", ratequota("login")(aanswer)),
    path("api/", Login.as_view()),
    path("method/", DecoratedMethod.as_view()),
    path("deciding/", deciding),
    path("nothing/", ratequota("login")(lambda request: None)),
    path("checking/", checking),
    path("refunding/", refunding),
]
#: Those that the middleware enforces, and those that enforce themselves; each on its own.
EVERY_WAY = ["/plain/", "/aplain/", "/decorated/", "/adecorated/", "/api/"]


@pytest.fixture(autouse=True)
def _urls(settings: Any) -> None:
    settings.ROOT_URLCONF = __name__
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}


@pytest.fixture(params=["wsgi", "asgi"])
def get(request: Any) -> Any:
    """GET through Django's sync or async handler."""
    if request.param == "wsgi":
        return Client(raise_request_exception=False).get
    return async_to_sync(AsyncClient(raise_request_exception=False).get)


def login(charged_statuses: str, rates: str = "5/hour", everywhere: str = "100/hour") -> Any:
    endpoint = Endpoint(name="login", routes="/*plain/", charged_statuses=charged_statuses)
    return override_policies({"login": rates, None: everywhere}, endpoints=[endpoint])


def left(response: Any = None) -> tuple[int, int]:
    """What a request at the login would find left now: at the login, and for all endpoints."""
    probe = Client().get("/decorated/", {"status": "599"})
    return remaining(probe, "login/hour"), remaining(probe, "all/hour")


@pytest.mark.parametrize("where", EVERY_WAY)
class TestEveryWay:
    def test_only_the_chosen_statuses_stay_charged(self, get: Any, where: str) -> None:
        with login("4xx, 503"):
            for status in ("200", "302", "500", "204"):
                get(where, {"status": status})
            assert left() == (4, 95)
            for status in ("401", "404", "503"):
                get(where, {"status": status})
            assert left() == (1, 91), "the probe before was not charged: what these find is one less than is left"

    @pytest.mark.parametrize("statuses", ["200", "2xx", "304", "3xx"])
    def test_a_response_that_the_client_has_already_counts_as_200_does(
        self, get: Any, where: str, statuses: str
    ) -> None:
        """With an If-None-Match all requests were free."""
        with login(statuses):
            get(where, {"status": "304"})
            assert left()[0] == 3

    def test_errors_are_responses_too(self, get: Any, where: str) -> None:
        with login("404, 403, 400, 401"):
            get(where, {"error": "500"}) if where != "/api/" else get(where, {"status": "500"})
            assert left()[0] == 4
            for error in ("404", "403", "400"):
                get(where, {"error": error})
            assert left()[0] == 1

    def test_refused_requests_get_nothing_back(self, get: Any, where: str) -> None:
        with login("401", "2/hour"):
            statuses = [get(where, {"status": "401"}).status_code for _ in range(4)]
            assert statuses == [401, 401, 429, 429]
            assert get(where).status_code == 429
            assert get(where).status_code == 429

    def test_nor_do_the_other_limits_of_a_refused_one(self, get: Any, where: str) -> None:
        with login("401", "5/hour, 2/day"):
            for status in ("401", "401", "200", "200"):
                get(where, {"status": status})
            assert left()[0] == 3

    def test_empty_counts_every_request(self, get: Any, where: str) -> None:
        with login(""):
            get(where)
            get(where, {"status": "401"})
            assert left()[0] == 2

    def test_headers_say_what_was_reserved(self, get: Any, where: str) -> None:
        with login("401"):
            for _ in range(2):
                response = get(where)
                assert 'login/hour";r=4;' in response["RateLimit"]


@pytest.mark.parametrize(("status", "error"), [("400", "4000"), ("500", "5000")])
@pytest.mark.parametrize("where", ["/plain/", "/decorated/"])
def test_other_errors_count_as_what_django_makes_of_them(get: Any, where: str, status: str, error: str) -> None:
    with login(status):
        assert get(where, {"error": error}).status_code == int(status)
        assert left()[0] == 3


def test_a_view_that_returns_nothing_is_told_so_by_django() -> None:
    with login("5xx"), pytest.raises(ValueError, match="didn't return an HttpResponse object"):
        Client().get("/nothing/")
    with login("401"):
        with pytest.raises(ValueError, match="didn't return an HttpResponse object"):
            Client().get("/nothing/")
        assert left()[0] == 4, "a 500"


def test_what_an_outer_decorator_makes_a_response_of_is_settled_by_that(get: Any) -> None:
    """It was refunded as an error, and the headers were written into the data."""
    with login("200"):
        response = get("/json/")
        assert response.json() == {"user": 1}
        assert remaining(response, "login/hour") == 4
        assert left()[0] == 3


def test_streams_are_settled_when_they_begin(get: Any) -> None:
    with login("401"):
        for where in ("/plain/", "/decorated/"):
            get(where, {"stream": "1"})
            get(where, {"stream": "1", "status": "401"})
        assert left()[0] == 2


def test_the_decorator_needs_no_middleware(get: Any, settings: Any) -> None:
    settings.MIDDLEWARE = []
    with login("401"):
        for where in ("/decorated/", "/adecorated/", "/method/"):
            get(where)
            get(where, {"status": "500"})
            get(where, {"status": "401"})
        assert left()[0] == 1


def test_a_view_that_decides_for_itself(get: Any) -> None:
    with login("401", "1/hour"):
        assert [get("/deciding/").status_code for _ in range(3)] == [200, 200, 200]
        get("/decorated/", {"status": "401"})
        assert [get("/deciding/").status_code for _ in range(2)] == [401, 401]


def test_what_a_view_gave_back_is_not_given_back_twice(get: Any) -> None:
    with login("401"):
        get("/plain/", {"status": "401"})
        get("/refunding/")
        get("/refunding/", {"status": "401"})
        assert left()[0] == 3


def test_other_endpoints_and_other_costs_keep_theirs(get: Any) -> None:
    with override_policies(
        {"login": "5/hour", "search": "9/hour", None: "50/hour"},
        endpoints=[Endpoint(name="login", charged_statuses="401"), Endpoint(name="search")],
    ):
        response = get("/checking/")
        assert {s.bucket.title: s.remaining for s in response_decision(response).statuses} == {
            "all/hour": 48,
            "login/hour": 3,
            "search/hour": 8,
        }
        again = response_decision(get("/checking/", {"status": "401"}))
        assert [s.remaining for s in again.statuses] == [46, 3, 7]
        assert [s.remaining for s in response_decision(get("/checking/")).statuses] == [44, 1, 6]


def response_decision(response: Any) -> Any:
    return vars(response).get("wsgi_request", vars(response).get("asgi_request")).ratequota


def test_logged_policies_get_their_units_back_too(get: Any) -> None:
    with override_policies(
        {"login": [Policy("1/hour", mode="log"), Policy("9/hour", counted_per="everyone")]},
        endpoints=[Endpoint(name="login", charged_statuses="401")],
    ):
        for _ in range(3):
            decision = response_decision(get("/decorated/"))
            assert [(s.remaining, s.allowed) for s in decision.statuses] == [(0, True), (8, True)]


def test_a_logged_policy_without_room_was_not_charged_and_gets_nothing(get: Any) -> None:
    with override_policies(
        {"login": [Policy("1/hour", mode="log")]}, endpoints=[Endpoint(name="login", charged_statuses="401")]
    ):
        for status in ("401", "200", "200"):
            get("/decorated/", {"status": status})
        assert not response_decision(get("/decorated/")).statuses[0].allowed


def test_projects_that_do_not_use_it_reserve_nothing() -> None:
    with login(""):
        request = request_from()
        check_request(request, "login")
        assert [name for name in vars(request) if "reserved" in name] == []
    with login("401"):
        check_request(request := request_from(), "login", 0)
        assert [name for name in vars(request) if "reserved" in name] == [], "nor does a request that costs nothing"


class TestModel:
    @pytest.mark.parametrize(
        ("given", "kept"),
        [("", ""), ("4XX", "4xx"), ("403 401", "401, 403"), ("5xx,401,,401", "401, 5xx"), (" 599 ", "599")],
    )
    def test_is_brought_into_one_form(self, given: str, kept: str) -> None:
        endpoint = Endpoint(name="login", charged_statuses=given)
        endpoint.clean()
        assert endpoint.charged_statuses == kept

    @pytest.mark.parametrize("given", ["6xx", "99", "4x", "40x", "success", "401-403", "٤xx", "4xxx", "0xx"])
    def test_what_is_no_status_is_refused(self, given: str) -> None:
        with pytest.raises(ValidationError, match=r"is not an HTTP status\. Enter statuses such as 401, 403 or 4xx"):
            Endpoint(name="login", charged_statuses=f"401 {given}").clean()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
class TestStored:
    def test_an_edit_counts_from_the_next_request_on_and_is_in_the_history(self) -> None:
        endpoint = Endpoint.objects.create(name="login")
        RatePolicy.objects.create(endpoint=endpoint, rates="5/hour")
        get = Client().get
        assert [remaining(get("/decorated/")) for _ in range(2)] == [4, 3]
        endpoint.charged_statuses = "401"
        endpoint.save()
        assert [remaining(get("/decorated/")) for _ in range(2)] == [2, 2]
        change = PolicyChange.objects.filter(model="endpoint", action="update").get()
        assert (change.before["charged_statuses"], change.after["charged_statuses"]) == ("", "401")

    def test_explain_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        endpoint = Endpoint.objects.create(name="login", charged_statuses="401, 5xx")
        RatePolicy.objects.create(endpoint=endpoint, rates="5/hour")
        RatePolicy.objects.create(rates="9/hour")
        call_command("ratequota", "explain", "--endpoint", "login", "--ip", "203.0.113.7")
        told = [line for line in capsys.readouterr().out.splitlines() if "stay charged" in line]
        assert len(told) == 1
        assert "only responses with status 401, 5xx stay charged" in told[0]

    def test_without_the_middleware_a_check_warns(self, settings: Any, django_assert_num_queries: Any) -> None:
        endpoint = Endpoint.objects.create(name="login")
        Endpoint.objects.create(name="status", charged_statuses="4xx", limits="none")
        assert check_outcome() == []
        settings.MIDDLEWARE = []
        assert check_outcome() == []
        endpoint.charged_statuses = "401"
        endpoint.save()
        with django_assert_num_queries(0):
            assert run_checks(tags=["database"], databases=[]) == []
        (warning,) = check_outcome()
        assert (warning.id, "(login)" in warning.msg) == ("django_ratequota.W006", True)
        settings.MIDDLEWARE = [MIDDLEWARE]
        assert check_outcome() == []


def test_a_response_that_does_not_count_gives_the_request_back(get: Any) -> None:
    with login("401", "5 requests/hour, 20/hour"):
        assert [get("/decorated/", {"status": status}).status_code for status in ("200", "401")] == [200, 401]
        probe = check_request(request_from(address="127.0.0.1"), "login", 0)
        assert [status.remaining for status in probe.statuses][-2:] == [3, 19]
