"""ENABLED = False and ``memory://``: what requests get, and what is asked of Redis (nothing)."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.utils import timezone
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota import check_caller, check_request
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, PolicyChange, RatePolicy, UsageCount
from django_ratequota.monitoring.collector import collector
from django_ratequota.ninja import QuotaThrottle as NinjaThrottle
from django_ratequota.operations.caller_limits import caller_limits
from django_ratequota.operations.explain import explain_caller, newest_policies
from django_ratequota.policies.cache import policies
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.runtime import default_limiter
from django_ratequota.testing import override_policies
from django_ratequota.throttling import QuotaThrottle
from tests.conftest import Check, Get

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "no_redis")]

LOCAL = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


@pytest.fixture
def no_redis(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Redis is configured, and connecting anywhere fails the test."""

    def connect(_socket: socket.socket, address: Any) -> None:
        pytest.fail(f"it connected to {address}")

    settings.CACHES = LOCAL
    if "sqlite" in settings.DATABASES["default"]["ENGINE"]:
        monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture
def disabled(settings: Any) -> None:
    settings.RATEQUOTA = {"ENABLED": False, "ENFORCE_ALL": True, "COUNT_UNCHECKED": True}


@pytest.fixture
def in_memory(settings: Any) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "memory://", "PREFIX": "rqmem"}


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("ratequota")}


def limit(rates: str = "1/day", **fields: Any) -> RatePolicy:
    endpoint, _created = Endpoint.objects.get_or_create(name="search")
    return RatePolicy.objects.create(endpoint=endpoint, rates=rates, **fields)


class Throttled(APIView):
    throttle_classes = (QuotaThrottle,)
    throttle_scope = "search"

    def get(self, request: Any) -> Any:
        return Response()


def run_priced(mode: str) -> list[Any]:
    """Send a request to a view with a function of its cost; return that function's calls."""
    calls: list[Any] = []

    def cost(*given: Any) -> int:
        calls.append(given)
        return 2

    def of_request(request: Any) -> int:
        return cost(request)

    request = RequestFactory().get("/")
    if mode == "throttle":
        view = type("Priced", (Throttled,), {"throttle_cost": staticmethod(lambda request, view: cost(request))})
        view.as_view()(request)
    elif mode == "decorator":
        ratequota("search", cost=of_request)(lambda request: HttpResponse())(request)
    else:
        async_to_sync(NinjaThrottle(scope="search", cost=of_request).arefuse)(request)
    return calls


@pytest.mark.usefixtures("disabled")
class TestDisabled:
    @pytest.mark.parametrize("rates", ["1/day", "blocked"])
    def test_check_request_admits_without_statuses(self, check: Check, rates: str) -> None:
        limit(rates)
        request = RequestFactory().get("/search/")
        decisions = [check(request, "search", 5) for _ in range(3)]
        assert {(d.allowed, d.statuses, d.degraded, d.blocked_by) for d in decisions} == {(True, (), False, ())}
        assert request.ratequota is decisions[-1]  # type: ignore[attr-defined]
        assert decisions[-1].settle(3) is decisions[-1]

    def test_decorated_views_are_not_limited_and_send_no_headers(self, get: Get) -> None:
        limit("blocked")
        before, pending = threads(), len(collector.pending)
        for _ in range(3):
            response = get("/decorated/")
            assert response.status_code == 200
            assert not [name for name in response.headers if "ratelimit" in name.lower() or name == "Retry-After"]
        assert threads() <= before
        assert len(collector.pending) == pending

    @pytest.mark.parametrize("mode", ["throttle", "decorator", "ninja"])
    def test_functions_of_costs_are_called_only_where_a_test_sets_policies(
        self, settings: Any, mode: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """They may query the database, or answer 400."""
        assert run_priced(mode) == []
        assert caplog.records == []
        settings.RATEQUOTA = {"ENABLED": False, "REDIS_URL": "memory://"}
        with override_policies({"search": "9/day"}):
            assert len(run_priced(mode)) == 1

    def test_callers_without_a_request_are_admitted(self) -> None:
        limit("blocked")
        decision = check_caller(ip="203.0.113.7", scope="search", cost=9)
        assert (decision.allowed, decision.statuses) == (True, ())

    def test_the_policies_are_not_read(self, django_assert_num_queries: Any) -> None:
        limit()
        with django_assert_num_queries(0):
            check_request(RequestFactory().get("/"), "search")

    def test_a_change_is_saved_and_publishes_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        limit()
        assert PolicyChange.objects.count() == 2
        assert caplog.records == []

    def test_status_says_so_once(self, capsys: Any) -> None:
        call_command("ratequota", "status")
        out = capsys.readouterr().out
        assert out.count("RATEQUOTA['ENABLED'] is False, so limits are not enforced") == 1
        assert "last change  none" in out

    def test_explain_and_the_usage_api_show_no_block_that_requests_do_not_meet(self, admin_client: Client) -> None:
        limit("blocked")
        caller = DescribedCaller(user_id=None, address="127.0.0.1")
        explained = explain_caller(caller, scope="search")
        assert explained.exempt == "RATEQUOTA['ENABLED'] is False"
        assert (explained.resolution.blocked_by, explained.resolution.buckets) == ((), ())
        assert explained.decision.allowed
        assert [candidate.policy.text for candidate in explained.candidates] == ["blocked"]
        assert caller_limits(caller, "search").blocked_by == ()
        page = admin_client.get("/admin/django_ratequota/ratepolicy/explain/?ip=127.0.0.1&scope=search")
        assert "would be refused" not in page.content.decode()
        with override_policies({"search": "blocked"}):
            assert explain_caller(caller, scope="search").exempt == ""
            assert caller_limits(caller, "search").blocked_by != ()

    def test_callers_have_no_limits(self) -> None:
        limit("7/day")
        caller = DescribedCaller(user_id=None, address="127.0.0.1")
        found = caller_limits(caller, "search")
        assert (found.limits, found.available, found.truncated) == ((), True, False)
        assert Client().get("/quota/usage/").json()["limits"] == []
        with pytest.raises(LookupError):
            caller_limits(caller, "no-such-endpoint")
        with override_policies({"search": "7/day"}):
            assert len(caller_limits(caller, "search").limits) == 1

    def test_explain_shows_this_processs_own_edit(self) -> None:
        caller = DescribedCaller(user_id=None, address="127.0.0.1")
        policy = limit("1/day")
        assert explain_caller(caller, scope="search").candidates
        policy.delete()
        assert explain_caller(caller, scope="search").candidates == ()

    def test_pages_of_the_admin_say_so_once(self, admin_client: Client) -> None:
        policy = limit()
        own = [f"ratepolicy/{name}/" for name in ("traffic", "health", "explain")]
        for page in [
            *own,
            "ratepolicy/",
            "endpoint/",
            "plan/matrix/",
            "ratepolicy/add/",
            f"ratepolicy/{policy.pk}/change/",
        ]:
            response = admin_client.get(f"/admin/django_ratequota/{page}")
            assert response.status_code == 200, page
            assert response.content.decode().count("ENABLED") == 1, page


@pytest.mark.usefixtures("in_memory")
class TestMemory:
    @pytest.fixture(autouse=True)
    def _fresh(self, in_memory: None) -> None:
        from django_ratequota.engine import memory

        memory._memories.clear()

    def test_requests_are_limited_and_get_headers(self, get: Get) -> None:
        limit("2/hour")
        responses = [get("/decorated/") for _ in range(3)]
        assert [response.status_code for response in responses] == [200, 200, 429]
        assert responses[0]["X-RateLimit-Remaining"] == "1"
        assert responses[0]["RateLimit-Policy"] == '"search/hour";q=2;w=3600'
        assert 0 < int(responses[2]["Retry-After"]) <= 1800
        assert "X-RateLimit-Refusal" not in responses[2]  # nobody could look it up

    def test_this_processs_own_edit_applies_to_its_next_request(self, check: Check) -> None:
        policy = limit("1/hour")
        assert [check(RequestFactory().get("/"), "search").allowed for _ in range(2)] == [True, False]
        policy.rates = "3/hour"
        policy.save()
        assert [check(RequestFactory().get("/"), "search").allowed for _ in range(3)] == [True, True, False]

    def test_another_processs_edit_applies_within_a_second(
        self, check: Check, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = limit("blocked")
        assert not check(RequestFactory().get("/"), "search").allowed
        # As another process does: the rows are written, and nothing tells this one.
        monkeypatch.setattr("django_ratequota.engine.memory.Memory.publish", lambda self: 1)
        policy.rates = "5/hour"
        policy.save()
        policies._polled -= 1.0
        assert check(RequestFactory().get("/"), "search").allowed

    def test_pages_read_the_newest_policies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = limit("blocked")
        check_request(RequestFactory().get("/"), "search")
        RatePolicy.objects.filter(pk=policy.pk)._raw_delete("default")
        PolicyChange.objects.create(model="*", action="publish")
        policies._polled -= 1.0
        assert not any(newest_policies().groups.values())

    def test_pages_leave_the_revision_as_it_is(self, admin_client: Client, django_assert_num_queries: Any) -> None:
        limit("5/hour")
        check_request(RequestFactory().get("/"), "search")
        revision = default_limiter().stored_revision()
        assert revision == policies.current().revision  # type: ignore[union-attr]
        admin_client.get("/admin/django_ratequota/ratepolicy/traffic/")
        explain_caller(DescribedCaller(user_id=None, address="203.0.113.7"), scope="search")
        assert default_limiter().stored_revision() == revision
        with django_assert_num_queries(0):
            check_request(RequestFactory().get("/"), "search")

    def test_status_says_what_it_cannot_show(self, capsys: Any) -> None:
        call_command("ratequota", "status")
        assert (
            "none: RATEQUOTA['REDIS_URL'] is memory://, so each worker counts on its own" in capsys.readouterr().out
        )


@pytest.mark.parametrize("mode", ["disabled", "in_memory"])
class TestWithoutRedis:
    @pytest.fixture(autouse=True)
    def _mode(self, mode: str, request: pytest.FixtureRequest) -> None:
        request.getfixturevalue(mode)

    def test_a_rollup_deletes_old_rows_and_writes_none(self, capsys: Any) -> None:
        counts = dict.fromkeys(("admitted", "refused", "would_refuse"), 1)
        starts_at = timezone.now() - timedelta(days=36)
        UsageCount.objects.create(starts_at=starts_at, place="total", **counts)
        call_command("ratequota", "rollup")
        assert capsys.readouterr().out == "0 hourly rows written, 1 old rows deleted\n"

    def test_publish_promises_no_more_than_it_can_do(self, capsys: Any) -> None:
        call_command("ratequota", "publish", "--reason", "raw SQL")
        out = capsys.readouterr().out
        assert "every process" not in out
        assert f"Recorded but not published: {default_limiter().store.absent}" in out
        assert "within POLL_SECONDS" in out
        assert PolicyChange.objects.get().action == "publish"
