"""Estimate what a policy would have refused: recorded attempts, replayed by the real algorithms.

Refused attempts count like admitted ones. Records hold the number of a caller's attempts in a second, which are
spread evenly over it: attempt ``i`` of ``n`` (from 0) is ``i * 10**6 // n`` µs after the second's beginning. Several
records of a counter in one second are each spread by themselves; attempts at the same µs keep the order of records.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import blake2b
from operator import itemgetter
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..conf import settings
from ..engine.rates import BLOCKED, MAX_UNITS, Rate
from ..exceptions import RateQuotaError
from ..models import RatePolicy
from ..monitoring import attempts
from ..monitoring.attempts import Attempts, RecordedAttempts
from ..monitoring.records import UNKNOWN_PLAN
from ..policies.audience_index import Group
from ..policies.facts import NOBODY, POLICY_COLUMNS, PolicyFacts, UserEntry, policy_facts
from ..policies.matching import Where
from ..policies.requests.caller import UNKNOWN, DescribedCaller
from ..policies.resolve_for import Own, resolve_for
from ..policies.snapshot import Memo, Snapshot
from .explain import newest_policies
from .replay import replay_each
from .roll_out import replaced_by
from .texts import number_text

#: Maximum number of attempts that one estimate replays; beyond it, only those of some callers are replayed.
MOST_ATTEMPTS = 200_000
#: Time to read callers; at least a quarter of it, however long reading the records took.
SECONDS = 2.0
#: Callers that an estimate names.
_MOST_HIT = 10
_EXACT = 2**53
_DAY_US, _CHANGE_US = 86_400 * 10**6, 2 * 3600 * 10**6
#: The longest that a calendar window can be: clocks change by two hours at most.
_LONGEST_US = {name: days * _DAY_US + _CHANGE_US for name, days in (("day", 1), ("week", 7), ("month", 31))}


class NotEstimable(RateQuotaError):
    """The records do not show what the policy would have done; the message says why, for operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Two limits for one of the policy's rates, as rate text, had it been enforced alone and without a burst."""

    #: The limit would have refused nobody: 87/min.
    nobody: str
    #: It would have refused at most 1 % of the counters; the same where there are fewer than 100.
    one_percent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A caller of whom the policy would have refused requests."""

    #: The caller in the form that counters use: ``user:42``.
    caller: str
    refused: int
    #: All of the caller's requests that the policy applies to, refused ones included.
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Impact:
    """The requests that a policy would have refused."""

    #: Time of the first record (aware); None = no records.
    since: datetime | None
    #: Share of the callers whose attempts were recorded and replayed; 1.0 = all.
    share: float
    #: Callers to whose requests the policy applies, and those it would have refused at least once.
    clients: int
    refused_clients: int
    requests: int
    refused_requests: int
    #: The callers of whom it would have refused most, at most ten.
    hit: tuple[Hit, ...]
    #: Policies that take precedence for callers that the records do not identify.
    unknown_policies: int
    #: Same order as the policy's rates; none without requests.
    fits: tuple[Fit, ...]


def estimate(policy: RatePolicy, hours: int = 24, *, most: int = MOST_ATTEMPTS, seconds: float = SECONDS) -> Impact:
    """Estimate what the policy would have refused, had it been enforced for the last ``hours``.

    ``policy`` is clean and need not be saved. It is replayed alone: refusals by other policies are not subtracted.
    Callers for whom another policy of the same endpoint and counted_per takes precedence now are left out, but not
    those of an enforced policy that ``policy`` is to replace. After
    ``seconds``, the estimate is based on the callers read so far. Raises ``NotEstimable`` and ``StoreError``.
    """
    until = time.monotonic() + seconds
    facts = policy_facts(policy)
    # Without the rates that limit how many requests run at once, because attempts are recorded without an end.
    rates: tuple[Rate, ...] = ()
    if not isinstance(facts.rates, str):
        rates = tuple(rate for rate in facts.rates if not rate.concurrent)
        if not rates:
            raise NotEstimable(_("Cannot be estimated: how long requests run is not recorded."))
    # One on trial as if it were rolled out.
    gone = [one.pk for one in replaced_by(policy)] if policy.mode == RatePolicy.Mode.LOG else []
    audience, recorded = RecordedAudience(facts, gone), attempts.recorded_attempts(hours, facts.endpoint_id)
    subjects = _by_subject(facts, recorded)
    until = max(until, time.monotonic() + seconds / 4)
    counted: list[Attempts] = []
    peaks: list[list[int]] = []
    to_replay: list[list[Attempts]] = []
    searched, left = 0, most
    # In the order of hashes, so that the next estimate begins with the same ones.
    for subject in sorted(subjects, key=_hash):
        if time.monotonic() > until:
            break
        records = audience.select(subjects[subject])
        own = [peak(rate, records) for rate in rates]
        if not all(map(has_room, rates, own)):
            left -= sum(record.admitted + record.refused for record in records)
            if left < 0:
                break
            to_replay.append(records)
        searched += 1
        counted += records
        if records:
            peaks.append(own)
    if left < 0 and not counted:
        text = _("The impact cannot be estimated, because more than %(most)s requests share one counter.")
        raise NotEstimable(text % {"most": number_text(most)})
    asked: Counter[str] = Counter()
    for record in counted:
        asked[record.caller] += record.admitted + record.refused
    refused = asked if facts.rates == BLOCKED else _refused(rates, to_replay)
    hit = sorted(refused.items(), key=lambda one: (-one[1], one[0]))[:_MOST_HIT]
    return Impact(
        since=recorded.since,
        share=recorded.share * (searched / len(subjects) if subjects else 1),
        clients=len(asked),
        refused_clients=len(refused),
        requests=asked.total(),
        refused_requests=refused.total(),
        hit=tuple(Hit(caller=caller, refused=times, requests=asked[caller]) for caller, times in hit),
        unknown_policies=audience.unknown,
        fits=_fits(rates, peaks),
    )


def _by_subject(policy: PolicyFacts, recorded: RecordedAttempts) -> dict[str, list[Attempts]]:
    """Return the attempts by the subject that each counts for."""
    subject_of = _subject_for(policy.counted_per)
    if recorded.share < 1 and policy.counted_per in ("ip", "plan", "everyone"):
        text = _(
            "The impact cannot be estimated, because the policy has shared counters and only some customers are "
            "recorded."
        )
        raise NotEstimable(text)
    found: dict[str, list[Attempts]] = {}
    for record in recorded.attempts:
        subject = subject_of(record)
        if subject is not None:
            found.setdefault(subject, []).append(record.at(policy.endpoint_id))
    return found


def _refused(rates: Sequence[Rate], subjects: Iterable[Sequence[Attempts]]) -> Counter[str]:
    """Return how many requests of each caller would have been refused, from the records of each subject."""
    walks = [spread(records) for records in subjects]
    outcomes = replay_each(rates, ([(at_us, cost) for at_us, cost, _caller in walk] for walk in walks))
    refused: Counter[str] = Counter()
    for walk, admitted in zip(walks, outcomes, strict=True):
        refused.update(caller for (_at, _cost, caller), passed in zip(walk, admitted, strict=True) if not passed)
    return refused


def sentences(impact: Impact, hours: int = 24) -> list[str]:
    """Return the estimate in sentences."""
    if impact.since is None or not impact.requests:
        none = _(
            "The policy does not apply to any request that was recorded in the last %(hours)d h. Explain names the "
            "policy that takes precedence for a customer."
        )
        return [none % {"hours": hours}, *_reservations(impact)]
    text = _(
        "In the last %(hours)d h this would have refused %(refused)s of %(clients)s customers, %(percent)s of "
        "%(requests)s requests."
    )
    words = {
        "hours": hours,
        "refused": number_text(impact.refused_clients),
        "clients": number_text(impact.clients),
        "percent": _percent(impact.refused_requests, impact.requests),
        "requests": number_text(impact.requests),
    }
    return [text % words, *map(_fit_text, impact.fits), *_reservations(impact)]


def _fit_text(fit: Fit) -> str:
    if fit.nobody == fit.one_percent:
        return _("A limit of %(nobody)s would have admitted all requests.") % {"nobody": fit.nobody}
    text = _(
        "A limit of %(nobody)s would have admitted all requests. A limit of %(some)s would have refused requests on "
        "at most 1 %% of the counters."
    )
    return text % {"nobody": fit.nobody, "some": fit.one_percent}


def _reservations(impact: Impact) -> list[str]:
    """Return the limits of an estimate in sentences."""
    found = []
    if impact.share != 1:
        text = _("This is an estimate from %(percent)s of the customers.")
        found.append(text % {"percent": _percent(impact.share, 1)})
    if impact.unknown_policies:
        text = ngettext(
            "Ignored: %(count)s policy that takes precedence for customers that the records do not identify.",
            "Ignored: %(count)s policies that take precedence for customers that the records do not identify.",
            impact.unknown_policies,
        )
        found.append(text % {"count": number_text(impact.unknown_policies)})
    return found


def _percent(part: float, whole: float) -> str:
    """Return ``1.2 %``; never 0 for some nor 100 for not all."""
    percent = 100 * part / whole if whole else 0.0
    if 0 < percent < 0.1:
        return f"< {number_text(0.1)} %"
    return f"> {number_text(99.9)} %" if 99.9 < percent < 100 else f"{number_text(round(percent, 1))} %"


def _fits(rates: Sequence[Rate], peaks: Sequence[Sequence[int]]) -> tuple[Fit, ...]:
    """Return the limits that fit the peaks, of each subject one for each rate; none without subjects."""
    in_order = map(sorted, zip(*peaks, strict=True))
    return tuple(
        Fit(nobody=_text(rate, own[-1]), one_percent=_text(rate, own[-1 - len(own) // 100]))
        for rate, own in zip(rates, in_order, strict=False)
    )


def _text(rate: Rate, limit: int) -> str:
    return str(replace(rate, limit=max(1, min(limit, MAX_UNITS)), burst=None))


def _hash(subject: str) -> bytes:
    return blake2b(subject.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def spread(records: Sequence[Attempts]) -> list[tuple[int, int, str]]:
    """Return (µs, cost, caller) of every attempt, in the order of time, spread as the module docstring says."""
    attempts = [
        (record.second * 10**6 + position * 10**6 // count, record.cost, record.caller)
        for record in records
        if (count := record.admitted + record.refused)
        for position in range(count)
    ]
    attempts.sort(key=itemgetter(0))
    return attempts


def peak(rate: Rate, records: Sequence[Attempts]) -> int:
    """Return a limit at which the rate refuses none of these attempts, which are in the order of time.

    It is the most units in any span that the rate may look at. As that is rounded up to whole seconds, the lowest
    such limit may be less: half as much for a rate by the second, or for the windowed counter.
    """
    longest_us = _LONGEST_US[rate.calendar] if rate.calendar else rate.period_us
    span = -(-longest_us * (2 if rate.algorithm == "sliding_window_counter" else 1) // 10**6) + 1
    units = [(record.second, (record.admitted + record.refused) * rate.units(record.cost)) for record in records]
    most = inside = first = 0
    for second, size in units:
        inside += size
        while units[first][0] <= second - span:
            inside -= units[first][1]
            first += 1
        most = max(most, inside)
    return most


def has_room(rate: Rate, units: int) -> bool:
    """Whether a counter certainly refuses no attempts with this ``peak``; False = it might.

    True if no span of one period holds more units than the limit and the burst. Fixed windows and the log admit any
    such span; the windowed counter depends on two periods at most. In a bucket, ``m`` periods and a fraction hold at
    most ``(m + 1) × min(limit, burst)``: the burst and what is refilled meanwhile.
    """
    room = min(rate.limit, rate.capacity)
    # Doubles are rounded there: half of the room is certain.
    return units <= (room // 2 if rate.capacity * rate.period_us >= _EXACT else room)


class RecordedAudience:
    """Selects the recorded attempts that a policy counts; raises ``NotEstimable`` where records lack the caller."""

    def __init__(self, policy: PolicyFacts, gone: Sequence[int] = ()) -> None:
        """``gone`` has the ids of policies to leave out."""
        snapshot, now_us = newest_policies(), time.time_ns() // 1000
        own = _in_force(policy, snapshot, now_us)
        stored = snapshot.groups.get(own.endpoint_id, {}).get(own.counted_per) or Group()
        # Only enforced policies take the place of others.
        left_out = [*gone, *(policy.id for policy in stored if policy.mode != "enforce")]
        group = stored.changed(dict.fromkeys(left_out) | {own.id: None if own.user else own})
        self._policy, self._now_us = own.id, now_us
        chosen = own.user or own.subject or own.list_id is not None
        self._needs_plans = own.counted_per == "plan" or bool(not chosen and group.having("plan"))
        # The policies of this endpoint and ``counted_per`` alone; records hold the caller's plan, default ones too.
        groups = {own.endpoint_id: {own.counted_per: group}}
        self._snapshot = snapshot.copied(groups=groups, defaults={}, memo=Memo())
        users: dict[str, list[PolicyFacts]] = {own.user: [own]} if own.user else {}
        place: dict[str, Any] = {"endpoint_id": own.endpoint_id, "counted_per": own.counted_per}
        enforced = RatePolicy.objects.filter(mode=RatePolicy.Mode.ENFORCE)
        rows = enforced.filter(user__isnull=False, **place).order_by()
        # Values instead of model instances, because there may be thousands.
        values = rows.values_list(*POLICY_COLUMNS, named=True)
        others = [policy_facts(row) for row in values if row.pk not in (own.id, *gone)]
        for facts in others:
            users.setdefault(facts.user, []).append(facts)
        #: Policies that may take precedence for callers that the records do not identify.
        self.unknown = 0 if own.user else _unidentified(group, snapshot) + len(others) * (not _identifies("user"))
        self._entries = {user: UserEntry(policies=tuple(policies)) for user, policies in users.items()}

    def select(self, records: Sequence[Attempts]) -> list[Attempts]:
        """Return the records that the policy counts."""
        known: dict[tuple[object, ...], bool] = {}
        for record in records:
            request = _request(record)
            if request not in known:
                if self._needs_plans and record.plan_id == UNKNOWN_PLAN:
                    raise _lacks("plan")
                known[request] = self._policy in self._winners(record)
        return [record for record in records if known[_request(record)]]

    def _winners(self, record: Attempts) -> tuple[int, ...]:
        """Return the ids of the policies that would apply to a recorded request now."""
        plan = self._snapshot.plans.get(record.plan_id or 0)
        caller = DescribedCaller.named(record.caller, record.ip, plan.slug if plan else None)
        known = self._snapshot.endpoints
        endpoints = tuple([known[pk] for pk in record.endpoint_ids if pk in known])
        entry = self._entries.get(caller.user_id or "", NOBODY)
        where = Where(endpoints=endpoints)
        return resolve_for(caller, where, self._snapshot, self._now_us, Own(entry))[1].policy_ids


def _request(record: Attempts) -> tuple[object, ...]:
    return record.caller, record.ip, record.plan_id, record.endpoint_ids


def _subject_for(counted_per: str) -> Callable[[Attempts], str | None]:
    """Return a function from a record to the subject of its counter; None = none. Raises ``NotEstimable``."""
    if counted_per == "caller":
        return lambda record: record.caller
    if counted_per == "ip":
        return lambda record: record.ip or UNKNOWN
    if counted_per == "plan":
        return lambda record: None if record.plan_id is None else f"plan:{record.plan_id}"
    if counted_per == "everyone":
        return lambda _record: "everyone"
    if not _identifies(counted_per):
        raise _lacks(counted_per)
    return lambda record: record.caller if record.caller.startswith(f"{counted_per}:") else None


def _in_force(policy: PolicyFacts, snapshot: Snapshot, now_us: int) -> PolicyFacts:
    """Return the policy as if it were enforced now; raises ``NotEstimable`` if the records lack its audience."""
    _check_recorded(policy, snapshot, now_us)
    starts_us = None if policy.starts_us is None else min(policy.starts_us, now_us)
    ends_us = None if policy.ends_us is None else max(policy.ends_us, now_us + 1)
    return replace(policy, mode="enforce", starts_us=starts_us, ends_us=ends_us)


def _unidentified(group: Group, snapshot: Snapshot) -> int:
    """Return the number of the group's policies whose callers the records do not identify."""

    def identifies(trait: str, value: Any) -> bool:
        if trait == "network":
            return not _is_narrow(*value)
        kinds = {value} if trait == "subject" else snapshot.members.kinds_of({value}) if trait == "list" else ()
        return all(map(_identifies, kinds))

    return sum(number for (trait, value), number in group.traits.items() if not identifies(trait, value))


def _is_narrow(bits: int, hosts: int) -> bool:
    """Whether records hold less of an address than the network does: the lengths are in bits."""
    return bits == 128 and hosts < 128 - int(settings.ipv6_prefix)


def _identifies(kind: str) -> bool:
    """Whether recorded caller names identify every caller of this kind.

    True only for the first entry of ``CALLER``: later ones are recorded only when the earlier ones gave no value.
    """
    return kind == "ip" or bool(settings.caller[0] == kind)


def _check_recorded(policy: PolicyFacts, snapshot: Snapshot, now_us: int) -> None:
    """Raise ``NotEstimable`` if the records do not identify every caller in the policy's audience."""
    kinds = {"user" if policy.user else policy.subject.partition(":")[0] or "ip"}
    narrow = policy.network is not None and _is_narrow(*policy.network[:2])
    if policy.list_id is not None:
        members = [one for one in snapshot.members if one.list_id == policy.list_id and one.active(now_us)]
        kinds = {one.kind for one in members}
        narrow = any(_is_narrow(*one.key[:2]) for one in members if not isinstance(one.key, str))
    if narrow:
        text = _(
            "The impact cannot be estimated, because only the first %(bits)d bits of IPv6 addresses are recorded."
        )
        raise NotEstimable(text % {"bits": settings.ipv6_prefix})
    for kind in sorted(kinds):
        if not _identifies(kind):
            raise _lacks(kind)


def _lacks(kind: str) -> NotEstimable:
    text = _("The impact cannot be estimated, because the records do not include the %(kind)s of every customer.")
    return NotEstimable(text % {"kind": kind})
