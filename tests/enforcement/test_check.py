"""From a request to a decision: one round trip, by the newest policies, whatever fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import time_machine
from asgiref.sync import async_to_sync
from django.conf import settings as django_settings
from django.contrib.auth.models import AnonymousUser, User
from django.db import OperationalError, connection, connections
from django.test import override_settings
from django.utils.functional import SimpleLazyObject
from django_redis.pool import ConnectionFactory
from rest_framework.request import Request

from django_ratequota import Decision, acheck_request, check_request, conf, headers
from django_ratequota.exceptions import InvalidCost
from django_ratequota.models import Endpoint, PlanAssignment, RatePolicy
from django_ratequota.monitoring.health import health
from django_ratequota.operations import counters as usage
from django_ratequota.operations.counters import give_back
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.cache import policies
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.runtime import default_limiter
from django_ratequota.signals import request_refused
from django_ratequota.testing import Policy, override_policies
from tests.conftest import Check, Get
from tests.project.views import NameAuthentication, Units, request_from
from tests.support import server

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

#: A port that nobody listens on.
CLOSED = {"PREFIX": "rqtest", "REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 5.0, "STATISTICS_SECONDS": 0}


@pytest.fixture
def search() -> Endpoint:
    return Endpoint.objects.create(name="search", cost=2)


def left(decision: Decision) -> list[int]:
    return [status.remaining for status in decision.statuses]


def room(decision: Decision) -> list[str]:
    """``remaining/limit`` of each bucket."""
    return [f"{status.remaining}/{status.limit}" for status in decision.statuses]


@contextmanager
def monitored() -> Iterator[list[str]]:
    """The names of the commands that clients send to the server meanwhile; what scripts call is left out."""
    commands: list[str] = []
    with redis.Redis.from_url(server.url()) as watcher, redis.Redis.from_url(server.url()) as marker:
        marker.ping()
        with watcher.monitor() as monitor:
            yield commands
            marker.echo("the end")
            for entry in iter(monitor.next_command, None):
                if entry["command"] == "ECHO the end":
                    return
                if entry["client_type"] != "lua":
                    commands.append(entry["command"].partition(" ")[0])


@contextmanager
def database_down() -> Iterator[None]:
    def fail(*args: Any) -> None:
        raise OperationalError("the database is gone")

    with connection.execute_wrapper(fail):
        yield


class TestOneRoundTrip:
    def test_a_warm_request_is_one_command_and_no_query(
        self, alice: User, search: Endpoint, django_assert_num_queries: Any
    ) -> None:
        RatePolicy.objects.create(rates="100/hour")
        RatePolicy.objects.create(endpoint=search, rates="50/hour")
        RatePolicy.objects.create(endpoint=search, counted_per="everyone", rates="1000/hour, 20/hour gcra")
        check_request(request_from(alice), "search")
        with monitored() as commands, django_assert_num_queries(0):
            decision = check_request(request_from(alice), "search")
        assert commands == ["EVALSHA"]
        assert room(decision) == ["96/100", "46/50", "996/1000", "16/20"]

        async def ask_twice() -> tuple[list[str], Decision]:
            await acheck_request(request_from(alice), "search")
            # In one loop, for each has a connection of its own to make.
            with monitored() as commands:
                decision = await acheck_request(request_from(alice), "search")
            return commands, decision

        with django_assert_num_queries(0):
            commands, decision = async_to_sync(ask_twice)()
        assert commands == ["EVALSHA"]
        assert room(decision) == ["92/100", "42/50", "992/1000", "12/20"]

    @pytest.mark.parametrize("rates", [None, "unlimited", "blocked"])
    def test_a_request_without_buckets_asks_all_the_same(self, rates: str | None) -> None:
        if rates:
            RatePolicy.objects.create(rates=rates)
        for _ in range(2):
            check_request(request_from())
        with monitored() as commands:
            decision = check_request(request_from())
        assert commands == ["EVALSHA"]
        assert decision.allowed is (rates != "blocked")
        assert decision.statuses == ()


@pytest.mark.parametrize("wrong", [None, "search"])
def test_what_is_no_request_is_a_type_error(check: Check, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"request, not {wrong!r}; without one, call check_caller"):
        check(wrong)


def test_a_scope_without_an_endpoint_matches_nothing(check: Check, search: Endpoint) -> None:
    RatePolicy.objects.create(endpoint=search, rates="1/hour")
    RatePolicy.objects.create(rates="9/hour")
    assert [room(check(request_from(), scope)) for scope in ("serach", "", None)] == [["8/9"], ["7/9"], ["6/9"]]
    assert room(check(request_from(), "\x00\ud800" * 1000)) == ["5/9"]


@pytest.mark.parametrize("name", ["", None, "Mars/Olympus"])
def test_a_time_zone_of_djangos_that_is_none_fails_no_request(check: Check, name: Any) -> None:
    """Django takes "" and None for the system's own; every request was an error."""
    RatePolicy.objects.create(rates="5/day fixed_window")
    with override_settings(USE_TZ=False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(django_settings, "TIME_ZONE", name)
            conf.settings.reload()
            assert check(request_from()).error == "configuration"
            assert "Set RATEQUOTA['TIME_ZONE']" in health().errors["configuration"]
        conf.settings.reload()
        assert not check(request_from()).degraded


def test_a_request_of_another_kind_needs_no_headers_where_the_user_is_counted(alice: User) -> None:
    RatePolicy.objects.create(rates="5/hour")
    assert room(check_request(SimpleNamespace(method="POST", user=alice))) == ["4/5"]


class TestCost:
    @pytest.mark.parametrize(("cost", "expected"), [(None, 8), (1, 9), (3, 7), (10, 0), (0, 10), (Units.THREE, 7)])
    def test_units_are_the_calls_or_the_endpoints(
        self, check: Check, search: Endpoint, cost: int | None, expected: int
    ) -> None:
        RatePolicy.objects.create(rates="10/hour")
        assert left(check(request_from(), "search", cost)) == [expected]

    @pytest.mark.parametrize("cost", [-1, True, False, 1.0, float("nan"), float("inf"), 10**30, 10**12 + 1, "1", [1]])
    def test_what_is_no_number_of_units_is_an_error_that_charges_nothing(self, check: Check, cost: Any) -> None:
        RatePolicy.objects.create(rates="10/hour")
        with pytest.raises(InvalidCost, match="a cost is a whole number"):
            check(request_from(), None, cost)
        assert left(check(request_from())) == [9]
        with override_settings(RATEQUOTA={"CACHE": "local"}), pytest.raises(InvalidCost):
            check(request_from(), None, cost)


class TestSettling:
    @pytest.mark.parametrize("verb", ["charge", "refund"])
    def test_a_store_that_fails_meanwhile_fails_no_request(self, settle: Any, verb: str) -> None:
        RatePolicy.objects.create(rates="10/hour")
        decision = check_request(request_from())
        before = health().degraded.get("connection", 0)
        with override_settings(RATEQUOTA=CLOSED):
            settled = settle(decision, verb, 5)
        assert (settled.allowed, settled.error) == (True, "connection")
        assert health().degraded["connection"] == before + 1
        assert left(check_request(request_from())) == [8]


class TestRefusedSignal:
    def test_it_is_sent_for_refusals_only(self, check: Check, heard: list[dict[str, Any]]) -> None:
        RatePolicy.objects.create(rates="1/hour")
        assert check(request_from()).allowed
        assert heard == []
        request = request_from()
        decision = check(request)
        assert heard == [{"sender": None, "request": request, "decision": decision}]

    def test_it_carries_djangos_request(self, heard: list[dict[str, Any]]) -> None:
        RatePolicy.objects.create(rates="blocked")
        http = request_from()
        check_request(Request(http))
        assert heard[0]["request"] is http
        assert http.ratequota.blocked_by == ("all/blocked",)

    def test_a_receiver_that_fails_fails_no_request(self, check: Check, caplog: Any) -> None:
        def fail(**kwargs: Any) -> None:
            raise RuntimeError("the receiver is broken")

        RatePolicy.objects.create(rates="blocked")
        request_refused.connect(fail)
        try:
            assert not check(request_from()).allowed
        finally:
            request_refused.disconnect(fail)
        assert "the receiver is broken" in caplog.text

    def test_async_receivers_fail_no_request(self, check: Check, heard: list[dict[str, Any]], caplog: Any) -> None:
        """A check on an event loop that refused was a 500."""

        async def areceive(request: Any, **kwargs: Any) -> None:
            awaited.append(request)

        async def ask() -> bool:
            return check_request(on_the_loop).allowed

        awaited: list[Any] = []
        request, on_the_loop = request_from(), request_from()
        request_refused.connect(areceive)
        try:
            with override_policies({None: "blocked"}):
                assert (check(request).allowed, async_to_sync(ask)()) == (False, False)
        finally:
            request_refused.disconnect(areceive)
        assert (awaited, [one["request"] for one in heard]) == ([request], [request, on_the_loop])
        assert "async receivers" in caplog.text


class TestEdits:
    def test_asking_again_for_newer_policies_consumes_nothing(self, check: Check) -> None:
        RatePolicy.objects.create(rates="10/hour")
        for expected in (9, 8, 7):
            assert left(check(request_from())) == [expected]
            default_limiter().publish()
        with monitored() as commands:
            check_request(request_from())
        assert commands == ["EVALSHA", "EVALSHA"]

    def test_a_decision_carries_the_revision_of_its_policies(self, check: Check) -> None:
        RatePolicy.objects.create(rates="10/hour")
        revision = default_limiter().publish()
        assert check(request_from()).revision == revision == default_limiter().stored_revision()

    def test_a_revision_that_the_store_lost_is_published_anew(self, check: Check, redis_client: redis.Redis) -> None:
        RatePolicy.objects.create(rates="10/hour")
        revision = check(request_from()).revision
        redis_client.delete("rqtest:revision")
        # With it, a publication may be lost that nobody has seen yet: all look again.
        RatePolicy.objects.all()._raw_delete("default")
        RatePolicy(rates="20/hour").save()
        redis_client.delete("rqtest:revision")
        decision = check(request_from())
        assert left(decision) == [18]
        assert decision.revision == default_limiter().stored_revision() > revision

    def test_publications_faster_than_a_process_can_read_hold_no_request_up(
        self, check: Check, monkeypatch: Any
    ) -> None:
        RatePolicy.objects.create(rates="10/hour")
        check(request_from())
        reload = policies.reload
        reloads: list[int] = []

        def outrun(revision: int, *instead_of: Any) -> Any:
            reloads.append(revision)
            snapshot = reload(revision)
            default_limiter().publish()
            return snapshot

        monkeypatch.setattr(policies, "reload", outrun)
        default_limiter().publish()
        assert left(check(request_from())) == [8]
        assert len(reloads) == 1
        policies.forget()
        assert left(check(request_from())) == [7]
        assert len(reloads) == 2, "a process that starts reads once as well"

    def test_polling_that_fails_leaves_the_last_policies_in_force(self, settings: Any, caplog: Any) -> None:
        RatePolicy.objects.create(rates="10/hour")
        check_request(request_from())
        settings.RATEQUOTA = {**settings.RATEQUOTA, "POLL_SECONDS": 0}
        with database_down():
            assert room(check_request(request_from())) == ["8/10"]
        assert "the policies cannot be read, the last known ones go on" in caplog.text

    @pytest.mark.parametrize("autocommit", [True, False])
    def test_a_connection_that_broke_is_closed_without_a_request_s_end(
        self, check: Check, settings: Any, monkeypatch: pytest.MonkeyPatch, autocommit: bool
    ) -> None:
        """Django closes none for a bot or a queue's consumer, which never read the policies again.

        A transaction that the project opened itself stays its own.
        """
        closed: list[bool] = []
        RatePolicy.objects.create(rates="10/hour")
        check(request_from())
        settings.RATEQUOTA = {**settings.RATEQUOTA, "POLL_SECONDS": 0}
        broken = connections["default"]
        with monkeypatch.context() as patched:
            patched.setattr(broken, "is_usable", lambda: False)
            patched.setattr(broken, "autocommit", autocommit)
            patched.setattr(broken, "close", lambda: closed.append(True))
            with database_down():
                assert room(check(request_from())) == ["8/10"]
        assert closed == ([True] if autocommit else [])


class TestDates:
    @pytest.mark.parametrize("hours", [-20, 20])
    def test_a_process_with_a_wrong_clock_goes_by_the_stores(self, check: Check, settings: Any, hours: int) -> None:
        now = datetime.now(UTC)
        RatePolicy.objects.create(rates="5/hour")
        RatePolicy.objects.create(
            rates="9/hour", starts_at=now - timedelta(hours=1), ends_at=now + timedelta(hours=1)
        )
        with time_machine.travel(now + timedelta(hours=hours)):
            # A limiter made now has this clock to start from.
            settings.RATEQUOTA = dict(settings.RATEQUOTA)
            assert check(request_from()).statuses[0].limit == 9


class TestUsers:
    def test_the_user_is_the_requests_user(self, check: Check, alice: User) -> None:
        async def auser() -> AnonymousUser:
            return AnonymousUser()

        RatePolicy.objects.create(rates="10/hour")
        # Django's own middleware put auser there; DRF, or a token middleware, then set the user.
        drf = Request(request_from(auser=auser))
        drf.user = alice
        token = request_from(auser=auser, headers={"Authorization": "Name alice"})
        unread = Request(token, authenticators=[NameAuthentication()])
        lazy, lazy_too = (SimpleLazyObject(lambda: User.objects.get(username="alice")) for _ in range(2))
        plain = [request_from(user, auser=auser) for user in (alice, lazy)]
        for request in (drf, unread, *plain, request_from(lazy_too)):
            decision = check(request)
            assert [status.bucket.subject for status in decision.statuses] == [f"user:{alice.pk}"]

    def test_a_user_known_to_the_event_loop_only_is_awaited(self, alice: User) -> None:
        async def auser() -> User:
            return alice

        RatePolicy.objects.create(rates="10/hour")
        request = request_from(auser=auser)
        del request.user
        decision = async_to_sync(acheck_request)(request)
        assert [status.bucket.subject for status in decision.statuses] == [f"user:{alice.pk}"]

    def test_a_lazy_user_that_was_read_takes_no_thread(self, alice: User, hops: list[Any]) -> None:
        """Django's is read by the first check, and by login_required before it; each further check took a hop."""
        RatePolicy.objects.create(rates="10/hour")
        check_request(request_from(alice))
        request = request_from(SimpleLazyObject(lambda: User.objects.get(username="alice")))

        async def check_twice() -> list[Decision]:
            return [await acheck_request(request, again=True) for _ in range(2)]

        assert [left(decision) for decision in async_to_sync(check_twice)()] == [[8], [7]]
        assert [hop.__name__ for hop in hops] == ["read_user"]

    def test_an_identifier_that_no_policy_here_needs_takes_no_thread(
        self, alice: User, settings: Any, hops: list[Any]
    ) -> None:
        """With IDENTIFIERS, each awaited check took a hop, at whatever endpoint."""
        settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"crowd": "tests.project.views.busiest"}}
        search = Endpoint.objects.create(name="search")
        RatePolicy.objects.create(rates="10/hour")
        RatePolicy.objects.create(endpoint=search, counted_per="crowd", rates="20/hour")
        check_request(request_from(alice))
        assert left(async_to_sync(acheck_request)(request_from(alice))) == [8]
        assert hops == []
        assert left(async_to_sync(acheck_request)(request_from(alice), "search")) == [7, 19]
        assert [hop.__name__ for hop in hops] == ["resolve_for"]

    def test_an_identifier_may_read_the_database(self, check: Check, settings: Any, alice: User) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"crowd": "tests.project.views.busiest"}}
        RatePolicy.objects.create(counted_per="crowd", rates="10/hour")
        decision = check(request_from(alice))
        assert [status.bucket.subject for status in decision.statuses] == ["crowd:1 users"]


class TestDatabaseDown:
    @pytest.mark.parametrize(("on_error", "allowed", "denied_by"), [("allow", True, ()), ("deny", False, ("all",))])
    def test_at_the_first_request_the_setting_decides(
        self, check: Check, settings: Any, caplog: Any, on_error: str, allowed: bool, denied_by: tuple[str, ...]
    ) -> None:
        RatePolicy.objects.create(rates="1/hour")
        settings.RATEQUOTA = {**settings.RATEQUOTA, "ON_ERROR": on_error}
        with database_down():
            decision = check(request_from())
        assert (decision.allowed, decision.denied_by, decision.error) == (allowed, denied_by, "database")
        assert health().degraded == {"database": 1}
        assert "the policies cannot be read: the database is gone" in caplog.text
        assert [check(request_from()).allowed for _ in range(2)] == [True, False]

    def test_later_the_last_known_policies_stay_in_force(self, check: Check, alice: User, caplog: Any) -> None:
        policy = RatePolicy.objects.create(rates="10/hour")
        check(request_from(alice))
        policy.rates = "20/hour"
        policy.save()
        with database_down():
            assert [room(check(request_from(alice))) for _ in range(2)] == [["8/10"], ["7/10"]]
            with monitored() as commands:
                assert room(check_request(request_from(alice))) == ["6/10"]
        # Refused for the newer policies, then judged by those at hand.
        assert commands == ["EVALSHA", "EVALSHA"]
        assert "the last known ones go on: the database is gone" in caplog.text
        assert room(check(request_from(alice))) == ["15/20"]

    def test_a_user_who_was_not_seen_before_keeps_the_plan(self, check: Check, alice: User, free: Any) -> None:
        RatePolicy.objects.create(rates="2/hour")
        RatePolicy.objects.create(plan=free, rates="10/hour")
        PlanAssignment.objects.create(user=alice, plan=free)
        check(request_from())
        with database_down():
            assert room(check(request_from(alice))) == ["9/10"]

    @pytest.mark.parametrize("on_error", ["allow", "deny"])
    def test_a_user_not_in_memory_is_held_to_the_shared_policies(
        self, check: Check, settings: Any, caplog: Any, alice: User, on_error: str, too_many_entries: None
    ) -> None:
        """Else a database that is down would lift every limit, or close the door on everybody."""
        RatePolicy.objects.create(rates="2/hour")
        RatePolicy.objects.create(user=alice, rates="10/hour")
        settings.RATEQUOTA = {**settings.RATEQUOTA, "ON_ERROR": on_error}
        check(request_from())
        with database_down():
            assert [room(check(request_from(alice))) for _ in range(3)] == [["1/2"], ["0/2"], ["0/2"]]
        assert [record.message for record in caplog.records] == [
            "the policies cannot be read, the last known ones go on: the database is gone"
        ]
        assert room(check(request_from(alice))) == ["7/10"]
        assert caplog.records[-1].message == "the policies can be read again"


class TestRedisDown:
    @pytest.mark.parametrize("when", ["from the first request on", "later"])
    @pytest.mark.parametrize(
        ("setting", "rows", "denied_by"),
        [
            ("allow", [], ()),
            ("deny", [], ()),
            ("allow", [""], ()),
            ("deny", [""], ("all/hour",)),
            ("allow", ["deny"], ("all/hour",)),
            ("deny", ["allow"], ()),
            ("allow", ["allow", "deny"], ("search/hour",)),
            ("deny", ["", "allow"], ("all/hour",)),
            ("deny", ["", ""], ("all/hour", "search/hour")),
            ("deny", ["log"], ()),
        ],
    )
    def test_each_policy_says_what_happens(
        self,
        check: Check,
        settings: Any,
        search: Endpoint,
        when: str,
        setting: str,
        rows: list[str],
        denied_by: tuple[str, ...],
    ) -> None:
        for row, endpoint in zip(rows, (None, search), strict=False):
            logged = row == "log"
            RatePolicy.objects.create(
                endpoint=endpoint,
                rates="1/hour",
                on_error="" if logged else row,
                mode="log" if logged else "enforce",
            )
        if when == "later":
            check(request_from(), "search", 1)
        settings.RATEQUOTA = {**CLOSED, "ON_ERROR": setting}
        for _ in range(2):
            decision = check(request_from(), "search")
            assert (decision.allowed, decision.denied_by) == (not denied_by, denied_by)
            assert (decision.error, decision.degraded, decision.statuses) == ("connection", True, ())

    def test_unlimited_and_blocked_need_no_store(self, check: Check, settings: Any, search: Endpoint) -> None:
        RatePolicy.objects.create(rates="unlimited", on_error="deny")
        RatePolicy.objects.create(endpoint=search, rates="blocked", on_error="allow")
        settings.RATEQUOTA = {**CLOSED, "ON_ERROR": "deny"}
        assert check(request_from()).allowed
        decision = check(request_from(), "search")
        assert (decision.allowed, decision.blocked_by) == (False, ("search/blocked",))

    @pytest.mark.parametrize("on_error", ["allow", "deny"])
    @pytest.mark.parametrize(
        "unusable",
        [
            {"CACHE": "local"},
            {"CACHE": "nowhere"},
            {"CACHE": "schemeless"},
            {"REDIS_URL": "http://127.0.0.1/"},
            {"REDIS_URL": "redis://127.0.0.1:port/0"},
        ],
        ids=str,
    )
    def test_a_store_that_cannot_be_used_is_a_store_that_is_down(
        self, check: Check, settings: Any, unusable: dict[str, str], on_error: str
    ) -> None:
        schemeless = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "127.0.0.1:6379"}
        settings.CACHES = {**settings.CACHES, "schemeless": schemeless}
        now = datetime.now(UTC)
        hour = timedelta(hours=1)
        RatePolicy.objects.create(starts_at=now - hour, ends_at=now + hour, rates="1/hour")
        RatePolicy.objects.create(starts_at=now + hour, counted_per="ip", on_error="deny", rates="1/hour")
        settings.RATEQUOTA = {**unusable, "ON_ERROR": on_error}
        decision = check(request_from())
        assert (decision.allowed, decision.error) == (on_error == "allow", "configuration")

    def test_a_cache_that_could_not_be_made_is_made_by_a_later_request(self, check: Check, settings: Any) -> None:
        """A connection factory may fetch its password; workers that began while that failed stayed without Redis."""
        RatePolicy.objects.create(rates="10/hour")
        fetching = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url()}
        settings.CACHES = {**settings.CACHES, "fetching": fetching}
        settings.RATEQUOTA = {"PREFIX": "rqtest", "CACHE": "fetching"}

        def connect(*_: Any) -> None:
            raise OSError

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ConnectionFactory, "connect", connect)
            assert check(request_from()).error == "configuration"
        assert left(check(request_from())) == [9]


@pytest.mark.slow
class TestTooManyLimits:
    @pytest.fixture(autouse=True)
    def _limits(self) -> None:
        endpoints = Endpoint.objects.bulk_create(Endpoint(name=f"e{n}", routes="/plain/") for n in range(501))
        RatePolicy.objects.bulk_create(
            RatePolicy(endpoint=one, rates="9/hour", mode="enforce" if number else "log")
            for number, one in enumerate(endpoints)
        )

    def test_the_first_are_checked_and_it_is_logged_once(self, get: Get, settings: Any, caplog: Any) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
        responses = [get("/plain/") for _ in range(10)]
        assert [response.status_code for response in responses] == [200] * 9 + [429]
        decision = vars(responses[0]).get("wsgi_request", vars(responses[0]).get("asgi_request")).ratequota
        assert [status.bucket.mode for status in decision.statuses] == ["enforce"] * 500
        logged = [one.message for one in caplog.records if "501 limits, of which 500 are checked" in one.message]
        assert len(logged) == 1
        assert health().errors["buckets"] == logged[0]

    def test_all_are_explained_and_their_counters_granted_and_reset(self) -> None:
        caller = DescribedCaller(user_id=None, address="203.0.113.7")
        found = explain_caller(caller, scope=None, route="/plain/")
        assert (len(found.candidates), len(found.decision.statuses)) == (501, 500)
        buckets = found.resolution.buckets
        default_limiter().charge(buckets[:500], 3)
        default_limiter().charge(buckets[500:], 3)
        assert {(one.used_before, one.used_after) for one in give_back(buckets, 1)} == {(3, 2)}
        assert [status.used for status in usage.peek(buckets).values()] == [2] * 501
        assert len(usage.give_back(buckets)) == 501
        assert {status.used for status in usage.peek(buckets).values()} == {0}


class TestWhatARequestDoesOnce:
    """Each of these was done two or three times."""

    @pytest.mark.parametrize(
        "path", ["/search/", "/decorated/", "/adecorated/", "/plain/", "/aplain/", "/unthrottled/"]
    )
    @pytest.mark.parametrize("rates", ["9/hour", "blocked"])
    def test_headers_are_rendered(self, get: Get, settings: Any, monkeypatch: Any, path: str, rates: str) -> None:
        render, rendered = headers.decision_headers, []

        def count(decision: Decision) -> dict[str, str]:
            rendered.append(decision)
            return render(decision)

        settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
        RatePolicy.objects.create(rates=rates)
        RatePolicy.objects.create(rates="20/hour", counted_per="everyone")
        monkeypatch.setattr(headers, "decision_headers", count)
        response = get(path)
        assert ("RateLimit" in response.headers) is (rates != "blocked")
        assert len(rendered) == 1


def test_a_refusal_without_redis_has_no_id(get: Get, settings: Any) -> None:
    """Its record goes to Redis, which is down: nobody would find it there."""
    settings.RATEQUOTA = {**CLOSED, "ENFORCE_ALL": True, "STATISTICS_SECONDS": 20}
    for on_error, status in (("deny", 503), ("local", 429)):
        with override_policies({None: Policy("1/hour", on_error=on_error)}):
            responses = [
                get("/plain/", headers={"Accept": accept}) for accept in ("text/html", "application/json") * 2
            ]
        assert responses[-1].status_code == responses[-2].status_code == status
        for response in responses[2:]:
            assert "X-RateLimit-Refusal" not in response.headers
            assert "refusal_id" not in response.content.decode()
            assert "eference" not in response.content.decode()
