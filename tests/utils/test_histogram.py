"""Durations by bin: where each is counted, their quantiles, and the last minute."""

from __future__ import annotations

from bisect import bisect_left
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota.utils.histogram import BOUNDS, Histogram, merged, quantile
from tests.support.properties import examples

BINS = len(BOUNDS) + 1


class Seconds:
    """A clock in seconds, moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def histogram(seconds: Seconds) -> Histogram:
    return Histogram(seconds)


# --- Quantiles. ---


def test_quantiles_without_durations_and_above_the_last_bound(histogram: Histogram) -> None:
    for share in (0.0, 0.5, 0.99, 1.0):
        assert quantile(histogram.counts, share) is None
        assert quantile(histogram.last_minute(), share) is None
        assert quantile(merged([]), share) is None
    histogram.record(-0.001)
    histogram.record(-60.0)
    assert quantile(histogram.counts, 0.5) == BOUNDS[bisect_left(BOUNDS, 0.001)]
    assert quantile(histogram.counts, 0.99) == float("inf")


@given(
    durations=st.lists(st.floats(0, 12), min_size=1, max_size=300),
    share=st.sampled_from([0.0, 0.01, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0]),
)
@examples(200)
def test_a_quantile_is_within_one_bin_of_the_sorted_durations(durations: list[float], share: float) -> None:
    histogram = Histogram(lambda: 0.0)
    for duration in durations:
        histogram.record(-duration)
    # The smallest duration that this many did not exceed.
    exact = sorted(durations)[max(0, ceil(share * len(durations)) - 1)]
    assert quantile(histogram.counts, share) == (*BOUNDS, float("inf"))[bisect_left(BOUNDS, exact)]


# --- The last minute. ---


def test_the_last_minute_moves_with_the_clock(histogram: Histogram, seconds: Seconds) -> None:
    seconds.now = 1000.0
    seen = []
    for _ in range(10):
        histogram.record(seconds() - 0.001)
        seen.append(sum(histogram.last_minute()))
        seconds.now += 10
    # The seventh slice is the one that is filling.
    assert seen == [1, 2, 3, 4, 5, 6, 7, 7, 7, 7]
    assert sum(histogram.counts) == 10


def test_it_keeps_a_duration_for_a_minute_and_forgets_it_after_seventy_seconds() -> None:
    for begin in (0.0, 5.0, 9.999, 1000.0, 86_405.5):
        seconds = Seconds()
        histogram, seconds.now = Histogram(seconds), begin
        histogram.record(begin - 0.001)
        minute = histogram.last_minute()
        for later, kept in ((0, 1), (30, 1), (59.999, 1), (70, 0), (75, 0), (140, 0), (10**6, 0)):
            seconds.now = begin + later
            assert sum(histogram.last_minute()) == kept, (begin, later)
        assert sum(histogram.counts) == 1
        histogram.record(seconds() - 2.0)
        assert [at for at, count in enumerate(histogram.last_minute()) if count] == [bisect_left(BOUNDS, 2.0)]
        assert sum(minute) == 1, "what was returned does not change"


def test_threads_that_read_the_clock_before_a_slice_began_keep_the_last_minute() -> None:
    seconds = Seconds()
    histogram = Histogram(seconds)
    for second in range(1000, 1060, 10):
        for seconds.now in (second + 0.1, second - 0.1, second + 0.2):
            histogram.record(seconds() - 0.001)
    assert sum(histogram.last_minute()) == 18


# --- Several. ---


def test_merged_is_all_of_them_together() -> None:
    one, two, both = (Histogram(lambda: 0.0) for _ in range(3))
    for histogram, durations in ((one, (0.001, 0.002, 20.0)), (two, (0.001, 0.1))):
        for duration in durations:
            histogram.record(-duration)
            both.record(-duration)
    assert merged([one.counts, two.counts]) == both.counts
    assert merged([one.counts]) == one.counts
    assert merged(()) == [0] * BINS
