"""Another server takes over: it is found without a restart, by the connection, by Sentinel; each hit counts once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis
import redis.asyncio.sentinel
from django.test import override_settings
from redis.sentinel import Sentinel

from django_ratequota import Bucket, Limiter, Rate
from tests.support.properties import thorough_after

from . import poll
from .asking import Ask, Begin, Load, aoutcome, failure, outcome, outcomes
from .servers import Node, Pair, Sentinels, follow
from .wire import Wire

LIMIT = 200
BUCKET = Bucket("user:1", Rate.parse(f"{LIMIT}/3650day"))


@pytest.fixture
def closing() -> Iterator[Callable[[Limiter], Limiter]]:
    """Closes limiters."""
    with ExitStack() as stack:

        def keep(limiter: Limiter) -> Limiter:
            stack.callback(limiter.store.close)
            return limiter

        yield keep


def test_roles_are_swapped_with_the_connections_kept(
    pair: Pair, proxies: Callable[[Node], Wire], limiters: Callable[..., Limiter], begin: Begin
) -> None:
    """A pool kept sending to the demoted master, which replied READONLY for ever."""
    proxy = proxies(pair.primary)
    limiter = limiters(proxy, timeout=1)

    def asked() -> set[str]:
        return set(outcomes(begin(limiter, 8, BUCKET)))

    poll(lambda: asked() == {"decided"}, 20, "eight are connected")
    pair.replica.command("REPLICAOF", "NO", "ONE")
    follow(pair.primary, pair.replica)
    proxy.target = pair.replica
    seen: set[str] = set()
    took = poll(lambda: seen.update(found := asked()) or found == {"decided"}, 20, "the new master decides")
    print(f"\nenforcing again after {took:.2f} s")
    assert took < 2 * 5
    assert seen <= {"readonly", "left alone", "decided"}


def by_client(sentinels: Sentinels) -> Limiter:
    return Limiter(client=Sentinel(sentinels.addresses).master_for(sentinels.service), prefix="rqtest", timeout=1)


def by_async_client(sentinels: Sentinels) -> Limiter:
    found = redis.asyncio.sentinel.Sentinel(sentinels.addresses).master_for(sentinels.service)
    return Limiter(client=found, prefix="rqtest", timeout=1)


def by_alias(sentinels: Sentinels) -> Limiter:
    alias = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"redis://{sentinels.service}/0",
        "OPTIONS": {
            "CLIENT_CLASS": "django_redis.client.SentinelClient",
            "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            "SENTINELS": sentinels.addresses,
        },
    }
    with override_settings(CACHES={"default": alias}, RATEQUOTA={"PREFIX": "rqtest", "TIMEOUT": 1}):
        return Limiter()


def watched_by(addresses: list[tuple[str, int]], service: str) -> Limiter:
    url = f"redis+sentinel://{','.join(f'{host}:{port}' for host, port in addresses)}/{service}/0"
    with override_settings(RATEQUOTA={"PREFIX": "rqtest", "TIMEOUT": 1, "REDIS_URL": url}):
        return Limiter()


def by_url(sentinels: Sentinels) -> Limiter:
    return watched_by(sentinels.addresses, sentinels.service)


@pytest.mark.parametrize("limiter_by", thorough_after(2, [by_client, by_async_client, by_alias, by_url]))
def test_sentinel_fails_over_under_load(
    sentinels: Sentinels, closing: Callable[[Limiter], Limiter], limiter_by: Callable[[Sentinels], Limiter]
) -> None:
    """Threads and tasks keep checking while the master dies; the new one admits the rest of the limit."""
    limiter = closing(limiter_by(sentinels))
    first, second = sentinels.primary, sentinels.replica
    assert limiter.check([BUCKET]).allowed
    poll(lambda: pair_in_step(sentinels), 20, "the first admission is replicated")
    first.kill()
    load = Load(limiter, [BUCKET], threads=4, tasks=4)
    with load.going_on():
        agreed = poll(lambda: sentinels.agree_on(second), 60, "the sentinels have promoted the replica")
        took = poll(lambda: load.errors and load.asked[-1].is_refused, 30, "the new master refuses")
    print(f"\n{limiter_by.__name__}: promoted after {agreed:.2f} s, refusing {took:.2f} s later; {load.errors}")
    assert took < 2 * 5
    assert load.errors <= {"connection", "timeout", "readonly"}
    assert load.admitted == LIMIT - 1
    assert sentinels.primary is not first


def pair_in_step(sentinels: Sentinels) -> bool:
    mine, theirs = sentinels.primary.info("replication"), sentinels.replica.info("replication")
    return bool(mine["master_repl_offset"] == theirs["slave_repl_offset"])


def test_a_dead_sentinel_and_one_that_hangs_are_passed_over(
    sentinels: Sentinels, closing: Callable[[Limiter], Limiter]
) -> None:
    sentinels.sentinels[0].kill()
    sentinels.sentinels[1].freeze()
    limiter = closing(by_url(sentinels))
    assert outcome(limiter, BUCKET) == "decided"
    assert asyncio.run(aoutcome(limiter, BUCKET)) == "decided"
    sentinels.sentinels[1].thaw()


def test_a_lost_reply_counts_once_under_sentinel(
    nodes: Callable[..., Node],
    proxies: Callable[[Node], Wire],
    closing: Callable[[Limiter], Limiter],
    ask: Ask,
) -> None:
    """redis-py's Sentinel connections keep a connection whose reply was lost; its clients send again."""
    proxy = proxies(nodes())
    watcher = nodes(f"sentinel monitor ratequota {proxy.host} {proxy.port} 1", sentinel=True)
    limiter = closing(watched_by([watcher.address], "ratequota"))
    ask(limiter, [BUCKET])
    for lost in range(5):
        proxy.cut_after_execution = 1
        assert failure(ask, limiter, [BUCKET]) == "connection"
        assert ask(limiter, [BUCKET]).statuses[0].remaining == LIMIT - 1 - 2 * (lost + 1)


def test_sentinels_and_masters_have_credentials_of_their_own(nodes: Callable[..., Node]) -> None:
    master = nodes()
    watcher = nodes(f"sentinel monitor ratequota {master.host} {master.port} 1", sentinel=True)
    watcher.command("SENTINEL", "SET", "ratequota", "auth-pass", "secret")
    master.command("CONFIG", "SET", "requirepass", "secret")
    watcher.command("ACL", "SETUSER", "default", "resetpass", ">watching")
    address = f"{watcher.host}:{watcher.port}"
    for url, expected in (
        (f"redis+sentinel://:secret@{address}/ratequota?sentinel_password=watching", "decided"),
        (f"redis+sentinel://default:secret@{address}/ratequota/0?sentinel_password=watching", "decided"),
        (f"redis+sentinel://:secret@{address}/ratequota", "connection"),
        (f"redis+sentinel://:wrong@{address}/ratequota?sentinel_password=watching", "noauth"),
    ):
        with override_settings(RATEQUOTA={"PREFIX": "rqtest", "TIMEOUT": 5, "REDIS_URL": url}):
            limiter = Limiter()
        assert outcome(limiter, BUCKET) == expected
        limiter.store.close()
