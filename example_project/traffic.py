"""Made-up requests of the last 24 hours, so that the admin has traffic to show. A project needs nothing of this.

The package's own script decides each request at its time in the past, by the policies of today, on counters that are
deleted afterwards; the decisions are recorded like those of real requests. The callers' real counters stay unused.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from django.contrib.auth.models import User

from django_ratequota import Bucket, Limiter
from django_ratequota.conf import settings
from django_ratequota.monitoring.collector import Collector
from django_ratequota.monitoring.rollup import roll_up
from django_ratequota.monitoring.timeline import Counts, timeline
from django_ratequota.operations.explain import ExplainQuery, Explanation

_HOURS = 24


class Habit(NamedTuple):
    """What a caller requests: ``visits`` a day, each of ``requests`` requests that are ``seconds`` apart."""

    user: str  # "" = anonymous
    ip: str
    path: str
    visits: int
    requests: int
    seconds: float
    method: str = "GET"
    cost: int = 1
    #: For a view that names its endpoint in a call.
    scope: str = ""


HABITS = [
    Habit("alice", "198.51.100.7", "/api/reports/", 90, 3, 4.0),
    Habit("alice", "198.51.100.7", "/api/search/", 80, 3, 3.0, cost=5),
    Habit("alice", "198.51.100.7", "/api/search/", 12, 16, 0.5, cost=5),
    Habit("alice", "198.51.100.7", "/api/exports/", 10, 4, 20.0),
    Habit("bob", "198.51.100.20", "/api/reports/", 12, 50, 0.3),
    Habit("bob", "198.51.100.20", "/api/search/", 40, 8, 1.0, cost=5),
    Habit("bob", "198.51.100.20", "/api/exports/", 6, 40, 0.5),
    Habit("carol", "198.51.100.31", "/api/reports/", 100, 2, 2.0),
    Habit("carol", "198.51.100.31", "/api/exports/", 24, 10, 1.0),
    *(Habit("", f"203.0.113.{host}", "/api/status/", 18, 2, 10.0) for host in range(1, 13)),
    Habit("", "203.0.113.80", "/api/status/", 12, 40, 0.5),  # a crawler
    Habit("", "203.0.113.99", "/api/login/", 4, 25, 2.0, method="POST"),  # guesses passwords
    Habit("", "203.0.113.5", "/api/completions/", 10, 4, 15.0, cost=9, scope="completions"),
]


def record_traffic() -> int:
    """Record the requests unless the last 24 hours have some; returns how many. Raises ``StoreError``."""
    if any(counts != Counts() for counts in timeline("day").total):
        return 0
    requests = _requests(time.time())
    users = {user.username: str(user.pk) for user in User.objects.all()}
    explained = {habit: _query(habit, users).explain() for habit in HABITS}
    routes = {habit: _query(habit, users).request_arguments()["route"] for habit in HABITS}
    clock = [0]
    # In the past, no key of the process's own may be written: other keys, by another prefix.
    limiter = Limiter(clock=lambda: clock[0], prefix=f"{settings.prefix[:5]}:{secrets.token_hex(4)}")
    collector = Collector()
    try:
        for number, (at, habit) in enumerate(requests):
            clock[0] = int(at * 10**6)
            context, resolution = explained[habit].context, explained[habit].resolution
            decision = limiter.check(resolution.buckets, habit.cost)
            if not decision.allowed:
                decision = replace(decision, revision=context.snapshot.revision)
            collector.record(context, routes[habit], habit.method, resolution, decision, habit.cost)
            if number % 100 == 0:  # a collector holds few refusals of a network
                collector.flush()
        collector.flush()
        collector.close()  # sends the attempts, which wait for more of them
    finally:
        for at, _habit in (requests[0], requests[-1]):  # a day begins in between, and once in a while a month
            clock[0] = int(at * 10**6)
            limiter.reset(_buckets(explained.values()))
    roll_up()
    return len(requests)


def _requests(now: float) -> list[tuple[float, Habit]]:
    """Return (Unix time, habit) of every request, in order: the same ones relative to ``now`` each time."""
    dice = random.Random(7)
    # Most requests now and at this time yesterday, fewest twelve hours ago.
    weights = [1.2 + math.cos(2 * math.pi * hour / _HOURS) for hour in range(_HOURS)]
    requests: list[tuple[float, Habit]] = []
    for habit in HABITS:
        for hour in dice.choices(range(_HOURS), weights, k=habit.visits):
            begun = now - (hour + dice.random()) * 3600
            requests += [(begun + number * habit.seconds, habit) for number in range(habit.requests)]
    return sorted((at, habit) for at, habit in requests if at < now - 1)


def _query(habit: Habit, users: dict[str, str]) -> ExplainQuery:
    return ExplainQuery(
        user_id=users.get(habit.user), ip=habit.ip, path=habit.path, method=habit.method, endpoint=habit.scope
    )


def _buckets(explained: Iterable[Explanation]) -> set[Bucket]:
    return {bucket for explanation in explained for bucket in explanation.resolution.buckets}
