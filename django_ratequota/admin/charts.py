"""Stacked bars over time as SVG, with the same numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from django.utils.functional import cached_property
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from .formatting import number_text

#: The drawing in SVG user units: its size, its axes, and where the labels of the values and of the times are.
_FRAME = {
    **{"width": 720, "height": 260, "left": 76, "right": 694, "top": 14, "bottom": 216},
    **{"values": 68, "times": 245},
}
_LEFT, _TOP = _FRAME["left"], _FRAME["top"]
_ACROSS, _DOWN = _FRAME["right"] - _LEFT, _FRAME["bottom"] - _TOP
#: Width of a label's character on narrow pages (see plots.css), and the least space between labels.
_CHARACTER, _SPACE = 12, 14
#: Slots from one written label to the next: steps that divide hours, days and weeks.
_LABEL_STEPS = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 24, 30, 48, 60, 96, 168)

_NO_DATA = _("No data.")


@dataclass(frozen=True, slots=True)
class Series:
    """One part of each bar."""

    name: Any
    #: ``admitted``, ``refused``, ``would`` or another word: its class in plots.css.
    kind: str
    #: One value per bar, 0 or more.
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A chart of stacked bars, the first series lowest, for the template ``django_ratequota/plot.html``.

    Numbers for SVG attributes are texts, which no language changes.
    """

    title: str
    #: One per bar.
    labels: Sequence[str]
    series: Sequence[Series]
    unit: Any = ""
    #: Replaces the drawing while every value is zero.
    empty: Any = _NO_DATA
    frame = _FRAME
    #: The kinds filled with a pattern; the style sheet colours the others.
    patterned = ("refused", "would")

    @property
    def id(self) -> str:
        """The prefix of every id in the drawing; plots with different titles can share a page."""
        return f"ratequota-plot-{crc32(self.title.encode(errors='backslashreplace')):08x}"

    @property
    def is_empty(self) -> bool:
        """Whether every value is zero."""
        return not any(any(series.values) for series in self.series)

    @cached_property
    def values(self) -> list[dict[str, str]]:
        """The marks of the y axis: round numbers, 0 first."""
        return [{"at": _number(self._y(tick)), "text": _tick_text(tick)} for tick in self._ticks]

    @cached_property
    def times(self) -> list[dict[str, Any]]:
        """The marks of the x axis: as many labels as narrow pages have room for."""
        step = self._label_step(max(map(len, self.labels)) * _CHARACTER + _SPACE)
        # Prefer whole hours and midnights to the first slot.
        first = max(range(step), key=lambda at: _roundness(self.labels[at::step]))
        places = [(_LEFT + (at + 0.5) * self._slot, self.labels[at]) for at in range(first, len(self.labels), step)]
        fit = [(x, text) for x, text in places if len(text) * _CHARACTER <= 2 * (_FRAME["width"] - x)]
        return [{"at": _number(x), "text": text} for x, text in fit]

    @cached_property
    def bars(self) -> list[dict[str, Any]]:
        """One bar per label, with the text that is shown on hover."""
        bars = []
        for at, (label, column) in enumerate(zip(self.labels, self._columns, strict=True)):
            parts, below = [], 0.0
            for series, value in zip(self.series, column, strict=True):
                y, bottom = self._y(below + value), self._y(below)
                if value:
                    parts.append({"kind": series.kind, "y": _number(y), "height": _number(bottom - y)})
                below += value
            words = (f"{one.name} {number_text(value)}" for one, value in zip(self.series, column, strict=True))
            text = f"{label}: {', '.join(words)}"
            bars.append({"x": _number(_LEFT + at * self._slot), "text": text, "parts": parts})
        return bars

    @property
    def widths(self) -> dict[str, str]:
        """The width of a slot of time, and that of its bar, which leaves a gap to the next."""
        return {"slot": _number(self._slot), "bar": _number(self._slot * 0.86), "height": str(_DOWN)}

    @property
    def description(self) -> str:
        """The drawing in words, for screen readers."""
        most, when = max(zip(map(sum, self._columns), self.labels, strict=True), key=lambda one: one[0])
        return gettext(
            "Stacked bars from %(first)s to %(last)s. The highest is %(most)s at %(when)s. "
            "The table below lists all values."
        ) % {"first": self.labels[0], "last": self.labels[-1], "most": number_text(most), "when": when}

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """The rows of the table: each label with the value of each series."""
        return [
            (label, [number_text(value) for value in column])
            for label, column in zip(self.labels, self._columns, strict=True)
        ]

    @cached_property
    def _columns(self) -> list[tuple[float, ...]]:
        return list(zip(*(series.values for series in self.series), strict=True))

    @cached_property
    def _ticks(self) -> tuple[float, ...]:
        return round_ticks(max(map(sum, self._columns)))

    @property
    def _slot(self) -> float:
        return _ACROSS / len(self.labels)

    def _y(self, value: float) -> float:
        return _TOP + _DOWN * (1 - value / self._ticks[-1])

    def _label_step(self, units: float) -> int:
        fits = max(1, int(_ACROSS / units))
        wanted = math.ceil(len(self.labels) / fits)
        return next((step for step in _LABEL_STEPS if step >= wanted), wanted)


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
