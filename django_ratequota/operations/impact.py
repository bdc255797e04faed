"""What a policy would have refused: recorded usage, replayed by the real algorithms against rates not saved yet.

Records say how many attempts a caller made in a second, not when in it: they are taken as spread evenly. Attempt
``i`` of ``n`` equal ones (counted from 0) is at the second's beginning plus ``i * 10**6 // n`` µs; where a counter
has several records in one second, each is spread by itself, and attempts at one instant go in the order of records.
Attempts that were refused in reality count as attempts like the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from operator import itemgetter

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..engine.rates import BLOCKED, Rate
from ..models import RatePolicy
from ..monitoring import attempts
from ..monitoring.attempts import Attempts
from ..policies.facts import PolicyFacts, policy_facts
from .impact_audience import Concerned, NotEstimable, subject_for
from .replay import replay_each
from .scenarios import number

#: Attempts that one estimate replays; beyond that, a part of the callers.
MOST_ATTEMPTS = 200_000
#: For the whole estimate; the replay has at least a quarter of it, however long reading the records took.
SECONDS = 2.0
_EXACT = 2**53
_DAY_SECONDS = 86_400
#: A day may be an hour or two longer where clocks change.
_LONGEST = {
    "day": _DAY_SECONDS + 7200,
    "week": 7 * _DAY_SECONDS + 7200,
    "month": 31 * _DAY_SECONDS + 7200,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Impact:
    """What a policy would have refused, and what was really refused of the same requests, by whatever policies."""

    #: Since when there are records (aware); None = there are none.
    since: datetime | None
    #: The part of all callers whose attempts were recorded and replayed; 1.0 = all.
    share: float
    #: Callers whose requests the policy concerns, and those of whom it would have refused some.
    clients: int
    refused_clients: int
    requests: int
    refused_requests: int
    really_refused_clients: int
    really_refused_requests: int
    #: Callers left out because another policy comes first for them.
    others_clients: int
    #: Policies that come first, but for whom the records do not tell.
    untold_policies: int


class _Totals:
    """Sums over the records that were replayed."""

    def __init__(self) -> None:
        self.requests = self.refused = self.really_refused = 0
        self.clients: set[str] = set()
        self.refused_clients: set[str] = set()
        self.really_refused_clients: set[str] = set()

    def add(self, records: Sequence[Attempts]) -> None:
        """Count what was recorded."""
        for record in records:
            self.requests += record.admitted + record.refused
            self.clients.add(record.caller)
            if record.refused:
                self.really_refused += record.refused
                self.really_refused_clients.add(record.caller)

    def refuse(self, caller: str, times: int = 1) -> None:
        """Count what would have been refused."""
        self.refused += times
        self.refused_clients.add(caller)


def estimate(policy: RatePolicy, hours: int = 24, *, most: int = MOST_ATTEMPTS, seconds: float = SECONDS) -> Impact:
    """What the policy would have refused in the last so many hours, had it been enforced all that time.

    ``policy`` is clean and need not be saved. It is replayed by itself: what other policies refuse is not taken off
    before. Callers for whom another policy of the same endpoint and counted_per comes first now are left out. Once
    the time is over, the callers looked at so far are the estimate. Raises ``NotEstimable`` and ``StoreError``.
    """
    until = time.monotonic() + seconds
    facts = replace(policy_facts(policy), mode="enforce")
    subject_of, concerned = subject_for(facts.counted_per), Concerned(facts)
    recorded = attempts.recorded_attempts(hours)
    if recorded.share < 1 and facts.counted_per in ("ip", "plan", "everyone"):
        raise NotEstimable(
            _("Cannot be estimated: its counters are shared, and only a part of the callers is recorded.")
        )
    subjects: dict[str, list[Attempts]] = {}
    for record in recorded.attempts:
        if facts.endpoint_id is None or facts.endpoint_id in record.endpoint_ids:
            subject = subject_of(record)
            if subject is not None:
                subjects.setdefault(subject, []).append(record)
    until = max(until, time.monotonic() + seconds / 4)
    totals, looked_at = _replay(facts, subjects, concerned, most, until)
    return Impact(
        since=recorded.since,
        share=recorded.share * (looked_at / len(subjects) if subjects else 1),
        clients=len(totals.clients),
        refused_clients=len(totals.refused_clients),
        requests=totals.requests,
        refused_requests=totals.refused,
        really_refused_clients=len(totals.really_refused_clients),
        really_refused_requests=totals.really_refused,
        others_clients=len(concerned.others),
        untold_policies=concerned.untold,
    )


def sentences(impact: Impact, hours: int = 24) -> list[str]:
    """The estimate in words."""
    if impact.since is None or not impact.requests:
        return [
            _("In the last %(hours)d h no request was recorded that the policy concerns.") % {"hours": hours},
            *_part(impact),
            *_left_out(impact),
        ]
    told = [
        _(
            "In the last %(hours)d h this would have refused %(refused)s of %(clients)s clients, "
            "%(percent)s of %(requests)s requests."
        )
        % {
            "hours": hours,
            "refused": number(impact.refused_clients),
            "clients": number(impact.clients),
            "percent": _percent(impact.refused_requests, impact.requests),
            "requests": number(impact.requests),
        },
        ngettext(
            "Of the same requests %(percent)s were really refused, by whatever policies, to %(refused)s client.",
            "Of the same requests %(percent)s were really refused, by whatever policies, to %(refused)s clients.",
            impact.really_refused_clients,
        )
        % {
            "percent": _percent(impact.really_refused_requests, impact.requests),
            "refused": number(impact.really_refused_clients),
        },
    ]
    return [*told, *_part(impact), *_left_out(impact)]


def _part(impact: Impact) -> list[str]:
    if impact.share == 1:
        return []
    return [_("This is an estimate from %(percent)s of the callers.") % {"percent": _percent(impact.share, 1)}]


def _left_out(impact: Impact) -> list[str]:
    told = []
    if impact.others_clients:
        text = ngettext(
            "Left out: %(count)s client for whom another policy comes first.",
            "Left out: %(count)s clients for whom another policy comes first.",
            impact.others_clients,
        )
        told.append(text % {"count": number(impact.others_clients)})
    if impact.untold_policies:
        text = ngettext(
            "Not considered: %(count)s policy that comes first, as the records do not tell whom it is for.",
            "Not considered: %(count)s policies that come first, as the records do not tell whom they are for.",
            impact.untold_policies,
        )
        told.append(text % {"count": number(impact.untold_policies)})
    return told


def _percent(part: float, whole: float) -> str:
    """``1.2 %``; neither "some" nor "not all" is rounded away."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.1:
        return f"< {number(0.1)} %"
    return f"> {number(99.9)} %" if 99.9 < percent < 100 else f"{number(percent)} %"


def _replay(
    policy: PolicyFacts, subjects: dict[str, list[Attempts]], concerned: Concerned, most: int, until: float
) -> tuple[_Totals, int]:
    """Count what would have been refused, and the subjects looked at: all, or as many as the bounds allow.

    Which ones those are depends on their names' hashes only, so that the next estimate takes the same ones first.
    """
    totals = _Totals()
    rates: tuple[Rate, ...] = () if isinstance(policy.rates, str) else policy.rates
    waiting: deque[list[tuple[int, int, str]]] = deque()
    looked_at, full = 0, False

    def sequences() -> Iterator[list[tuple[int, int]]]:
        nonlocal looked_at, full
        left = most
        for subject in sorted(subjects, key=_hash):
            if time.monotonic() > until:
                return
            records = concerned.among(subjects[subject])
            count = sum(record.admitted + record.refused for record in records)
            reaches = bool(rates) and not never_refused(rates, records)
            full = reaches and count > left
            if full:
                return
            looked_at += 1
            totals.add(records)
            if policy.rates == BLOCKED:
                for record in records:
                    totals.refuse(record.caller, record.admitted + record.refused)
            elif reaches:
                left -= count
                waiting.append(spread(records))
                yield [(at_us, cost) for at_us, cost, _caller in waiting[-1]]

    for outcome in replay_each(rates, sequences()):
        for (_at_us, _cost, caller), admitted in zip(waiting.popleft(), outcome, strict=True):
            if not admitted:
                totals.refuse(caller)
    if full and not totals.requests:
        raise NotEstimable(
            _("Cannot be estimated: more than %(most)s requests share one counter.") % {"most": number(most)}
        )
    return totals, looked_at


def spread(records: Sequence[Attempts]) -> list[tuple[int, int, str]]:
    """(µs, cost, caller) of every attempt, in the order of time, as the module says."""
    attempts = [
        (record.second * 10**6 + position * 10**6 // count, record.cost, record.caller)
        for record in records
        if (count := record.admitted + record.refused)
        for position in range(count)
    ]
    attempts.sort(key=itemgetter(0))
    return attempts


def never_refused(rates: Sequence[Rate], records: Sequence[Attempts]) -> bool:
    """Whether a counter with these attempts, in the order of time, can refuse none of them; False = it might.

    It cannot where no span as long as the period holds more units than both limit and burst. Fixed windows and the
    log admit any such span whole; the windowed counter looks at two periods at most. In a bucket, ``m`` periods and
    a part hold at most ``(m + 1) × min(limit, burst)``, that is the burst and what drips in meanwhile. Spans are
    counted in whole seconds, one more than the period touches.
    """
    units = [(record.second, (record.admitted + record.refused) * record.cost) for record in records]
    total = sum(size for _second, size in units)
    for rate in rates:
        room = min(rate.limit, rate.capacity)
        if rate.capacity * rate.period_us >= _EXACT:
            room //= 2  # doubles round there: half of it is beyond doubt
        if total <= room:
            continue
        period_us = rate.period_us * (2 if rate.algorithm == "sliding_window_counter" else 1)
        span = _LONGEST.get(rate.calendar) or -(-period_us // 10**6)
        if _busiest(units, span + 1) > room:
            return False
    return True


def _busiest(units: Sequence[tuple[int, int]], span: int) -> int:
    """The most units in any ``span`` consecutive seconds."""
    most = inside = first = 0
    for second, size in units:
        inside += size
        while units[first][0] <= second - span:
            inside -= units[first][1]
            first += 1
        most = max(most, inside)
    return most


def _hash(subject: str) -> bytes:
    return blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=8).digest()
