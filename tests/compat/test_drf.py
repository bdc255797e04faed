"""DRF's throttles on our engine: what DRF's own decide, and what they cannot: hold under load.

DRF's own tests run against them as well: tests/compat/drf.sh.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import redis
from django.contrib.auth.models import AnonymousUser, User
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.test import RequestFactory
from rest_framework import throttling as drf
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from django_ratequota.compat import drf as ours
from tests.support import server

pytestmark = pytest.mark.usefixtures("redis_client", "empty_cache")

NAMES = ["SimpleRateThrottle", "AnonRateThrottle", "UserRateThrottle", "ScopedRateThrottle"]


@pytest.fixture
def empty_cache() -> None:
    caches["local"].clear()


class PerName(ours.SimpleRateThrottle):
    """Counts by the request's ``name``."""

    rate = "3/min"
    scope = "name"

    def get_cache_key(self, request: Any, view: Any) -> str | None:
        return getattr(request, "name", "somebody")


def asked(kind: type, times: int = 1, request: Any = None) -> list[bool]:
    return [kind().allow_request(request, None) for _ in range(times)]


def with_(base: type = PerName, **attributes: Any) -> Any:
    return type("Throttle", (base,), attributes)


# --- The same classes. ---


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_subclass_of_the_one_it_stands_in_for(name: str) -> None:
    """So are subclasses of it, in DRF's order: what inherits from DRF's UserRateThrottle may inherit from ours."""
    kind = getattr(ours, name)
    assert issubclass(kind, (getattr(drf, name), ours.SimpleRateThrottle))
    assert [one for one in kind.__mro__ if one.__module__ == drf.__name__] == [
        one for one in getattr(drf, name).__mro__ if one is not object
    ]
    assert ours.BaseThrottle is drf.BaseThrottle


def test_attributes_of_one_class_are_not_those_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As DRF's own tests set the scope of SimpleRateThrottle, and those of other projects its rates."""
    monkeypatch.setattr(ours.SimpleRateThrottle, "scope", "else", raising=False)
    monkeypatch.setattr(ours.SimpleRateThrottle, "THROTTLE_RATES", {"anon": "5/day", "user": "6/day"}, raising=False)
    anonymous, user = ours.AnonRateThrottle(), ours.UserRateThrottle()
    assert [(anonymous.scope, anonymous.num_requests), (user.scope, user.num_requests)] == [("anon", 5), ("user", 6)]


# --- The same decisions. ---


class Clock:
    seconds = 0.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rate", ["1/sec", "3/min", "7/hour"])
def test_whatever_is_asked_when_both_say_the_same(rate: str, seed: int) -> None:
    """Admitted or not, how long to wait, the history: over hundreds of requests at random moments."""
    chance = random.Random(seed)
    attributes = {
        "rate": rate,
        "timer": lambda self: Clock.seconds,
        "get_cache_key": lambda self, request, view: request,
    }
    theirs = type("Theirs", (drf.SimpleRateThrottle,), {**attributes, "cache": caches["local"]})
    mine = type("Mine", (ours.SimpleRateThrottle,), attributes)
    Clock.seconds = chance.choice([0.0, 1.75e9])
    outcomes = []
    period = theirs().duration
    for _ in range(150):
        # Halves of a quarter of the period: moments at which requests expire exactly are among them.
        Clock.seconds += chance.choice([0, 0, 1, 2, 8]) * period / 8
        name, one, other = chance.choice("ab"), theirs(), mine()
        outcomes.append(one.allow_request(name, None))
        assert other.allow_request(name, None) is outcomes[-1]
        if not outcomes[-1] or chance.random() < 0.5:
            assert other.wait() == pytest.approx(one.wait())
        assert other.history == pytest.approx(one.history)
        assert other.now == one.now
        assert (other.key, other.num_requests, other.duration) == (one.key, one.num_requests, one.duration)
    assert set(outcomes) == {True, False}


def test_a_rate_of_none_counts_nothing_and_one_of_zero_admits_nothing() -> None:
    class Unlimited(PerName):
        rate = None
        THROTTLE_RATES = {"name": None}

    assert asked(Unlimited, 5) == [True] * 5
    closed = with_(rate="0/hour")()
    assert not closed.allow_request(None, None)
    assert (closed.wait(), closed.history) == (3600, [])


def test_who_has_no_key_is_not_throttled() -> None:
    throttle = with_(rate="1/day", get_cache_key=lambda self, request, view: None)
    assert asked(throttle, 3) == [True] * 3


def test_periods_of_ones_own() -> None:
    throttle = with_(rate="2/10m", parse_rate=lambda self, rate: (2, 600))
    assert asked(throttle, 3) == [True, True, False]
    last = throttle()
    last.allow_request(None, None)
    assert 590 < last.wait() <= 600


def test_a_rate_that_no_engine_counts_is_named() -> None:
    with pytest.raises(ImproperlyConfigured, match="3 requests in 0 seconds cannot be counted"):
        asked(with_(parse_rate=lambda self, rate: (3, 0)))


def test_a_wait_when_the_rate_was_lowered() -> None:
    """DRF says None then, and its clients are told nothing."""
    asked(PerName, 3)
    lowered = with_(rate="1/min")()
    assert not lowered.allow_request(None, None)
    assert 55 < lowered.wait() <= 60


# --- Views. ---


def view(*kinds: type, **attributes: Any) -> Any:
    body = {"throttle_classes": kinds, "get": lambda self, request: Response("ran"), **attributes}
    return type("View", (APIView,), body).as_view()


def get(view: Any, user: Any = None, address: str = "203.0.113.7") -> Any:
    request = APIRequestFactory().get("/", REMOTE_ADDR=address)
    request.user = user or AnonymousUser()
    return view(request)


@pytest.mark.django_db
def test_users_and_addresses_are_counted_apart() -> None:
    alice, bob = (User.objects.create(username=name) for name in ("alice", "bob"))
    limited = view(with_(ours.UserRateThrottle, rate="1/hour"))
    who = [(alice, "203.0.113.7"), (bob, "203.0.113.7"), (None, "203.0.113.7"), (None, "203.0.113.8")]
    assert [get(limited, *one).status_code for one in who] == [200] * 4
    assert [get(limited, *one).status_code for one in who] == [429] * 4
    anonymous = view(with_(ours.AnonRateThrottle, rate="1/hour"))
    assert [get(anonymous, alice).status_code for _ in range(3)] == [200] * 3
    assert [get(anonymous).status_code for _ in range(2)] == [200, 429]


def test_a_scope_is_that_of_the_view_and_its_rate_that_of_the_settings() -> None:
    throttle = with_(ours.ScopedRateThrottle, THROTTLE_RATES={"uploads": "1/day", "contacts": "2/day"})
    uploads, contacts, free = (
        view(throttle, throttle_scope="uploads"),
        view(throttle, throttle_scope="contacts"),
        view(throttle),
    )
    assert [get(uploads).status_code for _ in range(2)] == [200, 429]
    assert [get(contacts).status_code for _ in range(3)] == [200, 200, 429]
    assert [get(free).status_code for _ in range(3)] == [200] * 3
    refused = get(uploads)
    assert refused.data == {
        "detail": f"Request was throttled. Expected available in {refused['Retry-After']} seconds."
    }
    assert 86_390 < int(refused["Retry-After"]) <= 86_400


# --- What DRF's cannot. ---


def test_a_crowd_is_held_to_the_limit() -> None:
    """DRF's read, add and write: all of these were admitted."""
    crowd, limit = 40, 15
    throttle, together = with_(rate=f"{limit}/day"), Barrier(crowd)

    def ask(_: int) -> bool:
        together.wait(timeout=60)
        return throttle().allow_request(None, None)

    with ThreadPoolExecutor(crowd) as threads:
        assert sum(threads.map(ask, range(crowd))) == limit


def test_a_request_is_one_call_to_redis_refused_or_not(redis_client: redis.Redis) -> None:
    def calls() -> int:
        return int(redis_client.info("commandstats")["cmdstat_evalsha"]["calls"])

    asked(PerName)
    before = calls()
    throttles = [PerName() for _ in range(4)]
    assert [one.allow_request(None, None) for one in throttles] == [True, True, False, False]
    assert 0 < throttles[-1].wait() <= 60
    assert calls() - before == 4


def test_the_clock_is_the_servers() -> None:
    """A host whose clock is off admits no more than others do, and a test that moves it moves ``timer``."""
    import time_machine

    throttle = with_(rate="1/min")
    assert asked(throttle) == [True]
    with time_machine.travel(time.time() + 3600):
        later = throttle()
        assert not later.allow_request(None, None)
        assert later.now < time.time() - 3000
    Clock.seconds = 0.0
    moved = with_(rate="1/min", scope="moved", timer=lambda self: Clock.seconds, get_cache_key=lambda *_: "moved")
    assert asked(moved, 2) == [True, False]
    Clock.seconds = 60.0
    assert asked(moved, 2) == [True, False]


# --- Overrides. ---


def test_a_throttle_that_says_itself_what_counts_goes_on_as_drf_has_it() -> None:
    class Recorded(PerName):
        """As in the wild: looks before the work, and counts after it."""

        cache = caches["local"]

        def throttle_success(self) -> bool:
            return True

        def record(self) -> None:
            self.history.insert(0, self.now)
            self.cache.set(self.key, self.history, self.duration)

    assert asked(Recorded, 9) == [True] * 9
    for _ in range(3):
        throttle = Recorded()
        assert throttle.allow_request(None, None)
        throttle.record()
    assert asked(Recorded, 2) == [False, False]


def test_a_throttle_that_only_watches_its_successes_counts_all_the_same() -> None:
    seen = []

    class Watching(PerName):
        cache = caches["local"]

        def throttle_success(self) -> bool:
            seen.append(len(self.history))
            return super().throttle_success()

    assert asked(Watching, 4) == [True, True, True, False]
    assert seen == [0, 1, 2]


def test_a_throttle_with_a_way_of_its_own_may_end_in_ours() -> None:
    class Own(PerName):
        cache = caches["local"]

        def allow_request(self, request: Any, view: Any) -> bool:
            self.key, self.now = "own", self.timer()
            self.history = self.cache.get(self.key, [])
            return self.throttle_failure() if len(self.history) >= 2 else self.throttle_success()

    assert asked(Own, 3) == [True, True, False]
    last = Own()
    assert not last.allow_request(None, None)
    assert last.wait() == pytest.approx(30, abs=1)


def test_a_failure_is_told() -> None:
    told = []
    throttle = with_(rate="1/day", throttle_failure=lambda self: bool(told.append(self.history)))
    assert asked(throttle, 2) == [True, False]
    assert [len(history) for history in told] == [1]


# --- Which Redis. ---


@pytest.fixture
def more_caches(settings: Any) -> Any:
    """Caches of every kind; database 9 of the test server is emptied."""
    other = server.url().rpartition("/")[0] + "/9"
    settings.CACHES = settings.CACHES | {
        "other": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": other},
        "djangos": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": other},
        "dummy": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"},
        "two": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": [other, server.url()],
            "OPTIONS": {"CLIENT_CLASS": "django_redis.client.ShardClient"},
        },
    }
    with redis.Redis.from_url(other) as client:
        client.flushdb()
        yield client
        client.flushdb()


@pytest.mark.parametrize("alias", ["other", "djangos"])
def test_a_cache_of_ones_own_is_where_is_counted(more_caches: redis.Redis, alias: str) -> None:
    asked(PerName, 3)
    throttle = with_(cache=caches[alias])
    assert asked(throttle, 4) == [True, True, True, False]
    assert [key.partition(b"}")[0][:18] for key in more_caches.scan_iter()] == [b"rqtest:{throttle:~"]
    caches[alias].clear()
    assert asked(throttle) == [True]


def test_a_dummy_cache_never_throttles(more_caches: redis.Redis, settings: Any) -> None:
    throttle = with_(rate="1/day", cache=caches["dummy"])()
    assert [throttle.allow_request(None, None) for _ in range(3)] == [True] * 3
    assert throttle.history == []
    settings.CACHES = {"default": settings.CACHES["dummy"]}
    assert asked(with_(rate="1/day"), 3) == [True] * 3


@pytest.mark.parametrize("alias", ["local", "two"])
def test_a_cache_that_is_not_one_redis_is_an_error_that_says_so(more_caches: redis.Redis, alias: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"Throttle\.cache names a"):
        asked(with_(cache=caches[alias]))


def test_a_default_cache_that_is_not_redis_is_an_error_that_says_so(settings: Any) -> None:
    settings.CACHES = {"default": settings.CACHES["local"]}
    with pytest.raises(ImproperlyConfigured, match="LocMemCache, not django_redis"):
        asked(PerName)


# --- Without Redis. ---


@pytest.mark.parametrize(
    ("on_error", "codes"), [("allow", [200] * 5), ("local", [200] * 2 + [429] * 3), ("deny", [503] * 5)]
)
def test_without_redis_on_error_decides(settings: Any, on_error: str, codes: list[int]) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "ON_ERROR": on_error, "LOCAL_SHARE": 2}
    limited = view(with_(rate="4/hour"))
    responses = [get(limited) for _ in range(5)]
    assert [response.status_code for response in responses] == codes
    assert ("Retry-After" in responses[-1]) is (codes[-1] != 200)


def test_without_redis_there_is_no_history(settings: Any) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0"}
    throttle = PerName()
    assert throttle.allow_request(Request(RequestFactory().get("/")), None)
    assert throttle.history == []
