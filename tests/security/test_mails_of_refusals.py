"""A flood while Redis is down must not become a flood of mails: ``on_error: deny`` is a 503, which Django mails."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Callable, Iterator
from typing import Any

import django
import pytest
from asgiref.sync import async_to_sync
from django.core import mail
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.utils.log import DEFAULT_LOGGING
from ninja import NinjaAPI
from rest_framework.decorators import api_view, throttle_classes
from rest_framework.response import Response

from django_ratequota.decorators import ratequota
from django_ratequota.models import RatePolicy
from django_ratequota.ninja import QuotaThrottle as NinjaThrottle
from django_ratequota.throttling import QuotaThrottle

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies"),
    pytest.mark.urls(__name__),
    # Django 6.1 on settings without MAILERS, which older versions do not know.
    pytest.mark.filterwarnings("ignore:.*default mailer"),
]

FLOOD = 20


def plain(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ran")


@ratequota
def decorated(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ran")


@ratequota
async def adecorated(request: HttpRequest) -> HttpResponse:
    return HttpResponse("ran")


@ratequota(block=False)
def deciding(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=200 if request.ratequota.allowed else 503)


@api_view()
@throttle_classes([QuotaThrottle])
def drf(request: Any) -> Response:
    return Response({})


@ratequota
def broken(request: HttpRequest) -> HttpResponse:
    return HttpResponse(status=503)


@ratequota(block=False)
def raising(request: HttpRequest) -> HttpResponse:
    raise RuntimeError("a defect of the view")


api = NinjaAPI(throttle=[NinjaThrottle()], urls_namespace="mails")


@api.get("/sync")
def ninja_sync(request: HttpRequest) -> dict[str, str]:
    return {}


urlpatterns = [
    path("plain/", plain),
    path("decorated/", decorated),
    path("adecorated/", adecorated),
    path("deciding/", deciding),
    path("drf/", drf),
    path("broken/", broken),
    path("raising/", raising),
    path("ninja/", api.urls),
]


@pytest.fixture
def admins(settings: Any) -> None:
    """ADMINS who get what Django mails by default, and the app's own errors besides."""
    settings.ADMINS = ["ops@example.com"] if django.VERSION >= (6, 0) else [("Ops", "ops@example.com")]


@pytest.fixture
def down(settings: Any) -> None:
    """Redis is down, and every policy denies."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0", "ON_ERROR": "deny"}
    RatePolicy.objects.create(rates="1000/s")


@pytest.fixture
def own_errors(admins: None) -> Iterator[None]:
    """The app's logger mails its errors as well."""
    handler = django.utils.log.AdminEmailHandler()
    handler.setLevel(logging.ERROR)
    logger = logging.getLogger("django_ratequota")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def ask(path: str) -> int:
    return int(Client(raise_request_exception=False).get(path).status_code)


def aask(path: str) -> int:
    return int(async_to_sync(AsyncClient(raise_request_exception=False).get)(path).status_code)


@pytest.mark.usefixtures("down", "own_errors")
@pytest.mark.parametrize("client", [ask, aask], ids=["wsgi", "asgi"])
@pytest.mark.parametrize("path", ["/plain/", "/decorated/", "/adecorated/", "/deciding/", "/drf/", "/ninja/sync"])
def test_a_mail_for_each_refusal(settings: Any, client: Callable[[str], int], path: str, caplog: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": path.endswith("plain/")}
    assert [client(path) for _ in range(FLOOD)] == [503] * FLOOD
    assert len(mail.outbox) <= 1, [one.subject for one in mail.outbox]
    # As with 429, operators keep a line per refused request.
    lines = [record for record in caplog.records if record.name == "django.request"]
    assert [(record.levelname, record.getMessage()) for record in lines] == [
        ("WARNING", f"Service Unavailable: {path}")
    ] * FLOOD


@pytest.mark.usefixtures("admins")
@pytest.mark.parametrize("client", [ask, aask], ids=["wsgi", "asgi"])
def test_the_projects_own_503_is_mailed_as_ever(client: Callable[[str], int]) -> None:
    assert [client("/broken/") for _ in range(3)] == [503] * 3
    assert [one.subject.partition("ERROR")[1] for one in mail.outbox] == ["ERROR"] * 3


@pytest.mark.usefixtures("down", "admins")
def test_a_defect_in_a_request_that_was_denied_is_mailed_as_ever() -> None:
    assert [ask("/raising/") for _ in range(3)] == [500] * 3
    assert len(mail.outbox) == 3
    assert "a defect of the view" in mail.outbox[0].body


@pytest.mark.usefixtures("down", "admins")
def test_a_log_of_errors_only_has_no_warnings_of_ours(caplog: Any) -> None:
    logger = logging.getLogger("django.request")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        assert ask("/decorated/") == 503
    finally:
        logger.setLevel(before)
    assert [record for record in caplog.records if record.name == "django.request"] == []


@pytest.mark.usefixtures("down", "admins")
def test_logging_that_is_configured_again_keeps_it() -> None:
    """Django configures logging before the app is ready; a project's WSGI module may do so again afterwards."""
    logging.config.dictConfig({**DEFAULT_LOGGING, "loggers": {**DEFAULT_LOGGING["loggers"], "django.request": {}}})
    assert ask("/decorated/") == 503
    assert mail.outbox == []
