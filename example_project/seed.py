"""The example's plans, users and policies: missing rows are created, edited ones stay as they are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy

PASSWORD = "demo"
ADMIN = ("admin", "admin")

PLANS = {"Free": "authenticated", "Pro": "", "Enterprise": ""}
USERS = {"alice": "Free", "bob": "Pro", "carol": "Enterprise"}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "reports": {"routes": "/api/reports/*", "description": "Reading reports, matched by route."},
    "search": {"description": "Full text search; the view charges 5 units a request."},
    "exports": {"description": "Exports of all rows."},
    "login": {"methods": "POST", "description": "Password checks, per address."},
    "status": {"description": "The public status page."},
    "completions": {"description": "Charged by the words of its answer."},
}
#: plan (None = everyone), endpoint (None = all endpoints together), rates, other fields
POLICIES: list[tuple[str | None, str | None, str, dict[str, Any]]] = [
    ("Free", None, "60/min burst 20, 1000/day", {}),
    ("Free", "search", "50/min", {}),
    ("Free", "reports", "30/min", {}),
    ("Free", "exports", "3/hour", {}),
    ("Pro", None, "600/min burst 100, 50000/day", {}),
    ("Pro", "search", "1000/min", {}),
    ("Pro", "exports", "30/min", {}),
    ("Enterprise", None, "6000/min, 5000000/month", {}),
    ("Enterprise", "exports", "unlimited", {}),
    (None, None, "30/min", {"counted_per": "ip", "mode": "log", "reason": "Would a limit per address hurt anyone?"}),
    (None, "search", "10000/min", {"counted_per": "everyone", "reason": "Capacity of the search cluster."}),
    (None, "login", "5/min, 30/hour", {"counted_per": "ip", "algorithm": "sliding_window_counter"}),
    (None, "status", "20/min", {"algorithm": "gcra"}),
    (None, "completions", "20 requests/min, 100/hour", {"counted_per": "ip"}),
]


@transaction.atomic
def seed() -> None:
    """Create the missing rows."""
    plans = {name: _plan(name, default_for) for name, default_for in PLANS.items()}
    endpoints = {
        name: Endpoint.objects.get_or_create(name=name, defaults=fields)[0] for name, fields in ENDPOINTS.items()
    }
    for plan, endpoint, rates, fields in POLICIES:
        identity = {
            "plan": plans[plan] if plan else None,
            "endpoint": endpoints[endpoint] if endpoint else None,
            "counted_per": fields.get("counted_per", "caller"),
        }
        # Operators may have added policies with dates.
        if not RatePolicy.objects.filter(user=None, subject="", **identity).exists():
            RatePolicy.objects.create(rates=rates, **{**fields, **identity})
    for name, plan in USERS.items():
        user = _user(name, PASSWORD)
        if not PlanAssignment.objects.filter(user=user).exists():
            PlanAssignment.objects.create(user=user, plan=plans[plan], reason="Signed up")
    _user(*ADMIN, is_staff=True, is_superuser=True)
    alice = User.objects.get(username="alice")
    if not RatePolicy.objects.filter(user=alice).exists():
        RatePolicy.objects.create(
            user=alice,
            endpoint=endpoints["reports"],
            rates="300/min",
            ends_at=timezone.now() + timedelta(days=7),
            reason="Migration week, ticket 4711",
        )


def _plan(name: str, default_for: str) -> Plan:
    plan = Plan.objects.filter(Q(slug=name.lower()) | Q(name=name)).first()
    if plan is None:
        if Plan.objects.filter(default_for=default_for).exists():
            default_for = ""  # operators chose another default
        plan = Plan.objects.create(name=name, slug=name.lower(), default_for=default_for)
    return plan


def _user(name: str, password: str, **flags: bool) -> User:
    user, created = User.objects.get_or_create(username=name, defaults=flags)
    if created:
        user.set_password(password)
        user.save()
    return user
