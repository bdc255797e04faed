"""How statistics lie in Redis: the collector packs records into these keys, and the readers unpack them.

A *series* is what requests are counted for: ``t`` (all requests), ``e7`` (endpoint 7; 0 = requests that belong to no
endpoint) or ``p7`` (policy 7).
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from ..engine.keys import statistics_key
from ..engine.scripts import READ_PAIRS
from ..runtime import default_limiter
from ..store.commands import ScriptCall
from .records import DecisionRecord

Made = TypeVar("Made")
_types = lru_cache(maxsize=8)(get_type_hints)

KEPT_SECONDS = 48 * 3600
MINUTE, QUARTER, HOUR, DAY = 60, 900, 3600, 86_400
#: With the one that runs now.
_KEPT_HOURS = KEPT_SECONDS // HOUR + 1
OUTCOMES = ("admitted", "refused", "would_refuse")


class Slots(NamedTuple):
    """How counts over time are kept: by ``slot`` seconds, in a key for each ``span`` seconds."""

    name: str
    slot: int
    span: int

    def key(self, second: int) -> str:
        """Return the key of a Unix time."""
        return f"{self.name}:{second // self.span}"

    def position(self, second: int) -> int:
        """Return the number of the slot in its key."""
        return second % self.span // self.slot


MINUTES, QUARTERS = Slots("minutes", MINUTE, HOUR), Slots("quarters", QUARTER, DAY)

#: Records, each with how often it was made.
Records = Iterable[tuple[DecisionRecord, int]]


def pack_counts(records: Records) -> dict[str, Any]:
    """Return the counts that the records add up to, in flat lists as Lua reads them."""
    # Grouped by everything but the caller first: there are few such groups.
    groups: dict[tuple[Any, ...], Counter[str]] = defaultdict(Counter)
    for record, times in records:
        groups[record.second // MINUTE, *record.result, record.counted][record.caller] += times
    minutes: Counter[str] = Counter()
    quarters: Counter[str] = Counter()
    callers: list[Counter[str]] = [Counter() for _ in OUTCOMES]
    for (minute, endpoint_ids, policy_ids, allowed, against, before), by_caller in groups.items():
        in_hour, in_day = MINUTES.position(minute * MINUTE), QUARTERS.position(minute * MINUTE)
        places = ["t", *(f"e{endpoint}" for endpoint in endpoint_ids or (0,))]
        # Would-be refusals are admitted requests, too.
        for outcome in ((0, 2) if against else (0,)) if allowed else (1,):
            # A refusal by another policy is no count of this one.
            policies = [f"p{policy}" for policy in policy_ids if not outcome or policy in against]
            for series in (*places, *policies):
                if not outcome and series in before:
                    continue
                minutes[f"{in_hour}:{series}:{outcome}"] += by_caller.total()
                quarters[f"{in_day}:{series}:{outcome}"] += by_caller.total()
                if outcome or series in places:  # whom a policy admitted is not counted by caller
                    for caller, times in by_caller.items():
                        callers[outcome][f"{series}|{caller}"] += times
    return {"minutes": _flat(minutes), "quarters": _flat(quarters), "callers": list(map(_flat, callers))}


def pack_attempts(rows: list[Any]) -> bytes:
    """Return attempts, each a list of JSON values, as one compressed chunk."""
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode())


def unpack_attempts(chunk: bytes) -> list[Any]:
    """Return the rows of ``pack_attempts``."""
    return json.loads(zlib.decompress(chunk))  # type: ignore[no-any-return]


def key_of(name: str) -> str:
    """Return one of the statistics' keys, by its name."""
    return statistics_key(default_limiter().prefix, name)


def read(command: str, name: str, *args: object) -> Any:
    """Return Redis' reply to a command on one key of the statistics; raises ``StoreError``."""
    return default_limiter().store.execute((command, key_of(name), *args))


def read_pairs(kind: Literal["hash", "zset"], *names: str, prefix: str = "") -> list[list[tuple[str, str]]]:
    """Return for each hash its (field, value), or for each sorted set its (member, score), in one call.

    With ``prefix`` only those that begin with it. Raises ``StoreError``.
    """
    reply = default_limiter().store.execute(ScriptCall(READ_PAIRS, [*map(key_of, names)], (kind, prefix)))
    return [list(zip(*[iter(flat)] * 2, strict=True)) for flat in json.loads(reply)]


def made(cls: Callable[..., Made], values: dict[str, Any]) -> Made:
    """Return an object of values from Redis; raises ``TypeError`` or ``ValueError`` for those that it never has."""
    types = _types(cls)
    if wrong := [name for name in values.keys() & types.keys() if not _fits(values[name], types[name])]:
        raise TypeError(f"this cannot be {wrong[0]}")
    return cls(**values)


def _fits(value: Any, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, one) for one in args)
    wanted: Any = origin or (int | float if kind is float else kind)
    if not isinstance(value, wanted):
        return False
    if origin:
        return all(_fits(one, args[origin is dict]) for one in (value.values() if origin is dict else value))
    # No lone surrogates, which no page can send.
    return value.encode() is not None if kind is str else kind not in (int, float) or abs(value) < 2**63


def kept_hours(number: int = _KEPT_HOURS) -> range:
    """Return the last ``number`` hours since the Unix epoch, as far back as hours are kept."""
    current = int(time.time() // HOUR)
    return range(current - min(number, _KEPT_HOURS) + 1, current + 1)


def _flat(counts: Mapping[str, int]) -> list[Any]:
    return [item for pair in counts.items() for item in pair]
