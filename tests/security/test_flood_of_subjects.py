"""Many subjects at once: neither a flood of signals, nor everybody else's signals and refusal ids gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.test import Client

from django_ratequota.engine.keys import statistics_key
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring import alerts, pending_refusals
from django_ratequota.monitoring import collector as collecting
from django_ratequota.monitoring.collector import collector, counting
from django_ratequota.monitoring.health import reporting
from django_ratequota.monitoring.refusals import find_refusal
from django_ratequota.signals import quota_threshold
from tests.support.threads import by_hand

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


class Told(list[Any]):
    """(name of the limit, subject) of every signal, in order."""

    def __call__(self, sender: Any, status: Any, **_: Any) -> None:
        self.append((status.bucket.title, status.bucket.subject))


@pytest.fixture
def told(monkeypatch: Any, settings: Any) -> Iterator[Told]:
    """The received signals of all limits; crossings are sent when the test calls ``send``."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "NOTIFY_LIMITS": "all"}
    by_hand(monkeypatch, alerts.claiming, alerts.delivering)
    alerts.forget()
    told = Told()
    quota_threshold.connect(told)
    yield told
    quota_threshold.disconnect(told)
    alerts.forget()


@pytest.fixture
def noted(settings: Any, monkeypatch: Any) -> Iterator[None]:
    """Refusals get ids, and are sent when the test calls ``flush``; the minute does not end meanwhile."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1.0}
    by_hand(monkeypatch, counting, reporting)
    monkeypatch.setattr(pending_refusals, "MINUTE", int(time.time()))
    collector.clear()
    yield
    collector.clear()


def ask(address: str, path: str = "/decorated/") -> Any:
    return Client().get(path, REMOTE_ADDR=address)


# --- Signals. ---

SUBJECTS = 400


def flood(number: int = SUBJECTS) -> None:
    """One request per address, each of which uses its own limit up."""
    for at in range(number):
        ask(f"10.0.{at // 250}.{at % 250}")


def test_thousands_of_subjects_at_their_limits(told: Told, search: Endpoint, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(alerts, "_RETRY_US", 3600 * 10**6)  # however slow this machine is
    RatePolicy.objects.create(endpoint=search, counted_per="ip", rates="1/day")
    flood()
    flood()  # the same subjects, now refused
    alerts.send()
    # Each subject crosses 80 % and 100 % at once: the lower level only counts as sent.
    assert len(told) == 5
    assert told[0] == ("search/day per ip", "ip:10.0.0.0")
    while alerts._queue:
        sent = len(told)
        alerts.send()
        assert len(told) <= sent + 10
    assert len(told) == 50
    logged = [record.getMessage() for record in caplog.records if record.name == "django_ratequota"]
    assert logged == ["quota_threshold: crossings of search/day per ip are not sent, too many at once"]


# --- Refusal ids. ---


def refusal_id(address: str) -> str:
    return str(ask(address).get("X-RateLimit-Refusal", ""))


def networks(number: int) -> list[str]:
    """Addresses of one /48, each in a /64 of its own."""
    return [f"2001:db8:1:{at:x}::1" for at in range(number)]


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize(
    "attackers", [networks(620), [f"198.51.100.{at}" for at in range(250)]], ids=["one /48", "one /24"]
)
def test_one_network_that_takes_all_refusal_ids(search: Endpoint, attackers: list[str]) -> None:
    RatePolicy.objects.create(endpoint=search, rates="blocked")
    given = [name for name in map(refusal_id, attackers) if name]
    assert len(given) == collector.refusals.most_of_share < collector.refusals.most / 2
    others = [refusal_id(address) for address in ("203.0.113.7", "2001:db8:2::1", "198.51.101.1")]
    assert all(others)
    collector.flush()
    assert all(find_refusal(name) is not None for name in others)
    # Within the minute neither a flush nor another request opens a second share.
    assert [name for name in map(refusal_id, reversed(attackers)) if name] == given[::-1]


@pytest.mark.usefixtures("noted")
def test_a_busy_network_evicts_its_own_refusals_first(
    search: Endpoint, monkeypatch: Any, redis_client: redis.Redis
) -> None:
    monkeypatch.setattr(collecting, "MAX_KEPT_REFUSALS", 50)
    RatePolicy.objects.create(endpoint=search, rates="blocked")
    victim = refusal_id("203.0.113.7")
    collector.flush()
    for minute in range(5):
        given = [refusal_id(address) for address in networks(100)[minute * 20 :][:30]]
        assert all(given)
        collector.flush()
        collector.clear()  # the next minute
    assert find_refusal(victim) is not None
    kept = {name: redis_client.zcard(statistics_key("rqtest", name)) for name in ("refused_at", "refused_more")}
    assert kept["refused_at"] == 50
    assert kept["refused_more"] <= 50
    assert redis_client.hlen(statistics_key("rqtest", "refusals")) == 100
