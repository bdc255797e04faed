"""What this process notes of its decisions, for ``statistics`` to read: a request appends one tuple, a thread counts
them and hands them to Redis every STATISTICS_SECONDS.

Bounded whatever comes: a process holds at most ``MAX_NOTED`` decisions and ``MAX_REFUSALS`` refusals that Redis has
not taken yet; ``lua/collect.lua`` bounds what Redis keeps, to less than 100 MB even when every bound is met for 48
hours. Usage beyond its bound is kept of a part of the callers, the same in every process.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

from ..conf import settings
from ..engine.keys import statistics_key
from ..engine.limiter import Limiter
from ..engine.scripts import COLLECT
from ..engine.types import Decision
from ..exceptions import StoreError
from ..policies.resolver import EvaluationContext, Resolution
from ..runtime import default_limiter
from ..store.base import run_script
from ..utils.locks import ForkSafeLock
from ..utils.sansio import drive
from .background import Background
from .records import MAX_NAME, UNTOLD_PLAN, Note, bounded, describe, digest, sampled, shared_network

#: Decisions noted and not counted yet; those beyond it go uncounted.
MAX_NOTED = 20_000
#: Most refusals with an id per minute: of all clients, and of one network (/24, IPv6 /48).
MAX_REFUSALS, MAX_OF_NETWORK = 300, 30
#: A network's first refusals of a minute, which stay in Redis when there are too many and its others go.
_FIRST_OF_NETWORK = 3
#: Bounds of what Redis keeps: fields of each hash of counts, callers of an hour and outcome, bytes of an hour's
#: usage, refusals.
MAX_FIELDS, MAX_CALLERS, MAX_USAGE_BYTES, MAX_KEPT_REFUSALS = 20_000, 1_000, 2**19, 10_000
KEPT_SECONDS = 48 * 3600
MINUTE, QUARTER, HOUR, DAY = 60, 900, 3600, 86_400
#: How counts by the minute and by the quarter of an hour are kept: seconds of a slot, seconds of a key.
MINUTES, QUARTERS = (MINUTE, HOUR), (QUARTER, DAY)
OUTCOMES = ("admitted", "refused", "would_refuse")
#: Seconds from the last count of a key, which holds an hour or a day, until it goes.
_MINUTES_TTL, _TTL = 3 * HOUR, KEPT_SECONDS
#: One call to Redis takes so many different notes: it answers nobody else meanwhile.
_SLICE = 200
#: Usage is packed for so long before it is sent: equal attempts, and equal names, are then written once.
_USAGE_SECONDS = 10.0


class Collector:
    """What one process has noted and not handed over yet."""

    def __init__(self) -> None:
        #: Notes as plain tuples: these cost less to make, and the garbage collector passes them over.
        self._noted: deque[tuple[Any, ...]] = deque()
        #: id -> [minute, how many since the last flush, description, network, whether others of it came before]
        self._refusals: dict[str, list[Any]] = {}
        #: Network -> its refusals among these.
        self._networks: Counter[str] = Counter()
        #: The first six fields of a note -> [how many were admitted, and refused]
        self._usage: dict[tuple[Any, ...], list[int]] = {}
        self._usage_sent = time.monotonic()
        #: The last hour that usage was sent for, and the level it stood at.
        self._level = (0, 0)
        # Of refusals noted, and of one flush at a time.
        self._lock, self._flushing = ForkSafeLock(), ForkSafeLock()

    def note(
        self,
        context: EvaluationContext,
        route: str,
        method: str,
        resolution: Resolution,
        decision: Decision,
        cost: int,
    ) -> str:
        """Note a decision; returns the id of a refusal, "" where there is none."""
        name, ip = context.caller.name, context.caller.located.text
        allowed = decision.allowed
        # A loop, and what the resolution holds ready: every request pays for this.
        against: tuple[int | None, ...] = resolution.would_block if allowed else resolution.blocking
        for status in decision.statuses:
            if not status.allowed and (allowed or status.refused):
                against = (*against, status.bucket.policy_id)
        noted = (
            (decision.at_us or time.time_ns() // 1000) // 10**6,
            name if len(name) <= MAX_NAME and name.isascii() else bounded(name),
            "" if ip is None else f"ip:{ip}",
            _plan_id(context, resolution),
            resolution.endpoint_ids,
            cost,
            resolution.policy_ids,
            allowed,
            against,
        )
        if len(self._noted) < MAX_NOTED:
            self._noted.append(noted)
        if allowed:
            return ""
        return self._note_refusal(Note._make(noted), context.scope or "", route, method, decision)

    def _note_refusal(self, noted: Note, scope: str, route: str, method: str, decision: Decision) -> str:
        minute = noted.second // MINUTE
        told_by = (noted.caller, noted.ip, scope, noted.endpoint_ids, decision.violated, minute)
        refusal_id = digest(repr(told_by))
        with self._lock:
            known = self._refusals.get(refusal_id)
            if known is not None:
                known[1] += 1
                return refusal_id
            network = shared_network(noted.ip)
            earlier = self._networks[network]
            if len(self._refusals) >= MAX_REFUSALS or earlier >= MAX_OF_NETWORK:
                return ""
            text = describe(noted, scope, route, method, decision)
            self._refusals[refusal_id] = [minute, 1, text, network, earlier >= _FIRST_OF_NETWORK]
            self._networks[network] += 1
        return refusal_id

    def flush(self) -> None:
        """Hand over what was noted so far; raises ``StoreError``, and then that is lost."""
        with self._flushing:
            self._flush(default_limiter())

    def _flush(self, limiter: Limiter) -> None:
        counts = Counter(self._noted.popleft() for _ in range(len(self._noted)))
        for listen in listeners:
            listen(counts)
        hours: dict[int, list[tuple[tuple[Any, ...], int]]] = {}
        for noted, times in counts.items():
            hours.setdefault(noted[0] // HOUR, []).append((noted, times))
        for hour, notes in hours.items():
            self._add_usage(notes, self._level_for(hour))
        chunks = self._chunks()
        refusals = self._take_refusals()
        for hour in sorted({*hours, *chunks} or ({time.time_ns() // 10**9 // HOUR} if refusals else ())):
            rest = iter(hours.get(hour, ()))
            chunk = chunks.get(hour, b"")
            while (notes := list(islice(rest, _SLICE))) or chunk or refusals:
                payload = {**_payload(notes), "refusals": refusals[:_SLICE]}
                self._level = (hour, self._send(limiter, hour, payload, chunk))
                chunk, refusals = b"", refusals[_SLICE:]

    def _send(self, limiter: Limiter, hour: int, payload: dict[str, Any], chunk: bytes) -> int:
        at = hour * HOUR
        names = [f"minutes:{at // MINUTES[1]}", f"quarters:{at // QUARTERS[1]}"]
        names += [f"{outcome}:{hour}" for outcome in OUTCOMES]
        names += [f"usage:{hour}", f"level:{hour}", "refusals", "refused_at", "refused_more"]
        args = [json.dumps(payload), chunk, self._level_for(hour)]
        args += [MAX_FIELDS, MAX_CALLERS, MAX_USAGE_BYTES, MAX_KEPT_REFUSALS]
        args += [_MINUTES_TTL, _TTL, at - KEPT_SECONDS]
        steps = run_script(COLLECT, [statistics_key(limiter.prefix, name) for name in names], args)
        return int(drive(steps, limiter.store.call().do))

    def _level_for(self, hour: int) -> int:
        """The level to pack an hour's usage at: the one it is known to stand at, else one below the last hour's."""
        known, level = self._level
        return level if known == hour else max(0, level - 1)

    def _add_usage(self, notes: Iterable[tuple[tuple[Any, ...], int]], level: int) -> None:
        usage = self._usage
        for (*fields, _policy_ids, allowed, _against), times in notes:
            attempt = tuple(fields)
            counted = usage.get(attempt)
            if counted is None:
                if len(usage) >= MAX_NOTED or not sampled(attempt[1], level):
                    continue
                counted = usage[attempt] = [0, 0]
            counted[0 if allowed else 1] += times

    def _chunks(self) -> dict[int, bytes]:
        """The usage to send now, packed, by hour."""
        if time.monotonic() - self._usage_sent < _USAGE_SECONDS and len(self._usage) < MAX_NOTED // 2:
            return {}
        self._usage_sent = time.monotonic()
        hours: dict[int, list[Any]] = {}
        for attempt, counted in self._usage.items():
            hours.setdefault(attempt[0] // HOUR, []).append([*attempt, *counted])
        self._usage = {}
        return {hour: zlib.compress(json.dumps(rows, separators=(",", ":")).encode()) for hour, rows in hours.items()}

    def _take_refusals(self) -> list[list[Any]]:
        """Refusals to send, as [id, when (Unix time), how many, description, 1 = its network had others before].

        Refusals of past minutes are forgotten.
        """
        with self._lock:
            current = max((minute for minute, *_ in self._refusals.values()), default=0)
            taken = [
                [name, minute * MINUTE, times, text, int(more)]
                for name, (minute, times, text, _, more) in self._refusals.items()
            ]
            self._refusals = {
                name: [minute, 0, *rest] for name, (minute, _, *rest) in self._refusals.items() if minute == current
            }
            self._networks = Counter(network for _, _, _, network, _ in self._refusals.values())
        return [entry for entry in taken if entry[2]]

    def end(self) -> None:
        """Hand over what is left, as the process ends."""
        self._usage_sent = -_USAGE_SECONDS
        if self._noted or self._usage or self._refusals:
            try:
                self.flush()
            except StoreError:
                pass

    def forget(self) -> None:
        """As if nothing had been noted."""
        self._noted.clear()
        self._refusals.clear()
        self._networks.clear()
        self._usage.clear()
        self._level = (0, 0)


def _payload(notes: Iterable[tuple[tuple[Any, ...], int]]) -> dict[str, Any]:
    """The counts that the notes add up to, in flat lists as Lua reads them."""
    # Callers differ, what became of their requests seldom does: that is added up first, and then spelled out once.
    alike: Counter[tuple[Any, ...]] = Counter()
    callers: list[dict[str, int]] = [{} for _ in OUTCOMES]
    for (second, caller, _, _, endpoint_ids, _, policy_ids, allowed, against), times in notes:
        alike[second // MINUTE, endpoint_ids, policy_ids, allowed, against] += times
        for outcome in _outcomes(allowed, against):
            own = callers[outcome]
            names = [f"t|{caller}", *[f"e{endpoint}|{caller}" for endpoint in endpoint_ids or (0,)]]
            if outcome:
                names += [f"p{policy}|{caller}" for policy in policy_ids if policy in against]
            for name in names:
                own[name] = own.get(name, 0) + times
    minutes: Counter[str] = Counter()
    quarters: Counter[str] = Counter()
    for (minute, endpoint_ids, policy_ids, allowed, against), times in alike.items():
        in_hour = minute * MINUTE % MINUTES[1] // MINUTES[0]
        in_day = minute * MINUTE % QUARTERS[1] // QUARTERS[0]
        places = [("t", True), *((f"e{endpoint}", True) for endpoint in endpoint_ids or (0,))]
        places += [(f"p{policy}", policy in against) for policy in policy_ids]
        for outcome in _outcomes(allowed, against):
            for place, concerned in places:
                # What another policy refused says nothing of this one.
                if concerned or not outcome:
                    minutes[f"{in_hour}:{place}:{outcome}"] += times
                    quarters[f"{in_day}:{place}:{outcome}"] += times
    return {"minutes": _flat(minutes), "quarters": _flat(quarters), "callers": [_flat(one) for one in callers]}


def _outcomes(allowed: bool, against: tuple[int | None, ...]) -> tuple[int, ...]:
    """Numbers in ``OUTCOMES``; would-be refusals are admitted requests, too."""
    return ((0, 2) if against else (0,)) if allowed else (1,)


def _flat(counts: Mapping[str, int]) -> list[Any]:
    return [item for pair in counts.items() for item in pair]


def _plan_id(context: EvaluationContext, resolution: Resolution) -> int | None:
    if not context.caller.user_read and not settings.plan_resolver:
        return UNTOLD_PLAN
    return resolution.plan.id if resolution.plan else None


#: Told of every flush's notes, each with how often it was made, whether or not Redis takes them: for ``metrics``.
listeners: list[Callable[[Mapping[tuple[Any, ...], int]], None]] = []
#: What this process has noted.
collector = Collector()
_background = Background("ratequota-statistics", lambda: settings.statistics_seconds, collector.flush)
atexit.register(collector.end)
os.register_at_fork(after_in_child=collector.forget)


def note(
    context: EvaluationContext, route: str | None, method: str, resolution: Resolution, decision: Decision, cost: int
) -> str:
    """Note a decision, and see to it that a thread hands it over; returns the id of a refusal, "" without one."""
    if not settings.statistics_seconds:
        return ""
    _background.keep()
    return collector.note(context, route or "", method, resolution, decision, cost)
