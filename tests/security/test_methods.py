"""A request's method is the client's to choose: which methods count at an endpoint that names some.

An endpoint's methods are those it names, and HEAD is GET. If it names any but GET, a method counts there too unless
the view has a handler of its own for it. A CORS preflight is free unless OPTIONS is named.
"""

from __future__ import annotations

import functools
from base64 import b64encode
from typing import Any

import pytest
from django import forms
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import FormView
from ninja import NinjaAPI
from rest_framework.authentication import BasicAuthentication
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_ratequota import check_request
from django_ratequota.api import UsageView
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.operations.explain import ExplainQuery
from django_ratequota.policies.cache import policies
from django_ratequota.throttling import QuotaThrottle

LIMIT = 10


@csrf_exempt
def function(request: HttpRequest) -> HttpResponse:
    """Does the same for every method."""
    return HttpResponse("in")


class Callable_:
    """A view that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("in")


def handler(answer: Any = HttpResponse) -> Any:
    """A method of a view, which no other method shares."""
    return lambda self, request, *args, **kwargs: answer("in")


@method_decorator(csrf_exempt, name="dispatch")
class Plain(View):
    get, post, delete = handler(), handler(), handler()


class PutIsPost(Plain):
    put = Plain.post


class OptionsIsPost(Plain):
    options = Plain.post


class OwnOptions(Plain):
    options = handler()


@method_decorator(csrf_exempt, name="dispatch")
class OwnDispatch(View):
    dispatch = handler()


@method_decorator(csrf_exempt, name="dispatch")
class Login(FormView):  # type: ignore[type-arg]
    """Django's ``put`` of forms calls ``post``: a handler of its own."""

    form_class = forms.Form
    render_to_response, form_valid = handler(), handler()


class Awaited(View):
    async def get(self, request: HttpRequest) -> HttpResponse: ...


class Rest(APIView):
    authentication_classes = []
    throttle_classes = [QuotaThrottle]
    throttle_scope = "login"
    post = handler(Response)


class Guessed(APIView):
    """REST framework tries the password before it looks at the method."""

    authentication_classes = [BasicAuthentication]
    throttle_classes = [QuotaThrottle]
    get = handler(Response)


@method_decorator(ratequota(scope="login"), name="dispatch")
class GuessedBehindTheDecorator(Guessed):
    throttle_classes = []


@api_view(["GET", "POST"])
def rest_function(request: Request) -> Response:
    return Response("in")


class Things(ViewSet):
    authentication_classes = []
    create, destroy = handler(Response), handler(Response)


operations = NinjaAPI(urls_namespace="methods", openapi_url=None)


@operations.post("/thing")
def add(request: HttpRequest) -> str:
    return "in"


@operations.delete("/thing")
def remove(request: HttpRequest) -> str:
    return "gone"


urlpatterns = [
    path("function/", function),
    path("unhashable/", csrf_exempt(Callable_())),
    path("partial/", functools.partial(function)),
    path("cached/", never_cache(function)),
    path("plain/", Plain.as_view()),
    path("no-put/", PutIsPost.as_view(http_method_names=["get", "post"])),
    path("put-is-post/", PutIsPost.as_view()),
    path("options-is-post/", OptionsIsPost.as_view()),
    path("own-options/", OwnOptions.as_view()),
    path("own-dispatch/", OwnDispatch.as_view()),
    path("login/", Login.as_view()),
    path("decorated/", ratequota("login")(Plain.as_view())),
    path("adecorated/", ratequota("login")(Awaited.as_view())),
    path("usage/", UsageView.as_view()),
    path("rest/", Rest.as_view()),
    path("guessed/", Guessed.as_view()),
    path("guessed-decorated/", GuessedBehindTheDecorator.as_view()),
    path("rest-function/", rest_function),
    path("things/", Things.as_view({"post": "create", "put": "create", "delete": "destroy"})),
    path("ninja/", operations.urls),
]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "enforce_all"),
    pytest.mark.urls(__name__),
]


def limit(rates: str = f"{LIMIT}/hour", **fields: str) -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="login", **fields), rates=rates)


# --- What was shown. ---


@pytest.mark.parametrize("path", ["/function/", "/unhashable/", "/partial/", "/cached/", "/own-dispatch/"])
@pytest.mark.parametrize("methods", ["POST", ""])
def test_another_method(client: Client, path: str, methods: str) -> None:
    limit(routes="/*", methods=methods)
    tried = ["POST", "PUT", "PATCH", "FOO", "TRACE", "DELETE", *([] if methods else ["GET", "OPTIONS"])]
    guesses = [client.generic(tried[n % len(tried)], path).status_code for n in range(50)]
    assert guesses == [200] * LIMIT + [429] * (50 - LIMIT)


def test_methods_that_clients_make_up_have_one_counter_and_fill_no_memory(client: Client) -> None:
    limit(routes="/*", methods="POST")
    assert [client.generic(f"M{n}", "/function/").status_code for n in range(50)].count(200) == LIMIT
    snapshot = policies.current()
    assert snapshot is not None
    assert len(snapshot.memo.endpoints) == 1


@pytest.mark.parametrize("path", ["/guessed-decorated/", "/guessed/"])
@pytest.mark.parametrize("method", ["OPTIONS", "FOO", "TRACE"])
def test_passwords_are_not_tried_by_a_method_that_does_nothing(
    client: Client, settings: Any, method: str, path: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": True}
    RatePolicy.objects.create(
        endpoint=Endpoint.objects.create(name="login", routes="/*"), counted_per="ip", rates="9/h"
    )
    for n in range(30):
        guess = "Basic " + b64encode(f"alice:{n}".encode()).decode()
        answer = client.generic(method, path, HTTP_AUTHORIZATION=guess)
        assert answer.status_code == (401 if n < 9 else 429)


# --- Which methods count, by view and by the endpoint's methods; Explain agrees. ---

EVERY = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE FOO"
ALL_BUT_OPTIONS = "GET HEAD POST PUT PATCH DELETE TRACE FOO"
WRITING = "POST PUT PATCH DELETE TRACE FOO"


@pytest.mark.parametrize(
    ("path", "methods", "expected"),
    [
        ("/function/", "", EVERY),
        ("/function/", "POST", WRITING),
        ("/function/", "GET", "GET HEAD"),
        ("/function/", "OPTIONS", f"OPTIONS {WRITING}"),
        ("/plain/", "", ALL_BUT_OPTIONS),
        ("/plain/", "POST", "POST PUT PATCH TRACE FOO"),
        ("/plain/", "GET", "GET HEAD"),
        ("/plain/", "OPTIONS", "OPTIONS PUT PATCH TRACE FOO"),
        ("/no-put/", "POST", "POST PUT PATCH DELETE OPTIONS TRACE FOO"),
        ("/put-is-post/", "POST", "POST PUT PATCH TRACE FOO"),
        ("/put-is-post/", "DELETE", WRITING),
        ("/options-is-post/", "", EVERY),
        ("/options-is-post/", "POST", "POST PUT PATCH OPTIONS TRACE FOO"),
        ("/own-options/", "", ALL_BUT_OPTIONS),
        ("/own-dispatch/", "", EVERY),
        ("/own-dispatch/", "POST", f"GET HEAD {WRITING}"),
        ("/login/", "POST", "POST PATCH DELETE TRACE FOO"),
        ("/login/", "", ALL_BUT_OPTIONS),
        ("/rest/", "POST", ALL_BUT_OPTIONS),
        ("/rest/", "OPTIONS", EVERY.replace("POST ", "")),
        ("/guessed-decorated/", "", EVERY),
        ("/guessed-decorated/", "POST", WRITING),
        ("/rest-function/", "POST", WRITING),
        ("/rest-function/", "GET", "GET HEAD"),
        ("/things/", "POST", EVERY.replace("DELETE OPTIONS ", "")),
        ("/ninja/thing", "POST", EVERY.replace("DELETE ", "")),
    ],
)
def test_a_method_counts_unless_the_view_has_a_handler_of_its_own(
    client: Client, path: str, methods: str, expected: str
) -> None:
    limit(routes="/*", methods=methods, rates="blocked")
    refused = {method for method in EVERY.split() if client.generic(method, path).status_code == 429}
    assert refused == set(expected.split())
    for method in ("GET", "PUT", "OPTIONS"):
        told = ExplainQuery(ip="127.0.0.1", path=path, method=method).explain()
        assert told.decision.allowed is (method not in refused)


PREFLIGHT = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    "path", ["/plain/", "/own-options/", "/login/", "/rest/", "/decorated/", "/adecorated/", "/usage/"]
)
def test_a_preflight_is_free_unless_an_endpoint_names_options(client: Client, path: str, named: bool) -> None:
    """It was refused by limits for all endpoints, and a browser reported that CORS had failed."""
    RatePolicy.objects.create(rates="1/hour")
    if named:
        RatePolicy.objects.all().delete()
        limit("1/hour", routes="/*", methods="OPTIONS")
    statuses = [client.options(path, headers=PREFLIGHT).status_code for _ in range(3)]
    assert statuses == ([200, 429, 429] if named else [200] * 3)
    plain = [client.options(path).status_code for _ in range(2)]
    assert plain[1] == 429 or path == "/usage/", "without a browser's headers it is a request like any other"


@pytest.mark.parametrize("path", ["/function/", "/partial/", "/own-dispatch/", "/options-is-post/"])
def test_a_preflight_that_clients_make_up_reaches_no_other_code_for_free(client: Client, path: str) -> None:
    RatePolicy.objects.create(rates="1/hour")
    assert [client.options(path, headers=PREFLIGHT).status_code for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("header", ["Cookie", "Authorization"])
def test_a_preflight_with_credentials_is_none(client: Client, header: str) -> None:
    """No browser sends it."""
    RatePolicy.objects.create(rates="1/hour")
    made_up = PREFLIGHT | {header: "x=1"}
    assert [client.options("/plain/", headers=made_up).status_code for _ in range(2)][1] == 429


def test_a_preflight_passes_no_block(client: Client) -> None:
    RatePolicy.objects.create(subject="ip:127.0.0.1", rates="blocked")
    assert client.options("/plain/", headers=PREFLIGHT).status_code == 429


def test_a_request_that_nothing_resolved_counts_as_of_a_function() -> None:
    """As middleware sees it, or code that checks by hand."""
    limit(methods="POST", rates="blocked")
    refused = {m for m in EVERY.split() if not check_request(RequestFactory().generic(m, "/"), "login").allowed}
    assert refused == set(WRITING.split())
