"""A site whose views tell callers what was decided, and the same without a request, for tasks."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from django.http import HttpRequest, JsonResponse
from django.urls import path

from django_ratequota import acheck_caller, acheck_request, check_caller, check_request, warm

from .scene import Answer, Log, answer_of, cost_of

#: Seconds that a view works, so that a server's workers share its requests.
WORK = 0.01


def caller(request: Any) -> str | None:
    """The identifier ``tenant``."""
    return request.headers.get("X-Caller")


def view(request: HttpRequest) -> JsonResponse:
    number = int(request.headers["X-Caller"])
    decision = check_request(request, scope="world", cost=cost_of(number))
    time.sleep(WORK)  # the view's work
    return JsonResponse(answer_of(number, decision)._asdict(), status=200 if decision.allowed else 429)


async def aview(request: HttpRequest) -> JsonResponse:
    number = int(request.headers["X-Caller"])
    decision = await acheck_request(request, scope="world", cost=cost_of(number))
    await asyncio.sleep(WORK)  # the view's work
    return JsonResponse(answer_of(number, decision)._asdict(), status=200 if decision.allowed else 429)


urlpatterns = [path("view/", view), path("aview/", aview)]


def ask(number: int) -> Answer:
    """Check this caller."""
    return answer_of(number, check_caller(identifiers={"tenant": str(number)}, scope="world", cost=cost_of(number)))


async def aask(number: int) -> Answer:
    """``ask``, awaited."""
    decision = await acheck_caller(identifiers={"tenant": str(number)}, scope="world", cost=cost_of(number))
    return answer_of(number, decision)


def ask_and_note(number: int, log: Log) -> Answer:
    """Check this caller, and note what it was told."""
    answer = ask(number)
    log.note(answer)
    return answer


def wsgi() -> Any:
    """The application; ``WORLD_WARM`` = it has policies and a connection before its server forks."""
    from django.core.wsgi import get_wsgi_application
    from django.db import connections

    application = get_wsgi_application()
    if os.environ.get("WORLD_WARM"):
        warm()
        connections.close_all()
    return application


def asgi() -> Any:
    """The application."""
    from django.core.asgi import get_asgi_application

    return get_asgi_application()
