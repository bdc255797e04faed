"""The chart of Traffic: a stacked bar for each slot of time as SVG, with the same numbers as a table."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext_lazy as _

from ...monitoring.timeline import Span, Timeline
from ..formatting import number_text

#: The place of the bars in the drawing of ``chart.html``, in SVG user units.
_LEFT, _ACROSS, _BOTTOM, _DOWN = 76, 618, 216, 202
#: The parts of a bar, the lowest first: the class in plots.css, and its name.
_SERIES = {"admitted": _("admitted"), "would": _("admitted (log only)"), "refused": _("refused")}
_TITLES: dict[Span, Any] = {
    "hour": _("Requests per minute"),
    "day": _("Requests per 15 minutes"),
    "week": _("Requests per hour"),
}
#: Which slots have a label at the axis, and its format: as many as narrow pages have room for.
_LABELS: dict[Span, tuple[Callable[[datetime], bool], str]] = {
    "hour": (lambda at: at.minute % 15 == 0, "H:i"),
    "day": (lambda at: at.hour % 4 == 0 and at.minute < 15, "H:i"),
    "week": (lambda at: at.hour == 0, "D"),
}


def chart(timeline: Timeline, span: Span) -> dict[str, Any]:
    """Return the context of ``chart.html``; numbers for SVG attributes are texts, which no language changes."""
    columns = [(max(0, one.admitted - one.would_refuse), one.would_refuse, one.refused) for one in timeline.total]
    sums = [sum(column) for column in columns]
    marks = round_marks(max(sums))
    slot, (has_label, label_format) = _ACROSS / len(columns), _LABELS[span]
    bars, times = [], []
    for number, (start, column) in enumerate(zip(map(timezone.localtime, timeline.starts), columns, strict=True)):
        left, parts, top = _LEFT + number * slot, [], 0
        for (kind, name), value in zip(_SERIES.items(), column, strict=True):
            top += value
            place = {"y": _y(top, marks), "height": f"{_DOWN * value / marks[-1]:.2f}"}
            parts.append({"kind": kind, "name": name, "number": number_text(value), **place})
        label = date_format(start, "D H:i" if span == "week" else "H:i")
        bars.append({"x": f"{left:.2f}", "label": label, "parts": parts})
        if has_label(start):
            times.append({"at": f"{left + slot / 2:.2f}", "text": date_format(start, label_format)})
    return {
        "title": _TITLES[span],
        "unit": timezone.get_current_timezone_name(),
        "series": _SERIES,
        "highest": number_text(max(sums)) if any(sums) else "",
        "when": bars[sums.index(max(sums))]["label"],
        "marks": [{"at": _y(mark, marks), "text": _short(mark)} for mark in marks],
        "times": times,
        "bars": bars,
        "slot": f"{slot:.2f}",
        "width": f"{slot * 0.86:.2f}",
    }


def round_marks(most: int) -> range:
    """Return marks from 0 to ``most`` or just above, in at most five steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** (len(str(most // 5)) - 1)
    step = next(times * power for times in (1, 2, 5, 10) if times * power * 5 >= most)
    return range(0, max(most, 1) + step, step)


def _y(value: int, marks: range) -> str:
    return f"{_BOTTOM - _DOWN * value / marks[-1]:.2f}"


def _short(value: int) -> str:
    """Return a round number in as few characters as narrow pages have room for."""
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= 10 * size:
            return f"{number_text(value / size)} {unit}"
    return number_text(value)
