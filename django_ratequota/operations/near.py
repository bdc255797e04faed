"""Who is near a limit now: listed counters as they stand in Redis, by today's policies.

The ledger lists the calendar windows of durable policies (``operations.ledger``), Redis all other windows of an hour
or more (``monitoring.near``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice, takewhile
from typing import Any, ClassVar

from ..conf import settings
from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..models import RatePolicy
from ..monitoring import near
from ..monitoring.near import Candidate, Window
from ..policies.assigned import entries_of, is_plan_open
from ..policies.facts import Assigned, UserEntry, policy_facts
from ..policies.requests.caller import DescribedCaller
from ..policies.resolver import EvaluationContext, make_buckets, resolve_uncached
from ..policies.snapshot import Snapshot
from ..runtime import default_limiter
from .counters import peek
from .explain import newest_policies
from .explain_query import ExplainQuery
from .ledger import Chosen, Ledger, Recorded, current_ledgers, time_us

#: Counters read together for a whole list; how often twice as many are read for a page whose first are out of date.
_BATCH, _ROUNDS = 500, 5
Entry = Candidate | Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A counter as it stands now, and the policy that limits it."""

    policy: RatePolicy
    status: BucketStatus
    #: When it stood so, where the counter could not be read (µs since 1970); None = now.
    at_us: int | None = None

    @property
    def used(self) -> int:
        """Return what is used, debts included."""
        return self.status.used + self.status.debt

    @property
    def percent(self) -> int:
        """Return the whole percent of the limit that is used."""
        return 100 * self.used // self.status.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A part of a list."""

    #: The fullest first.
    rows: tuple[Row, ...]
    #: Where the next part begins; "" = there are no more.
    following: str
    #: Level -> how many of the window's subjects have that or more, as last written.
    counts: dict[int, int]
    #: Why the counters could not be read; "" = they were.
    error: str = ""


@dataclass(frozen=True, slots=True)
class RedisList:
    """The list that Redis keeps of one window."""

    window: Window
    #: What ``after`` returns.
    START: ClassVar[str] = "[0-9]{1,18}"

    @property
    def name(self) -> str:
        """Return its name in addresses."""
        return self.window.name

    def entries(self, chosen: Chosen, start: str, most: int) -> list[Candidate]:
        """Return up to ``most`` candidates, the fullest first; raises ``StoreError``."""
        return list(islice(self.all(chosen), int(start or 0), int(start or 0) + most))

    def all(self, chosen: Chosen) -> Iterator[Candidate]:
        """Return all candidates; raises ``StoreError``."""
        level = max(chosen.level, near.LEVELS[0])
        chunks = (near.candidates(self.window, level, start, near.CHUNK) for start in count(step=near.CHUNK))
        return filter(chosen.matches(), chain.from_iterable(takewhile(bool, chunks)))

    def after(self, start: str, entries: Sequence[Candidate]) -> str:
        """Return where the list goes on after these entries."""
        return str(int(start or 0) + len(entries))

    def is_of(self, entry: Candidate, bucket: Bucket) -> bool:
        """Return whether the entry is of the bucket's counter."""
        return entry.is_of(bucket, self.window)

    def read(self, buckets: dict[Candidate, Bucket]) -> tuple[dict[Bucket, tuple[BucketStatus, int | None]], str]:
        """Return the counters, without those of a Cluster node that is down; raises ``StoreError``."""
        return {bucket: (status, None) for bucket, status in peek(buckets.values()).items()}, ""

    def correct(self, live: dict[Candidate, Row | None]) -> dict[int, int]:
        """Correct what was out of date, and return level -> number of subjects; raises ``StoreError``."""
        percents = {
            entry.member: 0 for entry, row in live.items() if not row or Candidate.of(row.status.bucket) != entry
        }
        percents |= {Candidate.of(row.status.bucket).member: row.percent for row in live.values() if row}
        limiter = default_limiter()
        return near.keep(self.window, near.window_end(self.window, limiter), percents, limiter)


Listed = Ledger | RedisList


def lists() -> tuple[list[Listed], str]:
    """Return the lists with subjects, calendar windows and then the longest first, and why Redis named none."""
    found: list[Listed] = [*current_ledgers()]
    try:
        return [*found, *map(RedisList, near.windows())], ""
    except StoreError as error:
        return found, error.reason


def near_rows(listed: Listed, chosen: Chosen, start: str, most: int) -> Rows:
    """Return up to ``most`` counters from ``start`` on (see ``Rows.following``; "" = the fullest).

    Entries that are out of date are corrected on the way: after a reset, or a raised limit. Raises ``StoreError``
    where the list itself is in Redis, and ``django.db.Error``.
    """
    rows: list[Row] = []
    seen: dict[Any, Row | None] = {}
    cursor, size, more, error = start, most, True, ""
    ahead: Any = []
    for _ in range(_ROUNDS):
        if more and len(ahead) <= size:  # few rows take as long to find as some more
            ahead = listed.entries(chosen, cursor, 3 * size + 1)
            more = len(ahead) > 3 * size
        live, error = _live(listed, ahead[:size])
        seen |= live
        passed = 0
        for row in _fitting(chosen, ahead[:size], live):
            passed += 1
            if row is not None:
                rows.append(row)
            if len(rows) == most:
                break
        cursor, ahead = listed.after(cursor, ahead[:passed]), ahead[passed:]
        if not ahead or len(rows) == most:
            break
        size = 2 * size
    counts = listed.correct(seen)
    if isinstance(listed, RedisList):  # because what was corrected is not in the list any more
        cursor = str(int(start or 0) + len(rows))
    rows.sort(key=lambda row: (-row.used / row.status.limit, row.status.bucket.subject))
    return Rows(rows=tuple(rows), following=cursor if ahead else "", counts=counts, error=error)


def all_near(listed: Listed, chosen: Chosen) -> Iterator[list[Row]]:
    """Yield every counter, in batches; raises as ``near_rows`` does."""
    entries: Any = listed.all(chosen)
    if isinstance(listed, RedisList):  # read to the end first, because the order changes while batches are sent
        entries = iter(list(entries))
    while batch := list(islice(entries, _BATCH)):
        yield [row for row in _fitting(chosen, batch, _live(listed, batch)[0]) if row is not None]


def _fitting(chosen: Chosen, entries: Sequence[Entry], live: dict[Any, Row | None]) -> Iterator[Row | None]:
    """Yield the row of each entry, None where it is not of those that are chosen."""
    policies = chosen.among(row.policy.pk for row in live.values() if row)
    for entry in entries:
        row = live.get(entry)
        fits = row is not None and row.percent >= chosen.level and row.policy.pk in policies
        yield row if fits else None


def _live(listed: Any, entries: Sequence[Entry]) -> tuple[dict[Any, Row | None], str]:
    """Return the counter of each entry as it stands now, and why it could not be read.

    None = no limit applies to it any more. Entries of one counter, after its policy has changed, are one row: of the
    others None. Left out are those of a Cluster node that is down, where the list is in Redis.
    """
    snapshot = newest_policies()
    now_us = time_us()
    policies = _policies(entry.policy_id for entry in entries)
    callers = {entry: _caller(entry, snapshot) for entry in entries}
    owners = dict(zip(callers, entries_of(list(callers.values())), strict=True))
    buckets: dict[Any, Bucket] = {}
    counters = set()
    for entry in entries:
        policy = policies.get(entry.policy_id or 0)
        bucket = _bucket(listed, entry, callers[entry], owners[entry], snapshot, now_us, policy)
        if bucket is not None and bucket.counter not in counters:
            counters.add(bucket.counter)
            buckets[entry] = bucket
    policies |= _policies(bucket.policy_id for bucket in buckets.values() if bucket.policy_id not in policies)
    found, error = listed.read(buckets)
    live: dict[Any, Row | None] = dict.fromkeys(entries)
    for entry, bucket in buckets.items():
        stored = policies.get(bucket.policy_id or 0)
        if bucket not in found:
            del live[entry]
        elif stored is not None:
            status, at_us = found[bucket]
            live[entry] = Row(policy=stored, status=status, at_us=at_us)
    return live, error


def _bucket(
    listed: Any,
    entry: Entry,
    caller: DescribedCaller,
    owner: tuple[UserEntry, Assigned],
    snapshot: Snapshot,
    now_us: int,
    policy: RatePolicy | None,
) -> Bucket | None:
    """Return the bucket with the entry's counter, by the policy that applies to its caller now; None = none does.

    Where the subject alone does not tell which policy applies, it is the last one that did, if it is still active.
    """
    endpoint = None if entry.endpoint_id is None else snapshot.endpoints.get(entry.endpoint_id)
    if entry.endpoint_id is not None and (endpoint is None or endpoint.exempt):
        return None
    scope = endpoint.name if endpoint else None
    endpoints = (endpoint,) if endpoint else ()
    own, assigned = owner
    context = EvaluationContext(caller, own, endpoints, scope, snapshot.overview.snapshot, now_us, assigned)
    resolution = resolve_uncached(context)
    found = next((bucket for bucket in resolution.buckets if listed.is_of(entry, bucket)), None)
    known = _plan_is_known(caller, resolution.assigned_to)
    by_plan = found and any(one.id == found.policy_id and one.plan_id is not None for one in resolution.winners)
    if (found is not None and (known or not by_plan)) or (known and caller.user_id is not None):
        return found
    facts = None if policy is None or policy.mode == RatePolicy.Mode.OFF else policy_facts(policy)
    if facts is not None and facts.active(now_us) and facts.endpoint_id == entry.endpoint_id:
        last = (bucket for bucket in make_buckets(facts, endpoint, entry.subject) if listed.is_of(entry, bucket))
        found = next(last, found)
    return found and replace(found, anchor=entry.anchor)


def _plan_is_known(caller: DescribedCaller, assigned_to: str) -> bool:
    """Return whether the subject alone tells the plan of its requests."""
    if caller.plan_slug is not None:
        return True
    return not settings.plan_resolver and not is_plan_open(caller, assigned_to)


def _caller(entry: Entry, snapshot: Snapshot) -> DescribedCaller:
    """Return the caller that the subject names, as far as it does."""
    kind, _colon, value = entry.subject.partition(":")
    if kind == "plan" and value.isdecimal():
        plan = snapshot.plans.get(int(value))
        return DescribedCaller(user_id=None, address=None, plan_slug=plan.slug if plan else None)
    try:
        return ExplainQuery.for_caller(entry.subject).caller()
    except ValueError:
        return DescribedCaller(user_id=None, address=None)


def _policies(ids: Iterable[int | None]) -> dict[int, RatePolicy]:
    wanted = {pk for pk in ids if pk}
    return (
        RatePolicy.objects.select_related("user", "subject_list", "plan", "endpoint").in_bulk(wanted)
        if wanted
        else {}
    )
