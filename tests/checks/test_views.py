"""System checks of the views: whether any view enforces policies, and whether it returns the counted statuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from http import HTTPStatus
from types import ModuleType
from typing import Any

import pytest
import redis
from django.contrib import admin
from django.contrib.auth.views import LoginView
from django.core import checks
from django.core.exceptions import PermissionDenied
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.http import Http404, HttpResponse, HttpResponseForbidden, JsonResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.http import require_POST
from rest_framework import exceptions, status
from rest_framework.authtoken.views import ObtainAuthToken
from rest_framework.decorators import api_view, throttle_classes
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_ratequota import Limiter, check_request
from django_ratequota.api import UsageView
from django_ratequota.checks.views import (
    check_authenticated,
    check_declared,
    check_enforced,
    check_statuses,
    check_throttle_classes,
    check_unchecked,
    check_unlimited,
)
from django_ratequota.compat.drf import AnonRateThrottle
from django_ratequota.compat.ratelimit.decorators import ratelimit
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.policies.requests.view_code import never_answers
from django_ratequota.throttling import QuotaThrottle, throttle_scope
from tests.support.snippets import ROOT, snippets

DATABASES = ["default"]


def ids(messages: list[Any]) -> list[str]:
    assert all(message.hint and message.level == checks.WARNING for message in messages)
    return [str(message.id).removeprefix("django_ratequota.") for message in messages]


# --- Enforcement. ---


@pytest.fixture
def project(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Make a project of one module with these views (and other names), and a URLconf that routes to them."""

    def make(*routed: Any, **named: Any) -> ModuleType:
        views, urls = ModuleType("project_views"), ModuleType("project_urls")
        vars(views).update(named)
        for view in routed:
            if isinstance(view, type):
                view.__module__ = "project_views"
        callbacks = [view.as_view() if isinstance(view, type) else view for view in routed]
        for callback in callbacks:
            callback.__module__ = getattr(callback, "__module__", "").replace(__name__, "project_views")
        patterns = [path(f"{number}/", callback) for number, callback in enumerate(callbacks)]
        vars(urls)["urlpatterns"] = [*patterns, path("admin/", admin.site.urls)]
        monkeypatch.setitem(sys.modules, "project_views", views)
        monkeypatch.setitem(sys.modules, "project_urls", urls)
        settings.ROOT_URLCONF, settings.MIDDLEWARE = "project_urls", ["django.middleware.common.CommonMiddleware"]
        settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": False}
        settings.REST_FRAMEWORK = {}
        return views

    return make


def plain(request: Any) -> HttpResponse:
    return HttpResponse()


class Unlimited(APIView):
    throttle_classes = ()


class Limited(APIView):
    """Limited by DEFAULT_THROTTLE_CLASSES in this suite's settings."""


class WithCompatThrottle(APIView):
    throttle_classes = (AnonRateThrottle,)


class WithOtherThrottle(APIView):
    class Throttle(BaseThrottle):
        pass

    throttle_classes = (Throttle,)


@method_decorator(ratequota(scope="search"), name="dispatch")
class Decorated(View):
    pass


@pytest.mark.parametrize(
    ("views", "named", "enforced"),
    [
        ([], {}, False),
        ([plain], {}, False),
        ([plain, Unlimited, WithOtherThrottle], {}, False),
        ([UsageView.as_view()], {}, False),  # it has its own limit, but is no view of the project
        ([plain, Limited], {}, True),
        ([plain, Decorated], {}, True),
        ([WithCompatThrottle], {}, True),
        ([plain, ratequota(scope="search")(plain)], {}, True),
        ([plain], {"check_request": check_request}, True),
        ([plain], {"ratelimit": ratelimit}, True),
        ([plain], {"RatePolicy": RatePolicy, "never_answers": never_answers}, False),
    ],
)
def test_a_project_without_enforcement_is_a_warning(
    project: Any, views: list[Any], named: dict[str, Any], enforced: bool
) -> None:
    project(*views, **named)
    assert ids(check_enforced()) == ([] if enforced else ["W010"])


def test_enforce_all_is_enforcement(project: Any, settings: Any) -> None:
    project(plain)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    assert check_enforced() == []


def test_a_middleware_that_checks_requests_is_enforcement(project: Any, settings: Any, monkeypatch: Any) -> None:
    project(plain)
    module = ModuleType("project_middleware")
    vars(module)["check_request"] = check_request
    monkeypatch.setitem(sys.modules, "project_middleware", module)
    settings.MIDDLEWARE = ["project_middleware.Limits", "project_missing.Middleware"]
    assert check_enforced() == []


def service(**named: Any) -> ModuleType:
    """Return a module of the project that its views call."""
    module = ModuleType("project_service")
    vars(module).update(named)
    exec(  # functions have the globals of the module that defines them
        "def complete(request):\n    return check_request(request)\n\n"
        "def lazily(request):\n    from django_ratequota import check_request\n    return check_request(request)\n\n"
        "def engine(request):\n    return limiter.check([])\n\n"
        "def models(request):\n    from django_ratequota.models import RatePolicy\n    return RatePolicy\n",
        vars(module),
    )
    return module


@pytest.mark.parametrize(
    ("called", "enforced"), [("complete", True), ("lazily", True), ("engine", True), ("models", False)]
)
def test_a_function_that_views_call_is_enforcement(project: Any, called: str, enforced: bool) -> None:
    module = service(check_request=check_request, limiter=Limiter(client=redis.Redis()))
    space: dict[str, Any] = {"__name__": "project_views", "service": module}
    exec(f"def view(request):\n    return service.{called}(request)", space)
    project(space["view"])
    assert ids(check_enforced()) == ([] if enforced else ["W010"])


def test_a_ninja_operation_that_checks_requests_is_enforcement(project: Any) -> None:
    from ninja import NinjaAPI

    api = NinjaAPI(urls_namespace="checked-by-hand")
    api.get("/reports")(service(check_request=check_request).complete)
    project()
    sys.modules["project_urls"].urlpatterns.append(path("api/", api.urls))
    assert check_enforced() == []


def test_a_middleware_that_calls_a_check_is_enforcement(project: Any, settings: Any, monkeypatch: Any) -> None:
    project(plain)
    space: dict[str, Any] = {"__name__": "project_middleware", "service": service(check_request=check_request)}
    exec("class Limits:\n    def __call__(self, request):\n        return service.complete(request)", space)
    module = ModuleType("project_middleware")
    vars(module)["Limits"] = space["Limits"]
    monkeypatch.setitem(sys.modules, "project_middleware", module)
    settings.MIDDLEWARE = ["project_middleware.Limits"]
    assert check_enforced() == []


def test_default_throttles_that_no_view_uses_are_a_warning(project: Any, settings: Any) -> None:
    project()
    settings.REST_FRAMEWORK = {"DEFAULT_THROTTLE_CLASSES": ["django_ratequota.throttling.QuotaThrottle"]}
    assert check_enforced() == []
    project(plain)
    settings.REST_FRAMEWORK = {"DEFAULT_THROTTLE_CLASSES": ["django_ratequota.throttling.QuotaThrottle"]}
    [warning] = check_enforced()
    assert ids([warning]) == ["W010"]
    assert warning.hint.startswith("DEFAULT_THROTTLE_CLASSES has QuotaThrottle, but no view")


@pytest.mark.parametrize("limited", [False, True])
def test_one_throttled_ninja_operation_is_enforcement(project: Any, limited: bool) -> None:
    from ninja import NinjaAPI

    from django_ratequota.ninja import QuotaThrottle

    api = NinjaAPI(urls_namespace=f"checked-{limited}")

    @api.get("/reports", throttle=[QuotaThrottle()] if limited else [])
    def reports(request: Any) -> list[int]:
        return []

    @api.post("/reports")
    def report(request: Any) -> list[int]:
        return []

    project()
    sys.modules["project_urls"].urlpatterns.append(path("api/", api.urls))
    assert ids(check_enforced()) == ([] if limited else ["W010"])


def test_a_broken_urlconf_is_not_reported_again(settings: Any) -> None:
    settings.ROOT_URLCONF = "nowhere"
    assert check_enforced() == []


# --- Declared scopes. ---


def rest(declare: Any, *throttles: Any, **body: Any) -> Any:
    """A view of REST framework under the decorator, with these throttles."""
    get = body.pop("get", plain)
    return declare(type("Rest", (APIView,), {"throttle_classes": throttles, "get": get, **body}))


def function_view(declare: Any, *throttles: Any, below: bool) -> Any:
    def function(request: Any) -> Response: ...

    limited = throttle_classes(throttles)(declare(function) if below else function)
    view = api_view()(limited)
    return view if below else declare(view)


SEARCH = throttle_scope("search")
DECIDING = {"get_throttles": lambda self: [QuotaThrottle()]}


def nothing(view: Any) -> Any:
    return view


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (rest(SEARCH), ["W022"]),
        (rest(SEARCH, AnonRateThrottle), ["W022"]),
        (rest(SEARCH, QuotaThrottle), []),
        (rest(SEARCH, **DECIDING), []),
        (rest(nothing, get=SEARCH(plain)), ["W022"]),
        (rest(nothing, QuotaThrottle, get=SEARCH(plain)), []),
        (rest(nothing, get=method_decorator(ratequota("search"))(plain)), []),
        (rest(nothing, throttle_scope="search"), []),
        (function_view(SEARCH, below=True), ["W022"]),
        (function_view(SEARCH, below=False), ["W022"]),
        (function_view(SEARCH, QuotaThrottle, below=True), []),
        (function_view(SEARCH, QuotaThrottle, below=False), []),
        (function_view(ratequota("search"), below=True), []),
        (function_view(ratequota("search"), below=False), []),
        (SEARCH(plain), ["W022"]),
        (require_POST(SEARCH(plain)), ["W022"]),
        (ratequota("search")(plain), []),
        (plain, []),
    ],
)
def test_a_declaration_needs_a_throttle(project: Any, view: Any, expected: list[str]) -> None:
    project(view)
    found = check_declared()
    assert ids(found) == expected
    if found:
        assert found[0].msg == "Nothing enforces what @throttle_scope declares for these views: /0/."


def test_a_declaration_of_an_action_needs_a_throttle(project: Any) -> None:
    class Things(ViewSet):
        throttle_classes = []
        list = SEARCH(plain)
        create = plain

    for actions, expected in (({"get": "list"}, ["W022"]), ({"post": "create"}, [])):
        project(Things.as_view(actions))
        assert ids(check_declared()) == expected


def test_a_declaration_for_ninja_needs_ninja_s_throttle(project: Any) -> None:
    from ninja import NinjaAPI

    api = NinjaAPI(urls_namespace="declared", docs_url=None)
    api.get("/one")(SEARCH(plain))
    project()
    sys.modules["project_urls"].urlpatterns.append(path("api/", api.urls))
    assert ids(check_declared()) == ["W022"]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (rest(method_decorator(ratequota, name="dispatch")), ["W023"]),
        (rest(method_decorator(ratequota, name="dispatch"), QuotaThrottle), ["W023"]),
        (rest(method_decorator(ratequota, name="dispatch"), authentication_classes=[]), []),
        (method_decorator(ratequota, name="dispatch")(type("Plain", (View,), {"get": plain})), []),
        (rest(nothing, get=method_decorator(ratequota("search"))(plain)), []),
        (function_view(ratequota("search"), below=False), []),
        (ratequota(plain), []),
    ],
)
def test_a_decorator_around_dispatch_knows_no_user(project: Any, view: Any, expected: list[str]) -> None:
    project(view)
    assert ids(check_authenticated()) == expected


class OwnScope(QuotaThrottle):
    scope, rate = "burst", "10/min"


class OwnKey(QuotaThrottle):
    scope = "burst"

    def get_cache_key(self, request: Any, view: Any) -> str:
        return f"{self.scope}:1"


class ReadsItsScope(QuotaThrottle):
    scope = "burst"

    def allow_request(self, request: Any, view: Any) -> bool:
        view.throttle_scope = self.scope
        return super().allow_request(request, view)


@pytest.mark.parametrize(
    ("throttles", "expected"),
    [
        ([OwnScope], ["OwnScope sets scope, rate, which nothing reads."]),
        ([QuotaThrottle, OwnKey], ["OwnKey sets get_cache_key, which nothing reads."]),
        ([QuotaThrottle, ReadsItsScope, AnonRateThrottle], []),
    ],
)
def test_a_throttle_class_that_sets_a_scope_or_a_rate_is_named(
    project: Any, throttles: list[Any], expected: list[str]
) -> None:
    project(rest(nothing, *throttles), rest(nothing, *throttles))
    found = check_throttle_classes()
    assert ids(found) == ["W024"] * len(expected)
    assert [message.msg.rpartition("test_views.")[2] for message in found] == expected


@pytest.mark.parametrize("check", [check_declared, check_authenticated, check_throttle_classes])
def test_checks_of_views_leave_a_broken_urlconf_to_djangos(settings: Any, check: Any) -> None:
    settings.ROOT_URLCONF = "nowhere"
    assert check() == []


# --- Requests that views refuse before their throttle. ---


class Throttled(APIView):
    throttle_classes = [QuotaThrottle]


@pytest.mark.parametrize(
    ("view", "enforce_all", "count_unchecked", "expected"),
    [
        (Throttled, True, False, ["W015"]),
        (Throttled, True, True, []),
        (Throttled, False, False, []),
        (ratequota(plain), True, False, []),
        (require_POST(ratequota(plain)), True, False, ["W015"]),
        (rest(nothing, get=method_decorator(ratequota("search"))(plain)), True, False, ["W015"]),
        (function_view(ratequota("search"), below=True), True, False, ["W015"]),
        (function_view(ratequota("search"), below=False), True, False, ["W015"]),
        (plain, True, False, []),
    ],
)
def test_refusals_before_the_throttle_need_count_unchecked(
    project: Any, settings: Any, view: Any, enforce_all: bool, count_unchecked: bool, expected: list[str]
) -> None:
    project(view)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": enforce_all, "COUNT_UNCHECKED": count_unchecked}
    assert ids(check_unchecked()) == expected


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("view", "count_unchecked", "policy", "expected"),
    [
        (Throttled, True, None, ["W017"]),
        (Throttled, False, None, []),
        (plain, True, None, []),
        (UsageView, True, None, []),
        (Throttled, True, {"endpoint": None}, []),
        (Throttled, True, {"routes": "/0/"}, []),
        (Throttled, True, {"routes": "/other/"}, ["W017"]),
        (Throttled, True, {"endpoint": None, "counted_per": "caller"}, ["W017"]),
        (Throttled, True, {"endpoint": None, "mode": "off"}, ["W017"]),
        (Throttled, True, {"endpoint": None, "ends_at": "2020-01-01T00:00Z"}, ["W017"]),
        (Throttled, True, {"endpoint": None, "subject": "ip:203.0.113.7"}, ["W017"]),
    ],
)
def test_count_unchecked_needs_a_policy_counted_per_ip(
    project: Any,
    settings: Any,
    view: Any,
    count_unchecked: bool,
    policy: dict[str, Any] | None,
    expected: list[str],
) -> None:
    project(view)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": count_unchecked}
    if policy is not None:
        fields = {"counted_per": "ip", "rates": "100/min", **policy}
        if routes := fields.pop("routes", ""):
            fields["endpoint"] = Endpoint.objects.create(name="one", routes=routes)
        RatePolicy.objects.create(**fields)
    found = check_unlimited(databases=DATABASES)
    assert ids(found) == expected
    assert check_unlimited() == []
    if found:
        assert found[0].msg == "COUNT_UNCHECKED counts nothing where no policy counted per ip applies (/0/)."


# --- Counted statuses. ---


def returns_400(request: Any) -> HttpResponse:
    return JsonResponse({}, status=400)


def returns_the_response_of_a_function(request: Any) -> HttpResponse:
    return returns_400(request)


def returns_403_by_a_class(request: Any) -> HttpResponse:
    return HttpResponseForbidden()


def returns_422_by_a_constant(request: Any) -> Response:
    return Response(status=status.HTTP_422_UNPROCESSABLE_ENTITY)


def returns_401_by_http_status(request: Any) -> HttpResponse:
    return HttpResponse(status=HTTPStatus.UNAUTHORIZED)


def raises_404(request: Any) -> HttpResponse:
    raise Http404


def raises_404_by_a_shortcut(request: Any) -> HttpResponse:
    return HttpResponse(get_object_or_404(Endpoint, name="x"))


def raises_403_in_an_inner_function(request: Any) -> HttpResponse:
    def refuse() -> None:
        raise PermissionDenied

    refuse()
    return HttpResponse(status=400)


def redirects(request: Any) -> HttpResponse:
    return redirect("/")


class CallsMethod(View):
    def post(self, request: Any) -> HttpResponse:
        return self.failed()

    def failed(self) -> HttpResponse:
        return HttpResponse(status=409)


class Rest(APIView):
    def post(self, request: Any) -> Response:
        raise exceptions.Throttled if request else exceptions.NotFound


class Service:
    def refuse(self) -> None:
        raise exceptions.NotAuthenticated


def raises_401_in_a_method(request: Any) -> HttpResponse:
    Service().refuse()
    return HttpResponse(status=400)


class OwnLogin(LoginView):
    def form_invalid(self, form: Any) -> HttpResponse:
        return HttpResponse(status=401)


@pytest.mark.parametrize(
    ("view", "statuses", "never"),
    [
        (returns_400, "401 403", True),
        (returns_400, "400", False),
        (returns_400, "401 4xx", False),
        (returns_400, "5xx", False),
        (returns_400, "200", False),
        (returns_400, "302", False),
        (returns_400, "405", False),
        (returns_the_response_of_a_function, "401", True),
        (returns_the_response_of_a_function, "400", False),
        (require_POST(ratequota(scope="login")(returns_400)), "401 403", True),
        (ratequota(scope="login")(require_POST(returns_400)), "400", False),
        (returns_403_by_a_class, "401", True),
        (returns_403_by_a_class, "403", False),
        (returns_422_by_a_constant, "422", False),
        (returns_422_by_a_constant, "400", True),
        (returns_401_by_http_status, "401", False),
        (returns_401_by_http_status, "403", True),
        (raises_404, "404", False),
        (raises_404, "400", True),
        (raises_404_by_a_shortcut, "404", False),
        (raises_404_by_a_shortcut, "403", True),
        (raises_403_in_an_inner_function, "403", False),
        (raises_403_in_an_inner_function, "401", True),
        (raises_401_in_a_method, "401", False),
        (redirects, "401 403", False),  # unknown
        (plain, "401", False),
        (CallsMethod.as_view(), "409", False),
        (CallsMethod.as_view(), "401", True),
        (Rest.as_view(), "401 403", False),
        (Rest.as_view(), "409", True),
        (Limited.as_view(), "409", False),
        (LoginView.as_view(), "401 403", True),
        (LoginView.as_view(), "4xx", True),
        (LoginView.as_view(), "200", False),
        (OwnLogin.as_view(), "401", False),
        (ObtainAuthToken.as_view(), "401 403", True),
        (ObtainAuthToken.as_view(), "400", False),
        (max, "401", False),
    ],
)
def test_statuses_that_a_view_never_returns(view: Any, statuses: str, never: bool) -> None:
    assert never_answers(view, frozenset(statuses.split())) == never


@pytest.mark.django_db
@pytest.mark.parametrize(("charged", "warned"), [("401, 403", True), ("400", False), ("", False)])
def test_an_endpoint_that_counts_statuses_its_view_never_returns_is_a_warning(
    project: Any, django_assert_num_queries: Any, charged: str, warned: bool
) -> None:
    """With the login view of the docs."""
    [snippet] = [one for one in snippets(ROOT / "docs/howto/login.md") if one.file == "views.py"]
    names: dict[str, Any] = {"__name__": "login_views"}
    exec(compile(snippet.padded, str(snippet.page), "exec"), names)
    project(names["log_in"], returns_401_by_http_status)
    endpoint = Endpoint.objects.create(name="login", charged_statuses=charged)
    messages = check_statuses(databases=DATABASES)
    assert ids(messages) == (["W011"] if warned else [])
    if warned:
        assert "'login' counts responses with status 401, 403 only" in messages[0].msg
        with pytest.raises(SystemCheckError, match=r"django_ratequota\.W011"):
            call_command("check", databases=DATABASES, fail_level="WARNING")
    with django_assert_num_queries(0):
        assert check_statuses() == []
    # Another of its views returns the status, so the endpoint counts something.
    endpoint.routes = "/1/"
    endpoint.save()
    assert check_statuses(databases=DATABASES) == []


@pytest.mark.django_db
def test_an_endpoint_without_a_view_is_not_reported(project: Any) -> None:
    project(plain)
    Endpoint.objects.create(name="login", charged_statuses="401")
    assert check_statuses(databases=DATABASES) == []
