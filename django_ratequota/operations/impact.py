"""Estimate what a policy would have refused: recorded attempts, replayed by the real algorithms.

Refused attempts count like admitted ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..engine.rates import BLOCKED, MAX_UNITS, Rate
from ..models import RatePolicy
from ..monitoring import attempts
from ..monitoring.attempts import Attempts, RecordedAttempts
from ..policies.facts import PolicyFacts, policy_facts
from .impact_audience import NotEstimable, RecordedAudience, subject_for
from .replay import replay_each
from .scenarios import number
from .spans import has_room, peak, spread

#: Most attempts that one estimate replays; of more, it replays those of some callers.
MOST_ATTEMPTS = 200_000
#: Time for the whole estimate; the replay gets at least a quarter of it, however long reading the records took.
SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Two limits for one of the policy's rates, as rate text, had it been enforced alone and without a burst."""

    #: The limit would have refused nobody: 87/min.
    nobody: str
    #: It would have refused at most 1 % of the counters; the same where there are fewer than 100.
    one_percent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Impact:
    """What a policy would have refused, and what all policies really refused of the same requests."""

    #: Time of the first record (aware); None = no records.
    since: datetime | None
    #: Share of the callers whose attempts were recorded and replayed; 1.0 = all.
    share: float
    #: Callers to whose requests the policy applies, and those it would have refused at least once.
    clients: int
    refused_clients: int
    requests: int
    refused_requests: int
    really_refused_clients: int
    really_refused_requests: int
    #: Callers left out because another policy takes precedence.
    left_out_clients: int
    #: Policies that take precedence for callers that the records do not identify.
    unknown_policies: int
    #: Same order as the policy's rates; none without requests.
    fits: tuple[Fit, ...]


class _Totals:
    """Sums over the records that were replayed."""

    def __init__(self) -> None:
        self.requests = self.refused = self.really_refused = 0
        self.clients: set[str] = set()
        self.refused_clients: set[str] = set()
        self.really_refused_clients: set[str] = set()
        #: Of each subject with requests its ``peak`` at each rate.
        self.peaks: list[list[int]] = []

    def add(self, records: Sequence[Attempts], peaks: list[int]) -> None:
        """Count a subject's recorded attempts."""
        if records:
            self.peaks.append(peaks)
        for record in records:
            self.requests += record.admitted + record.refused
            self.clients.add(record.caller)
            if record.refused:
                self.really_refused += record.refused
                self.really_refused_clients.add(record.caller)

    def refuse(self, caller: str, times: int = 1) -> None:
        """Count attempts of the caller that would have been refused."""
        self.refused += times
        self.refused_clients.add(caller)


def estimate(policy: RatePolicy, hours: int = 24, *, most: int = MOST_ATTEMPTS, seconds: float = SECONDS) -> Impact:
    """Estimate what the policy would have refused, had it been enforced for the last ``hours``.

    ``policy`` is clean and need not be saved. It is replayed alone: refusals by other policies are not subtracted.
    Callers for whom another policy of the same endpoint and counted_per takes precedence now are left out. After
    ``seconds``, the estimate is based on the callers replayed so far. Raises ``NotEstimable`` and ``StoreError``.
    """
    until = time.monotonic() + seconds
    facts = policy_facts(policy)
    recorded, subjects, audience = _recorded_subjects(facts, hours)
    until = max(until, time.monotonic() + seconds / 4)
    totals, replayed = _replay(facts, subjects, audience, most, until)
    return Impact(
        since=recorded.since,
        share=recorded.share * (replayed / len(subjects) if subjects else 1),
        clients=len(totals.clients),
        refused_clients=len(totals.refused_clients),
        requests=totals.requests,
        refused_requests=totals.refused,
        really_refused_clients=len(totals.really_refused_clients),
        really_refused_requests=totals.really_refused,
        left_out_clients=len(audience.left_out),
        unknown_policies=audience.unknown,
        fits=() if isinstance(facts.rates, str) or not totals.requests else _fits(facts.rates, totals.peaks),
    )


def _recorded_subjects(
    facts: PolicyFacts, hours: int
) -> tuple[RecordedAttempts, dict[str, list[Attempts]], RecordedAudience]:
    """Return the records of the last ``hours``, those at the policy's endpoint by subject, and its audience.

    Raises ``NotEstimable`` and ``StoreError``.
    """
    subject_of, audience = subject_for(facts.counted_per), RecordedAudience(facts)
    recorded = attempts.recorded_attempts(hours)
    if recorded.share < 1 and facts.counted_per in ("ip", "plan", "everyone"):
        raise NotEstimable(_("Cannot be estimated: its counters are shared, and only some callers are recorded."))
    subjects: dict[str, list[Attempts]] = {}
    for record in recorded.attempts:
        if facts.endpoint_id is None or facts.endpoint_id in record.endpoint_ids:
            subject = subject_of(record)
            if subject is not None:
                subjects.setdefault(subject, []).append(record.at(facts.endpoint_id))
    return recorded, subjects, audience


def sentences(impact: Impact, hours: int = 24) -> list[str]:
    """Return the estimate in sentences."""
    if impact.since is None or not impact.requests:
        none = _("In the last %(hours)d h no request was recorded that the policy applies to.")
        return [none % {"hours": hours}, *_left_out(impact)]
    totals = [
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
            "Of the same requests %(percent)s were really refused, by any policy, to %(refused)s client.",
            "Of the same requests %(percent)s were really refused, by any policy, to %(refused)s clients.",
            impact.really_refused_clients,
        )
        % {
            "percent": _percent(impact.really_refused_requests, impact.requests),
            "refused": number(impact.really_refused_clients),
        },
    ]
    return [*totals, *map(_fit_text, impact.fits), *_left_out(impact)]


def _fit_text(fit: Fit) -> str:
    if fit.nobody == fit.one_percent:
        return _("A limit of %(nobody)s would have refused nobody.") % {"nobody": fit.nobody}
    text = _("A limit of %(nobody)s would have refused nobody, %(some)s at most 1 %% of the counters.")
    return text % {"nobody": fit.nobody, "some": fit.one_percent}


def _left_out(impact: Impact) -> list[str]:
    """Return the limits of an estimate in sentences."""
    found = []
    if impact.share != 1:
        text = _("This is an estimate from %(percent)s of the callers.")
        found.append(text % {"percent": _percent(impact.share, 1)})
    if impact.left_out_clients:
        text = ngettext(
            "Left out: %(count)s client for whom another policy takes precedence.",
            "Left out: %(count)s clients for whom another policy takes precedence.",
            impact.left_out_clients,
        )
        found.append(text % {"count": number(impact.left_out_clients)})
    if impact.unknown_policies:
        text = ngettext(
            "Ignored: %(count)s policy that takes precedence for callers that the records do not identify.",
            "Ignored: %(count)s policies that take precedence for callers that the records do not identify.",
            impact.unknown_policies,
        )
        found.append(text % {"count": number(impact.unknown_policies)})
    return found


def _percent(part: float, whole: float) -> str:
    """Return ``1.2 %``; never 0 for some nor 100 for not all."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.1:
        return f"< {number(0.1)} %"
    return f"> {number(99.9)} %" if 99.9 < percent < 100 else f"{number(percent)} %"


def _replay(
    policy: PolicyFacts, subjects: dict[str, list[Attempts]], audience: RecordedAudience, most: int, until: float
) -> tuple[_Totals, int]:
    """Return the totals, and how many subjects were replayed: all, or as many as the bounds allow."""
    totals = _Totals()
    rates: tuple[Rate, ...] = () if isinstance(policy.rates, str) else policy.rates
    waiting: deque[list[tuple[int, int, str]]] = deque()
    replayed, full = 0, False

    def sequences() -> Iterator[list[tuple[int, int]]]:
        nonlocal replayed, full
        left = most
        # So that the next estimate begins with the same ones.
        for subject in sorted(subjects, key=_hash):
            if time.monotonic() > until:
                return
            records = audience.select(subjects[subject])
            count = sum(record.admitted + record.refused for record in records)
            peaks = [peak(rate, records) for rate in rates]
            reaches = any(not has_room(rate, units) for rate, units in zip(rates, peaks, strict=True))
            full = reaches and count > left
            if full:
                return
            replayed += 1
            totals.add(records, peaks)
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
        text = _("Cannot be estimated: more than %(most)s requests share one counter.")
        raise NotEstimable(text % {"most": number(most)})
    return totals, replayed


def _fits(rates: Sequence[Rate], peaks: Sequence[Sequence[int]]) -> tuple[Fit, ...]:
    """Return the limits that fit the peaks, of each subject one for each rate."""
    found = []
    for rate, own in zip(rates, zip(*peaks, strict=True), strict=True):
        in_order = sorted(own)
        nobody, one_percent = (_text(rate, in_order[-1 - out]) for out in (0, len(in_order) // 100))
        found.append(Fit(nobody=nobody, one_percent=one_percent))
    return tuple(found)


def _text(rate: Rate, limit: int) -> str:
    return str(replace(rate, limit=max(1, min(limit, MAX_UNITS)), burst=None))


def _hash(subject: str) -> bytes:
    return blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=8).digest()
