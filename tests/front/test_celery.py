"""``django_ratequota.celery``, without a worker; those are in faults/test_celery_workers.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import celery
import pytest
from celery.exceptions import Retry

from django_ratequota.celery import rate_limited
from django_ratequota.exceptions import InvalidCost, InvalidRate
from django_ratequota.models import Endpoint, RatePolicy
from tests.support import server

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

#: Makes a task of a decorator; returns what calls it as a worker would.
Work = Callable[..., Callable[[], Any]]


@pytest.fixture
def app(settings: Any) -> celery.Celery:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": server.url(), "TIMEOUT": 5.0}
    return celery.Celery("tests", broker="memory://", backend="cache+memory://", set_as_current=False)


@pytest.fixture
def work(app: celery.Celery) -> Work:
    numbers = count()

    def make(decorator: Any, **headers: Any) -> Callable[[], Any]:
        @app.task(name=f"task-{next(numbers)}")
        @decorator
        def task() -> str:
            return "done"

        return lambda: task.apply(throw=True, headers=headers).get()

    return make


def waits(run: Callable[[], Any]) -> float:
    """Return the countdown (s) of a task that is handed back."""
    with pytest.raises(Retry) as handed_back:
        run()
    return float(handed_back.value.when)  # type: ignore[arg-type]


def test_tasks_of_one_name_share_a_limit(work: Work) -> None:
    first, second = work(rate_limited("partner:maps", "2/min")), work(rate_limited("partner:maps", "2/min"))
    assert [first(), second()] == ["done", "done"]
    assert 50 < waits(first) <= 60
    assert work(rate_limited("partner:mail", "2/min"))() == "done"


def test_a_period_never_has_more_than_its_limit(work: Work, redis_client: Any) -> None:
    assert work(rate_limited("partner", "2/min, 100/day"))() == "done"
    algorithms = {key.decode().rpartition(":")[2] for key in redis_client.scan_iter("rqtest:{:~*")}
    assert algorithms == {"sl60", "sl86400"}


def test_costs(work: Work) -> None:
    assert work(rate_limited("partner", "5/min", cost=3))() == "done"
    assert waits(work(rate_limited("partner", "5/min", cost=3))) > 0
    with pytest.raises(InvalidCost, match="never fits into 5/min"):
        rate_limited("partner", "5/min", cost=6)


@pytest.mark.parametrize("rates", ["", "often", "unlimited", "blocked"])
def test_rates_that_are_none(rates: str) -> None:
    with pytest.raises(InvalidRate):
        rate_limited("partner", rates)


def test_an_endpoints_policies_apply(work: Work) -> None:
    policy = RatePolicy.objects.create(
        endpoint=Endpoint.objects.create(name="exports"), rates="1/hour", counted_per="everyone"
    )
    run = work(rate_limited("exports"))
    assert run() == "done"
    assert waits(run) == 60
    policy.rates = "2/hour"
    policy.save()
    assert run() == "done"
    policy.rates = "blocked"
    policy.save()
    assert waits(run) == 60


def test_waits_grow_up_to_a_minute(work: Work) -> None:
    limit = rate_limited("partner", "1/s")
    assert work(limit)() == "done"
    assert waits(work(limit)) <= 1.5
    assert max(waits(work(limit, ratequota_waits=30)) for _ in range(50)) == 60


def test_a_task_waits_while_redis_is_down(work: Work, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0", "ON_ERROR": "allow"}
    assert waits(work(rate_limited("partner", "2/min"))) == 60
    assert work(rate_limited("exports"))() == "done", "an endpoint's policies have on_error"


def test_a_function_that_no_worker_runs_is_not_limited() -> None:
    @rate_limited("partner", "1/min")
    def function(word: str, *, end: str) -> str:
        """Joins."""
        return word + end

    assert [function("a", end="b") for _ in range(3)] == ["ab"] * 3
    assert (function.__name__, function.__doc__) == ("function", "Joins.")
