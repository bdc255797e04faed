"""Records the decisions of this process: a request appends one tuple, and a thread counts and sends them.

Everything is bounded: a process holds at most ``MAX_PENDING`` decisions, and some hundred refusals, that are not sent
yet; ``lua/collect.lua`` bounds what Redis keeps, to less than 100 MB even when every bound is met for 48 hours.
When there are too many attempts, they are kept of a sample of the callers, the same in every process.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from ..conf import settings
from ..engine.decision import Decision, without_room
from ..engine.keys import short, statistics_key
from ..engine.limiter import Limiter
from ..engine.scripts import COLLECT
from ..policies.resolver import EvaluationContext, Resolution
from ..runtime import default_limiter
from ..store.base import Call
from ..store.commands import ScriptCall
from ..utils import forks
from .packing import HOUR, KEPT_SECONDS, MINUTES, OUTCOMES, QUARTERS, Records, pack_attempts, pack_counts
from .pending_refusals import PendingRefusals
from .records import MAX_NAME, UNKNOWN_PLAN, DecisionRecord, Recorded, is_sampled
from .workers import redis_worker

#: Decisions recorded and not counted yet; those beyond it go uncounted.
MAX_PENDING = 20_000
#: Most refusals with an id per minute, of all clients and of one network; and the same for would-be refusals, of all
#: policies in log mode and of one.
MAX_REFUSALS, MAX_WOULD_BE = (300, 30), (100, 10)
#: Bounds of what Redis keeps: fields of each hash of counts, callers of an hour and outcome, bytes of an hour's
#: attempts, refusals, would-be refusals.
MAX_FIELDS, MAX_CALLERS, MAX_USAGE_BYTES, MAX_KEPT_REFUSALS, MAX_KEPT_WOULD_BE = 20_000, 1_000, 2**19, 10_000, 2_000
#: Seconds from the last count of a key, which holds an hour or a day, until it goes.
_MINUTES_TTL, _TTL = 3 * HOUR, KEPT_SECONDS
#: Most distinct records sent by one call: Redis serves nobody else meanwhile.
_SLICE = 200
#: Seconds between two chunks of attempts: equal attempts, and equal names, are then written once.
_CHUNK_SECONDS = 10.0


class Collector(forks.Renewed):
    """The decisions that one process has recorded and not sent yet."""

    def clear(self) -> None:
        """Begin with nothing that is not sent yet: in a forked child that is the parent's."""
        #: What is recorded and not sent yet: ``DecisionRecord``s as plain tuples, which cost less to make, and the
        #: garbage collector passes them over; and the refusals among them.
        self.pending: deque[tuple[Any, ...]] = deque()
        self.refusals, self.would_be = PendingRefusals(*MAX_REFUSALS), PendingRefusals(*MAX_WOULD_BE)
        #: ``DecisionRecord.attempt`` -> [how many were admitted, and refused]
        self._attempts: dict[tuple[Any, ...], list[int]] = {}
        self._attempts_sent = time.monotonic()
        #: The last hour that attempts were sent for, and the sampling level that Redis returned for it.
        self._level = (0, 0)
        self._flushing = forks.lock()

    def record(
        self,
        context: EvaluationContext,
        route: str | None,
        method: str,
        resolution: Resolution,
        decision: Decision,
        cost: int,
        before: Recorded | None = None,
    ) -> str:
        """Record a decision; returns the id of a refusal, "" where there is none.

        ``before`` is what the request's earlier checks recorded: this record stands for the whole request.
        Requests that a policy in log mode would have refused are recorded as refusals are, without an id.
        """
        if not settings.statistics_seconds:
            return ""
        caller, plan, allowed = context.caller, resolution.plan, decision.allowed
        name, ip = caller.name, caller.client_address.text
        plan_is_known = caller.user_read or resolution.plan_named
        # A plain loop, because every request pays for this.
        against: tuple[int | None, ...] = resolution.would_block if allowed else resolution.blocking
        for status in without_room(decision):
            if allowed or status.refused:
                against = (*against, status.bucket.policy_id)
        record = (
            (decision.at_us or time.time_ns() // 1000) // 10**6,
            name if len(name) <= MAX_NAME and name.isprintable() else short(name),
            "" if ip is None else f"ip:{ip}",
            (plan.id if plan else None) if plan_is_known else UNKNOWN_PLAN,
            resolution.endpoint_ids,
            cost,
            resolution.policy_ids,
            allowed,
            against,
            before,
        )
        if len(self.pending) < MAX_PENDING:
            self.pending.append(record)
        # Nobody could look up a refusal in memory. Not ``in_memory``, which is slower to read.
        if (allowed and not against) or settings.redis_url == "memory://":
            return ""
        refusals = self.would_be if allowed else self.refusals
        described, scope = DecisionRecord._make(record), context.scope or ""
        given = (resolution.assigned_to, resolution.plan_named)
        refusal_id = refusals.add(described, scope, route or "", method, decision, *given)
        return "" if allowed else refusal_id

    def flush(self) -> None:
        """Send what is recorded so far. Raises ``StoreError``; then that is lost."""
        with self._flushing:
            limiter = default_limiter()
            plain = Counter(self.pending.popleft() for _ in range(len(self.pending)))
            counts = [(DecisionRecord._make(fields), times) for fields, times in plain.items()]
            for listen in listeners:
                listen(counts)
            hours: dict[int, list[tuple[DecisionRecord, int]]] = {}
            for record, times in counts:
                hours.setdefault(record.second // HOUR, []).append((record, times))
            for hour, records in hours.items():
                self._add_attempts(records, self._level_for(hour))
            chunks = self._take_chunks()
            refusals = {"refusals": self.refusals.take(), "would_be": self.would_be.take()}
            waiting = any(refusals.values())
            for hour in sorted({*hours, *chunks} or ({time.time_ns() // 10**9 // HOUR} if waiting else ())):
                rest = iter(hours.get(hour, ()))
                chunk = chunks.get(hour, b"")
                while (records := list(islice(rest, _SLICE))) or chunk or waiting:
                    payload = {**pack_counts(records), **refusals}
                    self._level = (hour, self._send(limiter, hour, payload, chunk))
                    chunk, waiting = b"", False
                    refusals = {"refusals": [], "would_be": []}

    def _send(self, limiter: Limiter, hour: int, payload: dict[str, Any], chunk: bytes) -> int:
        start = hour * HOUR
        names = [MINUTES.key(start), QUARTERS.key(start)]
        names += [f"{name}:{hour}" for name in (*OUTCOMES, "usage", "level")]
        names += ["refusals", "refused_at", "refused_more", "would_be", "would_be_at"]
        args = [json.dumps(payload), chunk, self._level_for(hour)]
        args += [MAX_FIELDS, MAX_CALLERS, MAX_USAGE_BYTES, MAX_KEPT_REFUSALS]
        args += [_MINUTES_TTL, _TTL, start - KEPT_SECONDS, MAX_KEPT_WOULD_BE]
        command = ScriptCall(COLLECT, [statistics_key(limiter.prefix, name) for name in names], args)
        return int(Call(limiter.store).do(command))

    def _level_for(self, hour: int) -> int:
        """Return the sampling level for an hour's attempts: as Redis returned it, else one below the last hour's."""
        known, level = self._level
        return level if known == hour else max(0, level - 1)

    def _add_attempts(self, records: Records, level: int) -> None:
        for record, times in records:
            if is_sampled(record.caller, level):
                self._add_attempt(record.attempt, 0 if record.allowed else 1, times)
                if (replaced := record.replaced) is not None:
                    self._add_attempt(replaced, 0, -times)

    def _add_attempt(self, attempt: tuple[Any, ...], outcome: int, times: int) -> None:
        if attempt in self._attempts or len(self._attempts) < MAX_PENDING:
            self._attempts.setdefault(attempt, [0, 0])[outcome] += times

    def _take_chunks(self) -> dict[int, bytes]:
        """Return the attempts to send now, packed, by hour."""
        if time.monotonic() - self._attempts_sent < _CHUNK_SECONDS and len(self._attempts) < MAX_PENDING // 2:
            return {}
        self._attempts_sent = time.monotonic()
        hours: dict[int, list[Any]] = {}
        for (second, *fields), count in self._attempts.items():
            if any(count):  # else the request's later check has replaced it
                hours.setdefault(second // HOUR, []).append([second, *fields, *count])
        self._attempts = {}
        return {hour: pack_attempts(rows) for hour, rows in hours.items()}

    def close(self) -> None:
        """Send what is left, as the process ends. Raises ``StoreError``."""
        self._attempts_sent = -_CHUNK_SECONDS
        if self.pending or self._attempts or self.refusals or self.would_be:
            self.flush()


#: Called by every flush with its records and how often each was made, also when Redis fails: for ``metrics``.
listeners: list[Callable[[Records], None]] = []
#: This process's.
collector = Collector()
counting = redis_worker.add("statistics", lambda: settings.statistics_seconds, collector.flush, last=collector.close)
