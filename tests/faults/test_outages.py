"""Redis down for ten seconds and back: each policy's on_error applies, and then it is enforced again."""

from __future__ import annotations

import logging
import time
from collections import Counter

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser
from django.test import RequestFactory, override_settings

from django_ratequota import Decision, acheck_request, check_request
from django_ratequota.headers import decision_headers
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.health import health
from django_ratequota.responses import problem, status_code
from tests.support.properties import scaled

from . import poll
from .servers import Node

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DOWN_SECONDS = scaled(10)
LIMIT, SHARE = 100, 4


def settings_of(node: Node) -> dict[str, object]:
    shared = {"PREFIX": "rqtest", "LOCAL_SHARE": SHARE, "STATISTICS_SECONDS": 0, "TIMEOUT": 1}
    return {**shared, "REDIS_URL": node.url}


def ask(scope: str, ip: str, awaited: bool) -> Decision:
    request = RequestFactory().get("/", REMOTE_ADDR=ip)
    request.user = AnonymousUser()
    return async_to_sync(acheck_request)(request, scope) if awaited else check_request(request, scope)


def test_down_and_back(node: Node, events: list[tuple[str, str]], caplog: pytest.LogCaptureFixture) -> None:
    modes = ("allow", "deny", "local")
    for mode in modes:
        endpoint = Endpoint.objects.create(name=mode)
        RatePolicy.objects.create(endpoint=endpoint, on_error=mode, rates=f"{LIMIT}/day fixed_window")
    with override_settings(RATEQUOTA=settings_of(node)):
        for mode in modes:
            decision = ask(mode, "192.0.2.1", awaited=False)
            assert decision.allowed
            assert not decision.degraded
        before = Counter(health().degraded)
        caplog.clear()
        caplog.set_level(logging.INFO, "django_ratequota")
        node.kill()
        seen: dict[str, Counter[bool]] = {mode: Counter() for mode in modes}
        began, number = time.monotonic(), 0
        while time.monotonic() < began + DOWN_SECONDS:
            number += 1
            for mode in modes:
                decision = ask(mode, "192.0.2.1", awaited=number % 2 == 0)
                assert decision.error == "connection"
                assert not any(name.startswith(("RateLimit", "X-RateLimit")) for name in decision_headers(decision))
                if not decision.allowed:
                    assert status_code(decision) == (503 if mode == "deny" else 429)
                    assert int(decision_headers(decision)["Retry-After"]) >= 1
                    kind = "temporary-reduced-capacity" if mode == "deny" else "quota-exceeded"
                    assert problem(decision)["type"].endswith(f"#{kind}")
                seen[mode][decision.allowed] += 1
        degraded = Counter(health().degraded) - before
        # The next probe falls on the server before it is all there, at worst.
        node.start()
        back = poll(lambda: not ask("allow", "192.0.2.1", awaited=False).degraded, 20, "enforcing again")
        print(f"\n{number} rounds while down: {seen}; enforcing again after {back:.2f} s")
        assert seen["allow"][False] == 0
        assert seen["deny"][True] == 0
        assert seen["local"][True] == LIMIT // SHARE
        assert seen["local"][False] > 0
        assert degraded == {"connection": 3 * number}
        assert back < 2 * 5
        assert events == [("open", "connection"), ("closed", "connection")]
        lines = [(record.levelname, record.message.split(",")[0]) for record in caplog.records]
        where = f"Redis at {node.host}:{node.port} gives"
        assert lines == [("ERROR", f"{where} no decisions (connection)"), ("WARNING", f"{where} decisions again")]
        # Counting starts again from zero, as the server lost its data.
        admitted = sum(ask("deny", "192.0.2.1", awaited=number % 2 == 0).allowed for number in range(LIMIT + 5))
        assert admitted == LIMIT


def test_a_process_that_starts_while_redis_is_down(node: Node) -> None:
    """Redis down at boot is handled like Redis down later."""
    RatePolicy.objects.create(rates=f"{LIMIT}/day", on_error="deny")
    node.kill()
    with override_settings(RATEQUOTA=settings_of(node)):
        first = [ask("", "192.0.2.1", awaited=number % 2 == 0) for number in range(6)]
        assert [(decision.allowed, decision.error) for decision in first] == [(False, "connection")] * 6
        node.start()
        back = poll(lambda: not ask("", "192.0.2.1", awaited=False).degraded, 20, "enforcing")
        print(f"\nenforcing after {back:.2f} s")
        assert back < 2 * 5
        assert sum(ask("", "192.0.2.1", awaited=True).allowed for _ in range(LIMIT + 5)) == LIMIT - 1
