"""System checks of the views: whether anything enforces policies, and what views declare in vain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from django.contrib import admin
from django.core.checks import run_checks
from django.http import HttpResponse
from django.urls import path
from django.utils import timezone
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.http import require_POST
from rest_framework.decorators import api_view, throttle_classes
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from django_ratequota.api import UsageView
from django_ratequota.checks.views import (
    check_authenticated,
    check_declared,
    check_enforced,
    check_scopes,
    check_shared_slots,
    check_throttle_classes,
    check_unlimited,
)
from django_ratequota.compat.drf import AnonRateThrottle
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, Plan, RatePolicy, SubjectList
from django_ratequota.throttling import QuotaThrottle, throttle_scope
from tests.checks import ids

# --- Enforcement. ---


@pytest.fixture
def project(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a project of one module with these views, and a URLconf that routes to them."""

    def make(*routed: Any) -> None:
        views, urls = ModuleType("project_views"), ModuleType("project_urls")
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

    return make


def plain(request: Any) -> HttpResponse:
    return HttpResponse()


def nothing(view: Any) -> Any:
    return view


def rest(declare: Any, *throttles: Any, **body: Any) -> Any:
    """A view of REST framework under the decorator, with these throttles."""
    get = body.pop("get", plain)
    return declare(type("Rest", (APIView,), {"throttle_classes": throttles, "get": get, **body}))


def django_view(declare: Any) -> Any:
    return method_decorator(declare, name="dispatch")(type("Plain", (View,), {"get": plain}))


class Limited(APIView):
    """Limited by DEFAULT_THROTTLE_CLASSES in this suite's settings."""


class OtherThrottle(BaseThrottle):
    pass


@pytest.mark.parametrize(
    ("views", "enforced"),
    [
        ([], False),
        ([plain, rest(nothing), rest(nothing, OtherThrottle)], False),
        ([UsageView.as_view()], False),  # it has its own limit, but is no view of the project
        ([plain, Limited], True),
        ([plain, django_view(ratequota("search"))], True),
        ([rest(nothing, AnonRateThrottle)], True),
        ([plain, ratequota(scope="search")(plain)], True),
    ],
)
def test_a_project_without_enforcement_is_a_warning(project: Any, views: list[Any], enforced: bool) -> None:
    project(*views)
    assert ids(check_enforced()) == ([] if enforced else ["W010"])


def test_enforce_all_is_enforcement(project: Any, settings: Any) -> None:
    project(plain)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    assert check_enforced() == []


def test_default_throttles_that_no_view_uses_are_a_warning(project: Any, settings: Any) -> None:
    for views in ((), (plain,)):
        project(*views)
        settings.REST_FRAMEWORK = {"DEFAULT_THROTTLE_CLASSES": ["django_ratequota.throttling.QuotaThrottle"]}
        assert ids(check_enforced()) == ["W010"] * len(views)


def route_to_ninja(namespace: str, *operations: Any) -> None:
    """Route to an API of Django Ninja with these (function, throttles)."""
    from ninja import NinjaAPI

    api = NinjaAPI(urls_namespace=namespace, docs_url=None)
    for number, (function, throttles) in enumerate(operations):
        api.get(f"/{number}", throttle=throttles)(function)
    sys.modules["project_urls"].urlpatterns.append(path("api/", api.urls))


@pytest.mark.parametrize("limited", [False, True])
def test_one_throttled_ninja_operation_is_enforcement(project: Any, limited: bool) -> None:
    from django_ratequota.ninja import QuotaThrottle

    project()
    route_to_ninja(
        f"checked-{limited}", (lambda request: [], [QuotaThrottle()] if limited else []), (lambda request: [], [])
    )
    assert ids(check_enforced()) == ([] if limited else ["W010"])


# --- Declared scopes. ---


def function_view(declare: Any, *throttles: Any, below: bool) -> Any:
    def function(request: Any) -> Response: ...

    limited = throttle_classes(throttles)(declare(function) if below else function)
    view = api_view()(limited)
    return view if below else declare(view)


SEARCH = throttle_scope("search")
DECIDING = {"get_throttles": lambda self: [QuotaThrottle()]}


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
        assert found[0].msg == "The @throttle_scope of these views has no effect: /0/."


def test_a_declaration_for_ninja_needs_ninja_s_throttle(project: Any) -> None:
    project()
    route_to_ninja("declared", (SEARCH(plain), []))
    assert ids(check_declared()) == ["W022"]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (rest(method_decorator(ratequota, name="dispatch")), ["W023"]),
        (rest(method_decorator(ratequota, name="dispatch"), QuotaThrottle), ["W023"]),
        (rest(method_decorator(ratequota, name="dispatch"), authentication_classes=[]), []),
        (django_view(ratequota), []),
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
    scope, get_cache_key = "burst", lambda self, request, view: f"{self.scope}:1"


class ReadsItsScope(OwnScope):
    def allow_request(self, request: Any, view: Any) -> bool:
        view.throttle_scope = self.scope
        return super().allow_request(request, view)


def test_a_throttle_class_that_sets_a_scope_or_a_rate_is_named(project: Any) -> None:
    throttles = (QuotaThrottle, OwnScope, OwnKey, ReadsItsScope, AnonRateThrottle)
    project(rest(nothing, *throttles), rest(nothing, OwnKey))
    found = check_throttle_classes()
    assert ids(found) == ["W024"] * 2
    assert [message.msg.rpartition("test_views.")[2] for message in found] == [
        "OwnScope sets scope, rate, which have no effect.",
        "OwnKey sets scope, get_cache_key, which have no effect.",
    ]


def test_a_scope_that_is_no_text_is_an_error(project: Any) -> None:
    project(rest(nothing, QuotaThrottle, throttle_scope=7), rest(nothing, QuotaThrottle, throttle_scope="search"))
    [found] = check_scopes()
    assert found.id == "django_ratequota.E009"
    assert "such as 'search', not 7" in found.msg


@pytest.mark.parametrize(
    "check", [check_enforced, check_declared, check_authenticated, check_throttle_classes, check_scopes]
)
def test_checks_of_views_leave_a_broken_urlconf_to_djangos(settings: Any, check: Any) -> None:
    settings.ROOT_URLCONF = "nowhere"
    assert check() == []


# --- Requests that views refuse before their throttle. ---


IP = {"counted_per": "ip", "rates": "100/min"}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("view", "count_unchecked", "policy", "expected"),
    [
        (rest(nothing, QuotaThrottle), True, None, ["W017"]),
        (rest(nothing, QuotaThrottle), False, None, []),
        (plain, True, None, []),
        (UsageView, True, None, []),
        (rest(nothing, QuotaThrottle), True, IP, []),
        (rest(nothing, QuotaThrottle), True, IP | {"routes": "/0/"}, []),
        (rest(nothing, QuotaThrottle), True, IP | {"routes": "/other/"}, ["W017"]),
        (rest(nothing, QuotaThrottle), True, IP | {"counted_per": "caller"}, ["W017"]),
        (rest(nothing, QuotaThrottle), True, IP | {"mode": "off"}, ["W017"]),
        (rest(nothing, QuotaThrottle), True, IP | {"ends_at": "2020-01-01T00:00Z"}, ["W017"]),
        (rest(nothing, QuotaThrottle), True, IP | {"subject": "ip:203.0.113.7"}, ["W017"]),
    ],
)
def test_count_unchecked_needs_a_policy_counted_per_ip(
    project: Any, settings: Any, view: Any, count_unchecked: bool, policy: dict[str, Any] | None, expected: list[str]
) -> None:
    project(view)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": count_unchecked}
    if policy is not None:
        routes = policy.get("routes")
        endpoint = Endpoint.objects.create(name="one", routes=routes) if routes else None
        RatePolicy.objects.create(endpoint=endpoint, **{name: policy[name] for name in policy if name != "routes"})
    found = check_unlimited()
    assert ids(found) == expected
    assert all(message.msg.endswith("without a policy counted per ip (/0/).") for message in found)
    assert run_checks(tags=["database"], databases=[]) == []


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("policies", "others", "expected"),
    [
        ([None], "", ["W017"]),
        ([None, "one"], "", []),
        ([None], "none", []),
        ([None, "other"], "besides", []),
        ([], "", ["W017"]),
    ],
)
@pytest.mark.parametrize("by", ["route", "scope"])
def test_an_endpoint_with_limits_of_its_own_needs_one_counted_per_ip(
    project: Any, settings: Any, policies: list[str | None], others: str, expected: list[str], by: str
) -> None:
    """The policy for all endpoints, which does not apply there, silenced the warning."""
    project(rest(nothing, QuotaThrottle, throttle_scope="one"), rest(nothing, QuotaThrottle))
    settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": True}
    found = {"one": Endpoint.objects.create(name="one", routes="/0/" if by == "route" else "", limits="own")}
    if others:
        found["other"] = Endpoint.objects.create(name="other", routes="/0/", limits=others)
    for name in policies:
        RatePolicy.objects.create(endpoint=found.get(name or ""), **IP)
    assert ids(check_unlimited()) == expected
    assert all(("(/0/)" in message.msg) == (None in policies) for message in check_unlimited())


# --- Concurrent limits. ---


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("policies", "limits", "expected"),
    [
        ([("one", "everyone"), ("tasks", "everyone")], "besides", "one"),
        ([("one", "plan")], "besides", "one"),
        ([("one", "everyone"), ("one", "caller")], "besides", ""),
        ([("one", "everyone"), (None, "ip")], "besides", ""),
        ([("one", "everyone"), (None, "ip")], "own", "one"),
        ([("one", "everyone")], "none", ""),
        ([(None, "everyone"), ("one", "caller")], "besides", "all"),
    ],
)
def test_concurrent_limits_for_all_clients_together_are_a_warning(
    project: Any, policies: list[tuple[str | None, str]], limits: str, expected: str
) -> None:
    project(ratequota("one")(plain))
    endpoints = {name: Endpoint.objects.create(name=name, limits=limits) for name in ("one", "tasks")}
    for name, counted_per in policies:
        RatePolicy.objects.create(
            endpoint=endpoints.get(name or ""), counted_per=counted_per, rates="3 concurrent, 9/min"
        )
    own = partial(RatePolicy.objects.create, endpoint=endpoints["one"], counted_per="ip", rates="1 concurrent")
    own(mode="log")
    own(starts_at=timezone.now() + timedelta(days=1))
    own(subject="ip:203.0.113.7")
    own(subject_list=SubjectList.objects.create(name="partners"))
    own(plan=Plan.objects.create(name="Free", slug="free"))
    RatePolicy.objects.create(endpoint=endpoints["one"], counted_per="user", rates="9/min")
    found = check_shared_slots()
    assert ids(found) == ["W031"] * bool(expected)
    assert all(message.msg.endswith(f"these endpoints: {expected}.") for message in found)
