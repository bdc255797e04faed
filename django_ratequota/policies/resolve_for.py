"""The one way from a caller and a place to what applies there: requests, pages and commands take it.

It begins with what belongs to the caller alone: the user's entry, and the plan assignments of subjects such as
``tenant:acme``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseError

from ..conf import settings
from ..runtime import process
from .exemptions import exempt, exempt_preflight
from .facts import NOBODY, Assigned, SubjectKey, UserEntry
from .matching import Where
from .requests.caller import Caller
from .requests.routes import is_admin_page
from .resolver import EvaluationContext, Resolution, match, narrow, resolve, resolve_uncached
from .snapshot import Snapshot

#: What a resolution is found from, and the resolution.
Resolved = tuple[EvaluationContext, Resolution]


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
    """Return what belongs to the caller; while the database is down, what of it is in memory."""
    try:
        return own_of([caller])[0]
    except DatabaseError:
        policies, kinds = process.policies, process.policies.assigned_kinds or ()
        known = None if caller.user_id is None else policies.user(caller.user_id)
        found = {key: entry for key in _keys(caller, kinds) if (entry := policies.user(key)) is not None}
        return Own(known or NOBODY, _in_order(list(found), known or NOBODY, kinds, found))


def resolve_for(caller: Caller, where: Where, snapshot: Snapshot, now_us: int, own: Own | None = None) -> Resolved:
    """Return what applies to the caller there at that time (Redis' time, µs), and what that was found from.

    ``own`` None = it is read from the database; while that is down, what callers share applies. Calls the project's
    functions.
    """
    entry, assigned = own_or_shared(caller) if own is None else own
    matched = match(snapshot, where, entry)
    context = EvaluationContext(caller, entry, matched.endpoints, where.scope, snapshot, now_us, assigned)
    # The memo is for requests: of other places there are too many.
    resolution = resolve(context, matched) if where.endpoints is None else resolve_uncached(context)
    if where.only is not None:
        resolution = narrow(resolution, where.only)
    if where.exemption is not None or is_admin_page(where.name):
        resolution = exempt(resolution, where.name, where.exemption, caller)
    if where.preflight:
        resolution = exempt_preflight(resolution)
    return context, resolution


async def aresolve_for(
    caller: Caller, where: Where, snapshot: Snapshot, now_us: int, own: Own | None = None
) -> Resolved:
    """``resolve_for``, awaited: in a thread where that calls the project's functions, or queries."""
    if own is not None and not caller.calls_functions(match(snapshot, where, own.entry).kinds):
        return resolve_for(caller, where, snapshot, now_us, own)
    return await sync_to_async(resolve_for)(caller, where, snapshot, now_us, own)


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
