"""Draws the charts of algorithms.md and scaling.md: clients' traffic, decided by the script that decides requests."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from django.utils import translation

from benchmarks import overshoot
from django_ratequota import Rate
from django_ratequota.engine.calendar_windows import window_end_us
from django_ratequota.engine.rates import parse_rates
from django_ratequota.operations.texts import number_text as number
from django_ratequota.runtime import default_limiter
from docs.scenarios import (
    SLOTS,
    START_US,
    Outcome,
    Scenario,
    at_once,
    duration,
    evenly,
    in_slots,
    replayed,
    stream,
)

IMAGES = Path(__file__).parent / "images"
#: One panel each; the traffic is made for the last rate of each, which has the longest period.
RATES = (
    "60/min fixed_window",
    "60/min sliding_window_log",
    "60/min sliding_window_counter",
    "60/min token_bucket",
    "60/min burst 10 token_bucket",
    "2/s token_bucket, 60/min sliding_window_log",
)
#: The files, in the order of the scenarios.
FILES = ("algorithms-stream.svg", "algorithms-edge.svg", "algorithms-pause.svg")

_WIDTH, _COLUMNS = 760, 2
_PANEL_WIDTH, _PANEL_HEIGHT = 380, 168
_LEFT, _RIGHT, _TOP, _BARS = 34, 14, 48, 88
_HEAD, _LINE = 34, 13
#: With a background, because the page's colours may not be the browser's.
_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #333 }
.title { font-weight: bold } .rates { font: bold 11px monospace }
.ground { fill: #fff } .axis { stroke: #999 } .admitted { fill: #2a78c2 } .refused { fill: #f0b08a }
@media (prefers-color-scheme: dark) {
text { fill: #ddd } .ground { fill: #17191c } .axis { stroke: #777 }
.admitted { fill: #5aa9f0 } .refused { fill: #8a4b26 }
}
"""


def draw() -> dict[str, str]:
    """Return the drawings by file name: a scenario with a panel per rate, or a case with a panel per limiter."""
    with translation.override("en"):
        judged = [scenarios(rates) for rates in map(parse_rates, RATES) if isinstance(rates, tuple)]
        drawings = {
            file: _drawing(dict(zip(RATES, of_rates, strict=True)))
            for file, of_rates in zip(FILES, zip(*judged, strict=True), strict=True)
        }
        return drawings | {f"scaling-{case.name}.svg": _drawing(_limiters(case)) for case in overshoot.cases()}


def scenarios(rates: Sequence[Rate]) -> tuple[Scenario, Scenario, Scenario]:
    """Return an even stream above the limit, bursts at a window's edge, and a burst after a pause."""
    return stream(rates, rates[-1]), _edge(rates), _pause(rates)


def _limiters(case: overshoot.Case) -> dict[str, Scenario]:
    """Return what the textbook's limiter makes of the load, and ours."""
    panels = {}
    for name, decided in ((case.textbook, case.decide(case.load)), ("django-ratequota", case.ours())):
        outcome = [(at_us, 1, passed) for (at_us, _node), passed in zip(case.load, decided, strict=True)]
        admitted, asked = _admitted(outcome), len(outcome)
        panels[name] = _in_slots(
            outcome,
            title=case.title,
            sentence=f"{number(admitted)} of {number(asked)} pass, {admitted / case.allowed:.1f} × what is allowed.",
            start_us=case.start,
            span_us=case.span,
            slots=SLOTS,
            zero_us=overshoot.START,
        )
    return panels


def _edge(rates: Sequence[Rate]) -> Scenario:
    scale, edge_us = rates[-1], _window_edge_us(rates[-1])
    before_us = edge_us - scale.period_us // 1000
    attempts = [(at_us, cost) for at_us in (before_us, edge_us) for cost in at_once(scale.limit)]
    start_us, span_us = edge_us - scale.period_us // 2, scale.period_us
    outcome = replayed(attempts, rates)
    before, after = _apart(outcome, edge_us)
    return _in_slots(
        outcome,
        title="A burst at a window's edge",
        sentence=f"Requests {number(scale.limit)} at once just before the edge and again just after it: "
        f"{number(_admitted(before))} and {number(_admitted(after))} pass.",
        start_us=start_us,
        span_us=span_us,
        slots=SLOTS // 2,
        zero_us=edge_us,
    )


def _pause(rates: Sequence[Rate]) -> Scenario:
    scale, edge_us, room = rates[-1], _window_edge_us(rates[-1]), min(rate.capacity for rate in rates)
    attempts = [(edge_us, cost) for cost in at_once(2 * max(scale.limit, scale.capacity))]
    more, span_us = evenly(edge_us + 1, 6 * scale.limit, span_us=2 * scale.period_us, room=room)
    # The first fifth shows the end of the pause.
    start_us, whole_us = edge_us - span_us // 4, span_us // 4 + span_us
    outcome = replayed([*attempts, *more], rates)
    burst, then = _apart(outcome, edge_us + 1)
    return _in_slots(
        outcome,
        title="A burst after a pause",
        sentence=f"Requests {number(_asked(burst))} at once: {number(_admitted(burst))} pass. "
        f"Then requests {number(_asked(then))} evenly in the next {duration(span_us)}: "
        f"{number(_admitted(then))} pass.",
        start_us=start_us,
        span_us=whole_us,
        slots=SLOTS,
        zero_us=edge_us,
    )


def _window_edge_us(rate: Rate) -> int:
    """Return the simulated time at which a window of the rate begins, not the first one."""
    return window_end_us(rate, START_US, default_limiter().time_zone)


def _apart(outcome: Outcome, at_us: int) -> tuple[Outcome, Outcome]:
    """Return the attempts before that time, and the others."""
    return [one for one in outcome if one[0] < at_us], [one for one in outcome if one[0] >= at_us]


def _asked(outcome: Outcome) -> int:
    return sum(cost for _at_us, cost, _passed in outcome)


def _admitted(outcome: Outcome) -> int:
    return sum(cost for _at_us, cost, passed in outcome if passed)


def _in_slots(
    outcome: Outcome, *, title: str, sentence: str, start_us: int, span_us: int, slots: int, zero_us: int
) -> Scenario:
    """Return the units of each slot of the span, with these texts; labels count from ``zero_us``."""
    units = in_slots(outcome, slots, start_us, span_us)
    starts_us = (start_us - zero_us + span_us * slot // slots for slot in range(slots))
    labels = [f"−{duration(-at_us)}" if at_us < 0 else duration(at_us) for at_us in starts_us]
    return Scenario(title=title, sentence=sentence, labels=labels, admitted=units[True], refused=units[False])


def _drawing(panels: dict[str, Scenario]) -> str:
    """Return the panels, each under its name, in columns and on one scale."""
    [title, *_] = (panel.title for panel in panels.values())
    height = _HEAD + _PANEL_HEIGHT * -(-len(panels) // _COLUMNS)
    # Bars above what any rate admits are cut off, because the text says how much was refused.
    top = max(max(panel.admitted) for panel in panels.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
        f'<rect class="admitted" x="{_WIDTH - 150}" y="11" width="10" height="10"/>'
        f'<text x="{_WIDTH - 136}" y="20">admitted</text>',
        f'<rect class="refused" x="{_WIDTH - 76}" y="11" width="10" height="10"/>'
        f'<text x="{_WIDTH - 62}" y="20">refused</text>',
    ]
    for at, (name, panel) in enumerate(panels.items()):
        x, y = at % _COLUMNS * _PANEL_WIDTH, _HEAD + at // _COLUMNS * _PANEL_HEIGHT
        lines += [f'<g transform="translate({x} {y})">', *_panel(name, panel, top), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def _panel(name: str, panel: Scenario, top: int) -> Iterator[str]:
    bottom, right = _TOP + _BARS, _PANEL_WIDTH - _RIGHT
    step = (right - _LEFT) / len(panel.labels)
    yield f'<text class="rates" x="{_LEFT}" y="14">{escape(name)}</text>'
    for at, (passed, refused) in enumerate(zip(panel.admitted, panel.refused, strict=True)):
        high = _BARS * passed / top
        higher = min(_BARS, _BARS * (passed + refused) / top)
        for kind, base, size in (("admitted", bottom, high), ("refused", bottom - high, higher - high)):
            if size > 0:
                place = f'x="{_LEFT + at * step:.1f}" y="{base - size:.1f}"'
                yield f'<rect class="{kind}" {place} width="{step - 1:.1f}" height="{size:.1f}"/>'
    yield f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none"/>'
    for value, y in ((top, _TOP + 8), (0, bottom)):
        yield f'<text x="{_LEFT - 5}" y="{y}" text-anchor="end">{value}</text>'
    for at in range(0, len(panel.labels), len(panel.labels) // 4):
        yield f'<text x="{_LEFT + at * step:.1f}" y="{bottom + 13}">{panel.labels[at]}</text>'
    for at, line in enumerate(textwrap.wrap(panel.sentence, 62)):
        yield f'<text x="{_LEFT}" y="{28 + at * _LINE}">{escape(line)}</text>'
