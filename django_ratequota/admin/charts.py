"""Bars over time as an SVG drawing of our own, with the same numbers as a table beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from zlib import crc32

from django.utils.functional import cached_property
from django.utils.translation import gettext

from .formatting import number_text

#: The drawing in units of its own, whatever its size on the page.
_WIDTH, _HEIGHT = 720, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 26, 14, 44
#: Units that a character of a label takes, on wide pages and on narrow ones (see plots.css), with room to the next.
_CHARACTER, _NARROW_CHARACTER, _SPACE = 6.5, 12, 14
#: Every so manyth label is written: those that divide hours, days and weeks.
_THINNED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 48, 60, 96, 168)


#: The kinds of bars that are drawn with a pattern of the drawing's own, not plain.
_PATTERNED = ("refused", "would")


@dataclass(frozen=True, slots=True)
class Series:
    """One part of each bar."""

    name: str
    #: admitted, refused, would, or a word of the caller's own: its class in plots.css.
    kind: str
    #: One for each bar, 0 or more.
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One series' part of a bar: numbers of SVG attributes, never localised."""

    kind: str
    y: str
    height: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """All series at one time."""

    x: str
    width: str
    #: What is shown on hover.
    text: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark of an axis."""

    at: str
    text: str
    #: Whether there is room for it on a narrow page, too.
    narrow: bool = True


@dataclass(frozen=True, kw_only=True)
class Plot:
    """What ``django_ratequota/plot.html`` draws."""

    title: str
    labels: Sequence[str]
    series: Sequence[Series]
    unit: str
    line: Sequence[float | None]
    line_name: str
    empty: str

    @property
    def id(self) -> str:
        """Begins every id of the drawing: two plots of a page have titles of their own."""
        return f"ratequota-plot-{crc32(self.title.encode(errors='backslashreplace')):08x}"

    @property
    def patterned(self) -> Sequence[str]:
        """The kinds that are filled by a pattern; the others by the style sheet."""
        return _PATTERNED

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but nothing to draw."""
        return not any(any(one.values) for one in self.series)

    @property
    def view_box(self) -> str:
        """The drawing's own units."""
        return f"0 0 {_WIDTH} {_HEIGHT}"

    @property
    def edges(self) -> dict[str, str]:
        """Where the axes are, and where their texts go."""
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
        """The marks of the upright axis: round numbers, 0 first."""
        top = self._ticks[-1]
        return tuple(Tick(at=_number(self._y(tick, top)), text=number_text(tick)) for tick in self._ticks)

    @cached_property
    def times(self) -> tuple[Tick, ...]:
        """The marks of the level axis: as many labels as there is room for."""
        longest = max(map(len, self.labels))
        wide = self._every(longest * _CHARACTER + _SPACE)
        narrow = wide * math.ceil(self._every(longest * _NARROW_CHARACTER + _SPACE) / wide)
        # Whole hours and midnights tell more than whatever came first.
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
        """One for each label."""
        top = self._ticks[-1]
        width = self._x(1) - self._x(0)
        bars = []
        for at, label in enumerate(self.labels):
            parts, sum_below = [], 0.0
            for one in self.series:
                value = one.values[at]
                if value:
                    y = self._y(sum_below + value, top)
                    parts.append(Part(kind=one.kind, y=_number(y), height=_number(self._y(sum_below, top) - y)))
                    sum_below += value
            bar = Bar(x=_number(self._x(at)), width=_number(width), text=self._told(at, label), parts=tuple(parts))
            bars.append(bar)
        return tuple(bars)

    @property
    def bar_width(self) -> str:
        """Units: less than the distance from bar to bar."""
        return _number((self._x(1) - self._x(0)) * 0.86)

    @cached_property
    def path(self) -> str:
        """The line, in steps; interrupted where it has no value."""
        drawn = []
        for at, (before, value) in enumerate(pairwise([None, *self.line])):
            if value is not None:
                y = _number(self._y(value, self._ticks[-1]))
                drawn.append(f"M{_number(self._x(at))} {y}" if before is None else f"V{y}")
                drawn.append(f"H{_number(self._x(at + 1))}")
        return " ".join(drawn)

    @property
    def description(self) -> str:
        """The drawing in a sentence."""
        sums = [sum(one.values[at] for one in self.series) for at in range(len(self.labels))]
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
        """The table: each label with a number of each series, and of the line."""
        columns: list[Sequence[float | None]] = [one.values for one in self.series]
        if self.line_name:
            columns.append(self.line)
        return [
            (label, ["–" if column[at] is None else number_text(column[at]) for column in columns])
            for at, label in enumerate(self.labels)
        ]

    @cached_property
    def _ticks(self) -> tuple[float, ...]:
        sums = (sum(one.values[at] for one in self.series) for at in range(len(self.labels)))
        return round_ticks(max([*sums, *(value for value in self.line if value is not None)]))

    def _told(self, at: int, label: str) -> str:
        told = [f"{one.name} {number_text(one.values[at])}" for one in self.series]
        value = self.line[at] if self.line else None
        if value is not None:
            told.append(f"{self.line_name} {number_text(value)}")
        return f"{label}: {', '.join(told)}"

    def _x(self, at: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * at / len(self.labels)

    def _y(self, value: float, top: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / top)

    def _every(self, units: float) -> int:
        fits = max(1, int((_WIDTH - _LEFT - _RIGHT) / units))
        wanted = math.ceil(len(self.labels) / fits)
        return next((step for step in _THINNED if step >= wanted), wanted)


def plot(
    *,
    title: str,
    labels: Sequence[str],
    series: Sequence[Series],
    unit: str = "",
    line: Sequence[float | None] | None = None,
    line_name: str = "",
    empty: str = "",
) -> Plot:
    """Stacked bars, the first series lowest, with a line in steps (a limit, say) where one is given.

    Labels, and what each series and the line hold, have the same order and length. ``empty`` is the sentence
    that stands in place of a drawing without anything in it.
    """
    for one in (*(one.values for one in series), *([] if line is None else [line])):
        if len(one) != len(labels):
            raise ValueError(f"{len(labels)} labels, but {len(one)} values")
    return Plot(
        title=str(title),
        labels=[str(label) for label in labels],
        series=[replace(one, name=str(one.name)) for one in series],
        unit=str(unit),
        line=line or (),
        line_name=str(line_name) if line else "",
        empty=str(empty) or gettext("No data."),
    )


def round_ticks(highest: float) -> tuple[float, ...]:
    """From 0 in at most five equal steps of 1, 2 or 5 times a power of ten, up to ``highest`` or just above."""
    if highest <= 0:
        return (0, 1)
    power = 10.0 ** math.floor(math.log10(highest / 5))
    step = next(m * power for m in (1, 2, 5, 10) if m * power * 5 >= highest * 0.999999)
    if highest >= 1 and step < 1:
        step = 1.0
    return tuple(round(number * step, 12) for number in range(math.ceil(highest / step - 1e-9) + 1))


def _roundness(labels: Sequence[str]) -> float:
    return sum(len(label) - len(label.rstrip("0:")) for label in labels) / len(labels)


def _number(value: float) -> str:
    """For an SVG attribute: no comma in any language."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
