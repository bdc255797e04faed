"""What clients, operators and servers write is text in the log, and no line and no colour of its own."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.db import DatabaseError, IntegrityError
from django.test import AsyncClient, Client

from django_ratequota.exceptions import StoreError
from django_ratequota.models import Plan, RatePolicy
from django_ratequota.monitoring.health import note_degraded
from django_ratequota.policies import loading
from django_ratequota.policies.cache import policies
from django_ratequota.store.breaker import FAILURES, Breaker
from django_ratequota.utils.problems import forget
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

HOSTILE = "x\x1b[31m\nFORGED ERROR all limits are off\rFORGED\x9b"
BEGINNING = "django.log"


def written(request: Any) -> str:
    return str(request.headers.get("X-Api-Key", ""))


def raising(request: Any) -> str:
    raise ValueError(written(request)) from LookupError(HOSTILE)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The log of everything, as a file has it."""
    forget()
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    handler.setFormatter(logging.Formatter(f"{BEGINNING} %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    yield text
    root.removeHandler(handler)


def by_requests(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the text in each header, in the path, in the method and in the body."""
    here = {"IDENTIFIERS": {"key": f"{__name__}.raising"}, "PLAN_RESOLVER": f"{__name__}.written"}
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True, **here}
    RatePolicy.objects.create(counted_per="key", rates="1/hour")
    RatePolicy.objects.create(rates="1/hour")
    names = "User-Agent X-Api-Key X-Forwarded-For Accept-Language Referer Cookie Authorization Origin".split()
    headers = dict.fromkeys(names, HOSTILE)
    for path in ("/search/", "/decorated/", "/plain/", f"/files/{HOSTILE}", f"/nowhere/{HOSTILE}"):
        for get in (Client().get, async_to_sync(AsyncClient().get)):
            assert get(path, {"q": HOSTILE}, headers=headers).status_code in (200, 404, 429)
        for method in ("POST", HOSTILE):
            assert Client().generic(method, path, HOSTILE, headers=headers).status_code in (200, 403, 404, 405, 429)


def by_an_operator(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL and MariaDB quote the values that two saves at once have both written."""

    def refuse(*_: Any, **__: Any) -> None:
        raise IntegrityError(f"duplicate key value\nDETAIL:  Key (name)=({HOSTILE}) already exists.")

    plan = Plan.objects.create(name="Pro", slug="pro")
    monkeypatch.setattr(Plan, "delete", refuse)
    page = f"/admin/django_ratequota/plan/{plan.pk}/delete/"
    assert client_of(superuser=True).post(page, {"post": "yes"}).status_code == 302


def by_the_database(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise DatabaseError(HOSTILE)

    monkeypatch.setattr(loading, "load_snapshot", fail)
    with pytest.raises(DatabaseError):
        policies.reload(1)


def by_redis(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    error, breaker = StoreError("response", HOSTILE), Breaker("127.0.0.1:1")
    note_degraded("response", error)
    for _ in range(FAILURES):
        breaker.count(StoreError("connection", HOSTILE))
    assert breaker.open


def by_a_publication(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr(apps.get_app_config("django_ratequota"), "publish", fail)
    RatePolicy.objects.create(rates="1/hour")


@pytest.mark.parametrize("write", [by_requests, by_an_operator, by_the_database, by_redis, by_a_publication])
def test_lines_and_colours_in_the_log(
    settings: Any, monkeypatch: pytest.MonkeyPatch, log: io.StringIO, write: Any
) -> None:
    write(settings, monkeypatch)
    text = log.getvalue()
    assert f"{BEGINNING} " in text
    assert "FORGED" in text
    for line in text.split("\n"):
        assert line.replace("\t", "").isprintable(), ascii(line)
        assert not line.startswith("FORGED")
