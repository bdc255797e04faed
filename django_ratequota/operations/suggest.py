"""Suggest rates from recorded attempts: the limits under which 95, 99 and 99.9 % of callers stay.

A caller's peak is the most units, or requests, that it asked for in any span of one period, refused ones included. A
limit of the peak would have refused none of them: every such span holds no more than the limit. The windowed counter
estimates its span from two windows, so its peak is the highest such estimate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..engine.rates import Rate
from ..models import RatePolicy
from ..policies.facts import policy_facts
from .impact import MOST_ATTEMPTS, SECONDS, in_hash_order, left_out, recorded_subjects, too_many
from .scenarios import number
from .spans import busiest, longest_us, spread

#: Share of callers that stay under a suggested limit, in thousandths.
SHARES = (950, 990, 999)
#: Unit of a rate -> seconds.
PERIODS = {"s": 1, "min": 60, "hour": 3600, "day": 86_400}
#: Records of a whole day begin a moment after its start.
_REACH = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Limits for one period."""

    unit: str
    counts: Literal["units", "requests"]
    #: Rate texts; same order and length as ``SHARES``.
    rates: tuple[str, ...]
    #: The highest peak of all callers, and whose it is.
    peak: int
    peak_caller: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestions:
    """The limits, and what they are based on."""

    rows: tuple[Suggestion, ...]
    #: Time of the first record (aware); None = no records.
    since: datetime | None
    #: Share of the callers whose attempts were recorded and looked at; 1.0 = all.
    share: float
    #: Callers, or other subjects of ``counted_per``, and their requests.
    callers: int
    requests: int
    #: As in ``Impact``.
    left_out_clients: int
    unknown_policies: int


def suggest(
    policy: RatePolicy, hours: int = 24, *, most: int = MOST_ATTEMPTS, seconds: float = SECONDS
) -> Suggestions:
    """Suggest rates for the policy's audience, endpoint, ``counted_per`` and algorithm; its own rates do not matter.

    At most ``most`` attempts are looked at, for ``seconds``. Raises ``NotEstimable`` and ``StoreError``.
    """
    until = time.monotonic() + seconds
    facts = policy_facts(policy)
    recorded, subjects, audience = recorded_subjects(facts, hours)
    until = max(until, time.monotonic() + seconds / 4)
    reach = 0.0 if recorded.since is None else time.time() - recorded.since.timestamp()
    scales = [
        Rate(limit=1, period=period, algorithm=policy.algorithm, counts=counts)
        for counts in ("units", "requests")
        for period in PERIODS.values()
        if period * _REACH <= reach
    ]
    peaks: list[list[tuple[int, str]]] = [[] for _scale in scales]
    looked_at = requests = 0
    left, costs = most, set[int]()
    for subject in in_hash_order(subjects):
        records = audience.select(subjects[subject])
        count = sum(record.admitted + record.refused for record in records)
        if count > left and not requests:
            raise too_many(most)
        if time.monotonic() > until or count > left:
            break
        looked_at += 1
        left -= count
        if not count:
            continue
        requests += count
        costs.update(record.cost for record in records)
        attempts = [(at_us, cost) for at_us, cost, _caller in spread(records)]
        for own, scale in zip(peaks, scales, strict=True):
            own.append((peak(scale, attempts), subject))
    rows = [
        _suggestion(scale, own)
        for scale, own in zip(scales, peaks, strict=True)
        if own and (scale.counts == "units" or costs != {1})
    ]
    return Suggestions(
        rows=tuple(rows),
        since=recorded.since,
        share=recorded.share * (looked_at / len(subjects) if subjects else 1),
        callers=len(peaks[0]) if peaks else 0,
        requests=requests,
        left_out_clients=len(audience.left_out),
        unknown_policies=audience.unknown,
    )


def peak(scale: Rate, attempts: Sequence[tuple[int, int]]) -> int:
    """Return the lowest limit at which ``scale`` admits all attempts (µs, cost), which are in the order of time."""
    sized = [(at_us, scale.units(cost)) for at_us, cost in attempts]
    if scale.algorithm == "sliding_window_counter":
        return _windowed_peak(sized, scale.period_us)
    return busiest(sized, longest_us(scale))


def readable(value: int) -> int:
    """Round up to a number that is easy to read, by less than a quarter: 87 to 90, 123 to 130, 2,345 to 2,500."""
    if value <= 20:
        return value
    power: int = 10 ** (len(str(value)) - 2)
    step = power if value < 20 * power else 5 * power
    return -(-value // step) * step


def sentences(found: Suggestions, hours: int = 24) -> list[str]:
    """Return what the suggestions are based on, in sentences."""
    if not found.rows:
        none = _("In the last %(hours)d h no request was recorded that the policy applies to.")
        return [none % {"hours": hours}, *left_out(found)]
    text = ngettext(
        "Based on %(requests)s requests of %(callers)s caller in the last %(hours)d h.",
        "Based on %(requests)s requests of %(callers)s callers in the last %(hours)d h.",
        found.callers,
    )
    words = {"requests": number(found.requests), "callers": number(found.callers), "hours": hours}
    safer = _("Callers may ask for more than they did so far: save the policy as “log only” first, and watch it.")
    return [text % words, *left_out(found), safer]


def _suggestion(scale: Rate, peaks: list[tuple[int, str]]) -> Suggestion:
    in_order = sorted(peaks)
    unit = next(unit for unit, period in PERIODS.items() if period == scale.period_us // 10**6)
    limits = [readable(max(1, in_order[-(-len(in_order) * share // 1000) - 1][0])) for share in SHARES]
    what = " requests" if scale.counts == "requests" else ""
    highest, caller = in_order[-1]
    return Suggestion(
        unit=unit,
        counts=scale.counts,
        rates=tuple(f"{limit}{what}/{unit}" for limit in limits),
        peak=highest,
        peak_caller=caller,
    )


def _windowed_peak(sized: Sequence[tuple[int, int]], period_us: int) -> int:
    most = window = previous = current = 0
    for at_us, units in sized:
        index, elapsed_us = divmod(at_us, period_us)
        if index != window:
            previous, current, window = (current if index == window + 1 else 0), 0, index
        current += units
        most = max(most, -(-previous * (period_us - elapsed_us) // period_us) + current)
    return most
