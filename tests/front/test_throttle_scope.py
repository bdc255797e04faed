"""``@throttle_scope`` on classes, methods, actions and function views of REST framework."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework.decorators import action, api_view
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.mixins import ListModelMixin
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.serializers import ModelSerializer
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView
from rest_framework.viewsets import ModelViewSet, ViewSet

from django_ratequota.exceptions import InvalidCost
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.operations.explain import ExplainQuery
from django_ratequota.throttling import QuotaThrottle, throttle_scope
from tests.project.views import NameAuthentication

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies"),
    pytest.mark.urls(__name__),
]


def of_request_and_view(request: Any, view: Any) -> int:
    assert isinstance(view, APIView)
    return int(request.query_params.get("units", 3))


class Plain:
    """Both orders, and what the class declares."""

    authentication_classes = [NameAuthentication]
    throttle_scope = "files"
    throttle_cost = 2

    def answer(self, request: Any, **kwargs: Any) -> Response:
        return Response({"ran": True})


class Files(Plain, ViewSet):
    list = Plain.answer
    retrieve = throttle_scope("search", cost=5)(Plain.answer)

    @throttle_scope("exports", cost=3)
    @action(detail=False)
    def above(self, request: Any) -> Response:
        return self.answer(request)

    @action(detail=False, methods=["get", "post"])
    @throttle_scope("exports", cost=of_request_and_view)
    def below(self, request: Any) -> Response:
        return self.answer(request)

    @below.mapping.delete
    @throttle_scope("search", cost=0)
    def remove(self, request: Any) -> Response:
        return self.answer(request)

    @throttle_scope(cost=4)
    @action(detail=False)
    def cost_alone(self, request: Any) -> Response:
        return self.answer(request)

    @action(detail=False)
    @throttle_scope("search")
    def scope_alone(self, request: Any) -> Response:
        return self.answer(request)

    @throttle_scope("search")
    @throttle_scope("exports", cost=7)
    @action(detail=False)
    def twice(self, request: Any) -> Response:
        return self.answer(request)

    @action(detail=False)
    @method_decorator(never_cache)
    @throttle_scope("exports", cost=6)
    def wrapped(self, request: Any) -> Response:
        return self.answer(request)

    @action(detail=False, throttle_cost=8)
    def argument(self, request: Any) -> Response:
        return self.answer(request)


class Overriding(Files):
    """A method that overrides a decorated one declares for itself."""

    retrieve = Plain.answer


@throttle_scope("search", cost=5)
class Search(APIView):
    authentication_classes = [NameAuthentication]
    get = Plain.answer
    post = throttle_scope("exports", cost=of_request_and_view)(Plain.answer)


class Narrower(Search):
    throttle_cost = 1


@throttle_scope(cost=of_request_and_view)
class Computed(Search):
    pass


class UserSerializer(ModelSerializer[User]):
    class Meta:
        model = User
        fields = ("username",)


@method_decorator(throttle_scope("exports", cost=9), name="list")
class Users(ModelViewSet[User]):
    queryset = User.objects.order_by("pk")
    serializer_class = UserSerializer


def ran(request: Any) -> Response:
    return Response({"ran": True})


above = throttle_scope("search", cost=5)(api_view(["GET", "POST"])(ran))
below = api_view(["GET", "POST"])(throttle_scope("search", cost=lambda request, view: 6)(ran))
above_others = throttle_scope("search", cost=of_request_and_view)(never_cache(api_view()(ran)))
between = never_cache(api_view()(functools.wraps(above)(throttle_scope("exports")(ran))))

router = DefaultRouter()
for name, viewset in {"files": Files, "overriding": Overriding, "users": Users}.items():
    router.register(name, viewset, basename=name)

urlpatterns = [
    path("api/", include(router.urls)),
    path("search/", Search.as_view()),
    path("narrower/", Narrower.as_view()),
    path("computed/", Computed.as_view()),
    path("given/", Search.as_view(throttle_classes=[QuotaThrottle, QuotaThrottle])),
    path("at-the-route/", throttle_scope("exports", cost=4)(Search.as_view())),
    path("viewset-at-the-route/", throttle_scope("exports", cost=4)(Files.as_view({"get": "list"}))),
    path("above/", above),
    path("below/", below),
    path("above-others/", above_others),
    path("between/", between),
]
#: Path, method -> scope, units.
DECLARED = {
    ("/api/files/", "get"): ("files", 2),
    ("/api/files/7/", "get"): ("search", 5),
    ("/api/files/7/", "head"): ("search", 5),
    ("/api/files/7/", "options"): (None, 2),
    ("/api/files/above/", "get"): ("exports", 3),
    ("/api/files/below/", "get"): ("exports", 3),
    ("/api/files/below/?units=8", "post"): ("exports", 8),
    ("/api/files/below/", "delete"): ("search", 0),
    ("/api/files/cost_alone/", "get"): ("files", 4),
    ("/api/files/scope_alone/", "get"): ("search", 2),
    ("/api/files/twice/", "get"): ("search", 7),
    ("/api/files/wrapped/", "get"): ("exports", 6),
    ("/api/files/argument/", "get"): ("files", 8),
    ("/api/overriding/7/", "get"): ("files", 2),
    ("/api/overriding/above/", "get"): ("exports", 3),
    ("/api/users/", "get"): ("exports", 9),
    ("/api/users/", "options"): (None, 1),
    ("/search/", "get"): ("search", 5),
    ("/search/", "head"): ("search", 5),
    ("/search/?units=8", "post"): ("exports", 8),
    ("/search/", "put"): ("search", 5),
    ("/narrower/", "get"): ("search", 1),
    ("/narrower/", "post"): ("exports", 3),
    ("/computed/?units=8", "get"): ("search", 8),
    ("/given/", "get"): ("search", 5),
    ("/at-the-route/", "get"): ("exports", 4),
    ("/at-the-route/", "post"): ("exports", 3),
    ("/viewset-at-the-route/", "get"): ("exports", 4),
    ("/above/", "get"): ("search", 5),
    ("/above/", "post"): ("search", 5),
    ("/below/", "get"): ("search", 6),
    ("/below/", "post"): ("search", 6),
    ("/below/", "options"): (None, 1),
    ("/above-others/?units=8", "get"): ("search", 8),
    ("/between/", "get"): ("exports", 1),
}
#: Of them, those whose cost is a function: one unit at least.
COMPUTED = [
    *[("/api/files/below/", "get"), ("/api/files/below/?units=8", "post"), ("/search/?units=8", "post")],
    *[("/narrower/", "post"), ("/computed/?units=8", "get"), ("/at-the-route/", "post")],
    *[("/below/", "get"), ("/below/", "post"), ("/above-others/?units=8", "get")],
]
#: The same, where the units are what is known before the view runs.
LEAST = {asked: (scope, 1 if asked in COMPUTED else units) for asked, (scope, units) in DECLARED.items()}
MANY = 10_000


@pytest.fixture
def scopes() -> dict[str, Endpoint]:
    """The endpoints files, search and exports, of many units an hour, as for all endpoints."""
    found = {name: Endpoint.objects.create(name=name) for name in ("files", "search", "exports")}
    for endpoint in (None, *found.values()):
        rates = f"{MANY}/hour sliding_window_log"
        RatePolicy.objects.create(endpoint=endpoint, rates=rates, counted_per="ip")
    return found


def request(path: str, method: str) -> Any:
    return Client().generic(method.upper(), path)


def left(response: Any) -> dict[str, int]:
    """The units that are left, by scope; ``all`` = for all endpoints."""
    found = re.findall(r'"(\w+)/hour[^"]*";r=(\d+)', response["RateLimit"])
    return {scope: int(units) for scope, units in found}


class Charged:
    """Makes each request of the table; (path, method) -> the scope and the units at which it was charged."""

    def __init__(self) -> None:
        self.statuses = set[int]()
        self._left = dict.fromkeys(("all", "files", "search", "exports"), MANY)

    def __call__(self) -> dict[tuple[str, str], tuple[str | None, int]]:
        return {asked: self.charge(*asked) for asked in DECLARED}

    def charge(self, path: str, method: str) -> tuple[str | None, int]:
        response = request(path, method)
        self.statuses.add(response.status_code)
        now = left(response)
        units = {scope: self._left[scope] - now[scope] for scope in now}
        self._left |= now
        scope = next((name for name in units if name != "all"), None)
        assert set(units.values()) == {units["all"]}
        return scope, units["all"]


def test_a_request_counts_at_the_declared_scope_with_the_declared_cost(scopes: Any) -> None:
    charged = Charged()
    assert charged() == DECLARED
    assert charged.statuses == {200, 405}


@pytest.mark.parametrize("count_unchecked", [False, True])
def test_enforcing_all_views_charges_a_request_once(scopes: Any, settings: Any, count_unchecked: bool) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True, "COUNT_UNCHECKED": count_unchecked}
    assert Charged()() == DECLARED


def test_a_request_that_fails_before_the_throttle_counts_at_the_declared_scope(
    scopes: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": True}

    def fail(self: Any, request: Any) -> Any:
        raise AuthenticationFailed

    for authentication in (NameAuthentication, *APIView.authentication_classes):
        monkeypatch.setattr(authentication, "authenticate", fail)
    charged = Charged()
    # REST framework authenticates before it looks at the method.
    assert charged() == {**LEAST, ("/api/files/7/", "options"): ("files", 2)}
    assert charged.statuses == {403}


def test_explain_knows_scope_and_cost_of_a_path(scopes: Any) -> None:
    found = {}
    for path_, method in DECLARED:
        explanation = ExplainQuery(ip="203.0.113.7", path=path_, method=method).explain()
        named = {bucket.scope for bucket in explanation.resolution.buckets if bucket.scope}
        found[path_, method] = (next(iter(named), None), explanation.resolution.cost)
    assert found == LEAST


def test_explain_of_a_scope_finds_the_view_of_a_method(scopes: Any) -> None:
    Endpoint.objects.create(name="elsewhere")
    arguments = ExplainQuery(ip="203.0.113.7", endpoint="files", cost=3).request_arguments()
    assert arguments["scope"] == "files"
    assert ExplainQuery(ip="203.0.113.7", endpoint="elsewhere", path="/search/").explain().resolution.cost == 1


# --- Errors when decorating. ---


def function(request: Any) -> Response: ...


async def coroutine(request: Any, view: Any) -> int: ...


SCOPE = r"write @throttle_scope\('search'\), with the name of an endpoint"
UNITS, FORM = "a cost is a whole number", r"cost is a number of units or a function of \(request, view\), not <"


@pytest.mark.parametrize(
    ("error", "text", "declarations"),
    [
        (TypeError, SCOPE, [("",), (function,), (None,)]),
        (InvalidCost, UNITS, [("search", cost) for cost in (-1, 1.5, True, "3")]),
        (TypeError, FORM, [("search", cost) for cost in (function, lambda: 3, lambda self, request, view: 3)]),
        (TypeError, "throttles are not async, so cost must not be", [("search", coroutine)]),
    ],
)
def test_a_mistake_is_an_error_when_decorating(error: Any, text: str, declarations: list[Any]) -> None:
    for declaration in declarations:
        with pytest.raises(error, match=text):
            throttle_scope(*declaration)


def test_other_views_than_rest_framework_s_are_an_error_when_decorating() -> None:
    for target in (View, View.as_view()):
        with pytest.raises(TypeError, match=r"which View is not: write @method_decorator\(ratequota"):
            throttle_scope("search")(target)


def test_looking_for_declarations_reads_no_lazy_attribute(scopes: Any) -> None:
    def fail() -> Any:
        raise AssertionError

    view = type("Lazy", (Search,), {"lazy": SimpleLazyObject(fail)}).as_view()
    assert view(APIRequestFactory().get("/")).status_code == 200


def test_a_declaration_leaves_the_function_that_others_share_alone() -> None:
    """It would limit every view with REST framework's mixin."""
    declared = throttle_scope("search")(ListModelMixin.list)
    assert (declared.__name__, declared.__doc__) == ("list", ListModelMixin.list.__doc__)
    assert not hasattr(ListModelMixin.list, "ratequota_declared")

    def paged(self: Any, request: Any, *, size: int = 20) -> int:
        return size

    assert throttle_scope("search")(paged)(None, None) == 20


# --- Mistakes. ---


def test_one_view_cannot_have_two_scopes() -> None:
    """The last one counted for all its routes."""
    view = Files.as_view({"get": "list"})
    throttle_scope("reports")(view)
    throttle_scope("reports", cost=2)(view)
    with pytest.raises(TypeError, match=r"declares the scope 'reports' already, for all its routes: .*as_view"):
        throttle_scope("search")(view)
