"""Guessing keys: what a view refuses before its throttle is asked, under COUNT_UNCHECKED."""

from __future__ import annotations

import asyncio
import functools
from contextvars import ContextVar
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.http import HttpRequest, JsonResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views.decorators.http import require_POST
from ninja import NinjaAPI
from ninja.security import APIKeyHeader
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from django_ratequota import check_request
from django_ratequota.decorators import ratequota
from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from django_ratequota.monitoring import alerts
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.records import DecisionRecord
from django_ratequota.ninja import QuotaThrottle as NinjaThrottle
from django_ratequota.throttling import QuotaThrottle
from tests.conftest import Get
from tests.enforcement.test_check import CLOSED, left, monitored
from tests.project.views import request_from
from tests.support.threads import by_hand, on_threads

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "counting"),
    pytest.mark.urls(__name__),
]

RIGHT, WRONG = {"X-Key": "alice"}, {"X-Key": "guess"}
#: How often a key was looked at.
looked: list[str] = []


class Keys(BaseAuthentication):
    """A key is the name of a user."""

    def authenticate(self, request: Any) -> tuple[User, None] | None:
        key = request.headers.get("X-Key")
        if key is None:
            return None
        looked.append(key)
        if key == "guess":
            raise AuthenticationFailed
        return User.objects.get(username=key), None

    def authenticate_header(self, request: Any) -> str:
        return "Key"


class Account(APIView):
    authentication_classes = [Keys]
    permission_classes = [IsAuthenticated]
    throttle_scope = "account"
    throttle_cost: Any = None

    def get(self, request: Any) -> Response:
        return Response({"ran": True}, status=int(request.query_params.get("status", 200)))


class Metered(Keys):
    """Each look at a key is paid for on its own."""

    def authenticate(self, request: Any) -> tuple[User, None] | None:
        check_request(request._request, "keys", again=True)
        return super().authenticate(request)


class Looking(Account):
    authentication_classes = [Metered]


class Computed(Account):
    def throttle_cost(self, request: Any) -> int:
        return int(request.headers.get("X-Cost", 2))


class Regretting(Computed):
    """Checks another endpoint once it has been admitted."""

    def get(self, request: Any) -> Response:
        return Response({}, status=200 if check_request(request, "closed").allowed else 429)


class Dearer(Account):
    """Finds out what it costs once it has been admitted."""

    def get(self, request: Any) -> Response:
        return Response({}, status=200 if check_request(request, "account", 5).allowed else 429)


class Choosing(Account):
    """Its throttles are a user's only; they are not known before it has authenticated."""

    throttle_classes = []

    def get_throttles(self) -> list[BaseThrottle]:
        return [QuotaThrottle()] if self.request.user.is_authenticated else []


class StaffFree(QuotaThrottle):
    def allow_request(self, request: Any, view: Any) -> bool:
        return request.user.is_staff or super().allow_request(request, view)


class Sparing(Account):
    throttle_classes = [StaffFree]


class NinjaKeys(APIKeyHeader):
    param_name = "X-Key"

    def authenticate(self, request: Any, key: str | None) -> User | None:
        looked.append(str(key))
        return None if key != "alice" else User(pk=1, username="alice")


api = NinjaAPI(urls_namespace="unchecked", docs_url=None, auth=NinjaKeys(), throttle=[NinjaThrottle("account")])


@api.get("/sync")
def operation(request: Any) -> Any:
    return {"ran": True}


@api.get("/async")
async def aoperation(request: Any) -> Any:
    return {"ran": True}


@api.get("/free", throttle=[])
def free_operation(request: Any) -> Any:
    return {"ran": True}


@ratequota(scope="account")
def decorated(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"ran": True})


#: Set once the view below waits.
waiting: ContextVar[asyncio.Event] = ContextVar("waiting")


@functools.wraps(decorated)
async def slow(request: HttpRequest) -> JsonResponse:
    """Looks for a key before the quota is asked, and never ends."""
    waiting.get().set()
    await asyncio.Event().wait()
    raise AssertionError


urlpatterns = [
    path("slow/", slow),
    path("looking/", Looking.as_view()),
    path("account/", Account.as_view()),
    path("costly/", Account.as_view(throttle_cost=3)),
    path("cheap/", Account.as_view(throttle_cost=1)),
    path("computed/", Computed.as_view()),
    path("regretting/", Regretting.as_view()),
    path("dearer/", Dearer.as_view()),
    path("choosing/", Choosing.as_view()),
    path("sparing/", Sparing.as_view()),
    path("ninja/", api.urls),
    path("decorated/", decorated),
    path("posted/", require_POST(decorated)),
]


@pytest.fixture
def counting(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": True}
    looked.clear()


@pytest.fixture
def account() -> Endpoint:
    return Endpoint.objects.create(name="account")


@pytest.fixture
def alice() -> User:
    return User.objects.create(pk=1, username="alice")


def free(user: Any = None) -> list[int]:
    """What is left at the test client's address."""
    return left(check_request(request_from(user, address="127.0.0.1"), "account", 0))


def statuses(get: Get, path: str, times: int, **options: Any) -> list[int]:
    return [get(path, **options).status_code for _ in range(times)]


# --- The attacks. ---


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/account/", WRONG, 401),
        ("/account/", {}, 401),
        ("/account/", {**RIGHT, "Accept": "image/png"}, 406),
        ("/choosing/", WRONG, 401),
        ("/ninja/sync", WRONG, 401),
        ("/ninja/async", WRONG, 401),
        ("/posted/", {}, 405),
    ],
)
@pytest.mark.parametrize("everywhere", [False, True], ids=["", "ENFORCE_ALL"])
def test_wrong_keys(
    get: Get, settings: Any, account: Endpoint, path: str, headers: Any, status: int, everywhere: bool
) -> None:
    """All of them were answered 401, and none was counted."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": everywhere}
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="4/hour")
    assert statuses(get, path, 12, headers=headers) == [status] * 4 + [429] * 8
    assert len(looked) <= (8 if path == "/choosing/" else 4), "a refused guess was looked at"
    assert free() == [0]


@pytest.mark.parametrize("path", ["/account/", "/ninja/sync"])
def test_wrong_keys_in_parallel(account: Endpoint, path: str) -> None:
    """A look before and a charge afterwards would let as many through as there are threads."""
    RatePolicy.objects.create(rates="5/hour", counted_per="ip")

    def guess() -> int:
        try:
            return Client().get(path, headers=WRONG).status_code
        finally:
            # Of this thread, which may have read the policies; SQLite's own ``close`` leaves one to memory open.
            for connection in connections.all(initialized_only=True):
                BaseDatabaseWrapper.close(connection)

    answers = on_threads(20, guess)
    assert (answers.count(401), answers.count(429), len(looked)) == (5, 15, 5)


def test_a_right_key_is_not_found_by_an_address_that_has_used_up_its_guesses(
    get: Get, account: Endpoint, alice: User
) -> None:
    RatePolicy.objects.create(rates="3/hour", counted_per="ip")
    statuses(get, "/account/", 3, headers=WRONG)
    assert (statuses(get, "/account/", 2, headers=RIGHT), len(looked)) == ([429, 429], 3)


def test_an_address_that_is_blocked_gets_no_answer(get: Get, account: Endpoint, alice: User) -> None:
    """For any caller: nothing outranks the block of an address."""
    plan = Plan.objects.create(name="Pro", slug="pro", default_for="authenticated")
    RatePolicy.objects.create(plan=plan, rates="9/hour", counted_per="ip")
    RatePolicy.objects.create(user=alice, rates="9/hour", counted_per="ip")
    RatePolicy.objects.create(subject="ip:127.0.0.0/8", rates="blocked", counted_per="ip")
    assert (statuses(get, "/account/", 2, headers=WRONG), looked) == ([429, 429], [])


def test_a_limit_of_an_address_is_one_for_every_plan(get: Get, account: Endpoint) -> None:
    RatePolicy.objects.create(plan=Plan.objects.create(name="Pro", slug="pro"), rates="9/hour", counted_per="ip")
    RatePolicy.objects.create(subject="ip:127.0.0.0/8", rates="2/hour", counted_per="ip")
    assert (statuses(get, "/account/", 4, headers=WRONG), len(looked)) == ([401, 401, 429, 429], 2)


def test_it_is_off_by_default(get: Get, settings: Any, account: Endpoint) -> None:
    settings.RATEQUOTA = {key: value for key, value in settings.RATEQUOTA.items() if key != "COUNT_UNCHECKED"}
    RatePolicy.objects.create(rates="2/hour", counted_per="ip")
    assert statuses(get, "/account/", 4, headers=WRONG) == [401] * 4


# --- Nobody pays twice, and nobody pays for others. ---


@pytest.mark.parametrize(
    ("path", "cost", "each"),
    [
        ("/account/", 1, 1),
        ("/account/", 2, 2),
        ("/costly/", 1, 3),
        ("/costly/", 5, 3),
        ("/cheap/", 5, 1),
        ("/computed/", 5, 2),
        ("/choosing/", 1, 1),
        ("/ninja/sync", 2, 2),
        ("/ninja/async", 2, 2),
        ("/decorated/", 2, 2),
    ],
)
@pytest.mark.parametrize("algorithm", ["token_bucket", "sliding_window_log"])
def test_a_rightful_request_is_charged_once(
    get: Get, account: Endpoint, alice: User, path: str, cost: int, each: int, algorithm: str
) -> None:
    Endpoint.objects.filter(pk=account.pk).update(cost=cost)
    RatePolicy.objects.create(endpoint=account, rates="60/hour", algorithm=algorithm)
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="30/hour", algorithm=algorithm)
    for times in (1, 2, 3):
        response = get(path, headers=RIGHT)
        assert (response.status_code, response["X-RateLimit-Remaining"]) == (200, str(30 - times * each))
        assert response["RateLimit-Policy"].count("account/hour") == 2
    who = alice if path not in ("/decorated/",) else None
    assert free(who) == [60 - 3 * each, 30 - 3 * each]


@pytest.mark.parametrize(("path", "cost"), [("/cheap/", "1"), ("/computed/", "1"), ("/computed/", "0")])
def test_a_view_that_costs_less_than_its_endpoint_may_use_the_last_units(
    get: Get, account: Endpoint, alice: User, path: str, cost: str
) -> None:
    """A computed cost counts one unit before the view."""
    Endpoint.objects.filter(pk=account.pk).update(cost=5)
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="7/hour")
    assert statuses(get, path, 8, headers={**RIGHT, "X-Cost": cost}) == [200] * 7 + [429]


@pytest.mark.parametrize("edit", ["raised", "lowered", "deleted"])
def test_a_policy_may_change_while_the_view_authenticates(
    get: Get, account: Endpoint, alice: User, edit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RatePolicy.objects.create(counted_per="ip", rates="30/hour")
    RatePolicy.objects.create(endpoint=account, rates="60/hour")
    authenticate = Keys.authenticate

    def edit_and_authenticate(self: Keys, request: Any) -> Any:
        if edit == "deleted":
            policy.delete()
        else:
            policy.rates = {"raised": "40/hour", "lowered": "5/hour"}[edit]
            policy.save()
        return authenticate(self, request)

    monkeypatch.setattr(Keys, "authenticate", edit_and_authenticate)
    assert get("/account/", headers=RIGHT).status_code == 200
    assert free(alice) == {"raised": [39, 59], "lowered": [4, 59], "deleted": [59]}[edit]


def test_a_request_that_the_view_s_check_refuses_is_charged_nowhere(get: Get, account: Endpoint, alice: User) -> None:
    RatePolicy.objects.create(endpoint=account, rates="1/hour")
    RatePolicy.objects.create(counted_per="ip", rates="30/hour")
    assert statuses(get, "/account/", 4, headers=RIGHT) == [200, 429, 429, 429]
    refused = get("/account/", headers=RIGHT)
    assert [part.partition("r=")[2][:2].strip(";") for part in refused["RateLimit"].split(",")] == ["29", "0"]
    assert free(alice) == [29, 0]


def test_a_request_that_the_view_lets_pass_unchecked_is_counted(get: Get, account: Endpoint, alice: User) -> None:
    User.objects.update(is_staff=True)
    RatePolicy.objects.create(counted_per="ip", rates="2/hour")
    assert statuses(get, "/sparing/", 3, headers=RIGHT) == [200, 200, 429]
    RatePolicy.objects.create(plan=Plan.objects.create(name="Pro", slug="pro"), counted_per="ip", rates="9/hour")
    assert statuses(get, "/sparing/", 2, headers=RIGHT) == [200, 200], "whose address may have more, by its plan"


def test_a_check_in_the_view_charges_what_is_missing(get: Get, account: Endpoint, alice: User) -> None:
    """The first check's unit was deducted twice, once for each copy of its decision."""
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="30/hour")
    assert get("/dearer/", headers=RIGHT).status_code == 200
    assert free() == [25]


def test_an_operation_without_a_throttle_is_left_alone(get: Get, account: Endpoint) -> None:
    RatePolicy.objects.create(counted_per="ip", rates="2/hour")
    assert statuses(get, "/ninja/free", 4, headers=WRONG) == [401] * 4


@pytest.mark.parametrize("own", ["5/hour", "unlimited", "5/min"])
@pytest.mark.parametrize("audience", ["user", "plan", "subject_list"])
def test_a_customer_with_more_is_not_held_to_what_strangers_have(
    get: Get, account: Endpoint, alice: User, own: str, audience: str
) -> None:
    """Who asks is known only to the view: until then its address is a stranger's."""
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanAssignment.objects.create(user=alice, plan=plan)
    RatePolicy.objects.create(counted_per="ip", rates="2/hour")
    friends = SubjectList.objects.create(name="Friends")
    ListMember.objects.create(subject_list=friends, user=alice)
    owner: Any = {audience: {"user": alice, "plan": plan, "subject_list": friends}[audience]}
    RatePolicy.objects.create(counted_per="ip", rates=own, **owner)
    assert statuses(get, "/account/", 5, headers=RIGHT) == [200] * 5
    assert statuses(get, "/account/", 1, headers=RIGHT) == [200 if own == "unlimited" else 429]
    # Guesses are answered no more often for that.
    assert statuses(get, "/account/", 4, headers=WRONG).count(401) == (0 if own == "5/hour" else 2)
    assert statuses(get, "/account/", 1, headers=RIGHT) == [200 if own == "unlimited" else 429]


@pytest.mark.parametrize("mode", ["enforce", "log"])
@pytest.mark.parametrize("audience", ["user", "plan", "subject_list"])
def test_a_customer_with_less_is_held_to_it(
    get: Get, account: Endpoint, alice: User, audience: str, mode: str
) -> None:
    """The first check's units, checked under the strangers' limit, were taken for paid: nothing ever refused."""
    friends, plan = SubjectList.objects.create(name="Friends"), Plan.objects.create(name="Pro", slug="pro")
    PlanAssignment.objects.create(user=alice, plan=plan)
    ListMember.objects.create(subject_list=friends, user=alice)
    owner: Any = {audience: {"user": alice, "plan": plan, "subject_list": friends}[audience]}
    RatePolicy.objects.create(counted_per="ip", rates="100/hour", mode=mode)
    RatePolicy.objects.create(counted_per="ip", rates="2/hour", **owner)
    assert statuses(get, "/account/", 5, headers=RIGHT) == [200, 200, 429, 429, 429]
    assert free() == [98], "refused requests are charged nowhere"


def test_a_log_only_limit_of_the_address_lifts_no_enforced_one(get: Get, account: Endpoint, alice: User) -> None:
    RatePolicy.objects.create(counted_per="ip", rates="2/hour", user=alice)
    RatePolicy.objects.create(counted_per="ip", rates="3/hour", subject="ip:127.0.0.0/8", mode="log")
    assert statuses(get, "/account/", 5, headers=RIGHT) == [200, 200, 429, 429, 429]


@pytest.mark.parametrize("audience", ["user", "plan", "subject_list", "subject"])
@pytest.mark.parametrize(("mode", "looks"), [("log", 2), ("enforce", 4)])
def test_a_log_only_policy_lets_no_more_keys_be_tried(
    get: Get, api_keys: None, account: Endpoint, alice: User, audience: str, mode: str, looks: int
) -> None:
    """The view authenticated each request, as if a limit on trial could take the enforced one's place."""
    friends, plan = SubjectList.objects.create(name="Friends"), Plan.objects.create(name="Pro", slug="pro")
    ListMember.objects.create(subject_list=friends, user=alice)
    owners = {"user": alice, "plan": plan, "subject_list": friends, "subject": "tenant:acme"}
    RatePolicy.objects.create(counted_per="ip", rates="2/hour")
    RatePolicy.objects.create(counted_per="ip", rates="1/hour", mode=mode, **{audience: owners[audience]})
    assert (statuses(get, "/account/", 4, headers=WRONG), len(looked)) == ([401, 401, 429, 429], looks)


def test_using_up_an_address_s_limit(get: Get, account: Endpoint, alice: User) -> None:
    """Else what strangers do at an address would refuse its users."""
    RatePolicy.objects.create(rates="2/hour")
    assert statuses(get, "/account/", 5, headers=WRONG) == [401] * 5
    assert statuses(get, "/account/", 3, headers=RIGHT) == [200, 200, 429]


# --- Records and signals of one request. ---


def test_each_request_is_recorded_once_and_signals_once(
    get: Get,
    recording: None,
    heard: list[Any],
    account: Endpoint,
    alice: User,
    settings: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "NOTIFY_LIMITS": "all"}
    by_hand(monkeypatch, alerts.claiming)  # else a thread sends the queued signals
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="3/hour")
    RatePolicy.objects.create(rates="30/hour")

    def receive(**_: Any) -> None:
        """Without a receiver no crossing is queued."""

    alerts.quota_threshold.connect(receive)
    collector.clear()
    alerts.forget()
    try:
        seen = [statuses(get, "/account/", times, headers=key) for times, key in ((1, RIGHT), (2, WRONG), (1, RIGHT))]
        assert seen == [[200], [401, 401], [429]]
        noted = [DecisionRecord._make(one) for one in collector.pending]
        assert [(one.caller, one.allowed) for one in noted] == [
            ("user:1", True),
            ("ip:127.0.0.1", True),
            ("ip:127.0.0.1", True),
            ("ip:127.0.0.1", False),
        ]
        assert len(heard) == 1
        assert sorted(one.level for limit in alerts._queue.values() for one in limit) == [80, 100]
    finally:
        alerts.forget()
        alerts.quota_threshold.disconnect(receive)


def test_an_authenticator_that_checks_leaves_the_first_check_recorded(
    get: Get, recording: None, account: Endpoint
) -> None:
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="2/hour")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="keys"), rates="9/hour")
    collector.clear()
    assert statuses(get, "/looking/", 3, headers=WRONG) == [401, 401, 429]
    noted = [DecisionRecord._make(one) for one in collector.pending]
    collector.clear()
    first = [one.allowed for one in noted if account.pk in one.endpoint_ids]
    assert (first, len(noted)) == ([True, True, False], 5)


@pytest.mark.parametrize(("counted", "remaining"), [("401", [1]), ("4xx", [1]), ("5xx", [3])])
def test_endpoints_may_count_some_outcomes_only(
    get: Get, account: Endpoint, counted: str, remaining: list[int]
) -> None:
    Endpoint.objects.filter(pk=account.pk).update(charged_statuses=counted)
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="3/hour")
    statuses(get, "/account/", 2, headers=WRONG)
    assert free() == remaining


@pytest.mark.parametrize(("path", "status"), [("/computed/", 200), ("/regretting/", 429)])
def test_what_goes_back_is_all_of_a_cost_that_was_charged_in_parts(
    get: Get, account: Endpoint, alice: User, path: str, status: int
) -> None:
    """One unit was charged before the view, and the rest by its check: the smaller part stayed charged."""
    Endpoint.objects.filter(pk=account.pk).update(charged_statuses="401" if status == 200 else "")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="closed"), rates="blocked")
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="30/hour", algorithm="sliding_window_log")
    assert statuses(get, path, 3, headers={**RIGHT, "X-Cost": "4"}) == [status] * 3
    assert free() == [30]


@pytest.mark.parametrize(
    ("path", "headers", "per", "trips"),
    [
        ("/account/", WRONG, ["ip"], 1),
        ("/account/", WRONG, ["caller"], 0),
        ("/account/", RIGHT, ["caller"], 1),
        ("/account/", RIGHT, ["ip"], 1),
        ("/account/", RIGHT, ["ip", "caller"], 2),
        ("/decorated/", {}, ["ip", "caller"], 1),
    ],
)
def test_round_trips(account: Endpoint, alice: User, path: str, headers: Any, per: list[str], trips: int) -> None:
    for counted_per in per:
        RatePolicy.objects.create(endpoint=account, counted_per=counted_per, rates="30/hour")
    client = Client()
    client.get(path, headers=RIGHT)
    client.get(path, headers=headers)
    with monitored() as commands:
        client.get(path, headers=headers)
    assert commands == ["EVALSHA"] * trips


# --- Without Redis, and without the database. ---


@pytest.mark.parametrize(
    ("on_error", "expected"), [("allow", [401] * 4), ("deny", [503] * 4), ("local", [401, 401, 429, 429])]
)
def test_without_redis_on_error_decides(
    get: Get, settings: Any, account: Endpoint, on_error: str, expected: list[int]
) -> None:
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="2/hour", on_error=on_error)
    settings.RATEQUOTA = {**CLOSED, "COUNT_UNCHECKED": True, "LOCAL_SHARE": 1}
    assert statuses(get, "/account/", 4, headers=WRONG) == expected


def test_without_redis_a_rightful_request_is_charged_once(
    get: Get, settings: Any, account: Endpoint, alice: User
) -> None:
    RatePolicy.objects.create(endpoint=account, counted_per="ip", rates="3/hour", on_error="local")
    RatePolicy.objects.create(endpoint=account, rates="9/hour", on_error="local")
    settings.RATEQUOTA = {**CLOSED, "COUNT_UNCHECKED": True, "LOCAL_SHARE": 1}
    assert statuses(get, "/account/", 4, headers=RIGHT) == [200, 200, 200, 429]


def test_a_task_that_is_cancelled_has_been_charged(account: Endpoint) -> None:
    """A client that hangs up while its key is looked at would have guessed for nothing."""
    RatePolicy.objects.create(rates="5/hour", counted_per="ip")

    async def guess() -> None:
        started = asyncio.Event()
        waiting.set(started)
        task = asyncio.ensure_future(AsyncClient().get("/slow/"))
        await asyncio.wait_for(started.wait(), 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async_to_sync(guess)()
    assert free() == [4]
