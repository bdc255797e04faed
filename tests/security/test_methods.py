"""A request's method is the client's to choose: OPTIONS, or one that it makes up, is no way around an endpoint."""

from __future__ import annotations

import asyncio
import functools
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django import forms
from django.contrib.auth.mixins import LoginRequiredMixin
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest, HttpResponse
from django.test import Client, RequestFactory
from django.urls import path, resolve
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from django.views.generic import FormView
from ninja import NinjaAPI
from rest_framework.authentication import BasicAuthentication
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_ratequota import check_request
from django_ratequota.checks.views import check_methods
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.operations.explain_query import ExplainQuery
from django_ratequota.policies.requests.methods import handlings_of
from django_ratequota.throttling import QuotaThrottle
from example_project.views import completions

LIMIT = 10


@csrf_exempt
def function(request: HttpRequest) -> HttpResponse:
    """Does the same for every method."""
    return HttpResponse("in")


@csrf_exempt
def echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.body)


class Callable_:
    """A view that cannot be hashed."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("in")


def spying(view: Any) -> Any:
    """A project's decorator that works for every method before the view does."""

    @functools.wraps(view)
    def wrapper(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return view(request, *args, **kwargs)

    return wrapper


@method_decorator(csrf_exempt, name="dispatch")
class Plain(View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("form")

    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("in")

    def delete(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("gone")


@method_decorator(csrf_exempt, name="dispatch")
class OwnOptions(View):
    def options(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse("what there is")


@method_decorator(csrf_exempt, name="dispatch")
class OptionsAsPost(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("in")

    def options(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.post(request)


@method_decorator(csrf_exempt, name="dispatch")
class OwnDispatch(View):
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse("in")


class OwnSetup(Plain):
    def setup(self, request: HttpRequest, *args: Any, **kwargs: Any) -> None:
        super().setup(request, *args, **kwargs)


@method_decorator(spying, name="dispatch")
class Spied(Plain):
    pass


class OwnAnswerToOthers(Plain):
    def http_method_not_allowed(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.post(request)


class Members(LoginRequiredMixin, Plain):
    pass


@method_decorator(csrf_exempt, name="dispatch")
class Login(FormView):  # type: ignore[type-arg]
    """Django's ``put`` of forms is ``post``."""

    form_class = forms.Form

    def render_to_response(self, context: dict[str, Any], **kwargs: Any) -> HttpResponse:
        return HttpResponse("form")

    def form_valid(self, form: Any) -> HttpResponse:
        return HttpResponse("in")


class PutAsInheritedPost(Plain):
    def put(self, request: HttpRequest) -> HttpResponse:
        return super().post(request)


class OwnPost(Plain):
    """``post`` adds nothing to the inherited one, and is the handler of no other method."""

    def post(self, request: HttpRequest) -> HttpResponse:
        return super().post(request)


class Rest(APIView):
    authentication_classes = []
    throttle_classes = [QuotaThrottle]
    throttle_scope = "login"

    def post(self, request: Request) -> Response:
        return Response("in")


class RestOfAll(Rest):
    """Limited by ENFORCE_ALL."""

    throttle_classes = []


class Guessed(APIView):
    """REST framework tries the password before it looks at the method."""

    authentication_classes = [BasicAuthentication]
    throttle_classes = [QuotaThrottle]

    def get(self, request: Request) -> Response:
        return Response("in")


@method_decorator(ratequota(scope="login"), name="dispatch")
class GuessedBehindTheDecorator(Guessed):
    throttle_classes = []


@api_view(["GET", "POST"])
def rest_function(request: Request) -> Response:
    return Response("in")


@api_view(["POST"])
def rest_post(request: Request) -> Response:
    return Response("in")


class Things(ViewSet):
    authentication_classes = []

    def create(self, request: Request) -> Response:
        return Response("in")

    def destroy(self, request: Request) -> Response:
        return Response("gone")


operations = NinjaAPI(urls_namespace="methods", openapi_url=None)


@operations.post("/thing")
def add(request: HttpRequest) -> str:
    return "in"


@operations.delete("/thing")
def remove(request: HttpRequest) -> str:
    return "gone"


@operations.api_operation(["POST", "PATCH"], "/both")
def change(request: HttpRequest) -> str:
    return "in"


urlpatterns = [
    path("function/", function),
    path("echo/", echo),
    path("unhashable/", csrf_exempt(Callable_())),
    path("partial/", functools.partial(function)),
    path("cached/", never_cache(function)),
    path("post-only/", csrf_exempt(require_POST(function))),
    path("plain/", Plain.as_view()),
    path("plain-cached/", never_cache(Plain.as_view())),
    path("plain-spied/", spying(Plain.as_view())),
    path("own-options/", OwnOptions.as_view()),
    path("options-as-post/", OptionsAsPost.as_view()),
    path("own-dispatch/", OwnDispatch.as_view()),
    path("own-setup/", OwnSetup.as_view()),
    path("spied/", Spied.as_view()),
    path("others/", OwnAnswerToOthers.as_view()),
    path("members/", Members.as_view()),
    path("login/", Login.as_view()),
    path("put-as-inherited-post/", PutAsInheritedPost.as_view()),
    path("own-post/", OwnPost.as_view()),
    path("rest/", Rest.as_view()),
    path("rest-of-all/", RestOfAll.as_view()),
    path("guessed/", Guessed.as_view()),
    path("guessed-decorated/", GuessedBehindTheDecorator.as_view()),
    path("rest-function/", rest_function),
    path("rest-post/", rest_post),
    path("things/", Things.as_view({"post": "create", "put": "create", "delete": "destroy"})),
    path("ninja/", operations.urls),
    path("completions/", completions),
]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "enforce_all"),
    pytest.mark.urls(__name__),
]


@pytest.fixture
def enforce_all(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}


def limit(name: str = "login", rates: str = f"{LIMIT}/hour", **fields: str) -> Endpoint:
    endpoint = Endpoint.objects.create(name=name, **fields)
    RatePolicy.objects.create(endpoint=endpoint, rates=rates)
    return endpoint


# --- What was shown. ---


def test_options_of_the_examples_completions_are_counted(client: Client) -> None:
    limit("completions", "100/hour")
    statuses = []
    for _ in range(15):
        response = client.options("/completions/")
        b"".join(response)  # the stream settles at its end: it reserves 20 units, and uses 10
        statuses.append(response.status_code)
    assert statuses == [200] * 9 + [429] * 6


@pytest.mark.parametrize("path", ["/function/", "/unhashable/", "/partial/", "/cached/", "/own-dispatch/"])
def test_no_other_method_guesses_for_free_where_posts_are_counted(client: Client, path: str) -> None:
    limit(routes="/*", methods="POST")
    methods = ["POST", "PUT", "PATCH", "FOO", "OPTIONS", "TRACE", "DELETE"]
    guesses = [client.generic(methods[n % len(methods)], path).status_code for n in range(50)]
    assert guesses == [200] * LIMIT + [429] * (50 - LIMIT)
    assert client.get(path).status_code == client.head(path).status_code == 200  # the form's page


def test_methods_that_clients_make_up_have_one_counter_and_fill_no_memory(client: Client) -> None:
    from django_ratequota.policies.cache import policies

    limit(routes="/*", methods="POST")
    assert [client.generic(f"M{n}", "/function/").status_code for n in range(50)].count(200) == LIMIT
    snapshot = policies.current()
    assert snapshot is not None
    assert len(snapshot.memo.endpoints) == 1


def test_a_get_with_a_body_is_no_page(client: Client) -> None:
    """A view that reads JSON from the body finds it in a GET as well."""
    limit(routes="/*", methods="POST")
    for n in range(50):
        answer = client.generic("GET", "/function/", '{"password": "x"}', content_type="application/json")
        assert answer.status_code == (200 if n < LIMIT else 429)
    chunked = {"HTTP_TRANSFER_ENCODING": "chunked"}
    assert client.get("/function/", **chunked).status_code == 429
    assert client.get("/function/").status_code == client.get("/plain/").status_code == 200
    assert client.generic("GET", "/plain/", "{}", content_type="application/json").status_code == 200


@pytest.mark.parametrize(("version", "status"), [("1.1", 200), ("2", 429), ("3", 429)])
def test_a_get_of_http_2_has_a_body_that_no_header_tells_of(settings: Any, version: str, status: int) -> None:
    """HTTP/1.1 has no such body: the server would not know where it ends."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    limit(routes="/*", methods="POST")

    async def get(body: bytes) -> Any:
        received = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            return received.pop() if received else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            **{"type": "http", "http_version": version, "method": "GET", "path": "/echo/", "query_string": b""},
            "headers": [(b"host", b"testserver")],
        }
        await ASGIHandler()(scope, receive, send)
        return sent[0]["status"], sent[1]["body"]

    guesses = [async_to_sync(get)(b"guess") for _ in range(LIMIT + 1)]
    assert guesses[:LIMIT] == [(200, b"guess")] * LIMIT, "the view reads all of it"
    assert guesses[LIMIT][0] == status
    assert async_to_sync(get)(b"") == (200, b""), "the form's page"


@pytest.mark.parametrize("method", ["OPTIONS", "FOO", "TRACE"])
def test_passwords_are_not_tried_by_a_method_that_does_nothing(client: Client, method: str) -> None:
    limit()
    for n in range(50):
        guess = "Basic " + b64encode(f"alice:{n}".encode()).decode()
        answer = client.generic(method, "/guessed-decorated/", HTTP_AUTHORIZATION=guess)
        assert answer.status_code == (401 if n < LIMIT else 429)


# --- Which methods count, by view and by the endpoint's methods. ---

EVERY = "GET HEAD POST PUT PATCH DELETE OPTIONS TRACE FOO"
ALL_BUT_READING = "POST PUT PATCH DELETE OPTIONS TRACE FOO"
ALL_BUT_OPTIONS = "GET HEAD POST PUT PATCH DELETE TRACE FOO"


def counted(client: Client, path: str) -> set[str]:
    return {method for method in EVERY.split() if client.generic(method, path).status_code == 429}


@pytest.mark.parametrize(
    ("path", "methods", "expected"),
    [
        ("/function/", "", EVERY),
        ("/function/", "POST", ALL_BUT_READING),
        ("/function/", "GET", EVERY),
        ("/function/", "PUT DELETE", ALL_BUT_READING),
        ("/function/", "OPTIONS", ALL_BUT_READING),
        ("/post-only/", "POST", ALL_BUT_READING),
        ("/plain/", "", ALL_BUT_OPTIONS),
        ("/plain/", "POST", "POST"),
        ("/plain/", "GET", "GET HEAD"),
        ("/plain/", "OPTIONS POST", "OPTIONS POST"),
        ("/plain-cached/", "", ALL_BUT_OPTIONS),
        ("/plain-cached/", "POST", "POST"),
        ("/plain-spied/", "", EVERY),
        ("/plain-spied/", "POST", "POST PUT PATCH OPTIONS TRACE FOO"),
        ("/own-options/", "", ALL_BUT_OPTIONS),
        ("/own-options/", "OPTIONS", "OPTIONS"),
        ("/options-as-post/", "POST", "POST OPTIONS"),
        ("/own-dispatch/", "", EVERY),
        ("/own-dispatch/", "POST", ALL_BUT_READING),
        ("/own-setup/", "", EVERY),
        ("/own-setup/", "POST", "POST PUT PATCH OPTIONS TRACE FOO"),
        ("/spied/", "", EVERY),
        ("/others/", "POST", "POST PUT PATCH OPTIONS TRACE FOO"),
        ("/members/", "", ALL_BUT_OPTIONS),
        ("/members/", "POST", "POST"),
        ("/login/", "POST", "POST PUT"),
        ("/login/", "", ALL_BUT_OPTIONS),
        ("/put-as-inherited-post/", "POST", "POST PUT"),
        ("/own-post/", "DELETE", "DELETE"),
        ("/rest/", "", ALL_BUT_OPTIONS),
        ("/rest/", "POST", "POST"),
        ("/rest/", "OPTIONS", "OPTIONS"),
        ("/rest-of-all/", "", ALL_BUT_OPTIONS),
        ("/guessed/", "", ALL_BUT_OPTIONS),
        ("/guessed-decorated/", "", EVERY),
        ("/guessed-decorated/", "POST", ALL_BUT_READING),
        ("/rest-function/", "POST", "POST"),
        ("/rest-function/", "GET", "GET HEAD POST"),
        ("/rest-post/", "GET", "GET HEAD"),
        ("/things/", "POST", "POST PUT"),
        ("/ninja/thing", "", EVERY),
        ("/ninja/thing", "POST", "POST"),
        ("/ninja/both", "POST", "POST PATCH"),
        ("/things/", "DELETE", "DELETE POST PUT"),
    ],
)
def test_what_counts_is_what_the_view_does(client: Client, path: str, methods: str, expected: str) -> None:
    limit(routes="/*", methods=methods, rates="blocked")
    assert counted(client, path) == set(expected.split())


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("DELETE", "POST PUT PATCH OPTIONS TRACE FOO"),  # which the operator separates from posts
        ("PUT PATCH DELETE", "POST OPTIONS TRACE FOO"),
        ("POST PUT PATCH DELETE", ALL_BUT_READING),  # a wide limit on writing does not distinguish
        ("", ALL_BUT_READING),
    ],
)
def test_another_endpoint_that_names_the_method_tells_it_apart(client: Client, other: str, expected: str) -> None:
    limit(routes="/function/", methods="POST", rates="blocked")
    limit("wide", routes="/*", methods=other, rates="1000/hour")
    assert counted(client, "/function/") == set(expected.split())


def test_a_request_that_nothing_resolved_counts_whatever_its_method() -> None:
    """As middleware sees it, or code that checks by hand."""
    limit(methods="POST", rates="blocked")
    for method in ALL_BUT_READING.split():
        assert not check_request(RequestFactory().generic(method, "/"), scope="login").allowed
    assert check_request(RequestFactory().get("/"), scope="login").allowed


@pytest.mark.parametrize(("view", "allowed"), [(Rest, True), (Guessed, True), (OwnDispatch, False)])
def test_a_view_of_rest_framework_is_known_without_a_resolver_match(view: Any, allowed: bool) -> None:
    limit(rates="blocked")
    request = Request(RequestFactory().options("/"), parser_context={"view": view()})
    assert check_request(request, scope="login").allowed is allowed


# --- Explain agrees. ---


@pytest.mark.parametrize("where", [str(one.pattern) for one in urlpatterns[:-2]])
@pytest.mark.parametrize("methods", ["", "POST", "GET"])
def test_explain_says_what_requests_see(client: Client, where: str, methods: str) -> None:
    limit(routes="/*", methods=methods, rates="blocked")
    told = {
        method
        for method in EVERY.split()
        if not ExplainQuery(ip="127.0.0.1", path=f"/{where}", method=method).explain().decision.allowed
    }
    assert told == counted(client, f"/{where}")


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "GET"])
def test_explain_knows_the_view_by_its_scope(settings: Any, method: str) -> None:
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("rest/", Rest.as_view())]})
    limit(rates="blocked")
    assert ExplainQuery(ip="127.0.0.1", endpoint="login", method=method).explain().decision.allowed is (
        method == "OPTIONS"
    )


# --- The warning. ---


def checks_method(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=200 if request.method == "POST" else 405)


class CallsSuper(Plain):
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return super().dispatch(request, *args, **kwargs)


class AnswersAll(View):
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse("in")


@pytest.mark.parametrize(
    ("view", "warned"),
    [
        (function, True),
        (ratequota(scope="login")(function), True),
        (AnswersAll.as_view(), True),
        (require_POST(function), False),
        (ratequota(scope="login")(require_POST(function)), False),
        (checks_method, False),
        (Plain.as_view(), False),
        (OwnSetup.as_view(), False),
        (CallsSuper.as_view(), False),
        (Rest.as_view(), False),
        (rest_post, False),
    ],
)
@pytest.mark.parametrize("methods", ["POST", ""])
def test_methods_of_an_endpoint_whose_view_takes_any(
    settings: Any, django_assert_num_queries: Any, view: Any, warned: bool, methods: str
) -> None:
    settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("at/", view), path("else/", function)]})
    limit(routes="/at/", methods=methods)
    with django_assert_num_queries(1):
        messages = check_methods(databases=["default"])
    assert [message.id for message in messages] == ["django_ratequota.W013"] * bool(warned and methods)
    for message in messages:
        assert "'login' counts POST" in message.msg
        assert "at /at/" in message.msg
        assert "/else/" not in message.msg
        assert '@require_http_methods(["POST"])' in message.hint
    with django_assert_num_queries(0):
        assert check_methods() == []


# --- It costs nothing on the way. ---


def test_a_view_is_looked_into_once(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from django_ratequota.policies.requests import methods as module

    calls: list[Any] = []
    find: Callable[..., Any] = module._handlings_of_class
    monkeypatch.setattr(module, "_handlings_of_class", lambda *args: calls.append(args) or find(*args))
    module._cached_handlings.cache_clear()
    limit(routes="/*")
    for method in ["GET", "OPTIONS", *(f"M{n}" for n in range(5)), "OPTIONS"]:
        client.generic(method, "/plain/")
    assert len(calls) == 1
    assert handlings_of(resolve("/plain/").func)["OPTIONS"] == "free"
