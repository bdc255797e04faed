"""Rows of months that overlap, because a customer's months begin on another day than before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.db.models import Q

from ..engine.rates import MONTH
from ..policies.facts import to_datetime, to_us

if TYPE_CHECKING:
    from .checkpoint_rows import Figure, Window


def batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    """Yield the windows in batches: those of one counter in different ones, as a month may go on in another's row.

    In one order, so that processes wait for each other's rows instead of deadlocking.
    """
    turns: dict[str, int] = {}
    rounds: dict[int, list[Window]] = {}
    for window in windows:
        turn = turns[window[0]] = turns.get(window[0], 0) + 1
        rounds.setdefault(turn, []).append(window)
    for together in rounds.values():
        # No sort of all, during which no request could go on.
        parts = [sorted(together[at : at + size]) for at in range(0, len(together), size)]
        ordered = merge(*parts)
        while batch := list(islice(ordered, size)):
            yield batch


def end_months(rows: Any, figures: Mapping[Window, Figure]) -> dict[Window, Window]:
    """End the months during which another one begins; call it before rows of new windows are inserted.

    Return window -> the window of the row to write instead: the store counts on in a month that began later than the
    caller's (see ``lua/fixed_window.lua``). So each unit is in one row. A row that was to end earlier, by a day that
    was taken back since, goes on while its month does.
    """
    months = {window[0]: window for window, f in figures.items() if f.status.bucket.rate.calendar == MONTH}
    instead: dict[Window, Window] = {}
    if not months:
        return instead
    since = to_datetime(min(figures[window].at_us for window in months.values()))
    own = Q(starts_at__in={to_datetime(start_us) for _, start_us in months.values()})
    found = rows.filter(Q(ends_at__gt=since) | own, counter__in=list(months))
    ended: dict[Window, int] = {}
    for pk, counter, starts_at, ends_at in found.values_list("pk", "counter", "starts_at", "ends_at"):
        window, start_us, end_us = months[counter], to_us(starts_at), to_us(ends_at)
        at_us, until_us = figures[window].at_us, window[1] + figures[window].status.window_us
        if start_us == window[1] and end_us <= at_us < until_us:
            ended[window] = pk
        if end_us <= at_us or start_us == window[1] or start_us >= until_us:
            continue
        if start_us > window[1]:
            instead[window] = counter, start_us
        if (ends_us := until_us if start_us > window[1] else at_us) < end_us:
            rows.filter(pk=pk).update(ends_at=to_datetime(ends_us))
    for window in ended.keys() - instead.keys():
        ends_at = to_datetime(window[1] + figures[window].status.window_us)
        rows.filter(pk=ended[window]).update(ends_at=ends_at)
    return instead
