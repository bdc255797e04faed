"""Recorded attempts of the last 48 hours: what callers requested, to be replayed against another policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, NamedTuple

from ..store.base import reading
from .packing import HOUR, kept_hours, read, read_pairs, unpack_attempts
from .records import is_sampled


# A tuple, unlike other value objects: there may be hundreds of thousands.
class Attempts(NamedTuple):
    """Equal requests of one caller in one second."""

    #: Unix time, whole seconds.
    second: int
    caller: str
    #: The client's address as ``ip:...``; "" when unknown.
    ip: str
    plan_id: int | None
    #: The endpoints that the requests belonged to; empty = none.
    endpoint_ids: tuple[int, ...]
    #: Units each.
    cost: int
    #: (endpoint id, units) where checks of one request had different costs; id 0 = of all checks. Else empty.
    costs: tuple[tuple[int, int], ...] = ()
    admitted: int = 0
    refused: int = 0

    def at(self, endpoint_id: int | None) -> Attempts:
        """Return the attempts with the cost that a policy for this endpoint, or for all (None), counts."""
        return self._replace(cost=dict(self.costs)[endpoint_id or 0], costs=()) if self.costs else self


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAttempts:
    """The attempts of some hours, of all callers or of a sample."""

    #: In the order of time; one for each (second, caller, ip, plan, endpoints, cost).
    attempts: tuple[Attempts, ...]
    #: The part of all callers whose attempts are kept; 1.0 = all of them. A caller is kept whole, or not at all.
    share: float
    #: Since when attempts were recorded (aware), at most as far back as asked for; None when there are none.
    since: datetime | None


@reading()
def recorded_attempts(hours: int = 24, endpoint_id: int | None = None) -> RecordedAttempts:
    """Return the attempts of the last ``hours`` (48 at most), up to about ten seconds ago. Raises ``StoreError``.

    With ``endpoint_id``, those of this endpoint alone.
    """
    since = time.time() - hours * HOUR
    level = 0
    counts: dict[tuple[Any, ...], tuple[int, int]] = {}
    begun = None
    for hour in kept_hours(hours + 1):
        kept = dict(read_pairs("hash", f"level:{hour}")[0])
        level = max(level, int(kept.get("level", 0)))
        for chunk in read("LRANGE", f"usage:{hour}", 0, -1):
            for second, caller, ip, plan_id, endpoint_ids, cost, admitted, refused in unpack_attempts(chunk):
                if second >= since:
                    begun = second if begun is None else min(begun, second)
                    if endpoint_id is not None and endpoint_id not in endpoint_ids:
                        continue
                    # A request that was checked more than once lists its costs; its earlier attempt has -1 admitted.
                    costs = tuple(map(tuple, cost)) if isinstance(cost, list) else ()
                    units = dict(costs)[0] if costs else cost
                    attempt = (second, caller, ip, plan_id, tuple(endpoint_ids), units, costs)
                    before = counts.get(attempt, (0, 0))
                    counts[attempt] = before[0] + admitted, before[1] + refused
    # Where one hour keeps fewer callers than another, only those that every hour keeps are whole.
    sampled = {caller for caller in {attempt[1] for attempt in counts} if is_sampled(caller, level)}
    found = []
    for attempt in sorted(counts, key=itemgetter(0)):
        passed, refused = counts[attempt]
        if attempt[1] in sampled and (passed > 0 or refused > 0):
            found.append(Attempts(*attempt, max(0, passed), max(0, refused)))
    recorded_since = None if begun is None else datetime.fromtimestamp(begun, UTC)
    return RecordedAttempts(attempts=tuple(found), share=0.5**level, since=recorded_since)
