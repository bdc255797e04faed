"""Peek at counters, and give units back, also from the code of a project. The history records changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Literal

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from ..changes.databases import in_transaction, policy_alias, reading_and_writing
from ..changes.publication import Save
from ..changes.writer import in_batches, write_counted
from ..conf import settings
from ..engine.calendar_windows import CalendarWindow
from ..engine.decision import LimitRequest
from ..engine.keys import counter_name, short, window_name
from ..engine.limiter import Limiter
from ..engine.protocol import MAX_BUCKETS
from ..engine.rates import Rate
from ..engine.slots import HeldSlot
from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..ledger import book, corrections, restoring
from ..models import Endpoint, PolicyChange, QuotaWindow, RatePolicy
from ..monitoring.health import Health, health, reports
from ..monitoring.workers import is_kept
from ..policies.facts import to_datetime, to_us
from ..policies.limit_names import limit_name
from ..policies.matching import NO_METHOD
from ..policies.requests.caller import UNKNOWN, DescribedCaller, failed_kind
from ..runtime import default_limiter
from ..store.base import Call
from .explain import explain_caller
from .subjects import subject_of

#: Most characters of a key.
MAX_KEY = 64
#: A subject, and buckets of it.
_Group = tuple[str, Sequence[Bucket]]
Period = Literal["day", "week", "month"]


def peek(buckets: Iterable[Bucket]) -> dict[Bucket, BucketStatus]:
    """Return the status of each bucket, except those of a Cluster node that is down; raises ``StoreError``.

    With ``ENABLED = False`` every bucket would have the status of an unused one, so that is a ``StoreError`` too.
    """
    limiter = default_limiter()
    if getattr(limiter, "unlimited", False):
        raise StoreError("disabled", limiter.store.absent)
    parts = in_batches(tuple(buckets), MAX_BUCKETS)
    decisions = (restoring.peek(limiter, Call(limiter.store), tuple(part)) for part in parts)
    return {status.bucket: status for decision in decisions for status in decision.statuses}


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A counter that was reset, or to which units were refunded."""

    #: The owner of the counter, such as ``user:42``.
    subject: str
    #: The counter's title, such as ``search/month``.
    title: str
    #: First day of the window in TIME_ZONE; None = the counter's limit has no calendar window in the database.
    first_day: date | None
    #: Units used before and after, including debts: 5110 and 120 after a refund of 4990.
    used_before: int
    used_after: int
    #: Whether an earlier call with the same key has made it; this one has changed nothing.
    repeated: bool = field(default=False, compare=False)

    @property
    def units(self) -> int:
        """The units that were refunded."""
        return self.used_before - self.used_after


def give_back(
    buckets: Iterable[Bucket],
    units: int | None = None,
    reason: str = "",
    *,
    first_day: date | None = None,
    key: str = "",
) -> tuple[Correction, ...]:
    """Refund units to each bucket, or reset it (``units`` None), and record that in the history.

    A reset also frees the slots of concurrent requests. What durable counters have used is corrected in the ledger
    and in Redis, in the windows that began on ``first_day``; None = in those that run now. Without a key, resets
    change subject by subject, each completely or not at all; all else changes together.

    A second call with the same ``key`` (up to 64 characters) changes nothing and returns the first one's result.

    Raises ``ValidationError`` when a bucket has used fewer units, or has no window that began on the day, and
    ``StoreError`` at the first subject that fails. Those before it stay changed and recorded.
    """
    if len(key) > MAX_KEY or not key.isprintable():
        raise ValidationError(_("A key has at most %(most)d printable characters.") % {"most": MAX_KEY})
    if key and (found := made_with(key)):
        return found
    chosen, alias = list(buckets), policy_alias(PolicyChange)
    if units is not None:
        chosen = _countable(chosen)
    if not in_transaction(alias):  # its rollback would lose them
        book.write()
    # In the order in which the ledger writes, so that rows are not locked crosswise.
    groups = sorted(_by_subject(chosen), key=lambda group: counter_name(group[1][0]))
    made: list[PolicyChange] = []
    for part in [groups] if key or units is not None else [[group] for group in groups]:
        asked = _Asked(units, reason, key, [bucket for _subject, own in part for bucket in own], first_day)
        try:
            with reading_and_writing(PolicyChange):
                made += asked.change(part)
        except IntegrityError:
            # Another process was first, and has committed by now.
            if not key or not (found := made_with(key)):
                raise
            return found
    return _corrections(made)


class _Asked:
    """What is to be changed: these buckets, whose statuses were read before the transaction."""

    def __init__(
        self, units: int | None, reason: str, key: str, buckets: list[Bucket], first_day: date | None
    ) -> None:
        """Raises ``ValidationError`` where no bucket has a window that began on the day, and ``StoreError``."""
        self._units, self._reason, self._key, self._limiter = units, reason, key, default_limiter()
        self._statuses = peek(buckets) if first_day is None else {}
        #: The windows of those that the ledger has.
        self._windows = _windows(self._limiter, self._statuses if first_day is None else buckets, first_day)

    def change(self, groups: Iterable[_Group]) -> list[PolicyChange]:
        """Change and record the counters of each subject, in the caller's transaction."""
        books = corrections.read(self._limiter, self._windows)
        used = {bucket: status.used + status.debt for bucket, status in self._statuses.items()}
        used |= {bucket: both.used for bucket, both in books.items()}
        for bucket, most in used.items():
            self._refuse_more(bucket, most)
        # With a key first of all: where that is taken, nothing is changed.
        made = self._record(groups, used)
        refund = corrections.refund(self._limiter, books.values(), self._units)
        for _subject, own in groups:
            self._change_rates(tuple(bucket for bucket in own if bucket in used and bucket not in books))
        # Robust: the units are given back, so Redis failing now must not fail the request.
        transaction.on_commit(refund, using=policy_alias(PolicyChange), robust=True)
        return made

    def _refuse_more(self, bucket: Bucket, used: int) -> None:
        if self._units is not None and used < self._units:
            text = _(
                "Refund at most %(used)d to %(counter)s, because no more is used. To raise the limit itself, grant a "
                "boost."
            )
            raise ValidationError(text % {"counter": limit_name(bucket), "used": used})

    def _record(self, groups: Iterable[_Group], used: Mapping[Bucket, int]) -> list[PolicyChange]:
        """Write a row of the history for each subject; the first has the key, and all are of one save."""
        action = PolicyChange.Action.RESET if self._units is None else PolicyChange.Action.GRANT
        made, save, key = list[PolicyChange](), Save() if self._key else None, self._key
        for subject, own in groups:
            own_used = {bucket: used[bucket] for bucket in own if bucket in used}
            if not own_used:
                continue
            before, after = (self._states(own_used, given) for given in (0, self._units))
            row = write_counted(subject, action, before=before, after=after, reason=self._reason, key=key, save=save)
            made.append(row)
            key = ""
        return made

    def _states(self, used: Mapping[Bucket, int], units: int | None) -> dict[str, dict[str, Any]]:
        """Return the counters' states by ``own_title``, once up to ``units`` of each (None = all) are given back."""
        states = {}
        for bucket, taken in used.items():
            left = taken - (taken if units is None else min(units, taken))
            bounds = self._windows.get(bucket)
            window = {} if bounds is None else {"window": window_name(counter_name(bucket), bounds.first_day)[1]}
            states[own_title(bucket)] = {"used": left, "remaining": max(0, bucket.rate.capacity - left), **window}
        return states

    def _change_rates(self, buckets: tuple[Bucket, ...]) -> None:
        """Change the counters that only Redis has."""
        if buckets and self._units is None:
            self._limiter.reset(buckets)
        elif buckets and self._units is not None:
            # Each bucket's own units: else rates that count requests would keep theirs.
            costs = (self._units,) * len(buckets)
            self._limiter.decide(LimitRequest(mode="refund", buckets=buckets, cost=self._units, costs=costs))


def refund(
    customer: Any,
    units: int,
    *,
    endpoint: str | None = None,
    period: Period = "month",
    first_day: date | None = None,
    reason: str = "",
    key: str = "",
) -> tuple[Correction, ...]:
    """Refund units of a calendar limit to a customer, in Redis and in the database.

    ``customer`` is a user, or the subject of the counter such as ``user:42`` or ``organisation:7``.
    ``endpoint`` is the endpoint's name; None = the limit for all endpoints together. The period is the one that
    began on ``first_day``, which may be over; None = the one that runs now. If the customer also has a limit that
    counts requests, it gets nothing back.

    ``reason`` is for the history. A second call with the same ``key`` (up to 64 characters, such as the id of a
    webhook's event) changes nothing and returns the first one's result, whatever its other arguments.

    Returns a ``Correction`` for each counter; there may be several if policies count a customer in different ways.
    Raises ``ValidationError`` if the customer has used fewer units or has no such counter, and ``StoreError`` if
    Redis does not answer. Then nothing has changed.
    """
    if key and (made := made_with(key)):
        return made
    if type(units) is not int or units < 1:
        raise ValidationError(_("The units are a whole number, 1 or more."))
    found, first_day = _counters(_counted(customer), endpoint, period, first_day)
    counted = [bucket for bucket in found if bucket.rate.counts == "units"] or found
    return give_back(counted, units, reason, first_day=first_day, key=key)


def reset(
    customer: Any,
    *,
    endpoint: str | None = None,
    period: Period = "month",
    first_day: date | None = None,
    reason: str = "",
    key: str = "",
) -> tuple[Correction, ...]:
    """Refund all that a calendar limit has counted, in units and in requests; see ``refund``."""
    if key and (made := made_with(key)):
        return made
    found, first_day = _counters(_counted(customer), endpoint, period, first_day)
    return give_back(found, None, reason, first_day=first_day, key=key)


def _counted(customer: Any) -> str:
    """Return the customer's subject as counters have it; raises ``ValidationError``."""
    kind, _colon, value = subject_of(customer).partition(":")
    if not kind or not value:
        raise ValidationError(_("Enter a subject such as user:42 or tenant:acme."))
    return f"{kind}:{short(value)}"


def _counters(
    subject: str, endpoint: str | None, period: Period, first_day: date | None
) -> tuple[list[Bucket], date | None]:
    """Return the subject's counters, and the first day of their window; raises ``ValidationError`` if it has none.

    The day is None if nothing is written of the window that runs now: then the counters are those of the policies.
    """
    place = None if endpoint is None else Endpoint.objects.filter(name=endpoint).first()
    if endpoint is not None and place is None:
        raise ValidationError(_("There is no endpoint %(name)r.") % {"name": endpoint})
    endpoint_id = None if place is None else place.pk
    rows = QuotaWindow.objects.filter(subject=subject, endpoint_id=endpoint_id, period=period)
    if first_day is None:
        now = to_datetime(default_limiter().now_us)
        rows = rows.filter(starts_at__lte=now, ends_at__gt=now)
        # After a change of the day on which months begin, the new month runs beside the old one.
        first_day = max(rows.values_list("first_day", flat=True), default=None)
    buckets = list(recorded_buckets(rows.filter(first_day=first_day)))
    if first_day is None:
        described = DescribedCaller.named(subject)
        resolved = explain_caller(described, scope=endpoint, method=NO_METHOD).resolution
        own = (one for one in resolved.buckets if (one.subject, one.endpoint_id) == (subject, endpoint_id))
        buckets = [bucket for bucket in own if bucket.durable and bucket.rate.calendar == period]
    if not buckets:
        text = _("%(subject)s has no counter per %(period)s here. Check the subject, the endpoint and the first day.")
        raise ValidationError(text % {"subject": subject, "period": period})
    return buckets, first_day


def recorded_buckets(rows: Iterable[QuotaWindow]) -> dict[Bucket, QuotaWindow]:
    """Return the buckets of the rows' counters, also where the policies are gone, each with its row.

    A row is left out if its name had the digest of an identifier's long name, which IDENTIFIERS lacks by now.
    """
    rows = list(rows)
    policies = RatePolicy.objects.filter(pk__in={row.policy_id or 0 for row in rows})
    counted_per = dict(policies.values_list("pk", "counted_per"))
    scopes = dict(Endpoint.objects.filter(pk__in={row.endpoint_id or 0 for row in rows}).values_list("pk", "name"))
    found = {}
    for row in rows:
        kind, named = row.subject.partition(":")[0], row.counter.rsplit(":", 2)[-2].partition(".")[2]
        scope = "" if row.endpoint_id is None else scopes.get(row.endpoint_id, f"#{row.endpoint_id}")
        for per in (counted_per.get(row.policy_id or 0, kind), kind, named, *settings.identifiers):
            bucket = Bucket(
                row.subject,
                Rate.parse(row.rate),
                scope=scope,
                endpoint_id=row.endpoint_id,
                counted_per=per,
                policy_id=row.policy_id,
                durable=True,
            )
            if counter_name(bucket) == row.counter:
                found[bucket] = row
                break
    return found


def slots_by_worker(bucket: Bucket) -> list[tuple[Health | None, list[HeldSlot]]]:
    """Return the workers that hold slots of a concurrent bucket, with their slots; both the oldest first.

    None stands for all workers without a report. Raises ``StoreError``.
    """
    limiter = default_limiter()
    reported = [] if limiter.store.absent else reports()
    workers = {worker.number: worker for worker in (*reported, health()) if worker.number}
    found: dict[int, list[HeldSlot]] = {}
    for slot in limiter.slots(bucket):
        found.setdefault(slot.worker if slot.worker in workers else 0, []).append(slot)
    return [(workers.get(number), held) for number, held in found.items()]


def _countable(buckets: list[Bucket]) -> list[Bucket]:
    """Return the buckets that count units; raises ``ValidationError`` where none does."""
    found = [bucket for bucket in buckets if not bucket.rate.concurrent]
    if buckets and not found:
        text = _("%(counter)s counts requests that run. Leave the number empty to free all of their slots.")
        raise ValidationError(text % {"counter": limit_name(buckets[0])})
    return found


def _windows(limiter: Limiter, buckets: Iterable[Bucket], first_day: date | None) -> dict[Bucket, CalendarWindow]:
    """Return the windows that began on the day, of those buckets that have a row of it; None = those around now.

    Raises ``ValidationError`` where no bucket has such a row, or no counts are kept.
    """
    if first_day is None:
        kept = [bucket for bucket in buckets if bucket.durable and is_kept(limiter)]
        return {bucket: book.window_of(bucket, limiter.now_us, limiter.time_zone) for bucket in kept}
    if not is_kept(limiter):
        raise ValidationError(_("Past usage can be corrected only while it is kept in the database."))
    by_name = {counter_name(bucket): bucket for bucket in buckets}
    rows = QuotaWindow.objects.filter(counter__in=by_name, first_day=first_day)
    found = {
        by_name[row.counter]: CalendarWindow(to_us(row.starts_at), to_us(row.ends_at), row.first_day) for row in rows
    }
    if by_name and not found:
        text = _("No usage is recorded for a period that began on %(day)s.")
        raise ValidationError(text % {"day": first_day})
    return found


def made_with(key: str) -> tuple[Correction, ...]:
    """Return the result of the call that had the key; () = none had it."""
    own = PolicyChange.objects.filter(key=key).values("change_id")
    return _corrections(PolicyChange.objects.filter(change_id__in=own).order_by("pk"), repeated=True)


def _corrections(changes: Iterable[PolicyChange], *, repeated: bool = False) -> tuple[Correction, ...]:
    """Return what the rows of the history say, one for each counter."""
    return tuple(
        Correction(
            subject=change.object_text,
            title=title,
            first_day=date.fromisoformat(before["window"][-10:]) if "window" in before else None,
            used_before=before["used"],
            used_after=(change.after or {})[title]["used"],
            repeated=repeated,
        )
        for change in changes
        for title, before in sorted((change.before or {}).items())  # databases keep no order of JSON keys
    )


def own_title(bucket: Bucket) -> str:
    """Return the bucket's title, marked if its counter is beside that of an enforced limit of the same title."""
    return f"{bucket.title} (log only)" if bucket.beside else bucket.title


def is_shared(counted_per: str, subject: str | None) -> bool:
    """Return whether a counter is not one caller's own, such as that of all callers without a known address."""
    return counted_per in ("plan", "everyone") or subject == UNKNOWN or bool(failed_kind(subject or ""))


def _by_subject(buckets: Iterable[Bucket]) -> list[_Group]:
    """Group the buckets by subject, at most ``MAX_BUCKETS`` per group: each group changes atomically."""
    subjects: dict[str, list[Bucket]] = {}
    for bucket in buckets:
        subjects.setdefault(bucket.subject, []).append(bucket)
    return [(subject, part) for subject, own in subjects.items() for part in in_batches(own, MAX_BUCKETS)]
