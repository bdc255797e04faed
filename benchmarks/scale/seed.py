"""Rows of a large installation, the same at each run except for times, which are relative to the run's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count, cycle, islice
from typing import Any

from django.contrib.auth.models import Permission, User
from django.db import connection, transaction
from django.db.models import QuerySet
from django.utils import timezone

from benchmarks.scale import Size
from django_ratequota.changes.writer import field_values
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, QuotaWindow, RatePolicy

#: A superuser, an operator who may edit plans and policies but not see endpoints; the password is the name.
ADMIN, PLANNER = "admin", "planner"
_PLANNER_MAY = ("view_plan", "change_plan", "view_ratepolicy", "change_ratepolicy")
#: The plan with a policy at each endpoint, and the name of the user whose pages are opened.
FULL_PLAN = "pro"
_NAMES = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")
_AREAS = ("accounts", "billing", "catalog", "exports", "files", "reports", "search", "webhooks")
_RATES = (
    *("5/min", "60/min burst 20, 1000/day", "100/min", "10/s", "1000/hour burst 50", "50000/month", "unlimited"),
    *("600/min burst 100, 50000/day", "10/s, 1000/hour, 100000/month"),
)
_MODES = ("enforce",) * 17 + ("log", "log", "off")
_REASONS = ("", "", "Contract 2026", "Migration, ticket 4711", "Asked for by sales", "Before the sale")


def seed(size: Size) -> None:
    """Create all rows, in one transaction; takes less than two minutes for the largest size."""
    dice = random.Random(16)
    now = timezone.now()
    with transaction.atomic():
        _add_operators()
        _insert([_endpoint(number) for number in range(size.endpoints)])
        _insert([_plan(number) for number in range(size.plans)])
        users = _add_users(size.users, now)
        _add_assignments(size.assignments, users, now)
        _insert(islice(_policies(size, users, dice, now), size.policies))
        _insert(islice(_changes(dice, now), size.changes))
        _add_windows(size.windows, users, now)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def _insert(rows: Any) -> None:
    """Insert rows without recording them in the history."""
    rows = iter(rows)
    while batch := list(islice(rows, 5_000)):
        QuerySet(type(batch[0])).bulk_create(batch)


def _add_operators() -> None:
    User.objects.create_superuser(ADMIN, password=ADMIN)
    planner = User.objects.create_user(PLANNER, password=PLANNER, is_staff=True)
    planner.user_permissions.set(Permission.objects.filter(codename__in=_PLANNER_MAY))


def _endpoint(number: int) -> Endpoint:
    area = _AREAS[number % len(_AREAS)]
    return Endpoint(
        name=f"{area}-{number:03d}",
        routes=f"/api/{area}/v{number}/*\n{area}-{number}-*",
        description=f"Requests of the module {area}.",
        methods=("", "GET", "POST PUT PATCH DELETE")[number % 3],
    )


def _plan(number: int) -> Plan:
    name, default_for = {0: ("Free", "authenticated"), 1: ("Visitors", "anonymous"), 2: ("Pro", "")}.get(
        number, (f"Partner {number:03d}", "")
    )
    slug = name.lower().replace(" ", "-")
    return Plan(name=name, slug=slug, default_for=default_for, description=f"Sold since 20{10 + number % 16}.")


def _add_users(number: int, now: datetime) -> range:
    """Add users in SQL; return their ids."""
    before = User.objects.order_by("pk").last()
    names = " ".join(f"WHEN {at} THEN '{name}'" for at, name in enumerate(_NAMES))
    name = f"CASE MOD(i, {len(_NAMES)}) {names} END || CAST(i AS VARCHAR(10))"
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %s)"
            " INSERT INTO auth_user (username, password, first_name, last_name, email, is_superuser, is_staff,"
            f" is_active, date_joined) SELECT {name}, '!', '', '', {name} || '@example.com', FALSE, FALSE, TRUE, %s"
            " FROM n ORDER BY i",
            [number, now],
        )
    first = User.objects.filter(pk__gt=before.pk if before else 0).order_by("pk").values_list("pk", flat=True)[0]
    return range(first, first + number)


def _add_assignments(number: int, users: range, now: datetime) -> None:
    """Assign plans in SQL: every other one to a user, the others to subjects."""
    plans = list(Plan.objects.order_by("pk").values_list("pk", flat=True))
    months = [now - timedelta(days=30 * month, minutes=7) for month in range(12)]
    starts = " ".join(f"WHEN {month} THEN %s" for month in range(12))
    with connection.cursor() as cursor:
        # Half of the customers are on one plan. Of all assignments, some have ended, and some will. Two in three
        # organisations have a day on which their months begin.
        cursor.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %s)"
            f" INSERT INTO {PlanAssignment._meta.db_table}"
            " (user_id, subject, plan_id, starts_at, ends_at, anchor, reason, created_at)"
            f" SELECT CASE WHEN MOD(i, 2) = 0 THEN {users[0]} + MOD(i / 2, {len(users)}) END,"
            " CASE WHEN MOD(i, 2) = 1 THEN 'tenant:t' || CAST(i / 2 AS VARCHAR(10)) END,"
            f" CASE WHEN MOD(i / 2, 2) = 0 THEN {plans[2]} ELSE {plans[0]} + MOD(i / 4, {len(plans)}) END,"
            f" CASE MOD(i, 12) {starts} END, CASE WHEN MOD(i, 15) = 0 THEN %s WHEN MOD(i, 40) = 1 THEN %s END,"
            " CASE WHEN MOD(i, 2) = 1 AND MOD(i, 3) > 0 THEN 1 + MOD(i, 31) END,"
            " 'Signed up', %s FROM n ORDER BY i",
            [number, *months, now - timedelta(days=1), now + timedelta(days=30), now],
        )


def _add_windows(number: int, users: range, now: datetime) -> None:
    """Add what users on the full plan have used of two monthly limits each, in SQL."""
    limits = RatePolicy.objects.filter(plan__slug=FULL_PLAN, rates__contains="/month", mode="enforce").order_by("pk")
    places = [
        (pk, endpoint, 50_000 if rates == "50000/month" else 100_000)
        for pk, endpoint, rates in limits.values_list("pk", "endpoint_id", "rates")
    ]
    months = [now.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)]
    while len(months) < 25:
        months.insert(0, (months[0] - timedelta(days=1)).replace(day=1))
    months.append((months[-1] + timedelta(days=32)).replace(day=1))
    times = [connection.ops.adapt_datetimefield_value(month) for month in months]
    place = f"MOD((u.id - {users[0]}) / 2 + k.k, {len(places)})"
    policy, endpoint, limit = (
        f"CASE {place} {' '.join(f'WHEN {at} THEN {one[column]}' for at, one in enumerate(places))} END"
        for column in range(3)
    )
    starts = f"CASE r.m {' '.join(f'WHEN {at} THEN %s' for at in range(25))} END"
    quote, written_at = connection.ops.quote_name, connection.ops.adapt_datetimefield_value(now)
    with connection.cursor() as cursor:
        cursor.execute(
            f"""
            WITH RECURSIVE k(k) AS (SELECT 0 UNION ALL SELECT 1),
            m(m) AS (SELECT 0 UNION ALL SELECT m + 1 FROM m WHERE m < 24)
            INSERT INTO {QuotaWindow._meta.db_table} (counter, first_day, charged, refunded, held, notified,
                limited_us, mixed, starts_at, ends_at, period, subject, policy_id, endpoint_id, rate,
                {quote("limit")}, written_at)
            SELECT '{{user:' || r.id || '}}:' || r.endpoint || ':fwmonth', DATE({starts}), r.most / 1000 * r.share, 0,
                0, '', 0, false, {starts}, {starts}, 'month', 'user:' || r.id, r.policy, r.endpoint,
                r.most || '/month', r.most, %s
            FROM (
                SELECT u.id AS id, m.m AS m, {policy} AS policy, {endpoint} AS endpoint, {limit} AS most,
                    CAST(MOD(MOD(u.id, 1003) * 7919 + k.k * 31, 1003) AS INTEGER) AS share
                FROM auth_user u, k, m
                WHERE u.id >= %s AND MOD(u.id - {users[0]}, 2) = 0 AND u.id < %s
                    AND (m.m = 24 OR MOD(u.id - {users[0]}, 200) = 0)
            ) r
            """,
            [*times[:25], *times[:25], *times[1:], written_at, users[0], users[0] + number],
        )


def _policies(size: Size, users: range, dice: random.Random, now: datetime) -> Iterator[RatePolicy]:
    endpoints = list(Endpoint.objects.order_by("pk"))
    plans = list(Plan.objects.order_by("pk"))
    yield RatePolicy(rates="6000/min")
    yield RatePolicy(rates="300/min", counted_per="ip", mode="log", reason="Would a limit per address hurt anyone?")
    for endpoint in endpoints:
        yield RatePolicy(endpoint=endpoint, rates="100000/min", counted_per="everyone")
    for plan in plans:
        yield RatePolicy(plan=plan, rates="600/min burst 100, 50000/day")
        full = plan.slug == FULL_PLAN
        for endpoint in endpoints if full else dice.sample(endpoints, len(endpoints) * 3 // 20 - 1):
            yield _policy(dice, plan=plan, endpoint=endpoint)
    kinds = cycle(("user", "ip", "user", "network", "tenant"))
    for number, kind in zip(count(), kinds):
        audience: dict[str, Any] = {
            "user": {"user_id": users[number * 7919 % len(users)]},
            "ip": {"subject": f"ip:198.{18 + number // 65536 % 2}.{number // 256 % 256}.{number % 256}"},
            "network": {"subject": f"ip:10.{number // 256 % 256}.{number % 256}.0/24"},
            "tenant": {"subject": f"tenant:t{number}"},
        }[kind]
        # One in seven has dates: most are in force, some have ended, some have not begun.
        if number % 7 == 0:
            start = now + timedelta(days=dice.choice((-60, -10, -1, 5)))
            audience |= {"starts_at": start, "ends_at": start + timedelta(days=30)}
        rates = "blocked" if kind in ("ip", "network") else dice.choice(_RATES)
        # Another endpoint each time that a user's turn comes round.
        at = (number * 31 + number // len(users)) % len(endpoints)
        endpoint = None if kind == "network" else endpoints[at]
        yield RatePolicy(**audience, endpoint=endpoint, rates=rates, reason=dice.choice(_REASONS))


def _policy(dice: random.Random, **fields: Any) -> RatePolicy:
    return RatePolicy(rates=dice.choice(_RATES), mode=dice.choice(_MODES), reason=dice.choice(_REASONS), **fields)


def _changes(dice: random.Random, now: datetime) -> Iterator[PolicyChange]:
    """Yield changes of the last 90 days, in saves of up to twenty rows each, oldest first."""
    actors = list(User.objects.filter(is_staff=True))
    policies = list(RatePolicy.objects.select_related("user", "plan", "endpoint").order_by("pk")[:5_000])
    field: Any = PolicyChange._meta.get_field("at")
    field.auto_now_add = False
    try:
        for number in count():
            # The first ones are the oldest; later ones come closer to each other, and to now.
            at = now - timedelta(days=90) / (1 + number / 5)
            actor, reason = dice.choice(actors), dice.choice(_REASONS)
            for policy in dice.sample(policies, dice.choice((1, 1, 2, 20))):
                after = field_values(policy)
                yield PolicyChange(
                    model="ratepolicy",
                    object_id=str(policy.pk),
                    object_text=str(policy)[:300],
                    touched_user=str(policy.user_id or ""),
                    action="update",
                    actor=actor,
                    reason=reason,
                    before={**after, "rates": dice.choice(_RATES)},
                    after=after,
                    at=at,
                )
    finally:
        field.auto_now_add = True
