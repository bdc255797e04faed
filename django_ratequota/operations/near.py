"""Who is near a limit now: the kept candidates, resolved by today's policies, with their counters peeked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice, takewhile

from ..conf import settings
from ..engine.types import Bucket, BucketStatus
from ..models import RatePolicy
from ..monitoring import near
from ..monitoring.near import Candidate, Window, percent_used
from ..policies.assigned import entries_of, is_plan_open
from ..policies.facts import Assigned, UserEntry, policy_facts
from ..policies.requests.caller import DescribedCaller
from ..policies.resolver import EvaluationContext, make_buckets, resolve_uncached
from ..policies.snapshot import Snapshot
from ..runtime import default_limiter
from .counters import peek
from .explain import newest_policies
from .explain_query import ExplainQuery

#: Candidates resolved at once where the first of a page were out of date, and how often.
_BATCH, _ROUNDS = 500, 4
Matches = Callable[[Candidate], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A counter as it stands now, and the policy that limits it."""

    policy: RatePolicy
    status: BucketStatus

    @property
    def percent(self) -> int:
        """Return the whole percent of the limit that is used."""
        return percent_used(self.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A part of the list."""

    #: The fullest first.
    rows: tuple[Row, ...]
    #: Whether there are more.
    more: bool
    #: Level -> how many of the window's subjects have that or more, as last sent.
    counts: dict[int, int]


def near_counts() -> list[tuple[Window, dict[int, int]]]:
    """Return each window, with how many subjects have used 50, 80 and 100 % of a rate; raises ``StoreError``.

    Calendar windows come first, then the longest. As last sent: counters are not peeked.
    """
    limiter = default_limiter()
    return [(window, near.keep(window, near.window_end(window, limiter), {}, limiter)) for window in near.windows()]


def near_rows(window: Window, level: int, matches: Matches, start: int, most: int) -> Rows:
    """Return up to ``most`` counters at ``level`` percent or more, without the ``start`` fullest.

    Candidates that are out of date are corrected in Redis on the way: after a reset, or a raised limit. Raises
    ``StoreError`` and ``django.db.Error``.
    """
    limiter, size = default_limiter(), most
    end = near.window_end(window, limiter)
    for _ in range(_ROUNDS):
        found = list(islice(_matching(window, level, matches), start, start + size + 1))
        live = _live(window, found[:size])
        counts = near.keep(window, end, _corrections(live), limiter)
        rows = [row for row in live.values() if row and row.percent >= level and matches(_candidate(row))]
        if len(rows) >= most or len(found) <= size:
            break
        size = _BATCH
    rows.sort(key=lambda row: (-row.status.used / row.status.limit, row.status.bucket.subject))
    return Rows(rows=tuple(rows[:most]), more=len(found) > size or len(rows) > most, counts=counts)


def all_near(window: Window, level: int, matches: Matches) -> Iterator[list[Row]]:
    """Yield every counter at ``level`` percent or more, in batches; raises ``StoreError`` and ``django.db.Error``."""
    # Read to the end first, because the order changes while the batches are sent.
    found = iter(list(_matching(window, level, matches)))
    while batch := list(islice(found, _BATCH)):
        live = _live(window, batch).values()
        yield [row for row in live if row and row.percent >= level and matches(_candidate(row))]


def _matching(window: Window, level: int, matches: Matches | None) -> Iterator[Candidate]:
    chunks = (near.candidates(window, level, start, near.CHUNK) for start in count(step=near.CHUNK))
    return filter(matches, chain.from_iterable(takewhile(bool, chunks)))


def _candidate(row: Row) -> Candidate:
    return Candidate.of(row.status.bucket)


def _corrections(live: dict[Candidate, Row | None]) -> dict[bytes, int]:
    """Return the members to store again, with their percentages; 0 = to remove."""
    percents = {candidate.member: 0 for candidate, row in live.items() if not row or _candidate(row) != candidate}
    return percents | {_candidate(row).member: row.percent for row in live.values() if row}


def _live(window: Window, candidates: list[Candidate]) -> dict[Candidate, Row | None]:
    """Return the counter of each candidate as it stands now; None = no limit applies to it any more.

    Candidates of one counter, after its policy has changed, are one row: of the others None. Left out are those of a
    Cluster node that is down.
    """
    snapshot = newest_policies()
    now_us = default_limiter().now_us
    policies = _policies(candidate.policy_id for candidate in candidates)
    callers = {candidate: _caller(candidate, snapshot) for candidate in candidates}
    entries = dict(zip(callers, entries_of(list(callers.values())), strict=True))
    buckets: dict[object, tuple[Candidate, Bucket]] = {}
    for candidate in candidates:
        caller, policy = callers[candidate], policies.get(candidate.policy_id)
        bucket = _bucket(candidate, window, caller, entries[candidate], snapshot, now_us, policy)
        if bucket is not None:
            buckets.setdefault(bucket.counter, (candidate, bucket))
    policies |= _policies(b.policy_id for _c, b in buckets.values() if b.policy_id not in policies)
    statuses = peek(bucket for _candidate, bucket in buckets.values())
    live: dict[Candidate, Row | None] = dict.fromkeys(candidates)
    for candidate, bucket in buckets.values():
        row, status = policies.get(bucket.policy_id or 0), statuses.get(bucket)
        if status is None:
            del live[candidate]
        elif row is not None:
            live[candidate] = Row(policy=row, status=status)
    return live


def _bucket(
    candidate: Candidate,
    window: Window,
    caller: DescribedCaller,
    entries: tuple[UserEntry, Assigned],
    snapshot: Snapshot,
    now_us: int,
    policy: RatePolicy | None,
) -> Bucket | None:
    """Return the bucket with the candidate's counter, by the policy that applies to its caller now; None = none does.

    Where the subject alone does not tell which policy applies, it is the last one that did, if it is still active.
    """
    endpoint = None if candidate.endpoint_id is None else snapshot.endpoints.get(candidate.endpoint_id)
    if candidate.endpoint_id is not None and (endpoint is None or endpoint.exempt):
        return None
    scope = endpoint.name if endpoint else None
    endpoints = (endpoint,) if endpoint else ()
    entry, assigned = entries
    context = EvaluationContext(caller, entry, endpoints, scope, snapshot.overview.snapshot, now_us, assigned)
    resolution = resolve_uncached(context)
    found = next((bucket for bucket in resolution.buckets if candidate.is_of(bucket, window)), None)
    known = caller.user_id is not None and candidate.counted_per == "caller" and not settings.plan_resolver
    known = known and not is_plan_open(caller, resolution.assigned_to)
    if found is not None or known or policy is None or policy.mode == RatePolicy.Mode.OFF:
        return found
    facts = policy_facts(policy)
    if not facts.active(now_us) or facts.endpoint_id != candidate.endpoint_id:
        return None
    return next((b for b in make_buckets(facts, endpoint, candidate.subject) if candidate.is_of(b, window)), None)


def _caller(candidate: Candidate, snapshot: Snapshot) -> DescribedCaller:
    """Return the caller that the subject names, as far as it does."""
    kind, _colon, value = candidate.subject.partition(":")
    if kind == "plan" and value.isdecimal():
        plan = snapshot.plans.get(int(value))
        return DescribedCaller(user_id=None, address=None, plan_slug=plan.slug if plan else None)
    try:
        return ExplainQuery.for_caller(candidate.subject).caller()
    except ValueError:
        return DescribedCaller(user_id=None, address=None)


def _policies(ids: Iterable[int | None]) -> dict[int, RatePolicy]:
    wanted = {pk for pk in ids if pk}
    return (
        RatePolicy.objects.select_related("user", "subject_list", "plan", "endpoint").in_bulk(wanted)
        if wanted
        else {}
    )
