"""django-ratelimit on this engine: its own tests, and what they do not cover."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser, User
from django.core.cache import InvalidCacheBackendError, caches
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, RequestFactory
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View

from django_ratequota import Limiter
from django_ratequota.compat.limiters import limiter_of
from django_ratequota.compat.ratelimit import (
    ALL,
    Ratelimited,
    aget_usage,
    ais_ratelimited,
    core,
    get_usage,
    is_ratelimited,
    ratelimit,
)
from tests.conftest import Get
from tests.support import server

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("redis_client", "fixed_clock")


@pytest.fixture
def fixed_clock(monkeypatch: pytest.MonkeyPatch, clock: Any) -> None:
    """No window ends between two requests of one test."""
    monkeypatch.setattr(core, "limiter_of", functools.partial(core.limiter_of, clock=clock))


def get(address: str = "203.0.113.7", **attributes: Any) -> Any:
    request = RequestFactory().get("/", **{"REMOTE_ADDR": address, **attributes.pop("headers", {})})
    for name, value in attributes.items():
        setattr(request, name, value)
    return request


def limited(times: int, request: Any = None, **options: Any) -> list[bool]:
    options = {"group": "g", "key": "ip", "increment": True, **options}
    return [is_ratelimited(request or get(), **options) for _ in range(times)]


# --- The tests of django-ratelimit. ---


def test_the_tests_of_django_ratelimit_pass_unchanged() -> None:
    """They run on their own server, because they empty it. Warnings are failures."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RATEQUOTA_TEST_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.compat.django_ratelimit"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Ran 52 tests in .*\n\nOK$", done.stderr, re.MULTILINE), done.stderr


# --- What is counted. ---


def test_time_left_is_until_the_end_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    at = datetime(2026, 11, 21, 13, 59, 50, tzinfo=UTC)
    limiter = Limiter(
        client=redis.Redis.from_url(server.url()), prefix="rqtest", clock=lambda: int(at.timestamp()) * 10**6
    )
    monkeypatch.setattr(core, "limiter_of", lambda *_args, **_options: limiter)
    left = {"5/s": 1, "5/m": 10, "5/15m": 10, "5/h": 10, "5/d": 36_010, (5, 90): 10}
    for rate, seconds in left.items():
        for increment in (False, True):
            usage = get_usage(get(), group="g", key="ip", rate=rate, increment=increment)
            assert usage["time_left"] == seconds, (rate, increment)
    limiter.store.close()


def test_other_groups_rates_and_methods_are_counted_separately(redis_client: redis.Redis, settings: Any) -> None:
    joined = [("a", "1/60sb"), ("a1/60s", "b")]  # in django-ratelimit, these are one text
    for one, other in (
        ({"group": "ab"}, {"group": "a"}),
        ({"rate": "1/m"}, {"rate": "1/h"}),
        ({"rate": "2/m"}, {"rate": "1/m"}),
        ({"method": "GET"}, {"method": ["GET", "POST"]}),
        ({"method": "GET"}, {"method": ALL}),
        [{"group": group, "key": lambda *_, value=value: value} for group, value in joined],
    ):
        redis_client.flushdb()
        limited(3, **{"rate": "1/m", **one})
        assert limited(1, **{"rate": "1/m", **other}) == [False], (one, other)
    assert limited(1, rate="1/m", method=["post", "GET"]) == [False]
    assert limited(1, rate=(1, 60), method=["get", "POST"]) == [True], "equal ones are counted together"
    settings.RATELIMIT_CACHE_PREFIX = "staging:"
    assert limited(1, rate=(1, 60), method=["get", "POST"]) == [False]


def test_key_values_of_any_length_and_content_are_hashed(redis_client: redis.Redis) -> None:
    for value in ("x" * 5000, "\ud800", "{user:1}:0", "\x00", ""):
        assert limited(2, key=lambda group, request, value=value: value, rate="1/h") == [False, True]
    keys = list(redis_client.scan_iter("rqtest:*"))
    assert len(keys) == 5
    assert all(re.fullmatch(rb"rqtest:\{ratelimit:~[\w-]{20}\}:0:fw3600", key) for key in keys)


# --- Rates and keys. ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # django-ratelimit reads 5/month as 5/m, and 5/M as 5/s.
        ({"rate": "5/month"}, "5/m, 100/15m or 1000/d, not '5/month'"),
        ({"rate": "5"}, "a rate must be text such as 5/m"),
        ({"rate": "5/M"}, "a rate must be text such as 5/m"),
        ({"rate": "٥/m"}, "a rate must be text such as 5/m"),
        ({"rate": "5/0s"}, "the period of a rate must be above 0"),
        ({"rate": (5, 0)}, "the period of a rate must be above 0"),
        ({"rate": "5/9999d"}, "a rate cannot be counted: period must be"),
        ({"key": None}, "pass key='ip'"),
        ({"key": "nobody"}, "there is no key 'nobody'; there are ip, user, user_or_ip, get:NAME"),
        ({"key": "cookie:a.b"}, "there is no key 'cookie:a.b'"),
        ({"key": lambda group, request: 7}, "must return text, not int"),
        ({"key": lambda group, request: None}, "must return text, not NoneType"),
        ({"method": None}, "method is 'POST', a list such as UNSAFE, or ALL, not None"),
        ({"method": [None]}, "method is 'POST'"),
        ({"method": b"GET"}, "method is 'POST'"),
        ({"method": iter(["GET"])}, "method is 'POST'"),
        ({"method": {"GET": 1}.keys()}, "method is 'POST'"),
    ],
)
def test_an_invalid_rate_key_or_method_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=re.escape(message)):
        limited(1, **{"rate": "1/m", **options})


@pytest.mark.parametrize("where", ["REMOTE_ADDR", "HTTP_X_REAL_IP"])
def test_addresses_are_masked(settings: Any, where: str) -> None:
    """Under the mask of IPv6, all mapped IPv4 addresses would be one client."""
    if where != "REMOTE_ADDR":
        settings.RATELIMIT_IP_META_KEY = where
    for address, expected in (
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:0:1:2::3", "2001:db8:0:1::"),
        ("fe80::1%eth0", "fe80::"),
    ):
        assert core._get_ip(get("127.0.0.1", headers={where: address})) == expected


def test_trusted_proxies_are_respected(settings: Any) -> None:
    request = get("10.0.0.1", headers={"HTTP_X_FORWARDED_FOR": "198.51.100.9, 203.0.113.7"})
    assert core._get_ip(request) == "10.0.0.1"
    settings.RATEQUOTA = settings.RATEQUOTA | {"TRUSTED_PROXIES": ["10.0.0.0/8"]}
    assert core._get_ip(request) == "203.0.113.7"


def test_an_invalid_address_is_an_error(settings: Any) -> None:
    settings.RATELIMIT_IP_META_KEY = "HTTP_X_FORWARDED_FOR"
    for address in ("", "unknown", "203.0.113.7, 198.51.100.9", "1.2.3.4/8"):
        with pytest.raises(ImproperlyConfigured, match="is not an IP address; set RATEQUOTA"):
            core._get_ip(get(headers={"HTTP_X_FORWARDED_FOR": address}))


# --- Views. ---


def refusing(request: HttpRequest, exception: Exception) -> HttpResponse:
    return HttpResponse(type(exception).__name__, status=429)


async def arefusing(request: HttpRequest, exception: Exception) -> HttpResponse:
    return refusing(request, exception)


once = ratelimit(key="ip", rate="1/d")
per_caller = ratelimit(key="user_or_ip", rate="1/d", block=False)


def watched(*args: Any) -> HttpResponse:
    return HttpResponse(str(args[-1].limited))


async def awatched(*args: Any) -> HttpResponse:
    return watched(*args)


def kinds(view: Any) -> list[Any]:
    """The view as a function, as the method of a class that is limited, and as a limited method of a class."""
    limited_class = method_decorator(once, name="dispatch")(type("Class", (View,), {"get": view}))
    with_limited_method = type("Class", (View,), {"get": method_decorator(once)(view)})
    return [once(view), limited_class.as_view(), with_limited_method.as_view()]


KINDS = ["function", "class", "method", "afunction", "aclass", "amethod"]
urlpatterns = [
    *(path(f"{name}/", view) for name, view in zip(KINDS, kinds(watched) + kinds(awatched), strict=True)),
    path("watching/", per_caller(watched)),
    path("awatching/", per_caller(awatched)),
]


@pytest.fixture
def client_get(get: Get, settings: Any) -> Get:
    """GET of the views above, through Django's sync or async handler."""
    settings.ROOT_URLCONF = __name__
    return get


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_view_is_limited(client_get: Any, kind: str) -> None:
    first, second = client_get(f"/{kind}/"), client_get(f"/{kind}/")
    assert (first.status_code, first.content) == (200, b"False")
    assert second.status_code == 403


@pytest.mark.parametrize("view", ["refusing", "arefusing"])
@pytest.mark.parametrize("kind", ["function", "afunction"])
def test_the_middleware_responds_with_ratelimit_view(client_get: Any, settings: Any, kind: str, view: str) -> None:
    settings.MIDDLEWARE = ["django_ratequota.compat.ratelimit.middleware.RatelimitMiddleware"]
    settings.RATELIMIT_VIEW = f"{__name__}.{view}"
    assert client_get(f"/{kind}/").status_code == 200
    refused = client_get(f"/{kind}/")
    assert (refused.status_code, refused.content) == (429, b"Ratelimited")


def test_the_middleware_without_ratelimit_view_is_an_error() -> None:
    from django_ratequota.compat.ratelimit.middleware import RatelimitMiddleware

    middleware = RatelimitMiddleware(lambda request: HttpResponse())
    assert middleware.process_exception(get(), PermissionDenied()) is None
    with pytest.raises(ImproperlyConfigured, match="needs RATELIMIT_VIEW"):
        middleware.process_exception(get(), Ratelimited())


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["watching", "awatching"])
def test_users_are_counted_separately_in_sync_and_async_views(settings: Any, kind: str) -> None:
    """An async view must not read the session on the event loop."""
    settings.ROOT_URLCONF = __name__
    alice, bob = (User.objects.create(username=name) for name in ("alice", "bob"))

    async def ask(user: User | None) -> bytes:
        client = AsyncClient()
        if user:
            await client.aforce_login(user)
        return (await client.get(f"/{kind}/")).content

    seen = [async_to_sync(ask)(user) for user in (alice, bob, None, alice, bob, None)]
    assert seen == [b"False"] * 3 + [b"True"] * 3


def test_the_async_functions_return_what_the_sync_ones_do() -> None:
    def per_name(group: str, request: Any) -> str:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return "1/h"

    async def ask() -> list[Any]:
        lazy = SimpleLazyObject(lambda: AnonymousUser())
        options = {"group": "g", "key": "user", "increment": True}
        return [
            await ais_ratelimited(get(user=lazy), rate=per_name, **options),
            await ais_ratelimited(get(user=lazy), rate=per_name, **options),
            (await aget_usage(get(user=lazy), group="g", key="user", rate="1/h"))["count"],
            await aget_usage(get(), group="g", key="ip", rate=None),
        ]

    assert asyncio.run(ask()) == [False, True, 2, None]


# --- Which Redis, and without Redis. ---


@pytest.mark.parametrize("alias", ["other", "djangos"])
def test_requests_are_counted_in_the_redis_of_ratelimit_use_cache(
    more_caches: redis.Redis, settings: Any, alias: str
) -> None:
    assert limited(2, rate="1/h") == [False, True]
    assert more_caches.dbsize() == 0
    settings.RATELIMIT_USE_CACHE = alias
    assert limited(2, rate="1/h") == [False, True]
    assert more_caches.dbsize() == 1


def test_threads_share_the_limiter_of_a_cache_alias(more_caches: redis.Redis) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert (
            len(
                {
                    id(limiter)
                    for limiter in threads.map(lambda _: limiter_of(caches["djangos"], name="djangos"), range(20))
                }
            )
            == 1
        )


def test_a_dummy_cache_never_limits(more_caches: redis.Redis, settings: Any) -> None:
    settings.RATELIMIT_USE_CACHE = "dummy"
    assert limited(3, rate="1/h") == [False] * 3
    assert get_usage(get(), group="g", key="ip", rate="1/h", increment=True)["count"] == 1
    assert not async_to_sync(ais_ratelimited)(get(), group="g", key="ip", rate="1/h", increment=True)
    del settings.RATELIMIT_USE_CACHE
    settings.CACHES = {"default": settings.CACHES["dummy"]}
    assert limited(3, rate="1/h") == [False] * 3


def test_a_cache_alias_that_is_not_redis_is_an_error(more_caches: redis.Redis, settings: Any) -> None:
    settings.RATELIMIT_USE_CACHE = "local"
    with pytest.raises(ImproperlyConfigured, match=r"RATELIMIT_USE_CACHE is .*LocMemCache, not django_redis"):
        limited(1, rate="1/h")
    settings.RATELIMIT_USE_CACHE = "nowhere"
    with pytest.raises(InvalidCacheBackendError):
        limited(1, rate="1/h")
    del settings.RATELIMIT_USE_CACHE
    settings.CACHES = {"default": settings.CACHES["local"]}
    with pytest.raises(ImproperlyConfigured, match="LocMemCache, not django_redis"):
        limited(1, rate="1/h")


@pytest.mark.parametrize("fail_open", [False, True])
def test_without_redis_requests_are_refused_unless_fail_open(
    more_caches: redis.Redis, settings: Any, fail_open: bool
) -> None:
    settings.RATELIMIT_USE_CACHE = "down"
    settings.RATELIMIT_FAIL_OPEN = fail_open
    options = {"group": "g", "key": "ip", "rate": "1/h"}
    refused = {"count": 0, "limit": 0, "should_limit": True, "time_left": -1}
    expected = None if fail_open else refused
    assert get_usage(get(), increment=True, **options) == expected
    assert async_to_sync(aget_usage)(get(), increment=True, **options) == expected
    for usage in (get_usage(get(), **options), async_to_sync(aget_usage)(get(), **options)):
        assert (usage["count"], usage["limit"], usage["should_limit"]) == (0, 1, False)
