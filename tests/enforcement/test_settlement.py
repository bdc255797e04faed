"""Several checks of one request: it pays its highest cost once, and nothing where one of them refuses."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.http import HttpRequest, JsonResponse

from django_ratequota import Decision, acheck_request, check_request
from django_ratequota.decorators import ratequota
from django_ratequota.enforcement.settlement import StoreSettler
from django_ratequota.engine.decision import charges_of
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.runtime import default_limiter
from django_ratequota.store.pool import Pool
from tests.conftest import Check, Settle
from tests.enforcement.test_check import CLOSED, left, monitored
from tests.project.views import request_from
from tests.support.snippets import ROOT, snippet

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def completions() -> Endpoint:
    return Endpoint.objects.create(name="completions", routes="/completions/")


@pytest.fixture(params=["redis", "local"])
def counted(request: Any, settings: Any) -> str:
    """Where counts are kept: in Redis, or, while it is down, in the process."""
    if request.param == "local":
        settings.RATEQUOTA = {**CLOSED, "ON_ERROR": "local", "LOCAL_SHARE": 1}
    return str(request.param)


def free(scope: str | None = None) -> list[int]:
    return left(check_request(request_from(), scope, 0))


@pytest.mark.parametrize(("on_error", "left_over"), [("allow", None), ("local", 220)])
def test_the_view_of_the_docs_answers_without_redis(
    settings: Any, completions: Endpoint, on_error: str, left_over: int | None
) -> None:
    """``binding`` is None there, as where no policy applies: it was a 500."""
    page: dict[str, Any] = {}
    exec(snippet(ROOT / "docs" / "howto" / "costs.md", "completions.py"), page)
    RatePolicy.objects.create(endpoint=completions, rates="1000/day", on_error=on_error)
    settings.RATEQUOTA = CLOSED
    response = page["complete"](request_from())
    assert (response.status_code, json.loads(response.content)["left"]) == (200, left_over)


def test_a_limiter_is_forgotten_once_the_settings_change(settings: Any) -> None:
    """The last eight stayed, with their connections to the server."""
    RatePolicy.objects.create(rates="9/hour")
    check_request(request_from())
    before = weakref.ref(default_limiter())
    settings.RATEQUOTA = {**settings.RATEQUOTA, "LOCAL_SHARE": 2}
    check_request(request_from())
    gc.collect()
    assert before() is None


class TestLaterChecks:
    @pytest.mark.usefixtures("counted")
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_they_charge_what_their_cost_exceeds_the_first_by(
        self, check: Check, completions: Endpoint, algorithm: str
    ) -> None:
        RatePolicy.objects.create(rates="1000/3650day", algorithm=algorithm)
        RatePolicy.objects.create(endpoint=completions, rates="2000/3650day", algorithm=algorithm)
        request = request_from()
        assert left(check(request, None, 10)) == [990]
        assert left(check(request, "completions", 100)) == [900, 1900]
        assert left(check(request, "completions", 60)) == [900, 1900]
        assert left(check(request, "completions", 101)) == [899, 1899]
        assert free("completions") == [899, 1899]

    @pytest.mark.usefixtures("counted")
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_each_settles_its_own_units_only(
        self, check: Check, settle: Settle, completions: Endpoint, algorithm: str
    ) -> None:
        RatePolicy.objects.create(rates="1000/3650day", algorithm=algorithm)
        RatePolicy.objects.create(endpoint=completions, rates="2000/3650day", algorithm=algorithm)
        request = request_from()
        first = check(request, None, 10)
        second = check(request, "completions", 100)
        settle(second, "refund", 95)
        assert free("completions") == [990, 1995]
        settle(second, "refund", 95)
        assert free("completions") == [990, 2000]
        settle(first, "refund", 95)
        # A bucket keeps what has drained of the overlapping charges meanwhile, for as many milliseconds.
        assert free("completions")[0] in ((999, 1000) if algorithm in BURST_ALGORITHMS else (1000,))

    def test_one_that_charges_nothing_gives_nothing_back(self, check: Check, settle: Settle) -> None:
        RatePolicy.objects.create(rates="1000/3650day")
        check(request_from(), None, 300)
        request = request_from()
        first = check(request, None, 5)
        again = check(request, None, 5)
        assert (again.allowed, again.cost, left(again)) == (True, 0, [695])
        assert settle(again, "refund", 5) is again
        assert request.ratequota is first
        assert settle(first, "refund", 5).remaining == 700

    def test_it_charges_afterwards_all_the_same(self, check: Check, settle: Settle) -> None:
        """Else a decorator would make all that a view charges by hand free of charge."""
        RatePolicy.objects.create(rates="1000/3650day")
        request = request_from()
        check(request, None, 1)
        again = check(request, None, 1)
        assert left(settle(again, "charge", 50)) == [949]
        assert left(settle(again, "refund", 80)) == [999]

    def test_what_a_view_charges_by_hand_is_charged_where_it_asked(
        self, check: Check, settle: Settle, completions: Endpoint
    ) -> None:
        """A limit on requests that only the decorator asked about paid the tokens as well."""
        RatePolicy.objects.create(endpoint=completions, rates="1000/3650day")
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="door"), rates="60/hour")
        request = request_from()
        check(request, "door")
        for _ in range(2):
            completed = check(request, "completions", 100)
            settled = settle(completed, "charge", 50)
            settle(settle(settled, "refund", 50), "charge", 50)
            check(request, "door", 2)
        assert (free("door"), free("completions")) == ([58], [800])

    def test_they_are_one_round_trip_each(self, completions: Endpoint) -> None:
        RatePolicy.objects.create(rates="1000/3650day")
        RatePolicy.objects.create(endpoint=completions, rates="2000/3650day")
        check_request(request_from())
        request = request_from()
        with monitored() as commands:
            check_request(request, None, 10)
            check_request(request, "completions", 100)
            check_request(request, "completions", 100)
        assert commands == ["EVALSHA", "EVALSHA"]

    def test_a_log_only_limit_without_room_is_checked_once(self, check: Check, completions: Endpoint) -> None:
        RatePolicy.objects.create(rates="5/hour", mode="log")
        RatePolicy.objects.create(endpoint=completions, rates="20/hour")
        request = request_from()
        check(request_from(), None, 5)
        assert not check(request, None, 1).statuses[0].allowed
        both = check(request, "completions", 2)
        assert [(s.allowed, s.remaining) for s in both.statuses] == [(False, 0), (True, 18)]
        assert [charge.units for charge in charges_of(both)] == [2]


class TestARefusalChargesNowhere:
    @pytest.mark.usefixtures("counted")
    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_the_units_of_earlier_checks_go_back(self, check: Check, completions: Endpoint, algorithm: str) -> None:
        RatePolicy.objects.create(rates="1000/3650day", algorithm=algorithm)
        RatePolicy.objects.create(endpoint=completions, rates="50/3650day", algorithm=algorithm)
        request = request_from()
        check(request_from(), None, 300)
        assert check(request, None, 7).allowed
        assert check(request, None, 20).allowed
        refused = check(request, "completions", 60)
        assert (refused.allowed, len(refused.violated)) == (False, 1)
        assert left(refused) == [700, 50]
        assert request.ratequota is refused
        assert free("completions") == [700, 50]

    def test_they_go_back_although_the_client_hangs_up_meanwhile(
        self, completions: Endpoint, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        RatePolicy.objects.create(rates="1000/3650day", algorithm="fixed_window")
        RatePolicy.objects.create(endpoint=completions, rates="blocked")
        request, steps, tasks = request_from(), StoreSettler.steps, list[Any]()

        def hang_up(*args: Any) -> Any:
            tasks[0].cancel()
            return steps(*args)

        async def ask() -> None:
            for units in (7, 20):
                await acheck_request(request, None, units)
            tasks.append(asyncio.ensure_future(acheck_request(request, "completions")))
            with monkeypatch.context() as patched:
                patched.setattr(StoreSettler, "steps", hang_up)
                patched.setattr(Pool, "send", None)  # which would block the loop
                with pytest.raises(asyncio.CancelledError):
                    await tasks[0]
                await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

        async_to_sync(ask)()
        assert free() == [1000]

    def test_so_do_they_where_the_same_limit_refuses_the_rest(self, check: Check) -> None:
        RatePolicy.objects.create(rates="50/hour")
        request = request_from()
        check(request_from(), None, 10)
        check(request, None, 5)
        refused = check(request, None, 45)
        assert (refused.allowed, left(refused)) == (False, [40])
        # 5 of 45 units are missing, at 72 s each.
        assert refused.retry_after == pytest.approx(5 * 72, abs=5)
        assert refused.reset_after == pytest.approx(10 * 72, abs=5)
        assert free() == [40]

    def test_a_limit_lowered_between_the_checks_has_no_more_left_than_it_holds(self, check: Check) -> None:
        policy = RatePolicy.objects.create(rates="50/hour")
        request = request_from()
        check(request, None, 40)
        policy.rates = "20/hour"
        policy.save()
        refused = check(request, None, 45)
        assert (refused.allowed, refused.limit, refused.remaining) == (False, 20, 0)
        assert free() == [20]

    def test_a_request_that_was_refused_may_ask_again_at_its_full_cost(self, check: Check) -> None:
        policy = RatePolicy.objects.create(rates="50/hour")
        request = request_from()
        check(request, None, 20)
        refused = check(request, None, 60)
        assert (refused.allowed, refused.retry_after) == (False, None), "60 never fit, though 40 would"
        policy.rates = "100/hour"
        policy.save()
        assert left(check(request, None, 60)) == [40]

    def test_what_a_view_charged_by_hand_stays(self, check: Check, settle: Settle, completions: Endpoint) -> None:
        """It was done: a refusal afterwards makes no work undone."""
        RatePolicy.objects.create(rates="1000/3650day")
        RatePolicy.objects.create(endpoint=completions, rates="blocked")
        request = request_from()
        settle(check(request, None, 5), "charge", 200)
        assert left(check(request, None, 8)) == [792], "nor does it pay for later checks"
        assert not check(request, "completions").allowed
        assert free() == [800]

    def test_an_outcome_gives_nothing_back_a_second_time(self, completions: Endpoint) -> None:
        counting = Endpoint.objects.create(name="counting", charged_statuses="401")
        RatePolicy.objects.create(endpoint=counting, rates="50/hour")
        RatePolicy.objects.create(endpoint=completions, rates="blocked")

        @ratequota("counting", cost=5)
        def view(request: HttpRequest) -> JsonResponse:
            return JsonResponse({"allowed": check_request(request, "completions").allowed})

        check_request(request_from(), "counting", 20)
        assert view(request_from()).content == b'{"allowed": false}'
        assert free("counting") == [30]


class TestTwoPlaces:
    """Redis goes or comes between the checks."""

    @pytest.fixture
    def places(self, settings: Any, completions: Endpoint) -> Any:
        RatePolicy.objects.create(rates="1000/3650day", on_error="local")
        RatePolicy.objects.create(endpoint=completions, rates="50/hour", on_error="local")
        up = settings.RATEQUOTA
        check_request(request_from(), None, 300)

        def go(where: str) -> None:
            settings.RATEQUOTA = up if where == "redis" else {**CLOSED, "LOCAL_SHARE": 1}

        return go

    def test_a_unit_is_paid_in_one_of_them(self, check: Check, places: Any) -> None:
        request = request_from()
        check(request, None, 10)
        places("local")
        assert left(check(request, "completions", 30)) == [980, 20]
        places("redis")
        assert left(check(request, None, 40)) == [680]
        assert free() == [680]

    def test_a_refusal_without_redis_leaves_the_units_there(self, check: Check, places: Any) -> None:
        request = request_from()
        check(request, None, 10)
        places("local")
        refused: Decision = check(request, "completions", 60)
        assert (refused.allowed, refused.error, refused.at_us) == (False, "connection", 0)
        assert left(refused) == [1000, 50]
        places("redis")
        assert free() == [690]

    def test_a_refusal_by_redis_frees_the_process(self, check: Check, places: Any) -> None:
        request = request_from()
        places("local")
        assert left(check(request, None, 10)) == [990]
        places("redis")
        refused = check(request, "completions", 60)
        assert (refused.allowed, left(refused)) == (False, [700, 50])
        assert free() == [700]


class TestRatesThatCountRequests:
    """One completion of 349 tokens shut a client out of every endpoint limited to 30 a minute."""

    @pytest.fixture(autouse=True)
    def policies(self, completions: Endpoint) -> None:
        RatePolicy.objects.create(rates="30 requests/hour")
        RatePolicy.objects.create(endpoint=completions, rates="5 requests/hour, 1000/day")

    @pytest.mark.usefixtures("counted")
    def test_a_request_without_cost_counts_until_none_is_left(self, check: Check) -> None:
        outcomes = [check(request_from(), "completions", 0).allowed for _ in range(6)]
        assert outcomes == [True] * 5 + [False]
        assert left(check(request_from(), None, 0)) == [24]

    @pytest.mark.usefixtures("counted")
    def test_several_checks_of_a_request_are_one_request(self, check: Check, settle: Settle) -> None:
        request = request_from()
        check(request, None, 1)
        decision = check(request, "completions", 100)
        assert left(decision) == [29, 4, 900]
        assert left(check(request, "completions", 120)) == [29, 4, 880]
        settle(request.ratequota, "settle", 349)
        assert left(check(request_from(), "completions", 0)) == [28, 3, 651]

    def test_a_check_that_charged_nothing_settles_what_the_earlier_ones_left(
        self, check: Check, settle: Settle
    ) -> None:
        request = request_from()
        check(request, "completions", 1)
        again = check(request, "completions", 1)
        settle(again, "settle", 349)
        settle(again, "settle", 349)
        assert left(check(request_from(), "completions", 0)) == [28, 3, 651]

    def test_units_that_earlier_checks_paid_stay_among_the_requests_units(self, check: Check, settle: Settle) -> None:
        """Each settlement downwards, which gave nothing back, made the next one charge more."""
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="door"), rates="60/hour")
        request = request_from()
        check(request, "completions", 100)
        check(request, "door", 1)
        again = check(request, "completions", 100)
        for actual in (10, 50, 100):
            settle(again, "settle", actual)
        settle(again, "refund", 40)
        settle(again, "settle", 100)
        assert left(check(request_from(), "completions", 0))[-1] == 900
        settle(again, "settle", 110)
        assert left(check(request_from(), "completions", 0))[-1] == 890

    def test_what_remains_after_settling_is_of_a_limit_that_counts_units(self, settle: Settle) -> None:
        for host, (verb, units) in enumerate((("settle", 349), ("settle", 100), ("charge", 0), ("refund", 100))):
            reserved = check_request(request_from(address=f"203.0.113.{host}"), "completions", 100)
            settled = settle(reserved, verb, units)
            assert (settled.limit, settled.remaining) == (1000, [651, 900, 900, 1000][host])

    def test_a_later_refusal_gives_the_request_back(self, check: Check, completions: Endpoint) -> None:
        request = request_from()
        check(request, None, 0)
        assert not check(request, "completions", 1001).allowed
        assert left(check(request_from(), "completions", 0)) == [29, 4, 1000]

    def test_each_item_of_a_batch_is_a_request(self) -> None:
        request = request_from()
        for _ in range(3):
            check_request(request, "completions", 10, again=True)
        assert left(check_request(request_from(), "completions", 0)) == [26, 1, 970]

    def test_a_settlement_that_failed_is_not_repeated(self, settings: Any, settle: Settle) -> None:
        """Its reply may have been lost after Redis had charged the units."""
        decision = check_request(request_from(), "completions", 100)
        limits = settings.RATEQUOTA
        settings.RATEQUOTA = CLOSED
        settle(decision, "settle", 349)
        settings.RATEQUOTA = limits
        settle(decision, "settle", 349)
        assert left(check_request(request_from(), "completions", 0))[-1] == 900
