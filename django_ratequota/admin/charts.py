"""Stacked bars over time as SVG, with the same numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from django.utils.functional import cached_property
from django.utils.translation import gettext

from .formatting import number_text

#: Size and margins of the drawing in SVG user units.
_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 26, 14, 44
#: Width of a label's character on wide and on narrow pages (see plots.css), and the least space between labels.
_CHARACTER, _NARROW_CHARACTER, _SPACE = 6.5, 12, 14
#: Slots from one written label to the next: steps that divide hours, days and weeks.
_LABEL_STEPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 48, 60, 96, 168)
#: Kinds filled with a pattern instead of a plain colour.
_PATTERNED = ("refused", "would")


@dataclass(frozen=True, slots=True)
class Series:
    """One part of each bar."""

    name: str
    #: ``admitted``, ``refused``, ``would`` or another word: its class in plots.css.
    kind: str
    #: One value per bar, 0 or more.
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a bar that belongs to one series; its numbers are SVG attributes and never localised."""

    kind: str
    y: str
    height: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """All series in one slot of time."""

    x: str
    width: str
    #: Shown on hover.
    text: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: str
    text: str
    #: Whether narrow pages have room for it.
    narrow: bool = True


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A chart for the template ``django_ratequota/plot.html``; made by ``plot``."""

    title: str
    labels: Sequence[str]
    series: Sequence[Series]
    unit: str
    empty: str

    @property
    def id(self) -> str:
        """The prefix of every id in the drawing; plots with different titles can share a page."""
        return f"ratequota-plot-{crc32(self.title.encode(errors='backslashreplace')):08x}"

    @property
    def patterned(self) -> Sequence[str]:
        """The kinds filled with a pattern; the style sheet colours the others."""
        return _PATTERNED

    @property
    def is_empty(self) -> bool:
        """Whether every value is zero."""
        return not any(any(series.values) for series in self.series)

    @property
    def view_box(self) -> str:
        """The SVG ``viewBox``."""
        return f"0 0 {_WIDTH} {_HEIGHT}"

    @property
    def edges(self) -> dict[str, str]:
        """The positions of the axes and of their labels."""
        bottom = _HEIGHT - _BOTTOM
        return {
            "left": str(_LEFT),
            "right": str(_WIDTH - _RIGHT),
            "top": str(_TOP),
            "bottom": str(bottom),
            "height": str(bottom - _TOP),
            "values": str(_LEFT - 8),
            "times": str(bottom + 29),
        }

    @cached_property
    def values(self) -> tuple[Tick, ...]:
        """The marks of the y axis: round numbers, 0 first."""
        top = self._ticks[-1]
        return tuple(Tick(at=_number(self._y(tick, top)), text=_tick_text(tick)) for tick in self._ticks)

    @cached_property
    def times(self) -> tuple[Tick, ...]:
        """The marks of the x axis: as many labels as there is room for."""
        longest = max(map(len, self.labels))
        wide = self._label_step(longest * _CHARACTER + _SPACE)
        narrow = wide * math.ceil(self._label_step(longest * _NARROW_CHARACTER + _SPACE) / wide)
        # Prefer whole hours and midnights to the first slot.
        first = max(range(wide), key=lambda at: _roundness(self.labels[at::wide]))
        ticks = []
        for at in range(first, len(self.labels), wide):
            x, text = self._x(at + 0.5), self.labels[at]
            if x + len(text) * _CHARACTER / 2 <= _WIDTH:
                fits = (at - first) % narrow == 0 and x + len(text) * _NARROW_CHARACTER / 2 <= _WIDTH
                ticks.append(Tick(at=_number(x), text=text, narrow=fits))
        return tuple(ticks)

    @cached_property
    def bars(self) -> tuple[Bar, ...]:
        """One bar per label."""
        top = self._ticks[-1]
        width = self._x(1) - self._x(0)
        bars = []
        for at, label in enumerate(self.labels):
            parts, sum_below = [], 0.0
            for series in self.series:
                value = series.values[at]
                if value:
                    y = self._y(sum_below + value, top)
                    parts.append(Part(kind=series.kind, y=_number(y), height=_number(self._y(sum_below, top) - y)))
                    sum_below += value
            bar = Bar(
                x=_number(self._x(at)), width=_number(width), text=self._hover_text(at, label), parts=tuple(parts)
            )
            bars.append(bar)
        return tuple(bars)

    @property
    def bar_width(self) -> str:
        """The width of a bar, which leaves a gap to the next."""
        return _number((self._x(1) - self._x(0)) * 0.86)

    @property
    def description(self) -> str:
        """The drawing in words, for screen readers."""
        sums = self._sums
        highest = max(range(len(sums)), key=sums.__getitem__)
        return gettext(
            "Stacked bars from %(first)s to %(last)s. The highest is %(most)s at %(when)s. "
            "The table below lists all values."
        ) % {
            "first": self.labels[0],
            "last": self.labels[-1],
            "most": number_text(sums[highest]),
            "when": self.labels[highest],
        }

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """The rows of the table: each label with the value of each series."""
        return [
            (label, [number_text(series.values[at]) for series in self.series])
            for at, label in enumerate(self.labels)
        ]

    @cached_property
    def _sums(self) -> list[float]:
        return [sum(series.values[at] for series in self.series) for at in range(len(self.labels))]

    @cached_property
    def _ticks(self) -> tuple[float, ...]:
        return round_ticks(max(self._sums))

    def _hover_text(self, at: int, label: str) -> str:
        return f"{label}: {', '.join(f'{series.name} {number_text(series.values[at])}' for series in self.series)}"

    def _x(self, at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / len(self.labels)

    def _y(self, value: float, top: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / top)

    def _label_step(self, units: float) -> int:
        fits = max(1, int((_WIDTH - _LEFT - _RIGHT) / units))
        wanted = math.ceil(len(self.labels) / fits)
        return next((step for step in _LABEL_STEPS if step >= wanted), wanted)


def plot(*, title: str, labels: Sequence[str], series: Sequence[Series], unit: str = "", empty: str = "") -> Plot:
    """Return a chart of stacked bars, the first series lowest.

    ``labels`` and each series' values have the same order and length; raises ``ValueError`` otherwise. ``empty``
    replaces the drawing while every value is zero.
    """
    for part in series:
        if len(part.values) != len(labels):
            raise ValueError(f"{len(labels)} labels, but {len(part.values)} values")
    return Plot(
        title=str(title),
        labels=[str(label) for label in labels],
        series=[replace(part, name=str(part.name)) for part in series],
        unit=str(unit),
        empty=str(empty) or gettext("No data."),
    )


def round_ticks(highest: float) -> tuple[float, ...]:
    """Return marks from 0 to ``highest`` or just above, in at most five steps of 1, 2 or 5 times a power of ten."""
    if highest <= 0:
        return (0, 1)
    power = 10.0 ** math.floor(math.log10(highest / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * 5 >= highest * 0.999999)
    if highest >= 1 and step < 1:
        step = 1.0
    return tuple(round(number * step, 12) for number in range(math.ceil(highest / step - 1e-9) + 1))


def _roundness(labels: Sequence[str]) -> float:
    return sum(len(label) - len(label.rstrip("0:")) for label in labels) / len(labels)


def _tick_text(value: float) -> str:
    """Return a round number in as few characters as narrow pages have room for."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= 10 * size:
            return f"{number_text(value / size)} {unit}"
    return number_text(value)


def _number(value: float) -> str:
    """Return the number for an SVG attribute: never localised."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
