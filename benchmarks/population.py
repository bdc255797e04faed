"""A large project in the database: endpoints, plans, policies, and users of whom some have something of their own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import islice, product

from django.db import connection
from django.utils import timezone

from django_ratequota.models import Endpoint, Plan, RatePolicy

ENDPOINTS, PLANS = 1_000, 10
#: One user in so many has an assignment, and an override.
ASSIGNED, OVERRIDDEN = 10, 100
ROUTE = "/api/search/"


def add_endpoints() -> None:
    """``search`` and 999 others, and the plans; the first plan is the default."""
    others = [Endpoint(name=f"e{n}", routes=f"/api/v1/e{n}/*\ne{n}-*") for n in range(1, ENDPOINTS)]
    Endpoint._base_manager.bulk_create([Endpoint(name="search", routes=ROUTE), *others])
    plans = [Plan(name=f"Plan {n}", slug=f"plan-{n}") for n in range(PLANS)]
    plans[0].default_for = "authenticated"
    Plan._base_manager.bulk_create(plans)


def add_policies(until: int) -> None:
    """As many policies as are missing; the first three apply to everybody."""
    there = RatePolicy.objects.count()
    RatePolicy._base_manager.bulk_create(islice(_policies(), there, until), batch_size=1000)


def _policies() -> Iterator[RatePolicy]:
    search, *others = Endpoint.objects.order_by("pk")
    plans = Plan.objects.order_by("pk")
    yield RatePolicy(rates="1000000/min")
    yield RatePolicy(endpoint=search, rates="100000/min")
    yield RatePolicy(endpoint=search, counted_per="everyone", rates="10000000/min")
    # Plans at endpoints, networks and tenants by turns, so that every size has some of each.
    for number, (plan, endpoint) in enumerate(product(plans, others)):
        octets = f"198.{18 + number // 65536}.{number // 256 % 256}.{number % 256}"
        yield RatePolicy(plan=plan, endpoint=endpoint, rates=f"{100 + number % 50}/min, 10000/day")
        if number % 8 == 0:
            yield RatePolicy(subject=f"ip:{octets}", rates="blocked")
            yield RatePolicy(subject=f"tenant:t{number}", endpoint=search, rates="10/s")


def add_subjects(number: int) -> None:
    """Policies of tenants and single addresses for all endpoints, in SQL, for a hundred thousand of them."""
    with connection.cursor() as cursor:
        cursor.execute(
            "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < %s)"
            " INSERT INTO django_ratequota_ratepolicy"
            " (subject, counted_per, rates, algorithm, mode, on_error, durable, leads_headers, reason)"
            " SELECT CASE MOD(i, 2) WHEN 0 THEN 'tenant:s' || CAST(i AS VARCHAR(10)) ELSE 'ip:10.'"
            " || CAST(i / 65536 AS VARCHAR(3)) || '.' || CAST(MOD(i / 256, 256) AS VARCHAR(3))"
            " || '.' || CAST(MOD(i, 256) AS VARCHAR(3)) END,"
            " 'caller', '50/min', 'token_bucket', 'enforce', '', TRUE, FALSE, '' FROM n",
            [number - 1],
        )
        cursor.execute("ANALYZE")


def add_users(users: int) -> None:
    """Users with the ids from 1 on, and what is their own; in SQL, for a million of them."""
    second = Plan.objects.order_by("pk")[1]
    began = timezone.now() - timedelta(days=1)
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %s) "
    with connection.cursor() as cursor:
        cursor.execute(
            numbers + "INSERT INTO auth_user (id, username, password, first_name, last_name, email, is_superuser,"
            " is_staff, is_active, date_joined)"
            " SELECT i, 'user' || CAST(i AS VARCHAR(10)), '', '', '', '', FALSE, FALSE, TRUE, %s FROM n",
            [users, began],
        )
        cursor.execute(
            numbers + "INSERT INTO django_ratequota_planassignment (user_id, plan_id, starts_at, reason, created_at)"
            f" SELECT i * {ASSIGNED}, %s, %s, '', %s FROM n",
            [users // ASSIGNED, second.pk, began, began],
        )
        cursor.execute(
            numbers
            + "INSERT INTO django_ratequota_ratepolicy (user_id, subject, counted_per, rates, algorithm, mode,"
            " on_error, durable, leads_headers, reason)"
            f" SELECT i * {OVERRIDDEN}, '', 'caller', '2000000/min', 'token_bucket', 'enforce', '', TRUE, FALSE, ''"
            " FROM n",
            [users // OVERRIDDEN],
        )
        cursor.execute("ANALYZE")
