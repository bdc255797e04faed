"""Show or delete the data about one subject, such as ``user:7`` or ``tenant:acme``; or delete all that is in Redis.

Users are subjects by their key, because nothing here has their names. The functions raise ``StoreError``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from secrets import token_hex
from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import Q, QuerySet, Value
from django.db.models.functions import Concat, Substr

from ..changes.databases import reading_and_writing, saving
from ..changes.validators import primary_key
from ..changes.writer import changed_by, field_values, in_batches, write_publication
from ..engine.keys import beginning, own_keys, revision_key, subject_tag
from ..engine.limiter import Limiter
from ..engine.scripts import PURGE
from ..ledger import writers
from ..models import ListMember, PlanAssignment, PolicyChange, QuotaDay, QuotaWindow, RatePolicy
from ..monitoring import traces
from ..runtime import default_limiter
from ..store.commands import ScriptCall

#: What may be for one user or subject.
_MODELS: tuple[Any, ...] = (RatePolicy, PlanAssignment, ListMember)
#: Keys that a step looks at; it keeps the server busy for a few milliseconds.
_STEP = 1_000


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
        # Locked in the order in which the ledger writes. Checks that are open now end under the subject's name.
        writers.forget(set(_windows(subject).values_list("counter", flat=True)))
        list(_windows(subject).order_by("counter", "first_day").select_for_update())
        # The days first, as they are found by the windows.
        _days(subject).update(counter=anonymous)
        _windows(subject).update(counter=anonymous, subject=mark, held=0)
    if not default_limiter().store.absent:
        traces.forget(subject)


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
    """Put the mark in the subject's place in the history, and drop reasons and keys, which may name it.

    Returns the number of rows.
    """
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
            change.before, change.after, change.key = without(change.before), without(change.after), None
            change.save(
                update_fields=["object_id", "object_text", "reason", "touched_user", "before", "after", "key"]
            )
    return len(pks)


def _windows(subject: str) -> QuerySet[QuotaWindow]:
    """Return the subject's windows in the ledger."""
    return QuotaWindow.objects.filter(subject=subject).order_by()


def _days(subject: str) -> QuerySet[QuotaDay]:
    """Return the days of the subject's windows."""
    # By the windows' names, which are in an index.
    return QuotaDay.objects.filter(counter__in=_windows(subject).values("counter")).order_by()


def purge(limiter: Limiter) -> int:
    """Delete every key of the limiter's prefix on each server with counters, and return how many there were.

    Keys of a longer prefix, such as ``rq:b`` beside ``rq``, stay, and so do keys of other databases. Each step is a
    call of its own; raises ``StoreError`` at the first that fails, and may be repeated.
    """
    store, deleted = limiter.store, 0
    for server in store.info():
        cursor = "0"
        while True:
            call = ScriptCall(PURGE, [], (cursor, own_keys(limiter.prefix), _STEP))
            found, some = store.execute_on(server, call)
            deleted += some
            if (cursor := found.decode()) == "0":
                break
    return deleted + int(store.execute(("DEL", revision_key(limiter.prefix))))
