"""Copies of buckets for other subjects, and the commands about them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import redis

from django_ratequota.engine import protocol
from django_ratequota.engine.limiter import Limiter
from django_ratequota.engine.rates import Rate
from django_ratequota.engine.scripts import DECIDE
from django_ratequota.engine.types import Bucket, Copies, Patterns
from django_ratequota.store.commands import ScriptCall, ScriptPattern, encoded
from tests.conftest import Clock

SUBJECTS = ("user:1", "user:2", "ip:2001:db8::/64", "tenant:a b}c", "tenant:" + "é" * 300, "everyone")


def bucket(rate: str, **own: object) -> Bucket:
    return Bucket("user:7", Rate.parse(rate), scope="search", endpoint_id=3, counted_per="caller", **own)  # type: ignore[arg-type]


def copies(pattern: Patterns, subject: str) -> Copies:
    return Copies(pattern, (subject,) * len(pattern.buckets))


def test_a_copy_differs_in_the_subject_alone() -> None:
    others = {"name": "n", "mode": "log", "on_error": "deny", "policy_id": 4, "durable": True, "anchor": 5}
    one = bucket("5/month", leads=True, queued=True, beside=True, **others)
    copy = one.of("user:8")
    assert copy == replace(one, subject="user:8")
    assert (hash(copy), copy.title) == (hash(replace(one, subject="user:8")), one.title)
    plain = Bucket("", Rate.parse("1/s"))
    left_out = [
        each.name for each in fields(Bucket) if each.compare and getattr(one, each.name) == getattr(plain, each.name)
    ]
    assert left_out == [], "set every field above: ``of`` copies them one by one"


@pytest.mark.parametrize("text", ["100/min, 5/s gcra, 9/hour fixed_window", "10/month, 8/day", "7/min leaky_bucket"])
def test_the_command_is_that_of_plain_buckets(limiter: Limiter, clock: Clock, text: str) -> None:
    """Costs alternate, revisions grow, and calendar windows end between the commands."""
    sent: list[tuple[object, bytes]] = []
    connection = redis.Connection()

    def decide(buckets: tuple[Bucket, ...], cost: int, revision: int | None) -> None:
        steps = limiter.backend.ask(limiter._request("peek", (), cost)._replace(buckets=buckets, revision=revision))
        command = next(steps)
        assert isinstance(command, ScriptCall)
        sent.append((tuple(command), command.packed or b"".join(connection.pack_command(*command))))

    patterns = Patterns(tuple(bucket(rate.strip()) for rate in text.split(",")))
    for days, revision in ((0, None), (0, 5), (40, 6)):
        clock.advance(days * 86_400)
        for cost in (1, 2, 1):
            for subject in (*SUBJECTS, *SUBJECTS):
                own = copies(patterns, subject)
                decide(own, cost, revision)
                decide(tuple(own), cost, revision)
                assert sent[-1] == sent[-2]
    assert len({packed for _command, packed in sent}) > len(SUBJECTS)


def test_limiters_with_other_prefixes_have_keys_of_their_own(redis_client: redis.Redis) -> None:
    own = copies(Patterns((bucket("1/hour"),)), "user:1")
    limiters = [Limiter(client=redis_client, prefix=prefix) for prefix in ("rqtest", "rqtest:b", "rqtest")]
    found = [each.decide(each._request("check", (), 1)._replace(buckets=own)).allowed for each in limiters]
    assert found == [True, True, False]


def test_a_part_of_copies_is_plain() -> None:
    own = copies(Patterns((bucket("1/s"), bucket("2/min"))), "user:1")
    assert [type(one) for one in (own[:1], own[::-1], tuple(own))] == [tuple] * 3


def test_many_costs_do_not_fill_the_memory(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_CACHE_SIZE", 50)
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=5)
    patterns = Patterns((bucket("100000/min"),))
    for cost in range(1, 200):
        limiter.decide(limiter._request("check", (), cost)._replace(buckets=copies(patterns, "user:1")))
    assert 0 < len(limiter.backend._shared) <= 50


def test_a_pattern_is_encoded_as_redis_py_does() -> None:
    connection = redis.Connection()
    pattern = ScriptPattern(DECIDE, ["rq:revision"], 2, ["check", 0, -1, 2**53, "ä"])
    keys = ["rq:{user:1}:3:tb60", "rq:{everyone}:0:fw86400:2026-11-30"]
    call = ScriptCall.like(pattern, keys, encoded(keys))
    assert call.packed == b"".join(connection.pack_command(*call))
    assert call.text[:2] == ("EVAL", DECIDE.source)
