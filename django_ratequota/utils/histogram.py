"""Durations of decisions: counts per bin, since the process began and over the last minute."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence

#: Upper bounds in seconds: from 50 µs, each a fifth higher, up to about 10 s; one more bin holds longer durations.
BOUNDS: tuple[float, ...] = tuple(round(50e-6 * 1.2**step, 7) for step in range(68))
_SLICE_SECONDS = 10
_SLICES = 7  # six whole ones make the last minute, the seventh is filling


class Histogram:
    """Counts of durations in the bins of ``BOUNDS``; bounded, and cheap enough for every request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        #: Returns seconds; durations begin and end by it.
        self.clock = clock
        #: Since the process began: one count per bin, the last for durations above all bounds.
        self.counts = [0] * (len(BOUNDS) + 1)
        #: Sum of all durations, in seconds.
        self.total = 0.0
        #: When the last duration was recorded, by ``clock``; None before the first.
        self.recorded_at: float | None = None
        # One slice per ten seconds of the last minute, the last first: its number since the clock's zero, its counts.
        self._slices = deque([(-1.0, [0] * (len(BOUNDS) + 1))], _SLICES)

    def record(self, began_at: float) -> None:
        """Count the duration since then, by the clock."""
        now = self.recorded_at = self.clock()
        seconds = now - began_at
        bin_ = bisect_left(BOUNDS, seconds)
        number = now // _SLICE_SECONDS
        if number > self._slices[0][0]:  # a thread may have read the clock before another began the slice
            self._slices.appendleft((number, [0] * (len(BOUNDS) + 1)))
        self._slices[0][1][bin_] += 1
        self.counts[bin_] += 1
        self.total += seconds

    def idle(self) -> float | None:
        """Return the seconds since the last duration was recorded; None before the first."""
        return None if self.recorded_at is None else self.clock() - self.recorded_at

    def last_minute(self) -> list[int]:
        """Return the counts of the last 60 to 70 seconds."""
        oldest = self.clock() // _SLICE_SECONDS - _SLICES
        return merged(counts for number, counts in tuple(self._slices) if number > oldest)


def merged(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Return the sum of several histograms' counts."""
    return [sum(bins) for bins in zip([0] * (len(BOUNDS) + 1), *histograms, strict=True)]


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the upper bound (seconds) of the bin that holds the quantile ``share``; None without counts."""
    wanted, passed = share * sum(counts), 0
    for bound, count in zip((*BOUNDS, float("inf")), counts, strict=True):
        passed += count
        if passed and passed >= wanted:
            return bound
    return None
