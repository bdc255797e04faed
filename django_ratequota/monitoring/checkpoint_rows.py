"""The rows of checkpoints (``QuotaWindow``): written in batches, under locks, by any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any

from django.apps import apps
from django.db import connections
from django.db.models import Q

from ..changes.databases import reading_and_writing
from ..engine.keys import short
from ..engine.rates import MONTH
from ..engine.types import BucketStatus
from ..policies.facts import to_datetime, to_us

#: A counter's name in the database, and the start of its window (µs).
Window = tuple[str, int]
#: Tells of a figure that is lower than its row, which is of this time (µs), whether Redis may have lost counts.
IsLoss = Callable[[Window, int], bool]


@dataclass(frozen=True, slots=True)
class Figure:
    """What a counter has used."""

    status: BucketStatus
    #: Redis' time then (µs).
    at_us: int
    #: By how much refunds since the last checkpoint can have lowered the count below a row; ``ALL`` after a reset.
    lowered: float

    @property
    def used(self) -> int:
        """Units used, debts included."""
        return self.status.used + self.status.debt


def batches(windows: Iterable[Window], size: int) -> Iterator[list[Window]]:
    """Yield the windows in batches: those of one counter in different ones, as a month may go on in another's row.

    In one order, so that processes wait for each other's rows instead of deadlocking.
    """
    turns: dict[str, int] = {}
    rounds: dict[int, list[Window]] = {}
    for window in windows:
        turn = turns[window[0]] = turns.get(window[0], 0) + 1
        rounds.setdefault(turn, []).append(window)
    for together in rounds.values():
        # No sort of all, during which no request could go on.
        parts = [sorted(together[at : at + size]) for at in range(0, len(together), size)]
        ordered = merge(*parts)
        while batch := list(islice(ordered, size)):
            yield batch


def write(figures: dict[Window, Figure], below: dict[Window, int], is_loss: IsLoss) -> int:
    """Write a batch of figures, and take those that are written out of it; returns how many rows changed.

    Adds the figures that are lower than their row's to ``below``, with the row's time.
    """
    written = _write_rows(figures, below, is_loss)
    if not figures:
        return written
    model = _model()
    instead = _end_months(model.objects, figures)
    # In a transaction of its own: a process that waits for another's new row must hold no lock of a row.
    new = [_row(*item) for item in figures.items() if item[0] not in instead]
    model.objects.bulk_create(new, ignore_conflicts=True)
    # Those that count on in another month, and those that another process has inserted meanwhile.
    windows = {instead.get(window, window): window for window in figures}
    rest, lower = {row: figures[window] for row, window in windows.items()}, dict[Window, int]()
    _write_rows(rest, lower, lambda row, at_us: is_loss(windows[row], at_us))
    below |= {windows[row]: at_us for row, at_us in lower.items()}
    for row in windows.keys() - rest.keys():
        del figures[windows[row]]
    return written + len(new)


def _write_rows(figures: dict[Window, Figure], below: dict[Window, int], is_loss: IsLoss) -> int:
    """Write the figures that have a row, and take them out of ``figures``; returns how many rows changed."""
    model, found, lower = _model(), list[Window](), dict[Window, int]()
    higher, lowered = [], 0
    with reading_and_writing(model) as alias:
        rows = _rows(figures).order_by("pk").select_for_update()
        for pk, counter, starts_at, ends_at, used, limit, at_us in rows.values_list(
            "pk", "counter", "starts_at", "ends_at", "used", "limit", "at_us"
        ):
            window = counter, to_us(starts_at)
            figure = figures.get(window)
            if figure is None or figure.at_us >= to_us(ends_at):
                continue
            found.append(window)
            if figure.at_us <= at_us:
                continue
            if figure.used >= used - figure.lowered:
                higher.append(_row(window, figure))
                continue
            lower[window] = at_us
            if figure.lowered and is_loss(window, at_us):  # then only that is known
                used -= int(figure.lowered)
                lowered += model.objects.filter(pk=pk).update(used=used, percent=used * 100 // limit)
        if higher:
            # The rows are locked, so none of them can have grown since.
            model.objects.bulk_create(
                higher,
                update_conflicts=True,
                update_fields=["used", "limit", "percent", "at_us", "policy_id", "rate"],
                unique_fields=_unique(alias),
            )
    for window in found:
        del figures[window]
    below |= lower
    return len(higher) + lowered


def _end_months(rows: Any, figures: Mapping[Window, Figure]) -> dict[Window, Window]:
    """End the months during which another one begins; call it before rows of new windows are inserted.

    Return window -> the window of the row to write instead: the store counts on in a month that began later than the
    caller's (see ``lua/fixed_window.lua``). So each unit is in one row. A row that was to end earlier, by a day that
    was taken back since, goes on while its month does.
    """
    months = {window[0]: window for window, f in figures.items() if f.status.bucket.rate.calendar == MONTH}
    instead: dict[Window, Window] = {}
    if not months:
        return instead
    since = to_datetime(min(figures[window].at_us for window in months.values()))
    own = Q(starts_at__in={to_datetime(start_us) for _, start_us in months.values()})
    found = rows.filter(Q(ends_at__gt=since) | own, counter__in=list(months))
    ended: dict[Window, int] = {}
    for pk, counter, starts_at, ends_at in found.values_list("pk", "counter", "starts_at", "ends_at"):
        window, start_us, end_us = months[counter], to_us(starts_at), to_us(ends_at)
        at_us, until_us = figures[window].at_us, window[1] + figures[window].status.window_us
        if start_us == window[1] and end_us <= at_us < until_us:
            ended[window] = pk
        if end_us <= at_us or start_us == window[1] or start_us >= until_us:
            continue
        if start_us > window[1]:
            instead[window] = counter, start_us
        if (ends_us := until_us if start_us > window[1] else at_us) < end_us:
            rows.filter(pk=pk).update(ends_at=to_datetime(ends_us))
    for window in ended.keys() - instead.keys():
        ends_at = to_datetime(window[1] + figures[window].status.window_us)
        rows.filter(pk=ended[window]).update(ends_at=ends_at)
    return instead


def _unique(alias: str) -> list[str] | None:
    """Return the fields by which a row is found that is there already; MariaDB takes any unique ones."""
    named = connections[alias].features.supports_update_conflicts_with_target
    return ["counter", "starts_at"] if named else None


def _model() -> Any:
    # Not imported above, because check_request can be imported before Django is set up.
    return apps.get_model("django_ratequota", "QuotaWindow")


def _rows(windows: Iterable[Window]) -> Any:
    starts = {to_datetime(start_us) for _, start_us in windows}
    return _model().objects.filter(counter__in=[counter for counter, _ in windows], starts_at__in=starts)


def used_in(windows: Sequence[Window], until_us: int | None) -> dict[Window, int]:
    """Return what the windows have used by their checkpoints, but for those written after ``until_us`` (Redis' µs).

    Of a month that began on another day than it would now, its row is the newest one that began in the window.
    """
    counters = [counter for counter, _ in windows]
    since = to_datetime(min(start_us for _, start_us in windows))
    rows = _model().objects.filter(counter__in=counters, starts_at__gte=since).order_by("starts_at")
    newest = {counter: row for counter, *row in rows.values_list("counter", "starts_at", "used", "at_us")}
    used = dict[Window, int]()
    for counter, start_us in windows:
        if counter in newest:
            starts_at, units, at_us = newest[counter]
            if to_us(starts_at) >= start_us and (until_us is None or at_us <= until_us):
                used[counter, start_us] = units
    return used


def _row(window: Window, figure: Figure) -> Any:
    status = figure.status
    bucket = status.bucket
    return _model()(
        counter=window[0],
        starts_at=to_datetime(window[1]),
        ends_at=to_datetime(window[1] + status.window_us),
        period=bucket.rate.calendar,
        subject=stored_subject(bucket.subject),
        endpoint_id=bucket.endpoint_id,
        policy_id=bucket.policy_id,
        rate=str(bucket.rate),
        used=figure.used,
        limit=status.limit,
        percent=figure.used * 100 // status.limit,
        at_us=figure.at_us,
    )


def stored_subject(subject: str) -> str:
    """Return the subject as rows have it: without what databases refuse, lone surrogates and NUL."""
    return short(subject.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0"))
