"""Requests of the last 48 hours, decided and recorded by the package itself, and a week of counts from them."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db.models import QuerySet

from benchmarks.scale import Size
from django_ratequota import Limiter
from django_ratequota.models import Endpoint, UsageCount
from django_ratequota.monitoring.collector import Collector
from django_ratequota.monitoring.rollup import roll_up
from django_ratequota.operations.explain import newest_policies
from django_ratequota.policies.matching import Where
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.policies.requests.view_facts import facts_of
from django_ratequota.policies.resolve_for import Resolved, resolve_for

_HOURS = 47
#: Visits of a caller, and requests of a visit, which are a second apart.
_VISITS, _REQUESTS = 10, 10


def record(size: Size) -> None:
    """Record the requests in Redis, roll them up, and repeat the counts for the days before."""
    dice, now = random.Random(16), time.time()
    names = list(Endpoint.objects.order_by("pk").values_list("name", flat=True))
    users = list(User.objects.filter(is_staff=False).order_by("pk").values_list("pk", flat=True)[: size.callers])
    resolved = [_resolved(dice, number, users, names) for number in range(size.callers)]
    requests = []
    for caller in range(size.callers):
        for _visit in range(_VISITS):
            begun = now - dice.random() * _HOURS * 3600 - _REQUESTS
            requests += [(begun + number, caller) for number in range(_REQUESTS)]
    clock = [0]
    # Counters of another prefix, because real ones must not lie in the past.
    limiter, collector = Limiter(clock=lambda: clock[0], prefix="scale"), Collector()
    for number, (at, caller) in enumerate(sorted(requests)):
        clock[0] = int(at * 10**6)
        context, resolution = resolved[caller]
        decision = limiter.check(resolution.buckets, 1)
        if not decision.allowed:
            decision = replace(decision, revision=context.snapshot.revision)
        route = f"/api/{context.scope}/" if context.scope else ""
        collector.record(context, route, "GET", resolution, decision, 1)
        if number % 200 == 0:
            collector.flush()
    collector.flush()
    collector.close()
    roll_up()
    counts: Any = list(UsageCount.objects.order_by("pk"))
    for days in (2, 4, 6):
        earlier = [_moved(row, timedelta(days=days)) for row in counts]
        QuerySet(UsageCount).bulk_create(earlier, ignore_conflicts=True, batch_size=5_000)


def _resolved(dice: random.Random, number: int, users: list[int], names: list[str]) -> Resolved:
    """Return what applies to a request of a user, or one in four of nobody, of an address of its own."""
    user = str(users[number % len(users)]) if number % 4 else None
    address, scope = f"203.0.{number // 250 % 250}.{number % 250}", dice.choice(names)
    caller = DescribedCaller(user_id=user, address=address, identifiers={}, plan_slug=None)
    snapshot = newest_policies()
    where = Where(scope=scope, method="GET", handling=facts_of(None).handling("GET"))
    return resolve_for(caller, where, snapshot, time.time_ns() // 1000)


def _moved(row: UsageCount, back: timedelta) -> UsageCount:
    fields = {field.attname: getattr(row, field.attname) for field in row._meta.concrete_fields[1:]}
    return UsageCount(**{**fields, "starts_at": row.starts_at - back})
