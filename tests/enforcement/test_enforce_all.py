"""ENFORCE_ALL: views that pick their throttles, requests whose user nobody asks for, and the admin's own pages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.test import AsyncClient, Client
from django.test.utils import CaptureQueriesContext
from django.urls import include, path
from django.utils import timezone
from rest_framework.parsers import JSONParser, MultiPartParser
from rest_framework.response import Response
from rest_framework.routers import DefaultRouter
from rest_framework.throttling import BaseThrottle
from rest_framework.versioning import QueryParameterVersioning
from rest_framework.views import APIView

from django_ratequota import check_request
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring.attempts import recorded_attempts
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.records import UNKNOWN_PLAN
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.throttling import QuotaThrottle
from tests.conftest import Get
from tests.enforcement.test_check import CLOSED, left
from tests.project import views
from tests.project.views import request_from

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "enforce_all"),
    pytest.mark.urls(__name__),
]


class Picking(views.Search):
    throttle_classes = []

    def get_throttles(self) -> list[BaseThrottle]:
        return [QuotaThrottle()]


class Dropping(views.Search):
    def get_throttles(self) -> list[BaseThrottle]:
        return []


class ByAction(views.Reports):
    authentication_classes = [views.NameAuthentication]

    def get_throttles(self) -> list[BaseThrottle]:
        anonymous = not self.request.user.is_authenticated
        return (
            [] if self.action == "list" or (self.kwargs.get("pk") == "7" and anonymous) else super().get_throttles()
        )


class Failing(views.Search):
    def get_throttles(self) -> list[BaseThrottle]:
        raise LookupError("no throttles")


class Versions(QueryParameterVersioning):
    allowed_versions = ("1", "2")


class Knowing(APIView):
    """Picks its throttles by what REST framework finds out before it asks for them."""

    authentication_classes = [views.NameAuthentication]
    parser_classes = [JSONParser, MultiPartParser]
    versioning_class = Versions

    def get_throttles(self) -> list[BaseThrottle]:
        known = (self.request.version, self.request.accepted_renderer.format, self.format_kwarg)
        limited = known == ("2", "json", None) and "Allow" in self.headers and "heavy" in self.request.data
        return [QuotaThrottle()] if limited else []

    def post(self, request: Any) -> Response:
        return Response({"got": request.data})


router = DefaultRouter()
router.register("reports", ByAction, basename="report")

other_site = admin.AdminSite("backoffice")

urlpatterns = [
    path("admin/", admin.site.urls),
    path("backoffice/", other_site.urls),
    path("own/", include(([path("page/", views.plain, name="page")], "admin"), namespace="own")),
    path("picking/", Picking.as_view()),
    path("dropping/", Dropping.as_view()),
    path("failing/", Failing.as_view()),
    path("knowing/", Knowing.as_view()),
    path("api/", include(router.urls)),
    path("plain/", views.plain, name="plain"),
    path("aplain/", views.aplain, name="aplain"),
    path("other/", views.plain, name="other"),
]
TOKEN = {"Authorization": "Name alice"}


@pytest.fixture
def alice() -> User:
    return User.objects.create_superuser("alice")


@pytest.fixture(params=["wsgi", "asgi"])
def browse(request: Any, alice: User) -> Get:
    """GET by alice, who has a session."""
    client: Any = Client() if request.param == "wsgi" else AsyncClient()
    client.force_login(alice)
    return client.get if request.param == "wsgi" else async_to_sync(client.get)


class TestViewsThatPickTheirThrottles:
    @pytest.mark.parametrize("path", ["/picking/", "/api/reports/8/"])
    def test_a_quota_throttle_is_left_to_the_view(self, get: Get, alice: User, path: str) -> None:
        """The middleware charged the address as well: it does not know whom a token stands for."""
        RatePolicy.objects.create(rates="2/hour")
        assert [get(path, headers=TOKEN).status_code for _ in range(3)] == [200, 200, 429]
        assert left(check_request(request_from(address="127.0.0.1"), cost=0)) == [2]

    @pytest.mark.parametrize("path", ["/dropping/", "/api/reports/", "/api/reports/7/"])
    def test_without_one_the_middleware_enforces(self, get: Get, path: str) -> None:
        RatePolicy.objects.create(rates="2/hour")
        assert [get(path).status_code for _ in range(3)] == [200, 200, 429]

    def test_head_is_the_action_of_get(self) -> None:
        RatePolicy.objects.create(rates="2/hour")
        client = Client()
        assert [client.head("/api/reports/8/").status_code for _ in range(3)] == [200, 200, 429]
        assert left(check_request(request_from(address="127.0.0.1"), cost=0)) == [0]

    @pytest.mark.parametrize(
        "body",
        [
            {"data": {"heavy": "1"}, "content_type": "application/json"},
            {"data": {"heavy": "1"}},
        ],
    )
    def test_they_may_depend_on_all_that_the_view_knows_then(self, alice: User, body: Any, caplog: Any) -> None:
        """The address was charged as well, and a body that was read is one that the view has nothing of."""
        RatePolicy.objects.create(rates="2/hour")
        client = Client()
        answers = [client.post("/knowing/?version=2", headers=TOKEN, **body) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[0].json()["got"] == body["data"]
        assert left(check_request(request_from(address="127.0.0.1"), cost=0)) == [2]
        assert "get_throttles" not in caplog.text

    @pytest.mark.parametrize("fault", [{"headers": {"Accept": "image/png"}}, {"query_params": {"version": "9"}}])
    def test_what_the_view_refuses_by_itself_is_enforced(self, fault: Any, caplog: Any) -> None:
        RatePolicy.objects.create(rates="2/hour")
        client = Client()
        statuses = [client.post("/knowing/", **fault).status_code for _ in range(3)]
        assert statuses in ([406, 406, 429], [404, 404, 429])
        assert "get_throttles" not in caplog.text

    def test_one_that_fails_is_enforced(self, caplog: Any) -> None:
        RatePolicy.objects.create(rates="2/hour")
        client = Client(raise_request_exception=False)
        assert [client.get("/failing/").status_code for _ in range(3)] == [500, 500, 429]
        assert "ENFORCE_ALL enforces the view" in caplog.text


class TestTheUser:
    """``request.user`` costs two queries, and a ``Vary: Cookie`` that keeps responses out of shared caches."""

    @pytest.fixture(autouse=True)
    def _by_address(self, settings: Any) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["ip"]}

    @pytest.fixture
    def reads(self, browse: Get) -> Any:
        """Whether a warm GET reads the user."""

        def ask(path: str = "/plain/") -> bool:
            # After an edit, two: the first learns of it once it has asked for what the old policies ask for.
            browse(path)
            browse(path)
            with CaptureQueriesContext(connection) as queries:
                response = browse(path)
            assert response.status_code == 200
            varies = "Cookie" in response.headers.get("Vary", "")
            assert varies is bool(queries.captured_queries)
            return varies

        return ask

    @pytest.mark.parametrize("path", ["/plain/", "/aplain/"])
    def test_no_policy_needs_the_user(self, reads: Any, path: str) -> None:
        RatePolicy.objects.create(rates="100/hour")
        RatePolicy.objects.create(rates="200/hour", counted_per="ip", subject="ip:127.0.0.0/8")
        assert not reads(path)

    def test_caller_asks_for_it(self, reads: Any, settings: Any) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["user", "ip"]}
        assert reads()

    @pytest.mark.parametrize("audience", ["user", "subject", "plan", "counted per plan"])
    def test_a_policy_asks_for_it_where_it_applies(self, reads: Any, alice: User, audience: str) -> None:
        endpoint = Endpoint.objects.create(name="plain", routes="/plain/")
        plan = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
        assert not reads()
        given: dict[str, Any] = {
            "user": {"user": alice},
            "subject": {"subject": f"user:{alice.pk}"},
            "plan": {"plan": plan},
            "counted per plan": {"counted_per": "plan"},
        }[audience]
        policy = RatePolicy.objects.create(endpoint=endpoint, rates="100/hour", **given)
        assert reads()
        assert not reads("/other/")
        RatePolicy.objects.filter(pk=policy.pk).update(endpoint=None)
        assert reads("/other/")
        policy.delete()
        assert not reads()

    def test_statistics_record_no_plan_where_the_user_was_not_read(self, alice: User, recording: None) -> None:
        """Logged-in users were recorded with the plan of anonymous clients."""
        Plan.objects.create(name="Guests", slug="guests", default_for="anonymous")
        free = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
        RatePolicy.objects.create(rates="100/hour")
        check_request(request_from(alice))
        RatePolicy.objects.create(plan=free, rates="100/hour")
        check_request(request_from(alice))
        collector.flush()
        assert {attempt.plan_id for attempt in recorded_attempts().attempts} == {UNKNOWN_PLAN, free.pk}

    def test_an_override_that_ended_long_ago_asks_for_nobody(self, reads: Any, alice: User) -> None:
        """Responses stayed out of shared caches until somebody deleted the row."""
        ended = timezone.now() - timedelta(days=2)
        RatePolicy.objects.create(user=alice, rates="7/hour", ends_at=ended)
        assert not reads()
        RatePolicy.objects.update(ends_at=ended + timedelta(days=3))
        assert reads()


@pytest.mark.slow
class TestTheAdmin:
    @pytest.mark.parametrize("rates", ["blocked", "1/hour"])
    @pytest.mark.parametrize("path", ["/admin/", "/admin/django_ratequota/ratepolicy/", "/backoffice/"])
    def test_policies_for_all_endpoints_do_not_apply(self, browse: Get, rates: str, path: str) -> None:
        """``blocked`` for everyone shut operators out of the page that lifts it."""
        RatePolicy.objects.create(rates=rates)
        RatePolicy.objects.create(rates="2/hour", counted_per="everyone")
        assert [browse(path).status_code for _ in range(4)] == [200] * 4
        assert 429 in [browse("/plain/").status_code for _ in range(3)]

    @pytest.mark.parametrize(("rates", "statuses"), [("2/hour", [200, 200, 429]), ("blocked", [429] * 3)])
    def test_policies_for_its_endpoints_count(self, get: Get, rates: str, statuses: list[int]) -> None:
        login = Endpoint.objects.create(name="login", routes="admin:login")
        RatePolicy.objects.create(rates="blocked")
        RatePolicy.objects.create(rates="blocked", mode="log", counted_per="everyone")
        RatePolicy.objects.create(endpoint=login, rates=rates)
        responses = [get("/admin/login/") for _ in range(3)]
        assert [response.status_code for response in responses] == statuses
        if rates == "blocked":
            assert responses[0].json()["violated-policies"] == ["login/blocked"]

    def test_explain_says_so(self) -> None:
        login = Endpoint.objects.create(name="login", routes="admin:login")
        RatePolicy.objects.create(rates="blocked")
        RatePolicy.objects.create(rates="5/hour", counted_per="ip")
        RatePolicy.objects.create(endpoint=login, rates="7/hour")
        caller = DescribedCaller(user_id=None, address="203.0.113.7")
        found = explain_caller(caller, scope=None, route="/admin/login/", name="admin:login")
        assert [one.won for one in found.candidates] == [False, False, True]
        assert found.candidates[0].reason == "lost: policies for all endpoints do not apply to pages of the admin"
        assert (found.decision.allowed, left(found.decision)) == (True, [7])
        assert not explain_caller(caller, scope=None, route="/plain/", name="plain").decision.allowed

    def test_nor_does_redis(self, browse: Get, settings: Any) -> None:
        RatePolicy.objects.create(rates="9/hour", on_error="deny")
        settings.RATEQUOTA = {**CLOSED, "ENFORCE_ALL": True}
        assert (browse("/admin/").status_code, browse("/plain/").status_code) == (200, 503)

    def test_a_namespace_of_the_projects_is_none_of_the_admins(self, get: Get) -> None:
        RatePolicy.objects.create(rates="blocked")
        assert get("/own/page/").status_code == 429
