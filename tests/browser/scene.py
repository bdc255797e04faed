"""What the operators of the browser tests look at: plans, endpoints, policies, users, some of them hostile."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.auth.models import Permission, User
from django.db import transaction

from django_ratequota import Bucket, Rate, check_request
from django_ratequota.engine.keys import counter_name
from django_ratequota.models import (
    Endpoint,
    ListMember,
    Plan,
    PlanAssignment,
    PolicyChange,
    RatePolicy,
    SubjectList,
)
from django_ratequota.monitoring.collector import collector
from tests.project.views import request_from
from tests.support.windows import counted, of_day

#: The operators, and their permissions (codenames, None = superuser).
OPERATORS: dict[str, tuple[str, ...] | None] = {
    "superuser": None,
    "viewer": tuple(
        f"view_{model}"
        for model in (
            *("plan", "planassignment", "endpoint", "subjectlist", "listmember", "ratepolicy", "policychange"),
            "user",
        )
    ),
    "nobody": (),
}
#: Would run, would turn the rest of the line around, and has no place to break.
MARKUP = "<img src=x onerror=alert(1)></td></table><script>alert(2)</script>"
TURNED = "\u202egnp.eciovni\u2066"
LONG = "x" * 10_000


class Scene:
    """The rows, by the names that tests call them."""

    def __init__(self) -> None:
        with transaction.atomic():
            self._operators()
            self._usual()
            self._hostile()
        self.edit = self._edited(self.free_search, reason="Before the sale")
        self.hostile_edit = self._edited(self.hostile_plan, description="Cut short", name="Known")
        # The history is shown in pictures of the docs: its times must not change from day to day.
        PolicyChange.objects.update(at=datetime(2026, 11, 2, 9, 30, tzinfo=UTC))

    def _operators(self) -> None:
        self.operators: dict[str, User] = {}
        for name, permissions in OPERATORS.items():
            user = User.objects.create(username=name, is_staff=True, is_superuser=permissions is None)
            user.user_permissions.set(Permission.objects.filter(codename__in=permissions or ()))
            self.operators[name] = user

    def _usual(self) -> None:
        names = ("alice", "bob", "carol", "dave")
        self.alice, self.bob, self.carol, self.dave = (User.objects.create(username=name) for name in names)
        self.free = Plan.objects.create(name="Free", slug="free", default_for="authenticated", description="Try it.")
        self.pro = Plan.objects.create(name="Pro", slug="pro", description="Paid monthly.")
        self.search = Endpoint.objects.create(name="search", description="Full text search.", cost=5)
        self.reports = Endpoint.objects.create(name="reports", routes="report-*\n/api/reports/*", methods="GET")
        day = {"starts_at": datetime(2026, 11, 1, tzinfo=UTC), "ends_at": datetime(2036, 11, 1, tzinfo=UTC)}
        self.free_search = _policy(plan=self.free, endpoint=self.search, rates="10/min")
        _policy(plan=self.free, rates="60/min burst 20, 1000/day")
        _policy(plan=self.free, endpoint=self.reports, rates="30/min")
        _policy(plan=self.pro, rates="600/min burst 100, 50000/day")
        _policy(plan=self.pro, endpoint=self.search, rates="1000/min")
        _policy(endpoint=self.search, rates="10000/min", counted_per="everyone", reason="What the cluster takes.")
        self.logged = _policy(
            rates="30/min", counted_per="ip", mode="log", reason="Would a limit per address hurt anyone?"
        )
        self.override = _policy(user=self.bob, rates="300/min", reason="Migration, ticket 4711", **day)
        PlanAssignment.objects.create(user=self.alice, plan=self.pro, reason="Signed up", **day)

    def _hostile(self) -> None:
        """Rows as other code may write them: the forms would not take them all."""
        self.mallory = User.objects.create(username=f"{MARKUP}{TURNED}{'y' * 60}")
        self.long_user = User.objects.create(username=LONG)
        self.hostile_plan = Plan.objects.create(
            name=f"{MARKUP}{TURNED}{'z' * 100}", slug="hostile", description=f"{MARKUP}{TURNED}{LONG}"
        )
        self.hostile_endpoint = Endpoint.objects.create(
            name="e" * 100, routes=f"/{MARKUP.replace(' ', '')}{TURNED}{LONG}", description=f"{MARKUP}{TURNED}{LONG}"
        )
        place: dict[str, Any] = {"endpoint": self.hostile_endpoint, "reason": f"{MARKUP}{TURNED}"}
        self.hostile_override = _policy(user=self.mallory, rates="7/min", **place)
        self.long_override = _policy(user=self.long_user, rates="8/min", **place)
        self.hostile_list = SubjectList.objects.create(
            name=f"{MARKUP}{TURNED}{'l' * 60}", description=f"{TURNED}{LONG}"
        )
        ListMember.objects.create(subject_list=self.hostile_list, user=self.mallory, reason=f"{MARKUP}{TURNED}")
        self.member = ListMember.objects.create(
            subject_list=self.hostile_list, subject=f"tenant:{MARKUP}{TURNED}{LONG}"[:200]
        )
        self.hostile_assignment = PlanAssignment.objects.create(
            subject=f"tenant:{MARKUP}{TURNED}{LONG}"[:200],
            plan=self.hostile_plan,
            anchor=31,
            reason=f"{MARKUP}{TURNED}",
        )
        self.hostile_subject = _policy(subject=f"tenant:{MARKUP}{TURNED}{LONG}", rates="9/min", **place)
        monthly = _policy(plan=self.hostile_plan, rates="10/s, 1000/hour burst 50, 100000/month", **place)
        self.months(f"user:{self.mallory.pk}", monthly, 100_000, (20_000, 130_000, 0, 90_000))

    def months(self, subject: str, policy: RatePolicy, limit: int, used: tuple[int, ...]) -> None:
        """What the subject has used on the first day of the last months and of this one; 0 = no row."""
        rate = Rate.parse(f"{limit}/month")
        bucket = Bucket(subject, rate, endpoint_id=policy.endpoint_id, counted_per=policy.counted_per)
        first = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        ends = (first + timedelta(days=32)).replace(day=1)
        for units in reversed(used):
            starts = (ends - timedelta(days=1)).replace(day=1)
            if units:
                window = counted(
                    counter=counter_name(bucket),
                    starts_at=starts,
                    ends_at=ends,
                    subject=subject,
                    policy_id=policy.pk,
                    endpoint_id=policy.endpoint_id,
                    used=units,
                    limit=limit,
                )
                of_day(window, starts.date(), units)
            ends = starts

    def _edited(self, row: Any, **values: Any) -> PolicyChange:
        """The row with these values for a moment, and then as before; the change that brought them."""
        before = {name: getattr(row, name) for name in values}
        for state in (values, before):
            for name, value in state.items():
                setattr(row, name, value)
            row.save()
        return PolicyChange.objects.filter(model=row._meta.model_name, object_id=row.pk).order_by("-pk")[1]

    def traffic(self) -> None:
        """Requests of the last minute, some of them refused, counted for the operators to see."""
        for user, times in ((self.dave, 5), (self.mallory, 9), (None, 40)):
            for _ in range(times):
                endpoint = self.hostile_endpoint if user == self.mallory else self.search
                check_request(request_from(user), scope=endpoint.name)
        check_request(request_from(headers={"X-Api-Key": f"{MARKUP}{LONG}"}), scope=self.hostile_endpoint.name)
        collector.flush()

    def last_change(self) -> PolicyChange:
        """The newest row of the history."""
        change = PolicyChange.objects.order_by("-pk").first()
        assert change is not None
        return change


def _policy(**fields: Any) -> RatePolicy:
    return RatePolicy.objects.create(**fields)
