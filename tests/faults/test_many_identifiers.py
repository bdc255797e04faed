"""Thousands of callers nobody has seen before: every key they leave ends with its window."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
import redis

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.keys import bucket_key
from django_ratequota.engine.rates import ALGORITHMS
from tests.faults import poll
from tests.support import server
from tests.support.properties import scaled

MANY = scaled(100_000)
PER_CHECK = 250
PERIOD = 4
LIMIT = 5
#: Two windows, for sliding_window_counter looks back at the one before; and the second that every key is given.
LONGEST_MS = 2 * PERIOD * 1000 + 1000
#: Seconds of the machine's own stalls.
SLACK = 20.0

RATES = [Rate.parse(f"{LIMIT}/{PERIOD}s {algorithm}") for algorithm in ALGORITHMS]
RATES += [
    Rate.parse(f"{LIMIT}/{PERIOD}s burst 2 {algorithm}") for algorithm in ("token_bucket", "leaky_bucket", "gcra")
]


@pytest.fixture
def real_limiter(redis_client: redis.Redis) -> Iterator[Limiter]:
    """A limiter by the server's clock."""
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=30)
    yield limiter
    limiter.store.close()


def identifiers(rng: Random) -> Iterator[Bucket]:
    """Buckets of distinct subjects: hashed ones, readable ones, and some of a kilobyte."""
    for n in range(MANY):
        subject = (
            f"api_key:{rng.getrandbits(256):x}",
            f"user:{n}",
            f"ip:2001:db8:{n >> 16:x}:{n & 0xFFFF:x}::/64",
            f"tenant:{n}{'é' * 500}",
        )[n % 4]
        yield Bucket(subject, RATES[n % len(RATES)], scope=("", "search", "ex ports")[n % 3])


@pytest.mark.thorough
def test_many_identifiers_leave_keys_that_all_end(
    redis_client: redis.Redis, real_limiter: Limiter, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = Random(12)
    buckets = list(identifiers(rng))
    keys = [bucket_key("rqtest", bucket) for bucket in buckets]
    assert len(set(keys)) == MANY
    before, memory_before = redis_client.dbsize(), redis_client.info("memory")["used_memory"]

    def ask(first: int) -> list[int]:
        """Check once for each identifier; returns the remaining TTLs of their keys (ms)."""
        chosen = slice(first, first + PER_CHECK)
        with redis.Redis.from_url(server.url()) as client, client.pipeline(transaction=False) as pipeline:
            client.ping()
            asked = time.monotonic()
            # A cost of 2 fits every bucket; charges and refunds leave TTLs as well.
            assert real_limiter.check(buckets[chosen], 2).allowed
            refunds = bool(first % (2 * PER_CHECK))
            if refunds:
                real_limiter.charge(buckets[chosen], 1)
                real_limiter.refund(buckets[chosen], 1)
            for key in keys[chosen]:
                pipeline.pttl(key)
            left, took = pipeline.execute(), time.monotonic() - asked
        # Every key lives for a second at least: one that is gone (-2), or going (0), sooner was never there. But a
        # refund in the window after the charge deletes the key, which counts nothing.
        return [ttl for ttl in left if ttl not in (-2, 0) or (took < 1 and not refunds)]

    with ThreadPoolExecutor(4) as threads:
        lives = [ttl for part in threads.map(ask, range(0, MANY, PER_CHECK)) for ttl in part]
    there, memory = redis_client.dbsize() - before, redis_client.info("memory")["used_memory"] - memory_before
    assert min(lives) > 0, "-1 is a key without an end"
    assert max(lives) <= LONGEST_MS

    gone = poll(lambda: redis_client.dbsize() <= before, LONGEST_MS / 1000 + SLACK, "the last key is gone")
    assert list(redis_client.scan_iter("rqtest:*", count=10_000)) == []
    with capsys.disabled():
        print(
            f"\n{MANY} identifiers, {there} keys there at once at {memory / max(there, 1):.0f} bytes each, names and "
            f"TTLs included; {min(lives)} to {max(lives)} ms to live; the last was gone after {gone:.1f} s"
        )


def test_memory_of_one_key(
    redis_client: redis.Redis, real_limiter: Limiter, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's own measure, keys of the longest names included; the log grows by the request."""
    used = {}
    for rate in RATES[: len(ALGORITHMS)]:
        bucket = Bucket(f"tenant:{'x' * 100}", Rate(limit=100, period=600, algorithm=rate.algorithm), scope="s" * 100)
        for _ in range(100):
            assert real_limiter.check([bucket]).allowed
        used[rate.algorithm] = redis_client.memory_usage(bucket_key("rqtest", bucket))
    with capsys.disabled():
        print(f"\nbytes a key after 100 requests: {used}")
    log = used.pop("sliding_window_log")
    assert max(used.values()) <= 256
    assert log <= 4096
