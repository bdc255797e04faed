"""What belongs to callers alone: the user's entry, and the plan assignments of subjects such as ``tenant:acme``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, takewhile
from typing import Any

from asgiref.sync import sync_to_async
from django.db import Error as DatabaseError

from ..conf import settings
from ..runtime import process
from .facts import NOBODY, Assigned, SubjectKey, UserEntry
from .requests.caller import Caller
from .resolver import EvaluationContext, Resolution, match_policies, resolve
from .snapshot import Snapshot


def assigned_to(caller: Caller, entry: UserEntry) -> Assigned:
    """Return the caller's subjects on plans, and the user whose ``entry`` it is; () = no subject is on a plan.

    Calls the project's functions. Raises ``django.db.Error``.
    """
    kinds = process.policies.plan_kinds()
    keys = _keys(caller, kinds)
    return _in_order(keys, entry, kinds, process.policies.entries(keys)) if keys else ()


def resolve_assigned(
    context: EvaluationContext, how: Callable[[EvaluationContext], Resolution] = resolve
) -> Resolution:
    """Resolve with the plans of the caller's subjects; without these while the database is down."""
    with suppress(DatabaseError):
        context.assigned = assigned_to(context.caller, context.entry)
    return how(context)


async def aresolve(context: EvaluationContext) -> Resolution:
    """``resolve``, awaited: in a thread where the project's functions find the caller's name, plan or values."""
    matched = match_policies(context.snapshot, context.endpoints, context.scope, context.entry)
    calls = context.caller.calls_functions(matched.kinds)
    return await sync_to_async(resolve)(context) if calls else resolve(context)


async def aresolve_assigned(context: EvaluationContext) -> Resolution:
    """``resolve_assigned``, awaited: in a thread where that calls the project's functions, or queries."""
    known = _known_assigned(context.caller, context.entry)
    if known is None:
        return await sync_to_async(resolve_assigned)(context)
    context.assigned = known
    return await aresolve(context)


def contexts_of(callers: Sequence[Caller], snapshot: Snapshot, now_us: int) -> list[EvaluationContext]:
    """Return a context without endpoints for each caller, with what belongs to it alone, in three queries for all.

    Raises ``django.db.Error``.
    """
    kinds = process.policies.plan_kinds()
    keys = [_keys(caller, kinds) for caller in callers]
    users = {caller.user_id for caller in callers if caller.user_id is not None}
    found = process.policies.entries([*users, *set(chain.from_iterable(keys))])
    entries = [NOBODY if caller.user_id is None else found[caller.user_id] for caller in callers]
    return [
        EvaluationContext(caller, entry, (), None, snapshot, now_us, _in_order(own, entry, kinds, found))
        for caller, own, entry in zip(callers, keys, entries, strict=True)
    ]


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


def _known_assigned(caller: Caller, entry: UserEntry) -> Assigned | None:
    """Return what ``assigned_to`` would; None where that calls the project's functions, or queries."""
    policies = process.policies
    kinds = policies.assigned_kinds
    if kinds is None or policies.current() is None or caller.calls_functions(kinds):
        return None
    keys = _keys(caller, kinds)
    found = {key: known for key in keys if (known := policies.user(key)) is not None}
    return _in_order(keys, entry, kinds, found) if len(found) == len(keys) else None


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
