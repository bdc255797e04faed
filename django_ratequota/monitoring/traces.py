"""What Redis holds of one subject: each thing in words, and with the commands that delete it.

The functions raise ``StoreError``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..engine.keys import beginning, short
from ..engine.scripts import SCAN
from ..runtime import default_limiter
from ..store.commands import Command, ScriptCall
from .packing import HOUR, OUTCOMES, kept_hours, key_of, pack_attempts, read, read_pairs, unpack_attempts
from .refusals import read_refusals

#: Keys that a step of SCAN looks at.
_STEP = 1_000
#: Where refusals are kept -> their ids by time.
_REFUSALS = {"refusals": ("refused_at", "refused_more"), "would_be": ("would_be_at",)}
#: A kind (counter, refusals, would_be, requests by the hour, attempts), values, and the commands that delete it.
Trace = tuple[str, dict[str, Any], tuple[Command, ...]]
_ATTEMPT = ("second", "caller", "ip", "plan_id", "endpoint_ids", "cost", "admitted", "refused")


def traces_of(subject: str) -> Iterator[Trace]:
    """Yield all of them."""
    name = short(subject)
    yield from _counters(subject)
    for key, times in _REFUSALS.items():
        ids = [refusal_id.decode() for refusal_id in read("ZRANGE", times[0], 0, -1)]
        for one in read_refusals(ids, key):
            if name in (one.caller, one.ip, *one.subjects):
                lists = (("ZREM", key_of(listed), one.id) for listed in times)
                yield key, asdict(one), (*lists, ("HDEL", key_of(key), one.id, f"{one.id}:count"))
    for hour in kept_hours():
        keys = [f"{outcome}:{hour}" for outcome in OUTCOMES]
        for outcome, key, members in zip(OUTCOMES, keys, read_pairs("zset", *keys), strict=True):
            for member, count in members:
                series, _bar, caller = member.partition("|")
                if caller == name:
                    values = {"hour": hour * HOUR, "series": series, "outcome": outcome, "count": float(count)}
                    yield "requests", values, (("ZREM", key_of(key), member),)
        yield from _attempts(f"usage:{hour}", name)


def forget(subject: str) -> None:
    """Delete all of them; attempts of others from an address lose it instead."""
    for _kind, _values, deletion in traces_of(subject):
        for command in deletion:
            default_limiter().store.execute(command)


def _counters(subject: str) -> Iterator[Trace]:
    limiter = default_limiter()
    begins, execute = f"{limiter.prefix}:{beginning(subject)}", limiter.store.execute
    cursor, keys = "0", set[bytes]()
    while True:
        found, some = execute(ScriptCall(SCAN, [begins], (cursor, f"{begins}*", _STEP)))
        keys.update(some)
        if (cursor := found.decode()) == "0":
            break
    for key in sorted(key.decode() for key in keys):
        [value] = execute(("MGET", key))
        if value is None:  # a log is a list
            holds = [float(number) for number in execute(("LRANGE", key, 0, -1))]
        else:  # the limit behind it is no figure of the subject
            holds = [number for [number] in struct.iter_unpack(">d", value[: len(value) // 8 * 8])]
        yield "counter", {"key": key, "holds": holds}, (("DEL", key),)


def _attempts(key: str, name: str) -> Iterator[Trace]:
    for at, chunk in enumerate(read("LRANGE", key, 0, -1)):
        rows = unpack_attempts(chunk)
        own = [row for row in rows if name in row[1:3]]
        # Other processes append chunks meanwhile; none is ever moved.
        others = [[*row[:2], "" if row[2] == name else row[2], *row[3:]] for row in rows if row[1] != name]
        for row in own:
            deletion = (("LSET", key_of(key), at, pack_attempts(others)),) if row is own[-1] else ()
            yield "attempts", dict(zip(_ATTEMPT, row, strict=True)), deletion
