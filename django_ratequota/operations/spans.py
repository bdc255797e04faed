"""Recorded attempts in the order of time, and the busiest span of a period.

Records hold the number of a caller's attempts in a second, which are spread evenly over it: attempt ``i`` of ``n``
(from 0) is ``i * 10**6 // n`` µs after the second's beginning. Several records of a counter in one second are each
spread by themselves; attempts at the same µs keep the order of records.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from ..engine.rates import Rate
from ..monitoring.attempts import Attempts

_EXACT = 2**53
_DAY_US, _CHANGE_US = 86_400 * 10**6, 2 * 3600 * 10**6
#: The longest that a calendar window can be: clocks change by two hours at most.
_LONGEST_US = {name: days * _DAY_US + _CHANGE_US for name, days in (("day", 1), ("week", 7), ("month", 31))}


def spread(records: Sequence[Attempts]) -> list[tuple[int, int, str]]:
    """Return (µs, cost, caller) of every attempt, in the order of time, spread as the module docstring says."""
    attempts = [
        (record.second * 10**6 + position * 10**6 // count, record.cost, record.caller)
        for record in records
        if (count := record.admitted + record.refused)
        for position in range(count)
    ]
    attempts.sort(key=itemgetter(0))
    return attempts


def peak(rate: Rate, records: Sequence[Attempts]) -> int:
    """Return a limit at which the rate refuses none of these attempts, which are in the order of time.

    It is the most units in any span that the rate may look at. As that is rounded up to whole seconds, the lowest
    such limit may be less: half as much for a rate by the second, or for the windowed counter.
    """
    longest_us = _LONGEST_US[rate.calendar] if rate.calendar else rate.period_us
    span = -(-longest_us * (2 if rate.algorithm == "sliding_window_counter" else 1) // 10**6) + 1
    units = [(record.second, (record.admitted + record.refused) * rate.units(record.cost)) for record in records]
    most = inside = first = 0
    for second, size in units:
        inside += size
        while units[first][0] <= second - span:
            inside -= units[first][1]
            first += 1
        most = max(most, inside)
    return most


def has_room(rate: Rate, units: int) -> bool:
    """Whether a counter certainly refuses no attempts with this ``peak``; False = it might.

    True if no span of one period holds more units than the limit and the burst. Fixed windows and the log admit any
    such span; the windowed counter depends on two periods at most. In a bucket, ``m`` periods and a fraction hold at
    most ``(m + 1) × min(limit, burst)``: the burst and what is refilled meanwhile.
    """
    room = min(rate.limit, rate.capacity)
    # Doubles are rounded there: half of the room is certain.
    return units <= (room // 2 if rate.capacity * rate.period_us >= _EXACT else room)
