"""Show, delete or move the data about one subject, such as ``user:7`` or ``tenant:acme``.

Users are subjects by their key, because nothing here has their names. The functions raise ``StoreError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from secrets import token_hex
from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import F, Q, QuerySet, Sum, Value
from django.db.models.functions import Concat, Replace, Substr
from django.utils import timezone

from ..changes.databases import reading_and_writing, saving
from ..changes.validators import primary_key
from ..changes.writer import changed_by, field_values, in_batches, write_counted, write_publication
from ..engine.keys import beginning, per_kind, renamed, subject_tag, window_key
from ..engine.protocol import DURABLE_US
from ..models import Endpoint, ListMember, PlanAssignment, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from ..monitoring import ledger, traces
from ..monitoring.ledger_rows import stored_subject
from ..policies.facts import to_datetime, to_us
from ..runtime import default_limiter

#: What may be for one user or subject.
_MODELS: tuple[Any, ...] = (RatePolicy, PlanAssignment, ListMember)
_SUMS = ("charged", "refunded")


def held(subject: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield everything that is held of the subject: its kind, and values, of JSON but for dates and UUIDs."""
    for model in _MODELS:
        yield from ((model.__name__, {**field_values(row), "text": str(row)}) for row in _objects(model, subject))
    for rows in (_changes(subject), _windows(subject), _days(subject)):
        yield from ((rows.model.__name__, values) for values in rows.values().iterator(chunk_size=2000))
    if not default_limiter().store.absent:
        yield from ((kind, values) for kind, values, _deletion in traces.traces_of(subject))


def forget(subject: str) -> None:
    """Delete what is held of the subject; the figures of the ledger and the facts of the history stay, without it."""
    mark = f"gone:{token_hex(8)}"
    with changed_by(None, "ratequota forget"), saving(RatePolicy), reading_and_writing(QuotaWindow):
        for model in _MODELS:
            model.objects.filter(pk__in=[row.pk for row in _objects(model, subject)]).delete()
        # From the rows of these deletions, too. So processes read all policies again: the rows do not say whose.
        if _take_out(subject, mark):
            write_publication("ratequota forget")
        anonymous = Concat(Value(beginning(mark)), Substr("counter", len(beginning(subject)) + 1))
        _locked(subject)
        # The days first, as they are found by the windows.
        _days(subject).update(counter=anonymous)
        _windows(subject).update(counter=anonymous, subject=mark)
    if not default_limiter().store.absent:
        traces.forget(subject)


def move(source: str, target: str, reason: str) -> int:
    """Add what durable counters of ``source`` have used to those of ``target``; returns how many windows.

    The history records it for both.
    """
    limiter = default_limiter()
    with reading_and_writing(PolicyChange), reading_and_writing(QuotaWindow):
        before, unused = {subject: _used(subject) for subject in (source, target)}, {"used": 0, "remaining": 0}
        kept_us = limiter.now_us - DURABLE_US
        prefix, kept = f"{limiter.prefix}:", [row for row in _locked(source) if to_us(row.ends_at) > kept_us]
        keys = [window_key(prefix + row.counter, row.first_day) for row in kept]
        # The days first, as they are found by the windows.
        _move_rows(_days(source), source, target, {}, {})
        written = {"written_at": timezone.now()}  # the invoices of both change
        columns = {"subject": stored_subject(target), **written}
        moved = _move_rows(_windows(source), source, target, columns, {"mixed": True, **written})
        for subject, had in before.items() if moved else ():
            has = _used(subject)
            changed = [title for title in had | has if had.get(title) != has.get(title)]
            was, now = ({title: used.get(title, unused) for title in changed} for used in (had, has))
            write_counted(subject, PolicyChange.Action.UPDATE, before=was, after=now, reason=reason)
        in_store = bool(keys) and not limiter.store.absent
        if in_store:  # before the commit, so that nothing is moved where this fails: what is lost is restored
            limiter.store.execute(("DEL", *keys))
    if in_store:
        rows = _windows(target).filter(ends_at__gt=to_datetime(limiter.now_us))
        totals = {(row.counter, row.first_day): (row.charged, row.refunded, to_us(row.ends_at)) for row in rows}
        ledger.ledger.raise_store(limiter, totals)
        limiter.store.execute(("DEL", *keys))
    return moved


def _named(subject: str) -> dict[str, Any]:
    """Return the field that names the subject in objects and their recorded states, with its value there."""
    kind, _colon, value = subject.partition(":")
    if kind != "user":
        return {"subject": subject}
    key = primary_key(get_user_model(), value)
    # Not None, which would find what is for no user.
    return {} if key is None else {"user": key if isinstance(key, int | str) else str(key)}


def _objects(model: Any, subject: str) -> list[Any]:
    """Return the model's objects for this user or subject alone."""
    named = _named(subject)
    return list(model.objects.filter(**named)) if named else []


def _changes(subject: str) -> QuerySet[PolicyChange]:
    """Return the rows of the history that name the subject."""
    kind, _colon, value = subject.partition(":")
    found = Q(model="counter", object_id=subject_tag(subject))
    if kind == "user":
        found |= Q(touched_user=value)
    for name, key in _named(subject).items():
        for field in (f"before__{name}", f"after__{name}"):
            # By both, because MariaDB ignores trailing blanks in the first.
            found |= Q(**{field: key, f"{field}__startswith": str(key)})
    return PolicyChange.objects.filter(found).order_by("pk")


def _take_out(subject: str, mark: str) -> int:
    """Put the mark in the subject's place in the history, and drop reasons, which are about it; returns the rows."""
    named = _named(subject)

    def without(state: Any) -> Any:
        own = {name: mark for name, value in named.items() if state and state.get(name) == value}
        return state and state | own | ({"reason": ""} if "reason" in state else {})

    pks = list(_changes(subject).values_list("pk", flat=True))
    for batch in in_batches(pks):
        for change in PolicyChange.objects.filter(pk__in=batch):
            if change.model == "counter":
                change.object_id = subject_tag(mark)
            change.object_text, change.reason, change.touched_user = mark, "", change.touched_user and mark
            change.before, change.after = without(change.before), without(change.after)
            change.save(update_fields=["object_id", "object_text", "reason", "touched_user", "before", "after"])
    return len(pks)


def _windows(subject: str) -> QuerySet[QuotaWindow]:
    """Return the subject's windows in the ledger."""
    begins, stored = beginning(subject), stored_subject(subject)
    # Not ``startswith``, in which SQLite ignores case.
    rows: QuerySet[Any] = QuotaWindow.objects.alias(begins=Substr("counter", 1, len(begins))).filter(begins=begins)
    # For the index; and as ``ledger_rows.add`` writes what the database's encoding lacks.
    return rows.filter(subject__in={stored, stored.encode("ascii", "backslashreplace").decode()}).order_by()


def _days(subject: str) -> QuerySet[QuotaDay]:
    """Return the days of the subject's windows."""
    # By the windows' names, which are in an index.
    rows: QuerySet[Any] = QuotaDay.objects.filter(counter__in=_windows(subject).values("counter"))
    return rows.order_by()


def _locked(subject: str) -> list[QuotaWindow]:
    """Return the subject's windows, locked in the order in which the ledger writes, which begins with them, too."""
    return list(_windows(subject).order_by("counter", "first_day").select_for_update())


def _move_rows(
    rows: QuerySet[Any], source: str, target: str, columns: Mapping[str, Any], added: Mapping[str, Any]
) -> int:
    """Rename the source's rows and set ``columns``, or add them to the target's of the same key and set ``added``.

    Returns how many there were.
    """
    objects: Any = rows.model.objects
    key_of = attrgetter("counter", *(name for name in rows.model._meta.constraints[0].fields if name != "counter"))
    # The same as ``renamed``, in one statement for many rows.
    rest = Replace(Substr("counter", len(beginning(source)) + 1), Value(per_kind(source)), Value(per_kind(target)))
    name = Concat(Value(beginning(target)), rest)
    pks = list(rows.values_list("pk", flat=True))
    for batch in in_batches(pks):
        moved = {}
        for row in objects.filter(pk__in=batch):
            row.counter = renamed(row.counter, source, target)
            moved[key_of(row)] = row
        named = objects.filter(counter__in={row.counter for row in moved.values()})
        same = [row for row in named if key_of(row) in moved]
        merged = [moved.pop(key_of(row)) for row in same]
        for row, other in zip(same, merged, strict=True):
            vars(row).update({each: F(each) + getattr(other, each) for each in _SUMS}, **added)
        objects.bulk_update(same, [*_SUMS, *added])
        objects.filter(pk__in=[row.pk for row in merged]).delete()
        objects.filter(pk__in=[row.pk for row in moved.values()]).update(counter=name, **columns)
    return len(pks)


def _used(subject: str) -> dict[str, dict[str, int]]:
    """Return the state of each of the subject's rates, in all windows together, by a title."""
    endpoints = dict(Endpoint.objects.values_list("pk", "name"))
    sums = _windows(subject).values_list("endpoint_id", "rate").annotate(Sum("used"), Sum("limit"))
    return {
        f"{endpoints.get(pk, pk or 'all')} {rate}": {"used": int(used), "remaining": max(0, int(limit - used))}
        for pk, rate, used, limit in sums
    }
