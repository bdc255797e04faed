"""What servers serve to clients at once: views that tell how many requests run, in all processes together."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.urls import path

from django_ratequota.decorators import ratequota
from tests.support import server

#: How many requests run, how many ran when each began, the processes that ran one, and whether slow views go on.
RUNNING, SEEN, PIDS, GO_ON = "rqtest:running", "rqtest:seen", "rqtest:pids", "rqtest:go-on"
#: Seconds that a view works.
WORK = 0.02

client = redis.Redis.from_url(server.url())


@contextmanager
def counted() -> Iterator[None]:
    client.rpush(SEEN, client.incr(RUNNING))
    client.sadd(PIDS, os.getpid())
    try:
        yield
    finally:
        client.decr(RUNNING)


def parts(count: int) -> Iterator[bytes]:
    with counted():
        for _ in range(count):
            time.sleep(WORK)  # the view's work
            yield b"part"


async def aparts(count: int) -> AsyncIterator[bytes]:
    with counted():
        for _ in range(count):
            await asyncio.sleep(WORK)  # the view's work
            yield b"part"


async def broken() -> AsyncIterator[bytes]:
    yield b"part"
    raise LookupError("a body that raises")


@ratequota("search")
def run(request: HttpRequest) -> HttpResponse:
    with counted():
        time.sleep(WORK)  # the view's work
    return HttpResponse("done")


@ratequota("search")
async def arun(request: HttpRequest) -> HttpResponse:
    with counted():
        await asyncio.sleep(WORK)  # the view's work
    return HttpResponse("done")


@ratequota("search")
def slow(request: HttpRequest) -> HttpResponse:
    """Run until the test lets it go on."""
    with counted():
        for _ in range(6000):
            if client.exists(GO_ON):
                break
            time.sleep(2 * WORK)  # between two looks; the number of looks ends it
    return HttpResponse("done")


@ratequota("search")
def stream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(parts(3))


@ratequota("search")
async def astream(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(aparts(200 if "long" in request.GET else 3))


@ratequota("search")
def flood(request: HttpRequest) -> StreamingHttpResponse:
    """More than any socket's buffer holds."""
    return StreamingHttpResponse(b"x" * 10**5 for _ in range(10**4))


@ratequota("search")
async def aflood(request: HttpRequest) -> StreamingHttpResponse:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(10**4):
            yield b"x" * 10**5

    return StreamingHttpResponse(parts())


@ratequota("search")
async def abroken(request: HttpRequest) -> StreamingHttpResponse:
    return StreamingHttpResponse(broken())


urlpatterns = [
    path("run/", run),
    path("arun/", arun),
    path("slow/", slow),
    path("stream/", stream),
    path("astream/", astream),
    path("flood/", flood),
    path("aflood/", aflood),
    path("abroken/", abroken),
]


def _configure() -> None:
    from django.conf import settings

    settings.ROOT_URLCONF = __name__
    settings.RATEQUOTA = {**settings.RATEQUOTA, **json.loads(os.environ.get("RATEQUOTA_TEST_CHANGES", "{}"))}


def asgi() -> Any:
    """The application, for ``uvicorn --factory``."""
    from django.core.asgi import get_asgi_application

    application = get_asgi_application()
    _configure()
    return application


def wsgi() -> Any:
    """The application, for gunicorn."""
    from django.core.wsgi import get_wsgi_application

    application = get_wsgi_application()
    _configure()
    return application
