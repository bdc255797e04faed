"""Prove from the algorithms alone, for any requests, that one of two rates always refuses first."""

from __future__ import annotations

from ..engine.rates import BURST_ALGORITHMS, Rate

_HOUR_US = 3600 * 10**6
_DAY_US = 24 * _HOUR_US
#: Longest and shortest length of each calendar window; clocks change by two hours at most.
_CALENDAR_US = {
    "day": (_DAY_US + 2 * _HOUR_US, _DAY_US - 2 * _HOUR_US),
    "week": (7 * _DAY_US + 2 * _HOUR_US, 7 * _DAY_US - 2 * _HOUR_US),
    "month": (31 * _DAY_US + 2 * _HOUR_US, 28 * _DAY_US - 2 * _HOUR_US),
}
#: (inner, outer) calendar windows -> most inner windows within one outer window.
_NESTED = {("day", "day"): 1, ("week", "week"): 1, ("month", "month"): 1, ("day", "week"): 7, ("day", "month"): 31}


def binds_first(stricter: Rate, rate: Rate) -> str:
    """Return whether ``rate`` never refuses what ``stricter``, which counts the same requests or more, admits.

    ``always``: ``stricter`` always has at least as much in use, and at most as much room. ``uncharged``: it admits
    too little for ``rate`` to refuse, unless something is charged past its limit. "" when neither can be proved, as
    of a rate that counts units and one that counts requests.
    """
    if stricter.counts != rate.counts:
        return ""
    if stricter.capacity <= rate.capacity and _uses_more(stricter, rate):
        return "always"
    return "uncharged" if _admits_too_little(stricter, rate) else ""


def _uses_more(a: Rate, b: Rate) -> bool:
    """Whether ``a`` always has at least as much in use as ``b``, after the same charges and refunds."""
    kinds = (a.algorithm, b.algorithm)
    longest_b, shortest_a = longest_us(b), _shortest_us(a)
    if _is_bucket(a) and _is_bucket(b):  # a bucket that drains no faster is never less full
        return _no_faster(a, b)
    if kinds in (("sliding_window_log", "sliding_window_log"), ("sliding_window_log", "fixed_window")):
        return shortest_a >= longest_b  # all that b counts is within a's period
    if kinds == ("sliding_window_log", "sliding_window_counter"):
        return a.period_us >= 2 * b.period_us  # b's two windows are within a's period
    if kinds == ("fixed_window", "fixed_window"):  # b's window lies within a's
        if a.calendar or b.calendar:
            return (b.calendar, a.calendar) in _NESTED
        return a.period_us % b.period_us == 0
    if a.algorithm == "sliding_window_counter" and not b.calendar:  # a counts b's window, and the one before
        return b.algorithm in ("sliding_window_counter", "fixed_window") and a.period_us == b.period_us
    return False


def _admits_too_little(a: Rate, b: Rate) -> bool:
    """Whether ``b`` admits every sequence that ``a`` admits.

    In a span of ``b``'s period a bucket admits at most ``B + (P - 1 µs) × L/P`` units, and windows their limit, each
    window that the span touches. A bucket ``b`` admits what exceeds neither its burst at once nor its rate in the
    long run; around a window's edge, twice the limit may come at once.
    """
    if _is_bucket(b):
        at_once = a.limit * (1 if a.algorithm == "sliding_window_log" else 2)
        return not _is_bucket(a) and at_once <= b.capacity and _no_faster(a, b)
    if b.algorithm == "sliding_window_counter":
        return False
    span_us = longest_us(b)
    if _is_bucket(a):
        return a.capacity * a.period_us + (span_us - 1) * a.limit < (b.limit + 1) * a.period_us
    return a.limit * _windows_touched(a, b) <= b.limit


def _windows_touched(a: Rate, b: Rate) -> int:
    """Return the most windows of ``a`` that a span of ``b``'s period touches."""
    if a.algorithm == b.algorithm == "fixed_window":
        nested = _NESTED.get((a.calendar, b.calendar))
        if nested:
            return nested
        if not a.calendar and not b.calendar and b.period_us % a.period_us == 0:
            return b.period_us // a.period_us
    touched = -(-longest_us(b) // _shortest_us(a))
    return touched if a.algorithm == "sliding_window_log" else touched + 1


def _no_faster(a: Rate, b: Rate) -> bool:
    return a.limit * b.period_us <= b.limit * _shortest_us(a)


def _is_bucket(rate: Rate) -> bool:
    return rate.algorithm in BURST_ALGORITHMS


def longest_us(rate: Rate) -> int:
    """Return the longest that a window of the rate can be (µs): a day on which clocks change has two hours more."""
    return _CALENDAR_US[rate.calendar][0] if rate.calendar else rate.period_us


def _shortest_us(rate: Rate) -> int:
    return _CALENDAR_US[rate.calendar][1] if rate.calendar else rate.period_us
