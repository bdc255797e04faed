"""The one way from a caller and a place to what applies there: requests, pages and commands take it."""

from __future__ import annotations

from asgiref.sync import sync_to_async

from .assigned import Own, own_or_shared
from .exemptions import exempt, exempt_preflight
from .matching import Where, match_endpoints
from .requests.caller import Caller
from .requests.routes import is_admin_page
from .resolver import EvaluationContext, Resolution, match_policies, narrow, resolve, resolve_uncached
from .snapshot import Snapshot

#: What a resolution is found from, and the resolution.
Resolved = tuple[EvaluationContext, Resolution]


def resolve_for(caller: Caller, where: Where, snapshot: Snapshot, now_us: int, own: Own | None = None) -> Resolved:
    """Return what applies to the caller there at that time (Redis' time, µs), and what that was found from.

    ``own`` None = it is read from the database; while that is down, what callers share applies. Calls the project's
    functions.
    """
    entry, assigned = own_or_shared(caller) if own is None else own
    known = where.endpoints
    endpoints = match_endpoints(snapshot, where) if known is None else known
    context = EvaluationContext(caller, entry, endpoints, where.scope, snapshot, now_us, assigned)
    # The memo is for requests: of other places there are too many.
    resolution = resolve(context) if known is None else resolve_uncached(context)
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
    if own is not None:
        matched = match_policies(snapshot, match_endpoints(snapshot, where), where.scope, own.entry)
        if not caller.calls_functions(matched.kinds):
            return resolve_for(caller, where, snapshot, now_us, own)
    return await sync_to_async(resolve_for)(caller, where, snapshot, now_us, own)
