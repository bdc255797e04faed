"""How rates treat a typical client, by the real algorithms on a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from django.utils.translation import gettext as _

from django_ratequota.engine.calendar_windows import window_end_us
from django_ratequota.engine.rates import Rate, format_period
from django_ratequota.operations.replay import Attempt, replay
from django_ratequota.operations.texts import number_text as number
from django_ratequota.runtime import default_limiter

#: 2025-11-03 00:00 UTC, a Monday on which clocks change in no time zone.
START_US = 1_762_128_000_000_000
#: Bars of a chart.
SLOTS = 40
#: Most different times of requests in an even stream.
_INSTANTS = 1500
#: Requests of a client above the limit, as a multiple of it.
_ABOVE = 1.5
_MAX_SPAN_US = 50 * 366 * 86_400 * 10**6
#: (time, cost, whether it was admitted) of each attempt, in their order.
Outcome = list[tuple[int, int, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A client's admitted and refused units over time."""

    title: str
    #: What happened, in a sentence or two.
    sentence: str
    #: Start of each slot, counted from the scenario's start: "15 s".
    labels: Sequence[str]
    #: Units in each slot; same order and length as ``labels``.
    admitted: Sequence[int]
    refused: Sequence[int]


def fastest(rates: Sequence[Rate]) -> Rate:
    """Return the rate that admits most in the long run by itself."""
    return max(rates, key=lambda rate: rate.limit / rate.period_us)


def stream(rates: Sequence[Rate], scale: Rate) -> Scenario:
    """Return an even stream above the limit of ``scale``, long enough to use up all rates; raises ``StoreError``.

    It begins with a window, not the first one.
    """
    start_us = window_end_us(scale, START_US, default_limiter().time_zone)
    # Long enough to use up the burst and each limit, and to show what follows.
    used_up_us = max(rate.capacity * scale.period_us // scale.limit for rate in rates)
    span_us = max(4 * scale.period_us, min(3 * used_up_us, _MAX_SPAN_US))
    asked = max(6, int(_ABOVE * scale.limit * span_us / scale.period_us))
    attempts, span_us = evenly(start_us, asked, span_us=span_us, room=min(rate.capacity for rate in rates))
    outcome = replayed(attempts, rates)
    units = in_slots(outcome, SLOTS, start_us, span_us)
    return Scenario(
        title=_("A steady stream above the limit"),
        sentence=_about_stream(outcome, scale, start_us, span_us),
        labels=tuple(duration(span_us * slot // SLOTS) for slot in range(SLOTS)),
        admitted=units[True],
        refused=units[False],
    )


def _about_stream(outcome: Outcome, scale: Rate, start_us: int, span_us: int) -> str:
    last = [(cost, passed) for at_us, cost, passed in outcome if at_us >= start_us + span_us * 3 // 4]
    numbers = {
        "asked": f"{number(_ABOVE * scale.limit)}/{format_period(scale.period)}",
        "span": duration(span_us),
        "last": duration(span_us // 4),
        "passed": number(sum(cost for cost, passed in last if passed)),
        "of": number(sum(cost for cost, _passed in last)),
    }
    first_us = next((at_us for at_us, _cost, passed in outcome if not passed), None)
    if first_us is None:
        return _("Requests %(asked)s, evenly, for %(span)s: all pass.") % numbers
    numbers["first"] = duration(first_us - start_us)
    if first_us == start_us:
        return _("Requests %(asked)s, evenly: in the last %(last)s %(passed)s of %(of)s pass.") % numbers
    text = _(
        "Requests %(asked)s, evenly: in the first %(first)s all pass; in the last %(last)s %(passed)s of %(of)s."
    )
    return text % numbers


def replayed(attempts: Sequence[Attempt], rates: Sequence[Rate]) -> Outcome:
    """Return what became of the attempts at the rates; raises ``StoreError``."""
    # Requests of 1 unit at one time are replayed as one attempt: what counts requests has to count their units.
    in_units = [replace(rate, counts="units") for rate in rates]
    return [(*attempt, passed) for attempt, passed in zip(attempts, replay(in_units, attempts), strict=True)]


def in_slots(outcome: Outcome, slots: int, start_us: int, span_us: int) -> dict[bool, list[int]]:
    """Return the units admitted (True) and refused (False) in each slot of the span."""
    units = {True: [0] * slots, False: [0] * slots}
    for at_us, cost, passed in outcome:
        units[passed][min((at_us - start_us) * slots // max(1, span_us), slots - 1)] += cost
    return units


def duration(span_us: int) -> str:
    """Format µs with one unit and at most one decimal: 90 s as ``1.5 min``."""
    for unit, unit_us in (("d", 86_400 * 10**6), ("h", 3600 * 10**6), ("min", 60 * 10**6), ("s", 10**6)):
        if span_us >= unit_us:
            return f"{number(round(span_us / unit_us, 1))} {unit}"
    return f"{number(round(span_us / 1000, 1))} ms" if span_us else "0"


def at_once(units: int) -> Iterator[int]:
    """Yield costs of which, at one time, as many units are admitted as of ``units`` requests of 1 unit.

    Each cost is at most one more than the sum of those after it, so admitting in this order all that fit uses any
    room completely. A million requests become 20.
    """
    while units:
        yield (cost := (units + 1) // 2)
        units -= cost


def evenly(start_us: int, units: int, *, span_us: int, room: int) -> tuple[list[Attempt], int]:
    """Return requests of 1 unit, spread evenly over the span, and the span, cut where they are too many for a replay.

    Several may come at one time, but never more than half of the ``room``.
    """
    most = max(1, room // 2)
    if units > most * _INSTANTS:
        units, span_us = most * _INSTANTS, span_us * most * _INSTANTS // units
    instants = min(units, max(8 * SLOTS, -(-units // most)))
    attempts: list[Attempt] = []
    for instant in range(instants):
        at_us = start_us + span_us * instant // instants
        share = units * (instant + 1) // instants - units * instant // instants
        attempts += ((at_us, cost) for cost in at_once(share))
    return attempts, span_us
