"""``manage.py ratequota purge``: this app's keys go, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.core.management import CommandError

from django_ratequota import Bucket, Rate
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.monitoring.health import report
from django_ratequota.runtime import default_limiter
from tests.support.commands import run
from tests.support.server import memory_limit

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

#: Of another prefix that begins with this one, of this app elsewhere, and of other apps.
OTHERS = {"rqtest:b:{user:1}:7:tb60", "rqtest2:{user:1}:7:tb60", "rqtest:revision2", "session:1", "{rqtest:}"}


@pytest.fixture(autouse=True)
def emptied(redis_client: redis.Redis) -> Iterator[None]:
    redis_client.flushdb()
    yield
    redis_client.flushdb()


def use() -> None:
    """Have counters of each algorithm, a revision and a report."""
    limiter = default_limiter()
    for algorithm in ALGORITHMS:
        limiter.charge([Bucket("user:0", Rate.parse(f"9/h {algorithm}"))])
    limiter.publish()
    report()


def test_every_key_of_the_prefix_is_deleted(redis_client: redis.Redis) -> None:
    for key in OTHERS:
        redis_client.set(key, "kept")
    use()
    own = {key.decode() for key in redis_client.keys("rqtest:*")} - OTHERS
    assert {"rqtest:revision", "rqtest:{workers}", "rqtest:{user:0}:0:sl3600"} < own
    assert f"Deleted {len(own)} keys of rqtest at " in run("purge", "--no-input")
    assert {key.decode() for key in redis_client.keys("*")} == OTHERS
    assert "Deleted 0 keys of rqtest at " in run("purge", "--no-input")


def test_many_keys_are_deleted_a_batch_at_a_time(redis_client: redis.Redis) -> None:
    redis_client.mset({f"rqtest:{{user:{user}}}:0:tb60": "x" for user in range(5_000)})
    redis_client.mset({f"session:{number}": "x" for number in range(5_000)})
    redis_client.config_resetstat()
    assert "Deleted 5000 keys of rqtest at " in run("purge", "--no-input")
    assert redis_client.info("commandstats")["cmdstat_scan"]["calls"] >= 10
    assert redis_client.dbsize() == 5_000


def test_a_full_server_is_purged(redis_client: redis.Redis) -> None:
    use()
    with memory_limit(redis_client, used=1.01):
        assert "Deleted " in run("purge", "--no-input")
    assert redis_client.dbsize() == 0


@pytest.mark.parametrize(("typed", "left"), [("yes", 0), ("no", 1), ("", 1)])
def test_it_asks_first(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, typed: str, left: int) -> None:
    asked: list[str] = []

    def answer(question: str) -> str:
        asked.append(question)
        return typed

    monkeypatch.setattr("builtins.input", answer)
    redis_client.set("rqtest:{user:1}:0:tb60", "x")
    printed = run("purge")
    [question] = asked
    assert "every key of rqtest at 127.0.0.1:" in question
    assert redis_client.dbsize() == left
    assert ("Nothing was deleted" in printed) is bool(left)


def test_a_script_has_to_say_that_it_means_it(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_terminal(_question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", no_terminal)
    redis_client.set("rqtest:{user:1}:0:tb60", "x")
    with pytest.raises(CommandError, match="add --no-input"):
        run("purge")
    assert redis_client.dbsize() == 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"REDIS_URL": "memory://"}, "memory://, so each worker"), ({"ENABLED": False}, "ENABLED")],
)
def test_without_redis_there_is_nothing_to_delete(settings: Any, changed: dict[str, Any], text: str) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, **changed}
    with pytest.raises(CommandError, match=f"Nothing is counted in Redis: .*{text}"):
        run("purge", "--no-input")
