"""Rows of months that overlap, because a customer's months begin on another day than before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..engine.rates import MONTH
from ..policies.facts import to_datetime, to_us

if TYPE_CHECKING:
    from .checkpoint_rows import Figure, Window


def end_months(rows: Any, figures: Mapping[Window, Figure]) -> dict[Window, Window]:
    """End the months during which another one begins; call it before rows of new windows are inserted.

    Return window -> the window of the row to write instead: the store counts on in a month that began later than the
    caller's (see ``lua/fixed_window.lua``). So each unit is in one row.
    """
    months = {window[0]: window for window, f in figures.items() if f.status.bucket.rate.calendar == MONTH}
    instead: dict[Window, Window] = {}
    if not months:
        return instead
    changed = []
    since = to_datetime(min(figures[window].at_us for window in months.values()))
    for row in rows.filter(counter__in=list(months), ends_at__gt=since).order_by("pk").select_for_update():
        window = months[row.counter]
        at_us, until_us = figures[window].at_us, window[1] + figures[window].status.window_us
        start_us, end_us = to_us(row.starts_at), to_us(row.ends_at)
        if end_us <= at_us or start_us == window[1] or start_us >= until_us:
            continue
        if start_us > window[1]:
            instead[window] = row.counter, start_us
        if (ends_us := until_us if start_us > window[1] else at_us) < end_us:
            row.ends_at = to_datetime(ends_us)
            changed.append(row)
    rows.bulk_update(changed, ["ends_at"])
    return instead
