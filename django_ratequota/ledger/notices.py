"""Judges which calendar limits have reached 80 % or 100 %: by the rows, after a batch, in its transaction.

So a customer is notified about what is billed and not about reservations, and once, whichever worker notices it: the
row has the levels that were notified, by limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from ..engine.types import BucketStatus
from ..monitoring.alerts import Crossing, quota_threshold
from .rows import Part, Row, Sums, Window, model_of


@dataclass(slots=True)
class Notices:
    """What a batch has made known."""

    #: To be sent once the transaction is committed.
    crossings: list[Crossing] = field(default_factory=list)
    #: The windows, and their limits, of which nothing more is to be made known.
    told: set[tuple[Window, int]] = field(default_factory=set)


def claim(sums: Sums, rows: Mapping[Window, Row], notices: Notices) -> None:
    """Note the levels that the rows have reached, here and there; none without receivers."""
    notices.crossings, notices.told = [], set()
    for window, row in rows.items() if quota_threshold.receivers else ():
        used = row.charged - row.refunded
        told = json.loads(row.notified) if row.notified else {}
        # By the limit in force, which is the row's: not by that of an older check that has ended only now.
        part = max(sums[window], key=attrgetter("limited_us"))
        refused = max(one.refused for one in sums[window])
        in_force = 0 < part.limited_us >= row.limited_us
        crossing = _crossing(part, used, refused, told) if in_force else None
        if crossing is not None:
            told[str(crossing.status.limit)] = crossing.level
            counter, first_day = window
            rows_of_window = model_of("QuotaWindow").objects.filter(counter=counter, first_day=first_day)
            rows_of_window.update(notified=json.dumps(told))
            notices.crossings.append(crossing)
        notices.told.update((window, int(limit)) for limit, level in told.items() if level == 100)


def _crossing(part: Part, used: int, refused: int, told: Mapping[str, int]) -> Crossing | None:
    """Return the level that ``used`` units reach, or a refused cost on top; None if it was notified."""
    bucket, limit = part.bucket, part.bucket.rate.capacity
    if used * 5 < limit * 4:
        return None
    is_full = used >= limit or used + refused > limit
    level = 100 if is_full else 80
    if level <= told.get(str(limit), 0):
        return None
    at_us, (starts_us, ends_us, _first_day) = time.time_ns() // 1000, part.bounds
    reset_us = max(0, ends_us - at_us)
    status = BucketStatus(
        bucket,
        allowed=not is_full,
        remaining=max(0, limit - used),
        retry_after_us=reset_us if is_full else 0,
        reset_after_us=reset_us,
        window_us=ends_us - starts_us,
        debt=max(0, used - limit),
    )
    return Crossing(level, status, refused, at_us)
