"""How much of its tightest limit each of several callers has used, without consuming units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..conf import settings
from ..engine.protocol import MAX_BUCKETS
from ..engine.types import Bucket, BucketStatus
from ..policies.assigned import contexts_of, is_plan_open
from ..policies.facts import EndpointFacts
from ..policies.precedence import outranks_plans
from ..policies.requests.caller import DescribedCaller
from ..policies.resolver import EvaluationContext, resolve_uncached
from ..runtime import default_limiter, process
from .counters import is_shared, peek


def tightest(callers: Iterable[str], scope: str | None = None) -> dict[str, BucketStatus]:
    """Return caller -> its own enforced counter with the smallest share left; callers without one are left out.

    ``callers`` are subjects such as ``user:42``. Their limits at the endpoint ``scope`` and at all endpoints together
    are compared; without a scope also those at each endpoint, unless these are too many to ask for. Where only a
    request shows what plan its caller is on, the limits are compared that no plan changes. Raises ``StoreError`` and
    ``django.db.Error``.
    """
    limiter = default_limiter()
    if getattr(limiter, "unlimited", False):
        return {}
    overview = process.policies.reload(limiter.stored_revision()).overview
    # Without those that are counted together.
    names = [name for name in callers if name.partition(":")[2] and not is_shared("caller", name)]
    described = {name: DescribedCaller.named(name) for name in names}
    endpoints: tuple[EndpointFacts, ...] = ()
    if scope is not None and scope in overview.by_name:
        endpoints = (overview.by_name[scope],)
    elif scope is None and len(overview.limited) * len(described) <= MAX_BUCKETS:
        endpoints = overview.limited
    contexts = contexts_of(list(described.values()), overview.snapshot, limiter.now_us)
    buckets = {
        name: _own_buckets(replace(context, endpoints=endpoints))
        for name, context in zip(described, contexts, strict=True)
    }
    statuses = peek(dict.fromkeys(bucket for own in buckets.values() for bucket in own))
    found = {caller: [statuses[bucket] for bucket in own if bucket in statuses] for caller, own in buckets.items()}
    return {caller: min(own, key=_share_left) for caller, own in found.items() if own}


def _own_buckets(context: EvaluationContext) -> list[Bucket]:
    """Return the enforced buckets that count only this caller and apply on every plan."""
    resolution, groups = resolve_uncached(context), context.snapshot.groups
    is_open = settings.plan_resolver or is_plan_open(context.caller, resolution.assigned_to)
    found = []
    for policy, endpoint, buckets in resolution.applied:
        group = groups.get(endpoint.id if endpoint else None, {}).get(policy.counted_per)
        if not is_open or group is None or not group.having("plan") or outranks_plans(policy):
            found += [one for one in buckets if not is_shared(one.counted_per, one.subject)]
    return [bucket for bucket in found if bucket.mode == "enforce"]


def _share_left(status: BucketStatus) -> tuple[float, int]:
    return status.remaining / status.limit, status.remaining
