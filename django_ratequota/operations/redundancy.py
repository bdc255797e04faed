"""Which of two rates always refuses first: what can be proved of any requests, from the algorithms alone."""

from __future__ import annotations

from ..engine.rates import BURST_ALGORITHMS, Rate

_HOUR_US = 3600 * 10**6
_DAY_US = 24 * _HOUR_US
#: The longest and the shortest of each calendar window; clocks change by two hours at most.
_CALENDAR_US = {
    "day": (_DAY_US + 2 * _HOUR_US, _DAY_US - 2 * _HOUR_US),
    "week": (7 * _DAY_US + 2 * _HOUR_US, 7 * _DAY_US - 2 * _HOUR_US),
    "month": (31 * _DAY_US + 2 * _HOUR_US, 28 * _DAY_US - 2 * _HOUR_US),
}
#: Calendar windows that lie whole within another's: how many at most.
_NESTED = {("day", "day"): 1, ("week", "week"): 1, ("month", "month"): 1, ("day", "week"): 7, ("day", "month"): 31}


def binds_first(stricter: Rate, rate: Rate) -> str:
    """Whether ``rate`` never refuses what ``stricter``, which counts the same requests or more, admits.

    ``always``: whatever happened, ``stricter`` has at least as much in use, and at most as much room.
    ``uncharged``: what it admits is too little for the other; true as long as nothing is charged past its limit.
    "" when neither can be proved.
    """
    if stricter.capacity <= rate.capacity and _uses_more(stricter, rate):
        return "always"
    return "uncharged" if _admits_too_little(stricter, rate) else ""


def _uses_more(a: Rate, b: Rate) -> bool:
    """Whether ``a`` has at least as much in use as ``b`` at any instant, of the same charges and refunds."""
    kinds = (a.algorithm, b.algorithm)
    longest_b, shortest_a = _longest_us(b), _shortest_us(a)
    if _drips(a) and _drips(b):  # what drains no faster is never less full
        return _no_faster(a, b)
    if kinds in (("sliding_window_log", "sliding_window_log"), ("sliding_window_log", "fixed_window")):
        return shortest_a >= longest_b  # all that b counts is no older than that
    if kinds == ("sliding_window_log", "sliding_window_counter"):
        return a.period_us >= 2 * b.period_us  # its two windows are no older than that
    if kinds == ("fixed_window", "fixed_window"):  # b's window lies within a's
        if a.calendar or b.calendar:
            return (b.calendar, a.calendar) in _NESTED
        return a.period_us % b.period_us == 0
    if a.algorithm == "sliding_window_counter" and not b.calendar:  # a's current window is b's, and it has a past
        return b.algorithm in ("sliding_window_counter", "fixed_window") and a.period_us == b.period_us
    return False


def _admits_too_little(a: Rate, b: Rate) -> bool:
    """Whether whatever sequence ``a`` admits, ``b`` admits as well.

    In a span of ``b``'s period a bucket admits ``B + (P - 1 µs) × L/P`` units at most, and windows their limit each:
    as many as the span can touch. A bucket holds what it gets when it gets no more at once, and no more in the long
    run; around a window's edge, twice the limit may come at once.
    """
    if _drips(b):
        at_once = a.limit * (1 if a.algorithm == "sliding_window_log" else 2)
        return not _drips(a) and at_once <= b.capacity and _no_faster(a, b)
    if b.algorithm == "sliding_window_counter":
        return False
    span_us = _longest_us(b)
    if _drips(a):
        return a.capacity * a.period_us + (span_us - 1) * a.limit < (b.limit + 1) * a.period_us
    return a.limit * _windows_touched(a, b) <= b.limit


def _windows_touched(a: Rate, b: Rate) -> int:
    """How many of ``a``'s windows a span of ``b``'s period touches at most."""
    if a.algorithm == b.algorithm == "fixed_window":
        nested = _NESTED.get((a.calendar, b.calendar))
        if nested:
            return nested
        if not a.calendar and not b.calendar and b.period_us % a.period_us == 0:
            return b.period_us // a.period_us
    touched = -(-_longest_us(b) // _shortest_us(a))
    return touched if a.algorithm == "sliding_window_log" else touched + 1


def _no_faster(a: Rate, b: Rate) -> bool:
    return a.limit * b.period_us <= b.limit * _shortest_us(a)


def _drips(rate: Rate) -> bool:
    return rate.algorithm in BURST_ALGORITHMS


def _longest_us(rate: Rate) -> int:
    return _CALENDAR_US[rate.calendar][0] if rate.calendar else rate.period_us


def _shortest_us(rate: Rate) -> int:
    return _CALENDAR_US[rate.calendar][1] if rate.calendar else rate.period_us
