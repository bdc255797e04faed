"""Policies applied to a caller without an HTTP request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser, User
from django.utils.functional import SimpleLazyObject

from django_ratequota import Decision, acheck_caller, apeek_caller, check_caller, check_request, peek_caller
from django_ratequota.exceptions import InvalidCaller, InvalidCost
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.monitoring import refusals
from django_ratequota.monitoring.attempts import recorded_attempts
from django_ratequota.monitoring.collector import collector
from django_ratequota.operations.explain import ExplainQuery
from tests.enforcement.test_check import CLOSED, left, monitored, room
from tests.project.views import request_from
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

IDENTIFIERS = {"IDENTIFIERS": {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}}

CheckCaller = Callable[..., Decision]


@pytest.fixture(params=["sync", "async"])
def ask(request: Any) -> CheckCaller:
    """``check_caller``, or its async twin under an event loop."""
    return check_caller if request.param == "sync" else async_to_sync(acheck_caller)


@pytest.fixture
def exports() -> Endpoint:
    return Endpoint.objects.create(name="exports", methods="POST", cost=2)


def with_settings(settings: Any, **changed: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, **changed}


class TestWhoIsCounted:
    def test_a_user_shares_the_counter_of_their_requests(self, ask: CheckCaller, alice: User) -> None:
        RatePolicy.objects.create(rates="10/hour")
        check_request(request_from(alice))
        assert left(ask(user=alice)) == [8]
        assert left(ask(user=alice.pk)) == [7]
        assert left(ask(user=str(alice.pk), ip="203.0.113.9")) == [6]
        assert left(check_request(request_from(alice))) == [5]

    def test_a_lazy_user_is_read_without_blocking_the_loop(self, ask: CheckCaller, alice: User) -> None:
        """Reading the database on the event loop raises SynchronousOnlyOperation."""
        RatePolicy.objects.create(rates="10/hour")
        lazy = SimpleLazyObject(lambda: User.objects.get(username="alice"))
        assert ask(user=lazy).statuses[0].bucket.subject == f"user:{alice.pk}"

    def test_a_lazy_user_that_was_read_takes_no_thread(self, alice: User) -> None:
        """Channels passes one with every message."""
        RatePolicy.objects.create(rates="10/hour")
        check_caller(user=alice)
        seen: list[int] = []

        class Seen(SimpleLazyObject):
            @property
            def is_authenticated(self) -> bool:
                seen.append(threading.get_ident())
                return True

        lazy = Seen(lambda: alice)
        assert lazy.username == "alice"

        async def ask() -> int:
            await acheck_caller(user=lazy)
            return threading.get_ident()

        assert seen == [async_to_sync(ask)()]

    @pytest.mark.parametrize("ip", ["203.0.113.7", ip_address("203.0.113.7"), "::ffff:203.0.113.7"])
    def test_an_address_shares_the_counter_of_its_requests(self, ask: CheckCaller, ip: Any) -> None:
        RatePolicy.objects.create(rates="10/hour")
        check_request(request_from(address="203.0.113.7"))
        assert left(ask(ip=ip)) == [8]
        assert left(ask(ip=ip, user=AnonymousUser())) == [7]

    def test_identifiers_are_given_by_name(self, ask: CheckCaller, settings: Any) -> None:
        with_settings(settings, **IDENTIFIERS, CALLER=["api_key", "ip"])
        RatePolicy.objects.create(counted_per="tenant", rates="10/hour")
        RatePolicy.objects.create(rates="20/hour")
        RatePolicy.objects.create(counted_per="tenant", subject="tenant:acme", rates="30/hour")
        check_request(request_from(tenant="acme", headers={"X-Api-Key": "k1"}))
        assert room(ask(ip="203.0.113.7", identifiers={"tenant": "acme", "api_key": "k1"})) == ["18/20", "28/30"]
        assert room(ask(ip="203.0.113.7", identifiers={"tenant": None, "api_key": ""})) == ["19/20"]
        assert room(ask(identifiers={"tenant": 7})) == ["9/10"]

    def test_without_a_caller_what_is_counted_per_caller_or_ip_does_not_apply(
        self, ask: CheckCaller, settings: Any, exports: Endpoint
    ) -> None:
        """Ten recipients of messages refused each other: all spent the counter of requests without an address."""
        with_settings(settings, IDENTIFIERS={"recipient": None})
        for counted_per in ("caller", "ip"):
            RatePolicy.objects.create(counted_per=counted_per, rates="2/hour")
        RatePolicy.objects.create(endpoint=exports, counted_per="recipient", rates="10/hour")
        RatePolicy.objects.create(endpoint=exports, counted_per="everyone", rates="20/hour")
        assert room(check_request(request_from(address=""))) == ["1/2", "1/2"]
        for recipient, left_for_all in (("a", "18/20"), ("b", "16/20")):
            assert room(ask(scope="exports", identifiers={"recipient": recipient})) == [left_for_all, "8/10"]
        assert room(ask(scope="exports")) == ["14/20"]
        assert ask().statuses == ()
        assert room(ask(ip=None)) == ["0/2", "0/2"], "a client of unknown address is one of them"

    def test_a_scope_without_an_applicable_policy_is_logged_once(
        self, ask: CheckCaller, request: Any, caplog: Any, settings: Any
    ) -> None:
        """A task with a limit of 3/hour counted per caller ran 50 times, and the log was empty."""
        with_settings(settings, **IDENTIFIERS)
        # An endpoint of this test alone, because a process logs it once.
        endpoint = Endpoint.objects.create(name=f"nightly-{request.node.callspec.id}")
        RatePolicy.objects.create(endpoint=endpoint, counted_per="everyone", rates="3/hour", mode="off")
        ask(scope=endpoint.name)
        for counted_per in ("caller", "ip", "tenant"):
            RatePolicy.objects.create(endpoint=endpoint, counted_per=counted_per, rates="blocked")
        assert not ask(scope=endpoint.name).allowed
        RatePolicy.objects.filter(mode="enforce").update(rates="3/hour")
        RatePolicy.objects.create(counted_per="everyone", rates="9/hour")
        ask(user=User.objects.create(username="bob"), scope=endpoint.name)
        ask(identifiers={"tenant": "acme"}, scope=endpoint.name)
        ask(ip=None, scope=endpoint.name)
        assert caplog.text == ""
        for _ in range(2):
            ask(scope=endpoint.name)
        [logged] = caplog.messages
        assert logged == (
            f"checks of '{endpoint.name}' without a client are not limited, because its policies are counted per "
            "caller, ip, tenant. Count one per everyone, or pass the user, ip or identifiers to check_caller."
        )

    def test_a_user_without_an_address_is_not_counted_per_ip(self, ask: CheckCaller, alice: User) -> None:
        RatePolicy.objects.create(counted_per="ip", rates="5/hour")
        assert room(check_request(request_from(alice, ""))) == ["4/5"]
        assert room(ask(user=alice)) == []
        assert room(ask(user=alice, ip="")) == ["3/5"]

    def test_a_block_holds_without_a_caller(self, ask: CheckCaller, settings: Any) -> None:
        with_settings(settings, **IDENTIFIERS)
        RatePolicy.objects.create(subject="tenant:acme", rates="blocked")
        assert not ask(identifiers={"tenant": "acme"}).allowed
        assert ask(identifiers={"tenant": "globex"}).allowed

    def test_the_users_own_policies_and_plan_apply(self, ask: CheckCaller, alice: User, exports: Endpoint) -> None:
        pro, free = (Plan.objects.create(name=name, slug=name) for name in ("pro", "free"))
        PlanAssignment.objects.create(user=alice, plan=pro)
        RatePolicy.objects.create(plan=pro, rates="100/hour")
        RatePolicy.objects.create(plan=free, rates="5/hour")
        RatePolicy.objects.create(user=alice, endpoint=exports, rates="7/hour")
        assert room(ask(user=alice, scope="exports")) == ["98/100", "5/7"]
        assert room(ask(user=alice, plan="free")) == ["2/5"]

    def test_plan_is_what_the_plan_resolver_would_return(self, ask: CheckCaller, settings: Any, alice: User) -> None:
        """PLAN_RESOLVER takes a request, and there is none."""
        with_settings(settings, PLAN_RESOLVER="tests.project.views.tenant")
        pro, free = (Plan.objects.create(name=name, slug=name) for name in ("pro", "free"))
        RatePolicy.objects.create(plan=pro, rates="100/hour")
        RatePolicy.objects.create(plan=free, rates="5/hour")
        PlanAssignment.objects.create(user=alice, plan=free)
        assert [room(ask(user=alice, plan=plan)) for plan in ("pro", None)] == [["99/100"], ["3/5"]]

    def test_an_unknown_plan_is_logged_and_the_default_applies(
        self, ask: CheckCaller, alice: User, caplog: Any
    ) -> None:
        default = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
        RatePolicy.objects.create(plan=default, rates="5/hour")
        assert room(ask(user=alice, plan="gold")) == ["4/5"]
        assert "check_caller was called with plan= 'gold', but no plan has that slug" in caplog.text


class TestInvalidCallers:
    @pytest.mark.parametrize(
        "user",
        [True, "", b"7", request_from(), Endpoint(pk=7), {"type": "websocket"}, object(), lambda: 7, "alice", [7]],
        ids="boolean empty bytes request model mapping object function name list".split(),
    )
    def test_a_user_that_is_none(self, ask: CheckCaller, user: Any) -> None:
        with pytest.raises(InvalidCaller, match="user is a user, its primary key, or None"):
            ask(user=user)

    @pytest.mark.parametrize("ip", ["nonsense", "203.0.113.0/24", 42, ("203.0.113.7", 4711), b"\x01\x02\x03\x04"])
    def test_an_address_that_is_none(self, ask: CheckCaller, ip: Any) -> None:
        with pytest.raises(InvalidCaller, match=r"ip is one address, such as '203\.0\.113\.7', or None, not "):
            ask(ip=ip)

    @pytest.mark.parametrize(
        ("identifiers", "hint"),
        [
            ({"tennant": "acme"}, r"no identifier 'tennant'; RATEQUOTA\['IDENTIFIERS'\] has: tenant, api_key"),
            ({"user": 3}, "no identifier 'user'; write user="),
            ({"ip": "::1"}, "no identifier 'ip'; write ip="),
            (["tenant"], "identifiers is a dict of names and values"),
        ],
    )
    def test_identifiers_that_the_settings_do_not_name(
        self, ask: CheckCaller, settings: Any, identifiers: Any, hint: str
    ) -> None:
        with_settings(settings, **IDENTIFIERS)
        with pytest.raises(InvalidCaller, match=hint):
            ask(identifiers=identifiers)

    @pytest.mark.parametrize("value", [object(), lambda: "acme"], ids=["object", "function"])
    def test_an_identifier_without_a_text_of_its_own(self, ask: CheckCaller, settings: Any, value: Any) -> None:
        """Its text holds a memory address: each check would have a counter of its own."""
        with_settings(settings, **IDENTIFIERS)
        with pytest.raises(InvalidCaller, match="identifiers are texts or numbers"):
            ask(identifiers={"tenant": value})

    def test_a_cost_that_is_none(self, ask: CheckCaller) -> None:
        RatePolicy.objects.create(rates="10/hour")
        with pytest.raises(InvalidCost):
            ask(ip="203.0.113.7", cost=1.5)
        assert left(ask(ip="203.0.113.7")) == [9]

    def test_primary_keys_may_be_of_any_type(self, ask: CheckCaller) -> None:
        RatePolicy.objects.create(rates="10/hour")
        key = UUID("12345678-1234-5678-1234-567812345678")
        assert ask(user=key).statuses[0].bucket.subject == f"user:{key}"
        assert ask(user=0).statuses[0].bucket.subject == "user:0"


class TestEndpoint:
    def test_the_scope_names_it_whatever_its_methods(self, ask: CheckCaller, exports: Endpoint, alice: User) -> None:
        RatePolicy.objects.create(endpoint=exports, rates="10/hour")
        assert left(ask(user=alice, scope="exports")) == [8]
        assert left(ask(user=alice, scope="exports", cost=5)) == [3]
        assert left(ask(user=alice, scope="elsewhere")) == left(ask(user=alice)) == []

    def test_charges_stay_where_only_some_statuses_count(self, ask: CheckCaller, exports: Endpoint) -> None:
        """There is no response whose status could refund them."""
        Endpoint.objects.update(charged_statuses="401")
        RatePolicy.objects.create(endpoint=exports, rates="10/hour")
        assert [left(ask(ip="203.0.113.7", scope="exports")) for _ in range(2)] == [[8], [6]]


class TestPeek:
    @pytest.mark.parametrize("peek", [peek_caller, async_to_sync(apeek_caller)], ids=["sync", "async"])
    def test_it_tells_what_a_check_would_decide_and_charges_nothing(
        self, peek: CheckCaller, alice: User, exports: Endpoint, recording: None
    ) -> None:
        RatePolicy.objects.create(endpoint=exports, rates="3/hour")
        assert [peek(user=alice, scope="exports").allowed for _ in range(3)] == [True] * 3
        assert left(check_caller(user=alice, scope="exports")) == [1]
        collector.flush()
        refused = peek(user=alice, scope="exports")
        assert (refused.allowed, refused.retry_after is not None, refused.refusal_id) == (False, True, "")
        collector.flush()
        assert [attempt.cost for attempt in recorded_attempts().attempts] == [2]
        assert peek(user=alice, scope="exports", cost=1).allowed
        assert peek(user=alice, scope="elsewhere").allowed

    def test_its_decision_charges_afterwards(self, alice: User, exports: Endpoint) -> None:
        """As failures are counted, after it was checked whether there were too many."""
        RatePolicy.objects.create(endpoint=exports, rates="3/hour")
        for _ in range(4):
            peek_caller(user=alice, scope="exports", cost=1).charge(1)
        assert left(peek_caller(user=alice, scope="exports")) == [0]

    def test_it_sees_an_edit_and_follows_on_error(self, alice: User, settings: Any) -> None:
        RatePolicy.objects.create(rates="3/hour", on_error="deny")
        assert left(peek_caller(user=alice)) == [3]
        RatePolicy.objects.update(rates="5/hour")
        assert left(peek_caller(user=alice)) == [5]
        settings.RATEQUOTA = CLOSED
        assert peek_caller(user=alice).denied_by == ("all/hour",)


class TestIndependence:
    def test_each_check_charges_its_whole_cost(self, ask: CheckCaller, alice: User) -> None:
        """Each is a message or a field of its own."""
        RatePolicy.objects.create(rates="3/hour")
        assert [ask(user=alice).allowed for _ in range(4)] == [True, True, True, False]

    def test_a_refusal_refunds_nothing_of_other_checks(
        self, ask: CheckCaller, alice: User, exports: Endpoint
    ) -> None:
        RatePolicy.objects.create(rates="10/hour")
        RatePolicy.objects.create(endpoint=exports, rates="1/hour")
        ask(user=alice)
        assert not ask(user=alice, scope="exports").allowed
        assert left(ask(user=alice)) == [8]

    def test_it_leaves_a_request_in_progress_alone(self, alice: User) -> None:
        RatePolicy.objects.create(rates="10/hour")
        request = request_from(alice)
        first = check_request(request)
        assert left(check_caller(user=alice)) == [8]
        assert request.ratequota is first
        assert left(check_request(request, cost=2)) == [7]


class TestOneRoundTrip:
    @pytest.mark.parametrize("resolver", [None, "tests.project.views.busiest"])
    def test_awaited_it_calls_no_function_and_no_thread_either(
        self, settings: Any, resolver: str | None, hops: list[Any], django_assert_num_queries: Any
    ) -> None:
        """Their functions take a request; a thread for each message would be slow."""
        with_settings(settings, **IDENTIFIERS, PLAN_RESOLVER=resolver)
        plan = Plan.objects.create(name="Pro", slug="pro")
        PlanAssignment.objects.create(subject="tenant:acme", plan=plan)
        RatePolicy.objects.create(counted_per="tenant", rates="10/hour")
        check_caller(identifiers={"tenant": "acme"})

        async def ask_twice() -> Decision:
            await acheck_caller(identifiers={"tenant": "acme"})
            # In one loop, because each loop makes a connection of its own.
            hops.clear()
            with monitored() as commands:
                decision = await acheck_caller(identifiers={"tenant": "acme"})
            assert commands == ["EVALSHA"]
            return decision

        with django_assert_num_queries(0):
            decision = async_to_sync(ask_twice)()
        assert (left(decision), hops) == ([7], [])


class TestRecords:
    def test_a_refusal_is_found_and_explained_by_its_id(
        self, ask: CheckCaller, alice: User, exports: Endpoint, recording: None, heard: list[Any]
    ) -> None:
        RatePolicy.objects.create(endpoint=exports, rates="2/hour")
        assert ask(user=alice, ip="203.0.113.7", scope="exports").allowed
        decision = ask(user=alice, ip="203.0.113.7", scope="exports")
        assert not decision.allowed
        collector.flush()
        refusal = refusals.find_refusal(decision.refusal_id)
        assert refusal is not None
        assert (refusal.caller, refusal.ip, refusal.scope) == (f"user:{alice.pk}", "ip:203.0.113.7", "exports")
        assert (refusal.route, refusal.method, refusal.cost) == ("", "-", 2)
        assert heard == [], "receivers expect a request"
        explanation = ExplainQuery.from_refusal(refusal).explain()
        assert (explanation.decision.allowed, room(explanation.decision)) == (False, ["0/2"])

    def test_the_explain_page_asks_about_a_check_without_a_request(self, exports: Endpoint) -> None:
        """By GET the endpoint, whose methods are POST, would not count."""
        RatePolicy.objects.create(endpoint=exports, rates="17/hour")
        operator = client_of(superuser=True)
        for method, shown in (("-", True), ("GET", False)):
            query = {"ip": "203.0.113.7", "endpoint": "exports", "method": method}
            page = operator.get("/admin/django_ratequota/ratepolicy/explain/", query).content.decode()
            assert ("0 of 17 used" in page) is shown
            assert "errornote" not in page
