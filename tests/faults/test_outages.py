"""Redis down for ten seconds and back: each policy's on_error applies, and then it is enforced again."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from asgiref.sync import async_to_sync
from django.test import override_settings

from django_ratequota import Decision, acheck_request, check_request
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.health import health
from django_ratequota.testing.embedded import VARIABLE
from tests.enforcement.test_propagation import Process, environment, migrated  # noqa: F401 - fixtures
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
        where = f"Redis at {node.host}:{node.port} is"
        assert lines == [("ERROR", f"{where} unavailable (connection)"), ("WARNING", f"{where} available again")]
        # Counting starts again from zero, as the server lost its data.
        admitted = sum(ask("deny", number % 2 == 0).allowed for number in range(LIMIT + 5))
        assert admitted == LIMIT


@pytest.fixture
def workers(environment: dict[str, str], node: Node) -> Iterator[list[Process]]:  # noqa: F811
    """Two processes that report ten times a second."""
    found = [Process({**environment, VARIABLE: node.url}) for _ in range(2)]
    changed = {"PREFIX": "rqtest", "STATISTICS_SECONDS": 0.1, "TIMEOUT": 1}
    enable = f"from django.test import override_settings; override_settings(RATEQUOTA={changed!r}).enable()"
    for worker in found:
        worker.run(enable)
    found[0].run("User.objects.create_superuser('alice')")
    for mode in ("allow", "deny", "local"):
        found[0].run(
            f"place = Endpoint.objects.create(name='{mode}'); "
            f"RatePolicy.objects.create(endpoint=place, rates='100/day', on_error='{mode}')"
        )
    yield found
    for worker in found:
        worker.close()


def test_operators_are_told_what_two_workers_decided_while_redis_was_away(workers: list[Process], node: Node) -> None:
    one, other = workers
    counts = "answer = [list(row) for row in Outage.objects.order_by('allow').values_list('allow', 'deny', 'local')]"
    for worker in workers:
        assert worker.check(scope="allow")["error"] == ""
    node.stop()
    for worker, asked in ((one, {"allow": 3, "deny": 1}), (other, {"local": 2})):
        for scope, times in asked.items():
            for _ in range(times):
                assert worker.check(scope=scope)["error"] == "connection"
    poll(lambda: one.run(counts) == [[0, 0, 2], [3, 1, 0]], 30, "both have written what they saw")
    node.start()
    for worker in workers:
        poll(lambda worker=worker: worker.check(scope="local")["error"] == "", 30, "Redis decides again")
    flush = "from django_ratequota.monitoring.outages import outages; outages.flush(); "
    span = f"{flush}answer = [str(row.ended_at) for row in Outage.objects.order_by('pk')]"

    def written() -> list[str]:
        other.run(flush)
        return list(one.run(span))

    page = (
        "from django.test import Client; client = Client(); client.force_login(User.objects.get()); "
        "answer = client.get('/admin/django_ratequota/{}').content.decode()"
    )
    told = (
        r"Redis was unavailable [\d:–]+ \(3 requests were admitted without limits, 1 request was refused, "
        r"\d+ requests were decided by their workers alone\)\."
    )
    for address in ("", "ratepolicy/traffic/", "ratepolicy/explain/?user=1&endpoint=allow"):
        assert re.search(told, one.run(page.format(address))), address
    assert "Outages of Redis" in one.run(page.format("ratepolicy/health/"))
    # Each write would prolong an outage that goes on. The workers' own threads may still be writing what they saw.
    poll(lambda: written() == written(), 30, "it is over")
