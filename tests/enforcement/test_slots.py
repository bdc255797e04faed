"""Rates such as ``2 concurrent``: a request holds its slot while it runs, and releases it once, however it ends."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.core.handlers.asgi import ASGIHandler
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.datastructures import MultiValueDict
from rest_framework.exceptions import NotFound
from rest_framework.response import Response
from rest_framework.views import APIView

from django_ratequota import Bucket, Limiter, Rate, acheck_caller, acheck_request, check_caller, check_request
from django_ratequota.checks.database import check_concurrent
from django_ratequota.decorators import ratequota
from django_ratequota.enforcement import slots
from django_ratequota.enforcement.slots import renewing, running
from django_ratequota.engine import slots as engine_slots
from django_ratequota.engine.slots import HeldSlot, Lease, unreleased
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.health import health
from django_ratequota.runtime import default_limiter
from django_ratequota.utils import problems
from tests.conftest import Check
from tests.enforcement.test_check import CLOSED
from tests.faults import poll
from tests.project.views import request_from
from tests.support.failure import Failure
from tests.support.threads import by_hand

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "served")]

SECONDS = 10.0
#: How many slots were held while each view or body ran.
seen: list[int] = []


#: The key of the endpoint, for views in any thread.
_endpoint: list[int] = []


def held() -> list[HeldSlot]:
    """The slots that are held at the endpoint."""
    bucket = Bucket("everyone", Rate.parse("1 concurrent"), endpoint_id=_endpoint[0], counted_per="everyone")
    return default_limiter().slots(bucket)


def no_reply(*_: Any) -> Any:
    raise StoreError("timeout", "no reply")


async def aheld() -> int:
    return len(await asyncio.to_thread(held))


async def asgi(where: str, send: Any, left: asyncio.Event | None = None) -> None:
    """Let Django's ASGI handler serve a GET, whose client is gone once ``left`` is set."""
    messages = [{"type": "http.request"}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": where, "headers": [], "query_string": b""}
    await ASGIHandler()({**scope, "asgi": {"version": "3.0"}}, receive, send)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in the block, and all of it afterwards."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def look(parts: int = 0, fails: bool = False) -> Iterator[bytes]:
    for _ in range(parts):
        seen.append(len(held()))
        yield b"part"
    if fails:
        raise Failure


async def alook(parts: int, fails: bool = False) -> AsyncIterator[bytes]:
    for _ in range(parts):
        seen.append(await aheld())
        yield b"part"
    if fails:
        raise Failure


@ratequota("search")
def plain(request: Any) -> HttpResponse:
    seen.append(len(held()))
    return HttpResponse("done")


@ratequota("search")
async def aplain(request: Any) -> HttpResponse:
    seen.append(await aheld())
    return HttpResponse("done")


@ratequota("search")
def failing(request: Any) -> HttpResponse:
    seen.append(len(held()))
    raise Failure


@ratequota("search")
async def afailing(request: Any) -> HttpResponse:
    seen.append(await aheld())
    raise Failure


@ratequota("search")
def stream(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(look(2, "fails" in request.GET))


@ratequota("search")
async def astream(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(alook(2, "fails" in request.GET))


@ratequota("search")
def file(request: Any) -> FileResponse:
    seen.append(len(held()))
    found = tempfile.TemporaryFile()  # noqa: SIM115 - the response closes it
    found.write(b"content")
    found.seek(0)
    return FileResponse(found)


@ratequota("search")
def twice(request: Any) -> HttpResponse:
    assert check_request(request, "search").allowed
    assert check_request(request, "search", 3).allowed
    assert check_request(request, "search", again=True).allowed
    seen.append(len(held()))
    return HttpResponse("done")


@ratequota("search")
def refused_later(request: Any) -> HttpResponse:
    assert not check_request(request, "closed", 1000).allowed
    seen.append(len(held()))
    return HttpResponse("done")


#: The view has begun, and may go on.
entered, go_on = threading.Event(), threading.Event()


def late(request: Any) -> HttpResponse:
    """Check the request some time after it has begun."""
    entered.set()
    go_on.wait(SECONDS)
    check_request(request, "search")
    seen.append(len(held()))
    return HttpResponse()


class Api(APIView):
    throttle_scope = "search"
    authentication_classes: list[Any] = []

    def get(self, request: Any) -> Response:
        if "fails" in request.GET:
            raise NotFound
        bucket = Bucket("ip:127.0.0.1", Rate.parse("1 concurrent"), endpoint_id=_endpoint[0], counted_per="ip")
        seen.extend([len(held()), len(default_limiter().slots(bucket))])
        return Response({})


class SyncMiddleware:
    """It has no async side."""

    def __init__(self, get_response: Any) -> None:
        self.get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self.get_response(request)


urlpatterns = [
    path("plain/", plain),
    path("aplain/", aplain),
    path("failing/", failing),
    path("afailing/", afailing),
    path("stream/", stream),
    path("astream/", astream),
    path("file/", file),
    path("twice/", twice),
    path("refused-later/", refused_later),
    path("late/", late),
    path("api/", Api.as_view()),
]


@pytest.fixture
def served(settings: Any) -> Iterator[None]:
    """An endpoint that serves two requests at once, and another that refuses a cost of 1000."""
    settings.ROOT_URLCONF = __name__
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=search, counted_per="everyone", rates="2 concurrent, 1000/hour")
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="closed"), rates="5/hour")
    seen.clear()
    _endpoint[:] = [search.pk]
    yield
    unreleased.clear()


@pytest.fixture(params=["wsgi", "asgi"])
def get(request: Any) -> Callable[..., Any]:
    """GET through Django's sync or async handler."""
    if request.param == "wsgi":
        return Client(raise_request_exception=False).get
    return async_to_sync(AsyncClient(raise_request_exception=False).get)


@pytest.mark.parametrize("where", ["/plain/", "/aplain/", "/failing/", "/afailing/", "/file/", "/twice/"])
def test_a_request_holds_one_slot_while_its_view_runs(get: Any, where: str) -> None:
    for _ in range(4):
        response = get(where)
        assert response.status_code == (500 if "failing" in where else 200)
        if where == "/file/":
            response.close()
        assert held() == []
    assert seen == [1] * 4


@pytest.mark.usefixtures("everything_checks")
def test_several_checks_of_a_request_share_its_slots(get: Any) -> None:
    """By the middleware before the view, of the policies per address, and by the throttle, of all."""
    RatePolicy.objects.create(endpoint_id=_endpoint[0], counted_per="ip", rates="1 concurrent")
    for query in ({}, {}, {"fails": "1"}, {}):
        assert get("/api/", query).status_code == (404 if query else 200)
        assert held() == []
    assert seen == [1, 1] * 3


def test_a_sync_stream_holds_it_to_its_end(get: Any) -> None:
    for _ in range(4):
        assert list(get("/stream/")) == [b"part"] * 2
        assert held() == []
    assert seen == [1] * 8


def test_an_async_stream_holds_it_to_its_end() -> None:
    async def ask() -> None:
        for _ in range(4):
            response = await AsyncClient().get("/astream/")
            assert [part async for part in response.streaming_content] == [b"part"] * 2
            assert await aheld() == 0

    async_to_sync(ask)()
    assert seen == [1] * 8


def test_a_body_that_raises_releases_it() -> None:
    with pytest.raises(Failure):
        list(Client().get("/stream/", {"fails": "1"}))
    assert held() == []

    async def ask() -> None:
        response = await AsyncClient().get("/astream/", {"fails": "1"})
        with pytest.raises(Failure):
            async for _ in response.streaming_content:
                pass
        assert await aheld() == 0

    async_to_sync(ask)()


def test_a_body_that_nobody_reads_releases_it(get: Any) -> None:
    get("/stream/").close()
    assert held() == []
    next(iter(get("/stream/")))
    gc.collect()
    poll(lambda: held() == [], SECONDS, "the thread has released the slot of a body that was dropped")


def test_an_async_body_that_is_dropped_releases_it() -> None:
    async def ask() -> None:
        await anext(aiter((await AsyncClient().get("/astream/")).streaming_content))

    async_to_sync(ask)()
    gc.collect()
    poll(lambda: held() == [], SECONDS, "the thread has released the slot")


def test_requests_beyond_the_limit_are_refused() -> None:
    first, second = Client().get("/stream/"), Client().get("/stream/")
    refused = Client().get("/plain/")
    assert (refused.status_code, refused["Retry-After"]) == (429, "1")
    assert len(held()) == 2
    first.close()
    assert Client().get("/plain/").status_code == 200
    second.close()
    assert held() == []


def test_a_refusal_leaves_nothing_to_release() -> None:
    with check_caller(scope="search"), check_caller(scope="search"):
        refused = check_caller(scope="search")
        assert (refused.allowed, refused.slots) == (False, None)


def test_a_later_refusal_releases_the_slot() -> None:
    assert Client().get("/refused-later/").status_code == 200
    assert seen == [0]


@pytest.mark.parametrize("where", ["/plain/", "/aplain/", "/failing/"])
def test_a_plain_response_is_sent_when_the_slot_is_free(where: str) -> None:
    """Else a client's next request may find its last one's slot held."""
    during: list[tuple[str, int]] = []

    async def send(message: Any) -> None:
        during.append((message["type"], await aheld()))

    async_to_sync(asgi)(where, send)
    assert during == [("http.response.start", 0), ("http.response.body", 0)]
    assert seen == [1]


# Django does not close the request's body then, either.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("where", "during"),
    [
        ("/plain/", "http.response.start"),
        ("/stream/", "http.response.start"),
        ("/astream/", "http.response.start"),
        ("/astream/", "http.response.body"),
    ],
)
def test_a_client_that_cannot_be_sent_to_leaves_none(where: str, during: str) -> None:
    """Django closes no response whose ``send`` raises."""

    async def send(message: Any) -> None:
        if message["type"] == during:
            raise OSError("gone")

    async def ask() -> None:
        request = asyncio.create_task(asgi(where, send))
        await asyncio.wait([request], timeout=SECONDS)
        assert isinstance(request.exception(), OSError)

    with uncollected():  # a response that is being sent may be old, and its next collection far off
        async_to_sync(ask)()
        if during == "http.response.start":
            gc.collect()
        poll(lambda: held() == [], SECONDS, "the slot is released")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_client_that_leaves_before_the_check_leaves_none() -> None:
    """The middleware saw the end before the thread of a sync view had checked the request."""
    entered.clear()
    go_on.clear()
    left = asyncio.Event()

    async def send(_message: Any) -> None:
        """Nobody is there."""

    async def ask() -> None:
        request = asyncio.create_task(asgi("/late/", send, left))
        await asyncio.to_thread(entered.wait, SECONDS)
        left.set()
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        await asyncio.wait([request], timeout=SECONDS)

    with uncollected():
        async_to_sync(ask)()
        assert seen == [1], "it has run, and held its slot"
        poll(lambda: held() == [], SECONDS, "the slot is released")


def test_two_checks_of_a_request_at_once_lose_no_slot() -> None:
    async def ask() -> None:
        for _ in range(3):
            request = request_from()
            await asyncio.gather(acheck_request(request, "search"), acheck_request(request, "search", 2000))
            await asyncio.to_thread(request.close)
            assert await aheld() == 0

    async_to_sync(ask)()


def test_a_release_that_is_cancelled_is_left_to_the_thread() -> None:
    class Ending(Limiter):
        """The limiter of an event loop that ends."""

        async def arelease_slots(self, _leases: Any) -> Any:
            raise asyncio.CancelledError

    limiter = Ending()

    async def end() -> None:
        decision: Any = await limiter.acheck([Bucket("user:1", Rate.parse("1 concurrent"))])
        with pytest.raises(asyncio.CancelledError):
            await decision.slots.arelease()

    unreleased.clear()
    async_to_sync(end)()
    gc.collect()
    assert [left.keeper for left in unreleased] == [limiter]
    unreleased.clear()


@pytest.mark.parametrize("place", [0, 1])
def test_a_sync_middleware_changes_nothing(settings: Any, get: Any, place: int) -> None:
    own = "django_ratequota.middleware.RateQuotaMiddleware"
    settings.MIDDLEWARE = [own]
    settings.MIDDLEWARE.insert(place, f"{__name__}.SyncMiddleware")
    for where in ("/plain/", "/aplain/", "/failing/", "/afailing/"):
        get(where)
        assert held() == []
    assert list(get("/stream/"))
    assert held() == []
    assert seen == [1] * 6


def test_without_the_middleware_the_end_of_the_response_releases_it(settings: Any, get: Any) -> None:
    settings.MIDDLEWARE = []
    for where in ("/plain/", "/failing/", "/file/", "/aplain/"):
        get(where).close()
        assert held() == []
    response = get("/stream/")
    assert list(response)
    response.close()
    assert held() == []


def test_an_independent_check_takes_no_slot(check: Check) -> None:
    decision = check(request_from(), "search", again=True)
    assert (decision.allowed, len(held())) == (True, 0)
    assert [str(status.bucket.rate) for status in decision.statuses] == ["1000/hour"]


@pytest.mark.parametrize(("where", "calls"), [("/plain/", 2), ("/twice/", 4)])
def test_a_request_makes_one_call_more(redis_client: redis.Redis, where: str, calls: int) -> None:
    gc.collect()
    unreleased.clear()  # what earlier tests have dropped: the thread would release it meanwhile
    Client().get("/plain/")  # which loads policies and the script
    before = redis_client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert Client().get(where).status_code == 200
    assert redis_client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == calls


def test_a_free_request_takes_one(check: Check) -> None:
    request = request_from()
    assert check(request, "search", 0).allowed
    assert len(held()) == 1
    request.close()
    assert held() == []


def test_a_request_that_holds_one_still_closes_its_files(check: Check) -> None:
    request, upload = request_from(), BytesIO()
    request._files = MultiValueDict({"upload": [upload]})
    check(request, "search")
    request.close()
    assert (upload.closed, held()) == (True, [])


def test_settling_leaves_it_alone(check: Check) -> None:
    request = request_from()
    decision = check(request, "search", 5)
    decision.refund(5)
    decision.charge(2)
    decision.settle(0)
    assert (decision.remaining, len(held())) == (995, 1)
    request.close()


def test_a_check_asks_for_the_middleware(settings: Any) -> None:
    assert check_concurrent() == []
    settings.MIDDLEWARE = []
    (found,) = check_concurrent()
    assert (found.id, "2 concurrent, 1000/hour" in found.msg) == ("django_ratequota.W030", True)
    RatePolicy.objects.update(mode="off")
    assert check_concurrent() == []


# --- Without a request. ---


def test_a_caller_holds_a_slot_for_the_with_block() -> None:
    with check_caller(scope="search") as first, check_caller(scope="search") as second:
        assert first.allowed
        assert second.allowed
        assert not check_caller(scope="search").allowed
        assert len(held()) == 2
    assert held() == []

    async def ask() -> int:
        async with await acheck_caller(scope="search") as decision:
            assert decision.allowed
            during = await aheld()
        return during - await aheld()

    assert async_to_sync(ask)() == 1


def test_a_decision_that_nobody_refers_to_holds_none() -> None:
    assert check_caller(scope="search").allowed
    poll(lambda: held() == [], SECONDS, "the thread has released the slot")


def test_leases_are_renewed_while_the_slot_is_held(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CONCURRENCY_TTL": 30}
    with check_caller(scope="search"):
        (taken,) = held()
        for _ in range(3):
            ends_us = held()[0].ends_us
            poll(lambda ends_us=ends_us: held()[0].ends_us > ends_us, SECONDS, "its lease is renewed")
        assert (held()[0].id, held()[0].since_us) == (taken.id, taken.since_us)
    assert held() == []


def test_a_renewal_that_fails_is_repeated_soon(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CONCURRENCY_TTL": 1}
    renew, times = Limiter.renew_slots, list[bool]()

    def fail_twice(limiter: Limiter, leases: list[Lease]) -> int:
        times.append(len(times) >= 2)
        if not times[-1]:
            raise StoreError("connection", "lost")
        return renew(limiter, leases)

    monkeypatch.setattr(Limiter, "renew_slots", fail_twice)
    with check_caller(user=42, scope="search"):
        poll(lambda: times[2:3], SECONDS, "it is renewed")
        assert len(held()) == 1


@pytest.mark.parametrize("replied", [True, False])
def test_a_slot_that_is_released_during_its_renewal_stays_free(
    settings: Any, monkeypatch: pytest.MonkeyPatch, replied: bool
) -> None:
    """A renewal takes a slot that has lapsed, and so one that was released while the command was on its way."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CONCURRENCY_TTL": 30}
    renew, release = Limiter.renew_slots, Limiter.release_slots
    begun, released, renewed = threading.Event(), threading.Event(), threading.Event()

    def late(limiter: Limiter, leases: list[Lease]) -> int:
        begun.set()
        assert released.wait(SECONDS)
        count = renew(limiter, leases)
        renewed.set()
        return count

    def before_it(limiter: Limiter, leases: list[Lease]) -> int:
        count = release(limiter, leases)
        released.set()
        if threading.current_thread() is threading.main_thread():  # the other one renews
            assert replied or renewed.wait(SECONDS)
        return count

    monkeypatch.setattr(Limiter, "renew_slots", late)
    monkeypatch.setattr(Limiter, "release_slots", before_it)
    with check_caller(scope="search"):
        assert begun.wait(SECONDS)
    assert renewed.wait(SECONDS)
    poll(lambda: held() == [], SECONDS, "the thread has released it again")


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Make a pass of the thread, which does not run."""
    by_hand(monkeypatch, renewing)
    return renewing.work


def test_a_decision_that_is_dropped_after_a_renewal_holds_none(passes: Callable[[], object]) -> None:
    """The thread renewed it for good, as it kept the slots of its last pass."""
    decision: Any = check_caller(scope="search")
    passes()
    assert len(held()) == 1
    del decision
    passes()
    passes()
    assert held() == []


def test_a_late_release_by_the_thread_leaves_the_slot_of_a_later_check(
    passes: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check is refused and its release has no reply; the request's next check takes a slot, which it keeps."""
    request = request_from()
    assert check_request(request, "search").allowed
    passes()
    with monkeypatch.context() as patched:
        patched.setattr(Limiter, "release_slots", no_reply)
        assert not check_request(request, "search", 5000).allowed
    assert check_request(request, "search").allowed
    passes()
    assert len(held()) == 1
    with check_caller(scope="search"):
        assert not check_caller(scope="search").allowed
    request.close()
    assert held() == []


def test_a_request_holds_its_slots_for_concurrency_max(
    settings: Any, passes: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that a later check has taken; the slot of a task, which no client can prolong, is held to its end."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CONCURRENCY_TTL": 3600, "CONCURRENCY_MAX": 600}
    clock = SimpleNamespace(now=time.monotonic())
    for module in (slots, engine_slots):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    request = request_from()
    with check_caller(scope="search") as task:
        assert task.allowed
        assert check_request(request, "search").allowed
        for seconds, expected in ((0, 2), (599, 2), (1, 1), (600, 1)):
            clock.now += seconds
            passes()
            assert len(held()) == expected, clock
        assert problems.recent()["concurrency_max"].endswith("after CONCURRENCY_MAX (600 s) have lost their slots: 1")
        assert check_request(request, "search").allowed
        assert len(held()) == 2
        passes()
        assert len(held()) == 1
    request.close()
    assert held() == []


def test_a_process_that_ends_releases_the_slots_that_it_holds(passes: Callable[[], object]) -> None:
    with check_caller(scope="search"):
        assert renewing.last is not None
        renewing.last()
        assert held() == []


def test_a_slot_that_lapsed_is_taken_again_if_there_is_room(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CONCURRENCY_TTL": 30}
    with check_caller(scope="search") as decision:
        default_limiter().reset([status.bucket for status in decision.statuses])
        poll(lambda: len(held()) == 1, SECONDS, "it is held again")
    assert held() == []


def test_a_slot_that_another_request_has_taken_meanwhile_is_logged(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CONCURRENCY_TTL": 30}
    renew = Limiter.renew_slots

    def late(limiter: Limiter, leases: list[Lease]) -> int:
        bucket = leases[0].bucket
        limiter.reset([bucket])  # as if the lease had ended
        assert renew(limiter, [Lease(bucket, number, 10**6) for number in (1, 2)]) == 2
        return renew(limiter, leases)

    monkeypatch.setattr(Limiter, "renew_slots", late)
    with check_caller(scope="search"):
        poll(lambda: "1 of 1 running requests" in problems.recent().get("slots", ""), SECONDS, "it is logged")
        assert {slot.id for slot in held()} == {1, 2}, "the limit is never exceeded"


def test_the_lease_of_a_worker_that_is_gone_ends(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CONCURRENCY_TTL": 1}
    decision = check_caller(scope="search")
    assert decision.slots is not None
    running.pop(id(decision.slots))  # as if its process had been killed: nothing is renewed or released
    assert len(held()) == 1
    poll(lambda: held() == [], SECONDS, "the lease has ended")


# --- Without Redis. ---


@pytest.mark.parametrize(("on_error", "admitted"), [("allow", 3), ("deny", 0), ("local", 1)])
def test_while_redis_is_down_on_error_decides(settings: Any, check: Check, on_error: str, admitted: int) -> None:
    settings.RATEQUOTA = {**CLOSED, "ON_ERROR": on_error, "LOCAL_SHARE": 2}
    for _ in range(2):
        requests = [request_from() for _ in range(3)]
        assert [check(request, "search").allowed for request in requests].count(True) == admitted
        for request in requests:
            request.close()


def test_a_slot_whose_reply_was_lost_is_released(monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    steps = Limiter.ask

    def lost(*args: Any) -> Any:
        yield from steps(*args)
        raise StoreError("timeout", "no reply")

    request = request_from()
    with monkeypatch.context() as patched:
        patched.setattr(Limiter, "ask", lost)
        assert check(request, "search").degraded
    assert len(held()) == 1
    request.close()
    assert held() == []


def test_a_refusal_of_a_server_that_is_left_alone_leaves_nothing_to_release(settings: Any, check: Check) -> None:
    """The thread tried each of up to 10,000 releases once a second, and counted them as decisions by on_error."""
    settings.RATEQUOTA = {**CLOSED, "ON_ERROR": "deny"}
    before = Counter(health().degraded)
    for _ in range(20):
        request = request_from()
        assert not check(request, "search").allowed
        request.close()
    assert len(unreleased) < 10, "those that were sent, before the breaker opened"
    assert Counter(health().degraded) - before == {"connection": 20}


def test_a_slot_that_a_refusal_could_not_release_is_left_to_the_thread(
    settings: Any, monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ON_ERROR": "deny"}
    request = request_from()
    assert check(request, "search").allowed
    with monkeypatch.context() as patched:
        for verb in ("ask", "release_slots", "arelease_slots"):
            patched.setattr(Limiter, verb, no_reply)
        assert not check(request, "closed").allowed
        assert len(held()) == 1
    poll(lambda: held() == [], SECONDS, "the thread has released it")


def test_in_this_process_alone(settings: Any, get: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "memory://"}
    for _ in range(3):
        assert get("/plain/").status_code == 200
    assert seen == [1] * 3
    assert held() == []
