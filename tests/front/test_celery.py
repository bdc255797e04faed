"""``django_ratequota.celery``, without a worker; those are in faults/test_celery_workers.py."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from typing import Any

import celery
import pytest
import redis
from celery.app.trace import build_tracer
from celery.exceptions import Retry

from django_ratequota import check_caller
from django_ratequota.celery import rate_limited
from django_ratequota.engine.slots import unreleased
from django_ratequota.exceptions import InvalidCost, InvalidRate
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.utils import problems
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

        return lambda: run_by_worker(app, task, headers)

    return make


def run_by_worker(app: celery.Celery, task: Any, headers: dict[str, Any]) -> Any:
    """Return what the task returns, or the exception that ends it."""
    request = {"id": "an id", "headers": headers, "is_eager": False, "delivery_info": {}, "args": (), "kwargs": {}}
    result, info, _time, _text = build_tracer(task.name, task, app=app)("an id", (), {}, request)
    return info.retval if info else result


def waits(run: Callable[[], Any]) -> float:
    """Return the countdown (s) of a task that is handed back."""
    handed_back = run()
    assert isinstance(handed_back, Retry), handed_back
    return float(handed_back.when)  # type: ignore[arg-type]


def test_tasks_of_one_name_share_a_limit(work: Work) -> None:
    first, second = work(rate_limited("partner:maps", "2/min")), work(rate_limited("partner:maps", "2/min"))
    assert [first(), second()] == ["done", "done"]
    assert 30 <= waits(first) <= 60
    assert work(rate_limited("partner:mail", "2/min"))() == "done"


def test_a_period_never_has_more_than_its_limit(work: Work, redis_client: Any) -> None:
    assert work(rate_limited("partner", "2/min, 100/day"))() == "done"
    algorithms = {key.decode().rpartition(":")[2] for key in redis_client.scan_iter("rqtest:{:~*")}
    assert algorithms == {"sl60", "sl86400"}


def test_costs(work: Work) -> None:
    assert work(rate_limited("partner", "5/min", cost=3))() == "done"
    assert waits(work(rate_limited("partner", "5/min", cost=3))) > 0
    assert [work(rate_limited("free", "1/hour", cost=0))() for _ in range(3)] == ["done"] * 3
    with pytest.raises(InvalidCost, match="never fits into 5/min"):
        rate_limited("partner", "5/min", cost=6)
    with pytest.raises(InvalidCost):
        rate_limited("exports", cost=-1)


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
    assert 30 <= waits(run) <= 60
    policy.rates = "4/hour"
    policy.save()
    assert work(rate_limited("exports", cost=3))() == "done"
    assert 15 <= waits(run) <= 60
    policy.rates = "blocked"
    policy.save()
    assert 30 <= waits(run) <= 60
    assert "tasks wait for 'exports'" in problems.recent()["tasks"]


def test_a_task_that_no_policy_limits_is_logged(work: Work, caplog: Any) -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="nightly-task"), rates="1/hour")
    assert [work(rate_limited("nightly-task"))() for _ in range(2)] == ["done", "done"]
    assert "checks of 'nightly-task' without a client are not limited" in caplog.text


def test_a_task_holds_its_slot_while_it_runs(app: celery.Celery) -> None:
    """The slot was released when the task began."""
    exports = Endpoint.objects.create(name="exports")
    RatePolicy.objects.create(endpoint=exports, rates="1 concurrent", counted_per="everyone")
    seen: list[bool] = []

    @app.task(name="export")
    @rate_limited("exports")
    def task() -> None:
        gc.collect()
        for left in list(unreleased):  # as the thread does
            left.keeper.release_slots([left.lease])
        with check_caller(scope="exports") as decision:
            seen.append(decision.allowed)

    for _ in range(2):
        run_by_worker(app, task, {})
    assert seen == [False, False]
    with check_caller(scope="exports") as decision:
        assert decision.allowed
    with pytest.raises(InvalidRate, match="only a policy can have"):
        rate_limited("partner", "1 concurrent, 5/s")


def test_waits_grow_up_to_a_minute(work: Work) -> None:
    limit = rate_limited("partner", "1/20s")
    assert work(limit)() == "done"
    assert waits(work(limit)) <= 30
    countdowns = [waits(work(limit, ratequota_waits=2000)) for _ in range(20)]
    assert 30 < max(countdowns) <= 60
    assert len(set(countdowns)) == 20, "tasks that were refused together do not ask together"


def test_a_task_waits_while_redis_is_down(work: Work, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0", "ON_ERROR": "allow"}
    assert 30 <= waits(work(rate_limited("partner", "2/min"))) <= 60
    assert "as Redis is unavailable" in problems.recent()["tasks"]
    assert work(rate_limited("exports"))() == "done", "an endpoint's policies have on_error"


def test_a_name_shares_no_counter_with_requests(work: Work, redis_client: redis.Redis) -> None:
    assert work(rate_limited("everyone", "1/min"))() == "done"
    assert redis_client.exists("rqtest:{everyone}:task:sl60")


def test_without_a_worker_a_task_is_not_limited(app: celery.Celery) -> None:
    @app.task
    @rate_limited("partner", "1/min")
    def join(word: str, *, end: str) -> str:
        """Joins."""
        return word + end

    assert [join("a", end="b") for _ in range(3)] == ["ab"] * 3
    assert [join.apply(("a",), {"end": "b"}).get() for _ in range(3)] == ["ab"] * 3
    alone = rate_limited("partner", "1/min")(lambda: "done")
    assert [alone() for _ in range(3)] == ["done"] * 3
    assert join.__doc__ == "Joins."
    with pytest.raises(TypeError):
        join.delay("a", stop="b")


def test_what_a_task_is_sent_with_goes_on(app: celery.Celery, work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """``x-death`` would make RabbitMQ drop the task."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(app, "send_task", lambda *args, **options: sent.append(options))
    limit = rate_limited("partner", "1/min")
    assert work(limit)() == "done"
    waits(work(limit, tenant="acme", **{"x-death": "of RabbitMQ"}))
    assert sent[0]["headers"] == {"tenant": "acme", "ratequota_waits": 1}
    assert 1 < sent[0]["countdown"] <= 60


def test_a_tasks_own_retries_begin_to_wait_anew(app: celery.Celery) -> None:
    seen: list[Any] = []

    @app.task(bind=True, name="retries")
    @rate_limited("partner", "1/min")
    def task(self: Any) -> None:
        seen.append(dict(self.request.headers))

    run_by_worker(app, task, {"ratequota_waits": 7, "tenant": "acme"})
    assert seen == [{"tenant": "acme"}]
