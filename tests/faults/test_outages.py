"""Redis down for ten seconds and back: each policy's on_error applies, and then it is enforced again."""

from __future__ import annotations

import logging
import time
from collections import Counter

import pytest
from asgiref.sync import async_to_sync
from django.test import override_settings

from django_ratequota import Decision, acheck_request, check_request
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.health import health
from tests.project.views import request_from
from tests.support.properties import scaled

from . import poll
from .servers import Node

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DOWN_SECONDS = scaled(10)
LIMIT, SHARE = 100, 4
SETTINGS = {"PREFIX": "rqtest", "LOCAL_SHARE": SHARE, "STATISTICS_SECONDS": 0, "TIMEOUT": 1}


def ask(scope: str, awaited: bool = False) -> Decision:
    return async_to_sync(acheck_request)(request_from(), scope) if awaited else check_request(request_from(), scope)


def test_down_and_back(node: Node, events: list[tuple[str, str]], caplog: pytest.LogCaptureFixture) -> None:
    modes = ("allow", "deny", "local")
    for mode in modes:
        endpoint = Endpoint.objects.create(name=mode)
        RatePolicy.objects.create(endpoint=endpoint, on_error=mode, rates=f"{LIMIT}/day fixed_window")
    with override_settings(RATEQUOTA={**SETTINGS, "REDIS_URL": node.url}):
        for mode in modes:
            assert (ask(mode).allowed, ask(mode).degraded) == (True, False)
        before = Counter(health().degraded)
        caplog.clear()
        caplog.set_level(logging.INFO, "django_ratequota")
        node.kill()
        seen: dict[str, Counter[bool]] = {mode: Counter() for mode in modes}
        began, number = time.monotonic(), 0
        while time.monotonic() < began + DOWN_SECONDS:
            number += 1
            for mode in modes:
                decision = ask(mode, number % 2 == 0)
                assert decision.error == "connection"
                seen[mode][decision.allowed] += 1
        degraded = Counter(health().degraded) - before
        # The next probe falls on the server before it is all there, at worst.
        node.start()
        back = poll(lambda: not ask("allow").degraded, 20, "enforcing again")
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
        admitted = sum(ask("deny", number % 2 == 0).allowed for number in range(LIMIT + 5))
        assert admitted == LIMIT
