"""The chart of Traffic: round marks, stacked bars, labels that fit, and the same numbers as a table."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from django.template.loader import render_to_string
from django.utils import timezone, translation

from django_ratequota.admin.usage.chart import chart, round_marks
from django_ratequota.monitoring.timeline import Counts, Span, Timeline

_NOW = datetime(2026, 10, 3, 13, 7, tzinfo=UTC)
#: Minutes of a slot, and slots.
_SPANS: dict[Span, tuple[int, int]] = {"hour": (1, 120), "day": (15, 100), "week": (60, 168)}


def draw(*counts: Counts, span: Span = "hour") -> str:
    step, slots = _SPANS[span]
    begin = _NOW.replace(minute=0)
    total = (*counts, *(Counts() for _ in range(slots - len(counts))))
    starts = tuple(begin + timedelta(minutes=step * number) for number in range(slots))
    found = chart(Timeline(starts=starts, total=total, endpoints={}), span)
    return render_to_string("admin/django_ratequota/ratepolicy/chart.html", {"plot": found})


def drawing(text: str) -> ElementTree.Element:
    """The SVG, which must be XML too."""
    found = re.search(r'<svg class="ratequota-plot-drawing".*?</svg>', text, re.S)
    assert found is not None
    return ElementTree.fromstring(found[0])


def rects(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [one for one in svg.iter("rect") if f"ratequota-plot-{kind}" in one.get("class", "").split()]


def test_marks_are_round_and_reach_the_highest() -> None:
    expected = {
        0: [0, 1],
        1: [0, 1],
        3: [0, 1, 2, 3],
        6: [0, 2, 4, 6],
        11: [0, 5, 10, 15],
        99: [0, 20, 40, 60, 80, 100],
        101: [0, 50, 100, 150],
    }
    assert {most: [*round_marks(most)] for most in expected} == expected
    for most in (*range(1, 200), 123_456, 10**9, 2**53):
        marks = round_marks(most)
        assert 2 <= len(marks) <= 6
        assert marks[-2] < most <= marks[-1]


def test_bars_are_stacked_on_the_axis_and_differ_by_pattern() -> None:
    text = draw(Counts(admitted=6, refused=3, would_refuse=1), Counts(refused=10))
    svg = drawing(text)
    admitted, would, refused, slot = (rects(svg, kind)[0] for kind in ("admitted", "would", "refused", "slot"))
    tops = [float(one.get("y", "")) for one in (admitted, would, refused)]
    heights = [float(one.get("height", "")) for one in (admitted, would, refused)]
    whole = float(slot.get("height", ""))
    assert heights == [pytest.approx(whole * share, abs=0.01) for share in (0.5, 0.1, 0.3)]
    assert tops[1:] == [pytest.approx(top - height, abs=0.02) for top, height in zip(tops, heights[1:], strict=False)]
    assert rects(svg, "refused")[1].get("height") == f"{whole:.2f}"
    patterns = {f"url(#{one.get('id')})" for one in svg.iter("pattern")}
    assert admitted.get("fill") is None, "plain, by the style sheet"
    assert {would.get("fill"), refused.get("fill")} == patterns
    assert text.count('id="') == len(set(re.findall(r'\sid="(.*?)"', text))), "no id twice"


def test_the_drawing_and_the_table_tell_every_number() -> None:
    text = draw(Counts(admitted=1240, refused=5, would_refuse=6))
    svg = drawing(text)
    heads = re.findall(r'<th scope="col">(.*?)</th>', text)
    assert heads == ["Time", "admitted", "admitted (log only)", "refused"]
    label, cells = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text)[0]
    assert (label, re.findall("<td>(.*?)</td>", cells)) == ("13:00", ["1,234", "6", "5"])
    assert next(svg.iter("title")).text == "13:00: admitted 1,234, admitted (log only) 6, refused 5"
    (desc,) = svg.iter("desc")
    assert desc.get("id") == svg.get("aria-describedby")
    assert "The highest bar is 1,245 at 13:00." in (desc.text or "")
    assert "<svg" not in draw(), "a sentence replaces an empty chart"


@pytest.mark.parametrize("language", ["de", "fr", "ar", "hi"])
def test_no_language_breaks_the_drawing(language: str) -> None:
    """A decimal comma, a space in thousands or other digits in an attribute would."""
    with translation.override(language):
        svg = drawing(draw(Counts(1234, 7, 3), Counts(100_000)))
    for element in svg.iter():
        for name in ("x", "y", "width", "height", "d", "viewBox", "dy"):
            assert re.fullmatch(r"[-MHVem\d. ]*", element.get(name, "")), (element.tag, name, element.get(name))


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu"])
@pytest.mark.parametrize("span", ["hour", "day", "week"])
def test_labels_have_room(span: Any, zone: str) -> None:
    with timezone.override(zone):
        svg = drawing(draw(Counts(1), span=span))
    times = [one for one in svg.iter("text") if one.get("text-anchor") == "middle"]
    ends = [(float(one.get("x", "")), len(one.text or "") * 11 / 2) for one in times]
    assert len(ends) >= 6
    for (left, half), (right, other) in pairwise(ends):
        assert left + half < right - other, "labels overlap"
    assert all(at - half >= 0 and at + half <= 720 for at, half in ends), "cut off at the edge"
