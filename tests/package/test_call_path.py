"""How much of the package one warm request enters: what its limits cost a reader, and a process."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import RequestFactory
from django.urls import resolve
from rest_framework.test import force_authenticate

import django_ratequota
from django_ratequota import check_request
from django_ratequota.middleware import RateQuotaMiddleware
from django_ratequota.models import Endpoint, RatePolicy
from tests.project.views import request_from
from tests.support import server

PACKAGE = str(Path(django_ratequota.__file__).parent)


@pytest.fixture
def recorded_calls() -> Any:
    """Return the calls of a function into the package, in their order, as (file, function)."""

    def of(function: Any) -> list[tuple[str, str]]:
        calls: list[tuple[str, str]] = []

        def note(frame: FrameType, event: str, _argument: Any) -> None:
            code = frame.f_code
            # Comprehensions are calls up to Python 3.11 only.
            if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
                calls.append((code.co_filename, code.co_qualname))

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(before)
        return calls

    return of


@pytest.mark.django_db(transaction=True)
def test_a_warm_request_enters_few_files_and_functions(
    settings: Any, redis_client: Any, fresh_policies: None, recording: None, recorded_calls: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": server.url(), "TIMEOUT": 5.0}
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="1000/min")
    RatePolicy.objects.create(rates="100000/hour", counted_per="everyone")
    user, match = User.objects.create(username="alice"), resolve("/search/")

    def view(request: Any) -> HttpResponse:
        response: HttpResponse = match.func(request)
        return response

    middleware = RateQuotaMiddleware(view)

    def ask() -> None:
        request: Any = RequestFactory().get("/search/")
        request.user, request.resolver_match = user, match
        force_authenticate(request, user)
        response = middleware(request)
        assert (response.status_code, response["RateLimit"].count("r=")) == (200, 2)

    for _ in range(3):
        ask()
    # Other tests may have put a scene of ``testing`` between the process and its objects.
    calls = [(file, function) for file, function in recorded_calls(ask) if "/testing/" not in file]
    files = [file for file, _function in calls]
    found = {
        "files": len(set(files)),
        "functions": len(set(calls)),
        "calls": len(calls),
        "moves between files": sum(one != other for one, other in pairwise(files)),
    }
    bounds = {"files": 26, "functions": 85, "calls": 105, "moves between files": 60}
    assert {name: found[name] for name in bounds if found[name] > bounds[name]} == {}, sorted(set(calls))


@pytest.mark.django_db(transaction=True)
def test_a_durable_count_takes_a_request_few_calls_more(
    alice: User, fresh_policies: None, checkpointing: None, recorded_calls: Any
) -> None:
    RatePolicy.objects.create(rates="1000/month")
    found = {}
    for durable in (False, True):
        RatePolicy.objects.update(durable=durable)
        for _ in range(3):
            check_request(request_from(alice))
        request = request_from(alice)
        calls = recorded_calls(lambda request=request: check_request(request))
        found[durable] = sum("/testing/" not in file for file, _function in calls)
    assert 0 < found[True] - found[False] <= 8
