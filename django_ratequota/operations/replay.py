"""Replay a sequence of attempts against rates, by the real algorithms, on the attempts' own clock.

    replay([Rate.parse("2/s")], [(1_000_000, 1), (1_000_001, 1), (1_000_002, 1)])  # [True, True, False]

Redis runs the algorithms (``lua/replay.lua``) on slices of the attempts, and reads and writes no key. Both functions
raise ``StoreError`` when it does not answer, and ``ValueError`` on attempts out of order, and on concurrent rates.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from struct import pack

from ..engine.calendar_windows import calendar_window
from ..engine.limiter import Limiter
from ..engine.rates import MAX_UNITS, Rate
from ..engine.scripts import REPLAY
from ..runtime import default_limiter
from ..store.commands import ScriptCall

#: (time in µs since the Unix epoch, cost in units): (1_763_702_400_000_000, 1).
Attempt = tuple[int, int]

#: Attempts per call for one rate: the server is blocked for 1 to 3 ms.
SLICE = 1000
#: How much longer an attempt takes: the log is searched for its bounds.
_SLOWER = {"sliding_window_log": 3}
_MAX_US = 2**53 - 1
#: Separates two sequences; no attempt has this time.
_SEPARATOR: Attempt = (0, 0)
_ADMITTED = ord("1")


def replay(
    rates: Sequence[Rate],
    attempts: Sequence[Attempt],
    *,
    limiter: Limiter | None = None,
    slice_size: int | None = None,
) -> list[bool]:
    """Return whether each attempt would have been admitted; same order and length as ``attempts``.

    All attempts are one subject's, in the order of time, and nothing is used before the first. Every rate must admit
    an attempt, else it is refused and charged to none. ``limiter`` (default: that of the settings) names the server
    and the time zone of calendar windows.
    """
    return next(replay_each(rates, [attempts], limiter=limiter, slice_size=slice_size))


def replay_each(
    rates: Sequence[Rate],
    sequences: Iterable[Sequence[Attempt]],
    *,
    limiter: Limiter | None = None,
    slice_size: int | None = None,
) -> Iterator[list[bool]]:
    """Replay the sequences of many subjects, each with its own counters; yields one list per sequence, in order.

    Sequences are read as needed, and short ones share a call.
    """
    slice_size = slice_size or max(1, SLICE // max(1, sum(_SLOWER.get(rate.algorithm, 1) for rate in rates)))
    replayer = _Replayer(rates, limiter or default_limiter())
    waiting: list[Attempt] = []
    outcomes: list[bool] = []
    for sequence in sequences:
        _check_order(sequence)
        waiting += (*sequence, _SEPARATOR)
        start = 0
        while len(waiting) - start >= slice_size:
            outcomes = yield from _finished(outcomes, replayer.run(waiting[start : start + slice_size]))
            start += slice_size
        waiting = waiting[start:]
    if waiting:
        yield from _finished(outcomes, replayer.run(waiting))


def _finished(begun: list[bool], reply: bytes) -> Generator[list[bool], None, list[bool]]:
    """Yield the sequences that ended in this slice; return the outcomes of the unfinished one."""
    *ended, rest = reply.split(b"-")
    for part in ended:
        begun += [outcome == _ADMITTED for outcome in part]
        yield begun
        begun = []
    begun += [outcome == _ADMITTED for outcome in rest]
    return begun


class _Replayer:
    """The rates, and the current subject's state in each."""

    def __init__(self, rates: Sequence[Rate], limiter: Limiter) -> None:
        if concurrent := [str(rate) for rate in rates if rate.concurrent]:
            raise ValueError(f"an attempt has no duration, so {concurrent[0]!r} cannot be replayed")
        self._limiter = limiter
        self._rates = rates
        self._states: list[bytes] = [b""] * len(rates)

    def run(self, attempts: Sequence[Attempt]) -> bytes:
        """Return one character per attempt: 1 = admitted, 0 = refused, - = end of a sequence."""
        args: list[object] = [b"".join(pack(">dd", at_us, cost) for at_us, cost in attempts)]
        for rate, state in zip(self._rates, self._states, strict=True):
            windows, by_request = self._windows(rate, attempts), int(rate.counts == "requests")
            algorithm = "calendar_window" if rate.calendar else rate.algorithm
            args += (algorithm, rate.limit, rate.period_us, rate.capacity, state, windows, by_request)
        reply = self._limiter.store.execute(ScriptCall(REPLAY, (), args))
        outcomes, *self._states = reply
        return bytes(outcomes)

    def _windows(self, rate: Rate, attempts: Sequence[Attempt]) -> bytes:
        """Return the calendar windows of the attempts, packed, in the order of time; empty for other rates."""
        if not rate.calendar:
            return b""
        windows: set[tuple[int, int]] = set()
        start = finish = 0
        for at_us, _cost in attempts:
            if at_us and not start <= at_us < finish:
                start, finish, _ = calendar_window(rate.calendar, at_us, self._limiter.time_zone)
                windows.add((start, finish))
        return b"".join(pack(">dd", *window) for window in sorted(windows))


def _check_order(attempts: Sequence[Attempt]) -> None:
    before = 1
    for at_us, cost in attempts:
        if not before <= at_us <= _MAX_US:
            raise ValueError(f"attempts must be in the order of time, in µs from 1 to 2^53; {at_us} follows {before}")
        if not 0 <= cost <= MAX_UNITS:
            raise ValueError(f"a cost must be a whole number from 0 to {MAX_UNITS}, not {cost}")
        before = at_us
