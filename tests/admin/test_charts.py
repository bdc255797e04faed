"""Plots: round marks, labels that fit, numbers that no language breaks, and the same numbers as a table."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
from django.template.loader import render_to_string
from django.utils import translation

from django_ratequota.admin.charts import Plot, Series, round_ticks

MINUTES = [f"13:{minute:02d}" for minute in range(7, 60)] + [f"14:{minute:02d}" for minute in range(7)]
_SVG = "{http://www.w3.org/2000/svg}"


def draw(shown: Plot) -> str:
    return render_to_string("django_ratequota/plot.html", {"plot": shown})


def drawing(shown: Plot) -> ElementTree.Element:
    """The SVG, which must be XML too."""
    found = re.search(r'<svg class="ratequota-plot-drawing".*?</svg>', draw(shown), re.S)
    assert found is not None
    return ElementTree.fromstring(found[0])


def of(*values: float, **kwargs: Any) -> Plot:
    """A plot of one series."""
    labels = [f"t{number}" for number in range(len(values))]
    return Plot(title="Requests", labels=labels, series=[Series("admitted", "admitted", values)], **kwargs)


def rects(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [one for one in svg.iter("rect") if f"ratequota-plot-{kind}" in one.get("class", "").split()]


def test_ticks_are_round_and_reach_the_highest() -> None:
    expected: dict[float, tuple[float, ...]] = {
        0: (0, 1),
        1: (0, 1),
        3: (0, 1, 2, 3),
        6: (0, 2, 4, 6),
        11: (0, 5, 10, 15),
        99: (0, 20, 40, 60, 80, 100),
        101: (0, 50, 100, 150),
        10**9: (0, 2 * 10**8, 4 * 10**8, 6 * 10**8, 8 * 10**8, 10**9),
        0.3: (0, 0.1, 0.2, 0.3),
    }
    assert {highest: round_ticks(highest) for highest in expected} == expected
    for highest in (*range(1, 200), 1e3 + 1, 123_456, 7.77, 2**53):
        ticks = round_ticks(highest)
        assert 2 <= len(ticks) <= 6
        assert ticks[-2] < highest <= ticks[-1]


def test_bars_are_stacked_on_the_axis() -> None:
    shown = Plot(
        title="Requests",
        labels=["a", "b"],
        series=[Series("admitted", "admitted", [6, 0]), Series("refused", "refused", [4, 10])],
    )
    svg = drawing(shown)
    (admitted,), (first, second) = rects(svg, "admitted"), rects(svg, "refused")
    top, height = shown.frame["top"], float(shown.widths["height"])
    assert float(first.get("y", "")) == top
    assert float(first.get("y", "")) + float(first.get("height", "")) == pytest.approx(float(admitted.get("y", "")))
    assert float(admitted.get("height", "")) == pytest.approx(height * 0.6)
    assert float(second.get("height", "")) == height
    assert first.get("x") == admitted.get("x") != second.get("x")


def test_series_differ_by_pattern_and_not_by_colour_alone() -> None:
    kinds = ("admitted", "refused", "would")
    shown = Plot(title="Requests", labels=["a"], series=[Series(kind, kind, [1]) for kind in kinds])
    svg = drawing(shown)
    patterns = {f"url(#{one.get('id')})" for one in svg.iter("pattern")}
    fills = {kind: rects(svg, kind)[0].get("fill") for kind in kinds}
    assert fills["admitted"] is None, "plain, by the style sheet"
    assert len({fills["refused"], fills["would"]} & patterns) == 2
    legend = re.search(r"<ul class=\"ratequota-plot-legend\">.*?</ul>", draw(shown), re.S)
    assert legend is not None
    assert fills["refused"] in legend[0]


def test_the_drawing_and_the_table_tell_every_number() -> None:
    shown = Plot(
        title="Requests",
        labels=["13:05", "13:06"],
        series=[Series("admitted", "admitted", [1234, 0]), Series("refused", "refused", [5, 2.5])],
    )
    text, svg = draw(shown), drawing(shown)
    assert re.findall(r'<th scope="col">(.*?)</th>', text) == ["Time", "admitted", "refused"]
    found = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text)
    assert [(label, re.findall("<td>(.*?)</td>", cells)) for label, cells in found] == [
        ("13:05", ["1,234", "5"]),
        ("13:06", ["0", "2.5"]),
    ]
    assert [one.text for one in svg.iter("title")] == [
        "13:05: admitted 1,234, refused 5",
        "13:06: admitted 0, refused 2.5",
    ]
    assert (svg.get("role"), svg.get("aria-label")) == ("img", "Requests")
    (desc,) = svg.iter("desc")
    assert desc.get("id") == svg.get("aria-describedby")
    assert "from 13:05 to 13:06. The highest is 1,239 at 13:05." in (desc.text or "")


@pytest.mark.parametrize("language", ["de", "fr", "ar", "hi"])
def test_no_language_breaks_the_drawing(language: str) -> None:
    """A decimal comma, a space in thousands or other digits in an attribute would."""
    shown = of(*[1234.5, 0.25, 100_000] * 9)
    with translation.override(language):
        svg = drawing(shown)
        assert shown.rows[0][1][0] != "1,234.5" or language == "hi", "texts are localised"
    for element in svg.iter():
        for name in ("x", "y", "width", "height", "d", "viewBox", "dy"):
            assert re.fullmatch(r"[-MHVem\d. ]*", element.get(name, "")), (element.tag, name, element.get(name))


def test_two_plots_share_no_id() -> None:
    both = draw(of(1)) + draw(Plot(title="Other", labels=["a"], series=[Series("x", "admitted", [1])]))
    ids = re.findall(r'\sid="(.*?)"', both)
    assert len(ids) == len(set(ids)) > 2


def test_zeros_only_show_a_sentence_instead_of_a_chart() -> None:
    for shown in (of(), of(0, 0, 0), Plot(title="Requests", labels=["a"], series=[])):
        text = draw(shown)
        assert "No data." in text
        assert "<svg" not in text
        assert "<table" not in text


@pytest.mark.parametrize(
    ("labels", "written"),
    [
        (MINUTES, [f"13:{minute}" for minute in range(10, 60, 10)] + ["14:00"]),
        (
            [f"{hour:02d}:{minute:02d}" for hour in range(24) for minute in (0, 15, 30, 45)],
            [f"{hour:02d}:00" for hour in range(0, 24, 3)],
        ),
        ([f"Sat {day}, {hour:02d}:00" for day in range(1, 8) for hour in range(24)], None),
        (["one"], ["one"]),
        (["x" * 500, "y" * 500], []),
    ],
)
def test_labels_are_thinned_to_the_available_width(labels: list[str], written: list[str] | None) -> None:
    shown = Plot(title="", labels=labels, series=[Series("x", "admitted", [1] * len(labels))])
    assert written is None or [tick["text"] for tick in shown.times] == written
    ends = [(float(one["at"]), len(one["text"]) * 11 / 2) for one in shown.times]
    for (left, half), (right, other) in pairwise(ends):
        assert left + half < right - other, "labels overlap"
    assert all(at - half >= 0 and at + half <= 720 for at, half in ends), "cut off at the edge"


def test_a_week_is_labelled_at_midnight() -> None:
    days = ["Sat", "Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"]
    labels = [f"{days[hour // 24]} {hour % 24:02d}:00" for hour in range(13, 13 + 168)]
    shown = Plot(title="", labels=labels, series=[Series("x", "admitted", [1] * 168)])
    assert [tick["text"] for tick in shown.times] == [f"{day} 00:00" for day in days[1::2]]
