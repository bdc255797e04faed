"""Preview how rates treat three typical clients, by the real algorithms on a simulated clock.

Each scenario is built for one of the rates, its ``scale``, while all rates are enforced, as in a policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from ..engine.calendar_windows import window_end_us
from ..engine.rates import Rate, format_period
from ..runtime import default_limiter
from .replay import Attempt, replay_each

#: 2025-11-03 00:00 UTC, a Monday on which clocks change in no time zone.
_START_US = 1_762_128_000_000_000
_SLOTS = 40
#: Most different times of requests in an even stream.
_INSTANTS = 1500
#: Requests of a client above the limit, as a multiple of it.
_ABOVE = 1.5
_MAX_SPAN_US = 50 * 366 * 86_400 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A client's admitted and refused units over time."""

    title: str
    #: What happened, in a sentence or two.
    sentence: str
    #: Start of each slot, counted from the scenario's start or the window's edge: "0 s", "-15 s".
    labels: tuple[str, ...]
    #: Units in each slot; same order and length as ``labels``.
    admitted: tuple[int, ...]
    refused: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Script:
    """A client's attempts, and the slots to show them in."""

    attempts: Sequence[Attempt]
    start_us: int
    span_us: int
    slots: int
    #: The time that labels count from.
    zero_us: int


def scenarios(rates: Sequence[Rate], scale: Rate) -> tuple[Scenario, ...]:
    """Return a stream above the limit, bursts at a window's edge, a burst after a pause; raises ``StoreError``."""
    # The start of a window, not of the first one.
    edge_us = window_end_us(scale, _START_US, default_limiter().time_zone)
    room = min(rate.capacity for rate in rates)
    clients = (
        (_("A steady stream above the limit"), _about_stream, _stream(scale, edge_us, room)),
        (_("A burst at a window's edge"), _about_edge, _edge(scale, edge_us)),
        (_("A burst after a pause"), _about_pause, _pause(scale, edge_us, room)),
    )
    # Requests of 1 unit at one time are replayed as one attempt, so what counts requests has to count their units.
    in_units = [replace(rate, counts="units") for rate in rates]
    outcomes = replay_each(in_units, [script.attempts for _title, _about, script in clients])
    return tuple(
        _shown(title, about(scale, script, outcome), script, outcome)
        for (title, about, script), outcome in zip(clients, outcomes, strict=True)
    )


def duration(span_us: int) -> str:
    """Format µs with one unit and at most one decimal: 90 s as ``1.5 min``."""
    sign, size = ("−", -span_us) if span_us < 0 else ("", span_us)
    for unit, unit_us in (("d", 86_400 * 10**6), ("h", 3600 * 10**6), ("min", 60 * 10**6), ("s", 10**6)):
        if size >= unit_us:
            return f"{sign}{number(size / unit_us)} {unit}"
    return f"{sign}{number(size / 1000)} ms" if size else "0"


def at_once(units: int) -> Iterator[int]:
    """Yield costs of which, at one time, as many units are admitted as of ``units`` requests of 1 unit.

    Each cost is at most one more than the sum of those after it, so admitting in this order all that fit uses any
    room completely. A million requests become 20.
    """
    while units:
        yield (cost := (units + 1) // 2)
        units -= cost


def _evenly(start_us: int, units: int, span_us: int, room: int) -> tuple[list[Attempt], int]:
    """Return requests of 1 unit, spread evenly over the span, and the span, cut where they are too many for a replay.

    Several may come at one time, but never more than half of the ``room``.
    """
    most = max(1, room // 2)
    if units > most * _INSTANTS:
        units, span_us = most * _INSTANTS, span_us * most * _INSTANTS // units
    instants = min(units, max(8 * _SLOTS, -(-units // most)))
    attempts: list[Attempt] = []
    for instant in range(instants):
        at_us = start_us + span_us * instant // instants
        share = units * (instant + 1) // instants - units * instant // instants
        attempts += ((at_us, cost) for cost in at_once(share))
    return attempts, span_us


def _stream(scale: Rate, edge_us: int, room: int) -> _Script:
    # Long enough to use up a large burst, and to show what follows.
    periods = max(4, -(-3 * scale.capacity // scale.limit))
    periods = max(4, min(periods, _MAX_SPAN_US // scale.period_us))
    units = max(6, int(_ABOVE * scale.limit * periods))
    attempts, span_us = _evenly(edge_us, units, periods * scale.period_us, room)
    return _Script(attempts, edge_us, span_us, _SLOTS, edge_us)


def _edge(scale: Rate, edge_us: int) -> _Script:
    before_us = edge_us - max(1, scale.period_us // 1000)
    attempts = [(at_us, cost) for at_us in (before_us, edge_us) for cost in at_once(scale.limit)]
    return _Script(attempts, edge_us - scale.period_us // 2, scale.period_us, _SLOTS // 2, edge_us)


def _pause(scale: Rate, edge_us: int, room: int) -> _Script:
    attempts = [(edge_us, cost) for cost in at_once(2 * max(scale.limit, scale.capacity))]
    more, span_us = _evenly(edge_us + 1, 6 * scale.limit, 2 * scale.period_us, room)
    # The first fifth shows the end of the pause.
    return _Script([*attempts, *more], edge_us - span_us // 4, span_us // 4 + span_us, _SLOTS, edge_us)


def _about_stream(scale: Rate, script: _Script, outcome: list[bool]) -> str:
    last_us = script.start_us + script.span_us * 3 // 4
    numbers = {
        "asked": f"{number(_ABOVE * scale.limit)}/{format_period(scale.period)}",
        "span": duration(script.span_us),
        "last": duration(script.span_us // 4),
        "passed": number(_units(script, outcome, since_us=last_us, admitted=True)),
        "of": number(_units(script, outcome, since_us=last_us)),
    }
    first = next((at_us for (at_us, _cost), ok in zip(script.attempts, outcome, strict=True) if not ok), None)
    if first is None:
        return _("Requests %(asked)s, evenly, for %(span)s: all pass.") % numbers
    numbers["first"] = duration(first - script.start_us)
    if first == script.start_us:
        return _("Requests %(asked)s, evenly: in the last %(last)s %(passed)s of %(of)s pass.") % numbers
    text = _(
        "Requests %(asked)s, evenly: in the first %(first)s all pass; in the last %(last)s %(passed)s of %(of)s."
    )
    return text % numbers


def _about_edge(scale: Rate, script: _Script, outcome: list[bool]) -> str:
    before = _units(script, outcome, until_us=script.zero_us, admitted=True)
    after = _units(script, outcome, since_us=script.zero_us, admitted=True)
    numbers = {"asked": number(scale.limit), "before": number(before), "after": number(after)}
    text = _(
        "Requests %(asked)s at once just before the edge and again just after it: %(before)s and %(after)s pass."
    )
    return text % numbers


def _about_pause(scale: Rate, script: _Script, outcome: list[bool]) -> str:
    burst = script.zero_us + 1
    numbers = {
        "asked": number(_units(script, outcome, until_us=burst)),
        "at_once": number(_units(script, outcome, until_us=burst, admitted=True)),
        "more": number(_units(script, outcome, since_us=burst)),
        "passed": number(_units(script, outcome, since_us=burst, admitted=True)),
        "span": duration(script.start_us + script.span_us - script.zero_us),
    }
    text = _(
        "Requests %(asked)s at once: %(at_once)s pass. Then requests %(more)s evenly in the next %(span)s: "
        "%(passed)s pass."
    )
    return text % numbers


def _units(
    script: _Script, outcome: list[bool], *, since_us: int = 0, until_us: int = 2**62, admitted: bool = False
) -> int:
    """Return the units requested, or ``admitted``, from ``since_us`` until before ``until_us``."""
    return sum(
        cost
        for (at_us, cost), ok in zip(script.attempts, outcome, strict=True)
        if since_us <= at_us < until_us and (ok or not admitted)
    )


def _shown(title: str, sentence: str, script: _Script, outcome: list[bool]) -> Scenario:
    admitted, refused = [0] * script.slots, [0] * script.slots
    for (at_us, cost), ok in zip(script.attempts, outcome, strict=True):
        slot = min((at_us - script.start_us) * script.slots // max(1, script.span_us), script.slots - 1)
        (admitted if ok else refused)[slot] += cost
    return Scenario(
        title=title,
        sentence=sentence,
        labels=tuple(
            duration(script.start_us + script.span_us * slot // script.slots - script.zero_us)
            for slot in range(script.slots)
        ),
        admitted=tuple(admitted),
        refused=tuple(refused),
    )


def number(value: float) -> str:
    """Format the number for the active language, floats with at most one decimal."""
    text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
    return number_format(text, use_l10n=True, force_grouping=True)
