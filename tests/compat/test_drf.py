"""DRF's throttles on this engine: the decisions of DRF's own throttles, and no more than the limit under load.

DRF's own tests run against them as well: tests/compat/drf.sh.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import redis
from django.contrib.auth.models import AnonymousUser
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.test import RequestFactory
from rest_framework import throttling
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from django_ratequota.compat import drf
from tests.support.threads import on_threads

pytestmark = pytest.mark.usefixtures("redis_client", "empty_cache")


@pytest.fixture
def empty_cache() -> None:
    caches["local"].clear()


class PerName(drf.SimpleRateThrottle):
    """Counts by the request's ``name``."""

    rate = "3/min"
    scope = "name"

    def get_cache_key(self, request: Any, view: Any) -> str | None:
        return getattr(request, "name", "somebody")


def allowed(kind: type, times: int = 1, request: Any = None) -> list[bool]:
    return [kind().allow_request(request, None) for _ in range(times)]


def throttle_class(base: type = PerName, **attributes: Any) -> Any:
    return type("Throttle", (base,), attributes)


# --- The same classes. ---


def test_each_throttle_subclasses_the_drf_class_it_replaces() -> None:
    """With DRF's order of base classes: a subclass of DRF's UserRateThrottle may inherit from this one instead."""
    for name in ("SimpleRateThrottle", "AnonRateThrottle", "UserRateThrottle", "ScopedRateThrottle"):
        theirs, mine = getattr(throttling, name), getattr(drf, name)
        assert issubclass(mine, drf.SimpleRateThrottle)
        assert [one for one in mine.__mro__ if one.__module__ == throttling.__name__] == list(theirs.__mro__[:-1])
    assert drf.BaseThrottle is throttling.BaseThrottle


def test_attributes_set_on_one_class_do_not_affect_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """DRF's own tests set the scope of SimpleRateThrottle, and tests of other projects set its rates."""
    monkeypatch.setattr(drf.SimpleRateThrottle, "scope", "else", raising=False)
    monkeypatch.setattr(drf.SimpleRateThrottle, "THROTTLE_RATES", {"anon": "5/day", "user": "6/day"}, raising=False)
    anonymous, user = drf.AnonRateThrottle(), drf.UserRateThrottle()
    assert [(anonymous.scope, anonymous.num_requests), (user.scope, user.num_requests)] == [("anon", 5), ("user", 6)]


# --- The same decisions. ---


class Clock:
    seconds = 0.0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rate", ["1/min", "3/min", "7/hour"])
def test_decisions_waits_and_history_equal_those_of_drf(rate: str, seed: int) -> None:
    """Over hundreds of requests at random times."""
    chance = random.Random(seed)
    attributes = {
        "rate": rate,
        "timer": lambda self: Clock.seconds,
        "get_cache_key": lambda self, request, view: request,
    }
    theirs = type("Theirs", (throttling.SimpleRateThrottle,), {**attributes, "cache": caches["local"]})
    mine = type("Mine", (drf.SimpleRateThrottle,), attributes)
    Clock.seconds = chance.choice([0.0, 1.75e9])
    outcomes = []
    period = theirs().duration
    for _ in range(150):
        # Eighths of the period: some requests come exactly when earlier ones expire.
        Clock.seconds += chance.choice([0, 0, 1, 2, 8]) * period / 8
        name, one, other = chance.choice("ab"), theirs(), mine()
        outcomes.append(one.allow_request(name, None))
        assert other.allow_request(name, None) is outcomes[-1]
        if not outcomes[-1] or chance.random() < 0.5:
            assert other.wait() == pytest.approx(one.wait())
        assert len(other.history) == len(one.history)
        assert other.history[:1] + other.history[-1:] == pytest.approx(one.history[:1] + one.history[-1:])
        assert other.now == one.now
        assert (other.key, other.num_requests, other.duration) == (one.key, one.num_requests, one.duration)
    assert set(outcomes) == {True, False}


def test_what_admits_all_requests_and_what_none() -> None:
    for free in ({"rate": None, "THROTTLE_RATES": {"name": None}}, {"get_cache_key": lambda *_: None}):
        assert allowed(throttle_class(**free), 5) == [True] * 5
    closed = throttle_class(rate="0/hour")()
    assert not closed.allow_request(None, None)
    assert (closed.wait(), closed.history) == (3600, [])


def test_parse_rate_may_return_a_custom_period() -> None:
    throttle = throttle_class(rate="2/10m", parse_rate=lambda self, rate: (2, 600))
    assert allowed(throttle, 3) == [True, True, False]
    last = throttle()
    last.allow_request(None, None)
    assert 590 < last.wait() <= 600
    with pytest.raises(ImproperlyConfigured, match="a rate cannot be counted: period must be"):
        allowed(throttle_class(parse_rate=lambda self, rate: (3, 0)))


@pytest.mark.parametrize(("other", "here"), [("5/min", [2, 2, 2]), ("5/hour", [3, 0, 0])])
def test_two_rates_of_one_scope(other: str, here: list[int]) -> None:
    """DRF adds a request to their one list twice, and the minute's throttle drops the hour's older requests."""

    def admitted(base: type, **more: Any) -> list[int]:
        """Send five requests in each of three minutes, all checked by both throttles, as DRF does."""
        fields = {"timer": lambda self: Clock.seconds, "get_cache_key": lambda *_: "one", **more}
        throttles = [type("Throttle", (base,), {"rate": rate, **fields}) for rate in ("3/min", other)]
        Clock.seconds, counts = 1000.0, []
        for _ in range(3):
            answers = [[kind().allow_request(None, None) for kind in throttles] for _ in range(5)]
            counts.append(sum(map(all, answers)))
            Clock.seconds += 61
        return counts

    assert admitted(throttling.SimpleRateThrottle, cache=caches["local"]) == [2, 2, 2]
    assert admitted(drf.SimpleRateThrottle) == here


def test_wait_after_the_rate_was_lowered() -> None:
    """DRF returns None then, and sends no Retry-After."""
    allowed(PerName, 3)
    lowered = throttle_class(rate="1/min")()
    assert not lowered.allow_request(None, None)
    assert 55 < lowered.wait() <= 60


# --- Views. ---


def view(*throttles: type, **attributes: Any) -> Any:
    body = {"throttle_classes": throttles, "get": lambda self, request: Response("ran"), **attributes}
    return type("View", (APIView,), body).as_view()


def get(view: Any, user: Any = None, address: str = "203.0.113.7") -> Any:
    request = APIRequestFactory().get("/", REMOTE_ADDR=address)
    request.user = user or AnonymousUser()
    return view(request)


def test_scoped_throttles_use_the_scope_of_the_view_and_the_rate_of_the_settings() -> None:
    throttle = throttle_class(drf.ScopedRateThrottle, THROTTLE_RATES={"uploads": "1/day", "contacts": "2/day"})
    for attributes, codes in (
        ({"throttle_scope": "uploads"}, [200, 429, 429]),
        ({"throttle_scope": "contacts"}, [200, 200, 429]),
        ({}, [200] * 3),
    ):
        limited = view(throttle, **attributes)
        assert [get(limited).status_code for _ in range(3)] == codes
    refused = get(view(throttle, throttle_scope="uploads"))
    assert f"available in {refused['Retry-After']} seconds" in refused.data["detail"]
    assert 86_390 < int(refused["Retry-After"]) <= 86_400


# --- Beyond DRF's throttles. ---


def test_concurrent_requests_do_not_exceed_the_limit() -> None:
    """DRF's throttles read, add and write: they admitted all of these."""
    crowd, limit = 40, 15
    throttle = throttle_class(rate=f"{limit}/day")
    assert sum(on_threads(crowd, lambda: throttle().allow_request(None, None))) == limit


def test_each_request_is_one_call_to_redis(redis_client: redis.Redis) -> None:
    def calls() -> int:
        return int(redis_client.info("commandstats")["cmdstat_evalsha"]["calls"])

    allowed(PerName)
    before = calls()
    throttles = [PerName() for _ in range(4)]
    assert [one.allow_request(None, None) for one in throttles] == [True, True, False, False]
    assert 0 < throttles[-1].wait() <= 60
    assert calls() - before == 4


def test_the_clock_is_that_of_redis_unless_timer_is_set() -> None:
    """A host with a wrong clock admits no more than others; a test that needs another time sets ``timer``."""
    import time_machine

    throttle = throttle_class(rate="1/min")
    assert allowed(throttle) == [True]
    with time_machine.travel(time.time() + 3600):
        later = throttle()
        assert not later.allow_request(None, None)
        assert later.now < time.time() - 3000
    Clock.seconds = 0.0
    moved = throttle_class(
        rate="1/min", scope="moved", timer=lambda self: Clock.seconds, get_cache_key=lambda *_: "moved"
    )
    assert allowed(moved, 2) == [True, False]
    Clock.seconds = 60.0
    assert allowed(moved, 2) == [True, False]


# --- Overrides. ---


def test_a_throttle_success_of_its_own_works_as_in_drf() -> None:
    """As in existing projects: one checks before the work and counts after it, the other watches."""
    seen = []

    class Recorded(PerName):
        cache = caches["local"]

        def throttle_success(self) -> bool:
            return True

        def record(self) -> None:
            self.history.insert(0, self.now)
            self.cache.set(self.key, self.history, self.duration)

    class Watching(PerName):
        cache = caches["local"]

        def throttle_success(self) -> bool:
            seen.append(len(self.history))
            return super().throttle_success()

    assert allowed(Recorded, 9) == [True] * 9
    for _ in range(3):
        throttle = Recorded()
        assert throttle.allow_request(None, None)
        throttle.record()
    assert allowed(Recorded, 2) == [False, False]
    caches["local"].clear()
    assert allowed(Watching, 4) == [True, True, True, False]
    assert seen == [0, 1, 2]


def test_an_allow_request_that_calls_throttle_success_works_as_in_drf() -> None:
    class Own(PerName):
        cache = caches["local"]

        def allow_request(self, request: Any, view: Any) -> bool:
            self.key, self.now = "own", self.timer()
            self.history = self.cache.get(self.key, [])
            return self.throttle_failure() if len(self.history) >= 2 else self.throttle_success()

    assert allowed(Own, 3) == [True, True, False]
    last = Own()
    assert not last.allow_request(None, None)
    assert last.wait() == pytest.approx(30, abs=1)


def test_throttle_failure_is_called_when_a_request_is_refused() -> None:
    histories = []
    throttle = throttle_class(rate="1/day", throttle_failure=lambda self: bool(histories.append(self.history)))
    assert allowed(throttle, 2) == [True, False]
    assert [len(history) for history in histories] == [1]


# --- Which Redis. ---


@pytest.mark.parametrize("alias", ["other", "djangos"])
def test_requests_are_counted_in_the_redis_of_the_throttles_cache(more_caches: redis.Redis, alias: str) -> None:
    allowed(PerName, 3)
    throttle = throttle_class(cache=caches[alias])
    assert allowed(throttle, 4) == [True, True, True, False]
    assert [key.partition(b"}")[0][:18] for key in more_caches.scan_iter()] == [b"rqtest:{throttle:~"]
    caches[alias].clear()
    assert allowed(throttle) == [True]


def test_a_dummy_cache_never_throttles(more_caches: redis.Redis, settings: Any) -> None:
    throttle = throttle_class(rate="1/day", cache=caches["dummy"])()
    assert [throttle.allow_request(None, None) for _ in range(3)] == [True] * 3
    assert throttle.history == []
    settings.CACHES = {"default": settings.CACHES["dummy"]}
    assert allowed(throttle_class(rate="1/day"), 3) == [True] * 3


def test_a_cache_that_is_not_one_redis_is_an_error(more_caches: redis.Redis, settings: Any) -> None:
    for alias in ("local", "two"):
        with pytest.raises(ImproperlyConfigured, match=r"Throttle\.cache (is|cannot be used)"):
            allowed(throttle_class(cache=caches[alias]))
    settings.CACHES = {"default": settings.CACHES["local"]}
    with pytest.raises(ImproperlyConfigured, match="LocMemCache, not django_redis"):
        allowed(PerName)


# --- Without Redis. ---


@pytest.mark.parametrize(
    ("on_error", "codes"), [("allow", [200] * 5), ("local", [200] * 2 + [429] * 3), ("deny", [503] * 5)]
)
def test_without_redis_on_error_decides(settings: Any, on_error: str, codes: list[int]) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "ON_ERROR": on_error, "LOCAL_SHARE": 2}
    limited = view(throttle_class(rate="4/hour"))
    responses = [get(limited) for _ in range(5)]
    assert [response.status_code for response in responses] == codes
    assert ("Retry-After" in responses[-1]) is (codes[-1] != 200)
    if on_error == "allow":
        throttle = PerName()
        assert throttle.allow_request(Request(RequestFactory().get("/")), None)
        assert throttle.history == []
