"""What belongs to callers alone: the user's entry, and the plan assignments of subjects such as ``tenant:acme``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple

from django.db import Error as DatabaseError

from ..conf import settings
from ..runtime import process
from .facts import NOBODY, Assigned, SubjectKey, UserEntry
from .requests.caller import Caller
from .resolver import Resolution


class Own(NamedTuple):
    """What belongs to a caller alone."""

    #: The user's.
    entry: UserEntry = NOBODY
    #: The entries of the caller's subjects on plans, and of the user among them; () = no subject is on a plan.
    assigned: Assigned = ()


def own_in_memory(caller: Caller, pending: bool | None) -> Own | None:
    """Return what belongs to the caller; None where that calls the project's functions, or queries.

    ``pending`` is whether the current transaction has changed policies; None = unknown.
    """
    policies, user_id = process.policies, caller.user_id
    entry = NOBODY if user_id is None else policies.user(user_id, pending)
    kinds = policies.assigned_kinds if pending is False else None
    if entry is None or kinds is None:
        return None
    if not kinds:
        return Own(entry)
    if caller.calls_functions(kinds):
        return None
    keys = _keys(caller, kinds)
    found = {key: known for key in keys if (known := policies.user(key, pending)) is not None}
    return Own(entry, _in_order(keys, entry, kinds, found)) if len(found) == len(keys) else None


def own_of(callers: Sequence[Caller]) -> list[Own]:
    """Return what belongs to each caller, in three queries for all; raises ``django.db.Error``."""
    kinds = process.policies.plan_kinds()
    keys = [_keys(caller, kinds) for caller in callers]
    users = {caller.user_id for caller in callers if caller.user_id is not None}
    found = process.policies.entries([*users, *set(chain.from_iterable(keys))])
    entries = [NOBODY if caller.user_id is None else found[caller.user_id] for caller in callers]
    return [Own(entry, _in_order(own, entry, kinds, found)) for own, entry in zip(keys, entries, strict=True)]


def own_or_shared(caller: Caller) -> Own:
    """Return what belongs to the caller; while the database is down, what is known of the user."""
    try:
        return own_of([caller])[0]
    except DatabaseError:
        known = None if caller.user_id is None else process.policies.user(caller.user_id)
        return Own(known or NOBODY)


def unnamed_kinds(caller: Caller, resolution: Resolution) -> list[str]:
    """Return the kinds of subjects that a described caller lacks, and whose plans would take precedence.

    Raises ``django.db.Error``.
    """
    if resolution.plan_named:
        return []
    kinds, found = process.policies.plan_kinds(), resolution.assigned_to.partition(":")[0]
    before = kinds[: kinds.index(found)] if found in kinds else kinds
    return [kind for kind in before if kind != "user" and caller.value(kind) is None]


def is_plan_open(caller: Caller, resolution: Resolution) -> bool:
    """Return whether the callers that are counted under this caller's name may be on different plans."""
    if settings.plan_resolver and not resolution.plan_named:
        return True
    own = caller.name.partition(":")[0]
    # Callers with one of these are counted under its name.
    earlier = takewhile(lambda kind: kind != own, settings.caller)
    return not set(unnamed_kinds(caller, resolution)).issubset(earlier)


def _keys(caller: Caller, kinds: Sequence[str]) -> list[SubjectKey]:
    # Not "": the identifier failed, and such a caller is on no plan of a subject.
    return [(kind, value) for kind in kinds if kind != "user" and (value := caller.value(kind))]


def _in_order(
    keys: Sequence[SubjectKey], entry: UserEntry, kinds: Sequence[str], subjects: Mapping[Any, UserEntry]
) -> Assigned:
    own = {key[0]: subjects[key] for key in keys if subjects[key].assignments}
    if not own:
        return ()
    own["user"] = entry
    return tuple((kind, own[kind]) for kind in kinds if kind in own)
