"""Judges which calendar limits have reached 80 % or 100 %: by the rows, after a batch, in its transaction.

So a customer is told of what is billed, not of reservations, and once, whichever worker notices it: the row has the
levels of which somebody has been told, by limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..engine.types import BucketStatus
from ..monitoring.alerts import Crossing, has_room, quota_threshold
from .rows import Part, Row, Sums, Window, model_of


class Notices(NamedTuple):
    """What a batch has made known."""

    #: To be sent once the transaction is committed.
    crossings: list[Crossing]
    #: The windows, and their limits, of which nothing more is to be made known.
    told: set[tuple[Window, int]]


def claim(sums: Sums, rows: Mapping[Window, Row]) -> Notices:
    """Return the levels that the rows have reached, and note there that they are told; none without receivers."""
    notices = Notices([], set())
    for window, row in rows.items() if quota_threshold.receivers else ():
        used = row.charged - row.refunded
        told = json.loads(row.notified) if row.notified else {}
        # By the limit that was in force last, not by that of an older charge that was refunded.
        asked = [part for part in sums[window] if part.charged or part.refused]
        found = list(_crossing(asked[-1], used, told)) if asked else []
        if found:
            told |= {str(each.status.limit): each.level for each in found}
            counter, first_day = window
            rows_of_window = model_of("QuotaWindow").objects.filter(counter=counter, first_day=first_day)
            rows_of_window.update(notified=json.dumps(told))
            notices.crossings.extend(found)
        notices.told.update((window, int(limit)) for limit, level in told.items() if level == 100)
    return notices


def _crossing(part: Part, used: int, told: Mapping[str, int]) -> Iterator[Crossing]:
    """Yield the level that ``used`` units reach, if nobody has been told of it."""
    bucket, limit = part.bucket, part.bucket.rate.capacity
    if used * 5 < limit * 4:
        return
    is_full = used >= limit or used + part.refused > limit
    level = 100 if is_full else 80
    if level <= told.get(str(limit), 0) or not has_room(bucket):
        return
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
    yield Crossing(level, status, part.refused, at_us)
