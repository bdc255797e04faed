"""Plans of subjects such as tenants and API keys: whose plan counts, what is read for that, and what is kept."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import permutations
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import connection, transaction
from django.utils import timezone

from django_ratequota import Decision, acheck_caller, acheck_request, check_caller, check_request
from django_ratequota.changes.writer import write_publication
from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.operations.caller_limits import caller_limits, tightest
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.cache import policies
from django_ratequota.policies.facts import Assignment, UserEntry
from django_ratequota.policies.requests.caller import DescribedCaller
from django_ratequota.policies.resolver import Resolution
from django_ratequota.runtime import default_limiter
from django_ratequota.testing import isolated
from tests.enforcement.test_check import database_down
from tests.policies.test_cache import queries
from tests.project.views import request_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

IDENTIFIERS = {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}
ACME, KEY = {"tenant": "acme"}, {"api_key": "k1"}
BOTH = {**ACME, **KEY}
WRITE = "Enter kind:value, such as tenant:acme. The kind is one of tenant, api_key."


@pytest.fixture(autouse=True)
def identifiers(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}


@pytest.fixture(params=["sync", "async"])
def ask(request: Any) -> Callable[..., Decision]:
    """``check_caller``, or its async twin under an event loop."""
    return check_caller if request.param == "sync" else async_to_sync(acheck_caller)


def plan_of(limit: int, **default: str) -> Plan:
    """Return a new plan whose callers have this many requests an hour."""
    plan = Plan.objects.create(name=f"p{limit}", slug=f"p{limit}", **default)
    RatePolicy.objects.create(plan=plan, rates=f"{limit}/hour")
    return plan


def assign(subject: str, limit: int, **fields: Any) -> PlanAssignment:
    """Put a subject on a new plan with this limit."""
    return PlanAssignment.objects.create(subject=subject, plan=plan_of(limit), **fields)


def limits(decision: Decision) -> list[int]:
    assert not decision.degraded
    return [status.limit for status in decision.statuses]


class TestWhosePlanCounts:
    def test_another_subject_of_the_kind_has_the_default_plan(self, ask: Callable[..., Decision]) -> None:
        plan_of(9, default_for="anonymous")
        assign("tenant:acme", 2)
        for other in ("ACME", "acme ", "acmé", "a", "", "acme\x00", "\ud800", "x" * 300, "%", "acme'"):
            assert limits(ask(ip=None, identifiers={"tenant": other})) == [9], other
        assert limits(ask(ip=None, identifiers={"api_key": "acme"})) == [9]
        assert limits(ask(ip=None, identifiers=ACME)) == [2]

    def test_a_plan_begins_and_ends_while_it_is_in_memory(self) -> None:
        plan_of(9, default_for="anonymous")
        with isolated() as scene:
            now = datetime.fromtimestamp(scene.clock() / 10**6, UTC)
            assign("tenant:acme", 2, starts_at=now + timedelta(hours=1), ends_at=now + timedelta(hours=2))
            assert limits(check_caller(ip=None, identifiers=ACME)) == [9]
            found = []
            for seconds in (3599.999, 0.001, 3599.999, 0.001):
                scene.clock.advance(seconds)
                assert queries(lambda: found.extend(limits(check_caller(ip=None, identifiers=ACME)))) == 0
        assert found == [9, 2, 2, 9]

    def test_a_failed_identifier_has_no_plan(self) -> None:
        plan_of(9, default_for="anonymous")
        assign("tenant:acme", 2)
        PlanAssignment.objects.bulk_create([PlanAssignment(subject="tenant:", plan=plan_of(3))])
        assert limits(check_request(request_from(tenant=ValueError("no such tenant")))) == [9]
        assert limits(check_request(request_from(tenant="acme"))) == [2]

    def test_the_user_is_not_read_where_no_plan_matters(self, settings: Any) -> None:
        """Reading her adds ``Vary: Cookie``; so may an identifier."""
        settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["ip"]}
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="open"), rates="5/hour")
        PlanAssignment.objects.create(subject="tenant:acme", plan=Plan.objects.create(name="Pro", slug="pro"))
        assert limits(check_request(request_from(), "open")) == [5], "the request has no attribute tenant"
        RatePolicy.objects.create(plan=Plan.objects.get(), rates="7/hour")
        assert limits(check_request(request_from(tenant="acme"), "open")) == [7, 5]


class TestPlansByCode:
    @pytest.fixture
    def resolver(self, settings: Any) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "tests.project.views.plan_of_some"}

    @pytest.mark.parametrize("how", ["sync", "async"])
    def test_a_resolver_without_an_opinion_leaves_the_plan_to_assignments(
        self, resolver: None, how: str, alice: User, caplog: Any
    ) -> None:
        """Regression: a resolver for staff and services switched off the assignments of everyone else."""
        check = check_request if how == "sync" else async_to_sync(acheck_request)

        def limit(user: User | None = None, tenant: str | None = None, **headers: str) -> list[int]:
            return limits(check(request_from(user, headers=headers, tenant=tenant)))

        staff, bob = (User.objects.create(username=name, is_staff=name == "staff") for name in ("staff", "bob"))
        RatePolicy.objects.create(plan=Plan.objects.create(name="Staff", slug="staff"), rates="unlimited")
        RatePolicy.objects.create(plan=Plan.objects.create(name="Service", slug="service"), rates="300/min")
        plan_of(9, default_for="authenticated")
        assign("tenant:acme", 2)
        for user in (alice, staff):
            PlanAssignment.objects.create(user=user, plan=Plan.objects.get_or_create(slug="p9")[0])
        PlanAssignment.objects.filter(user=alice).update(plan=plan_of(5))
        assert limit(staff, "acme") == []
        assert limit(alice, "acme", **{"X-Service": "service"}) == [300]
        assert limit(alice, "acme") == [5]
        assert limit(bob, "acme") == limit(None, "acme") == [2]
        assert (limit(bob), limit()) == ([9], [])
        assert not caplog.records
        # A plan that was deleted, or a typing error.
        assert limit(alice, **{"X-Service": "gone"}) == [5]
        assert limit(bob, **{"X-Service": "gone"}) == [9]
        assert "PLAN_RESOLVER answered 'gone', but no plan has that slug" in caplog.text
        check_request(request_from(tenant="acme"))
        assert queries(lambda: limit(alice, "acme")) == 0

    def test_plan_of_check_caller_replaces_assignments_also_under_a_resolver(
        self, resolver: None, ask: Callable[..., Decision]
    ) -> None:
        plan_of(9)
        assign("tenant:acme", 2)
        assert limits(ask(ip=None, identifiers=ACME, plan="p9")) == [9]
        assert limits(ask(ip=None, identifiers=ACME)) == limits(ask(ip=None, identifiers=ACME, plan="gone")) == [2]

    def test_months_begin_on_the_day_of_the_assignment_whatever_names_the_plan(
        self, resolver: None, ask: Callable[..., Decision], alice: User
    ) -> None:
        """Regression: with a resolver, quotas and invoices were of calendar months."""
        for slug in ("staff", "own"):
            plan = Plan.objects.create(name=slug, slug=slug)
            RatePolicy.objects.create(plan=plan, rates="5/month")
            RatePolicy.objects.create(plan=plan, counted_per="tenant", rates="7/month")
        PlanAssignment.objects.create(user=alice, plan=plan, anchor=13)
        assign("tenant:acme", 2, anchor=20)
        alice.is_staff = True
        decisions = [
            check_request(request_from(alice, tenant="acme")),
            *(ask(user=alice, identifiers=ACME, plan=slug) for slug in ("staff", None, "gone")),
        ]
        days = [[status.bucket.anchor for status in one.statuses] for one in decisions]
        assert days == [[13, 20]] * 4
        found = caller_limits(DescribedCaller(user_id=str(alice.pk), address=None, plan_slug="staff"))
        assert [bucket.anchor for bucket, _status in found.limits] == [13]

    def test_a_resolver_costs_no_query_once_its_callers_are_known(self, resolver: None, alice: User) -> None:
        RatePolicy.objects.create(plan=Plan.objects.create(name="Staff", slug="staff"), rates="5/hour")
        check_request(request_from(alice, tenant="acme"))
        assert policies.assigned_kinds == ()
        assert queries(lambda: check_request(request_from(alice, tenant="acme"))) == 0
        assign("tenant:acme", 2)
        counts = [queries(lambda: check_request(request_from(alice, tenant="acme"))) for _ in range(3)]
        assert counts[1:] == [0, 0]


class TestWhatIsRead:
    def test_nothing_where_no_subject_is_on_a_plan(self, alice: User) -> None:
        PlanAssignment.objects.create(user=alice, plan=plan_of(1))
        RatePolicy.objects.create(rates="5/hour")
        assert limits(check_request(request_from())) == [5], "the identifier tenant was not called"
        assert policies.assigned_kinds == ()
        assert queries(lambda: check_caller(ip=None, identifiers=BOTH)) == 0

    def test_one_query_for_all_subjects_that_are_not_in_memory(self, too_many_entries: None) -> None:
        assign("tenant:acme", 2)
        assign("api_key:k1", 3)
        check_caller()
        counts = [queries(lambda: check_caller(ip=None, identifiers=BOTH)) for _ in range(2)]
        counts += [queries(lambda: check_caller(ip=None, identifiers={**ACME, "api_key": "k2"})) for _ in range(2)]
        counts += [queries(lambda: check_caller(ip=None, identifiers={"tenant": "none"})) for _ in range(2)]
        assert counts == [1, 0] * 3

    def test_kinds_without_an_assignment_are_not_looked_for(self) -> None:
        assign("tenant:acme", 2)
        check_caller()
        assert policies.assigned_kinds == ("user", "tenant")
        assert queries(lambda: check_caller(ip=None, identifiers=KEY)) == 0

    def test_while_the_database_is_down_only_the_default_plan_counts(self, too_many_entries: None) -> None:
        plan_of(9, default_for="anonymous")
        assign("tenant:acme", 2)
        assign("tenant:globex", 3)
        assert limits(check_caller(ip=None, identifiers=ACME)) == [2]
        with database_down():
            assert limits(check_caller(ip=None, identifiers={"tenant": "globex"})) == [9]
            assert limits(check_caller(ip=None, identifiers=ACME)) == [2], "in memory"
            policies.assigned_kinds = None
            assert limits(check_caller(ip=None, identifiers=ACME)) == [9]
        assert limits(check_caller(ip=None, identifiers={"tenant": "globex"})) == [3]

    @pytest.mark.parametrize("how", [check_caller, async_to_sync(acheck_caller)], ids=["sync", "async"])
    def test_a_plan_in_memory_applies_to_users_who_are_not(
        self, how: Callable[..., Decision], too_many_entries: None
    ) -> None:
        """With the database down, they got the default plan, and months began on another day."""
        plan_of(9, default_for="authenticated")
        row = assign("tenant:acme", 500, anchor=9)
        RatePolicy.objects.create(plan=row.plan, rates="20/month", counted_per="tenant")
        check_caller(ip=None, identifiers=ACME)
        with database_down():
            decision = how(user=77, identifiers=ACME)
            shown = caller_limits(DescribedCaller(user_id="77", address=None, identifiers=ACME)).limits
        assert [(one.limit, one.bucket.anchor) for one in decision.statuses] == [(500, 1), (20, 9)]
        assert [bucket.rate.limit for bucket, _status in shown] == [500, 20]


class TestEdits:
    def test_an_edit_drops_only_its_subjects_entry(self, alice: User) -> None:
        acme, globex = assign("tenant:acme", 2), assign("tenant:globex", 3)
        for who in ({"identifiers": ACME}, {"identifiers": {"tenant": "globex"}}, {"user": alice}):
            check_caller(**who)
        keys = [("tenant", "acme"), ("tenant", "globex"), str(alice.pk)]
        before, reloads = policies.entries(keys), policies.reloads
        globex.plan = acme.plan
        globex.save()
        assert queries(lambda: check_caller(ip=None, identifiers={"tenant": "globex"})) == 2, (
            "the change, and the subject"
        )
        after = policies.entries(keys)
        assert [key for key in keys if after[key] is not before[key]] == [("tenant", "globex")]
        assert policies.reloads == reloads, "the snapshot is as before"
        assert limits(check_caller(ip=None, identifiers={"tenant": "globex"})) == [2]

    def test_the_first_assignment_of_a_kind_binds_the_next_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert limits(check_caller(ip=None, identifiers=BOTH)) == []
        made = assign("api_key:k1", 3)
        assert limits(check_caller(ip=None, identifiers=BOTH)) == [3]
        assign("tenant:acme", 2)
        assert limits(check_caller(ip=None, identifiers=BOTH)) == [2]
        assert policies.assigned_kinds == ("user", "tenant", "api_key")
        PlanAssignment.objects.exclude(pk=made.pk).delete()
        assert limits(check_caller(ip=None, identifiers=BOTH)) == [3]
        monkeypatch.setattr("django_ratequota.policies.cache.TIDY_SECONDS", 0)
        default_limiter().publish()
        assert limits(check_caller(ip=None, identifiers=BOTH)) == [3]
        assert policies.assigned_kinds == ("user", "api_key")

    def test_a_published_edit_by_raw_sql_is_found(self) -> None:
        made = assign("tenant:acme", 2)
        assert limits(check_caller(ip=None, identifiers=BOTH)) == [2]
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE django_ratequota_planassignment SET subject = 'api_key:k1' WHERE id = %s", [made.pk]
            )
        write_publication("raw SQL")
        assert limits(check_caller(ip=None, identifiers=ACME)) == []
        assert limits(check_caller(ip=None, identifiers=KEY)) == [2]

    def test_a_transaction_sees_its_own_assignments_and_nobody_else_does(self) -> None:
        check_caller(ip=None, identifiers=ACME)
        with transaction.atomic():
            assign("tenant:acme", 2)
            assert limits(check_caller(ip=None, identifiers=ACME)) == [2]
            transaction.set_rollback(True)
        assert limits(check_caller(ip=None, identifiers=ACME)) == []
        assert policies.assigned_kinds == ()
        assert policies.entries([("tenant", "acme")])["tenant", "acme"].assignments == ()


class TestAnchors:
    def test_only_months_that_are_the_customers_own_begin_on_her_day(self, alice: User) -> None:
        plan = Plan.objects.create(name="Pro", slug="pro")
        rates = "5/month, 7/week fixed_window, 9/hour"
        for counted_per in ("caller", "tenant", "api_key", "ip", "plan", "everyone"):
            RatePolicy.objects.create(plan=plan, counted_per=counted_per, rates=rates)
        PlanAssignment.objects.create(subject="tenant:acme", plan=plan, anchor=15)

        def anchors(**who: Any) -> dict[str, list[int]]:
            caller = DescribedCaller(**{"user_id": None, "address": "203.0.113.7", "identifiers": BOTH, **who})
            explanation = explain_caller(caller, scope=None)
            found: dict[str, list[int]] = {}
            for bucket in explanation.resolution.buckets:
                found.setdefault(bucket.counted_per, []).append(bucket.anchor)
            assert [b for c in explanation.candidates for b in c.buckets] == list(explanation.resolution.buckets)
            return found

        own, shared = [15, 1, 1], [1, 1, 1]
        expected = {"tenant": own, "api_key": own, "ip": shared, "plan": shared, "everyone": shared}
        assert anchors(user_id=str(alice.pk)) == {"caller": own, **expected}
        assert anchors() == {"caller": shared, **expected}, "several customers share the address"
        PlanAssignment.objects.create(user=alice, plan=plan, anchor=None)
        # Now her plan is her own, and no longer the organisation's; its limits still begin on its day.
        assert anchors(user_id=str(alice.pk)) == {**expected, "caller": shared, "api_key": shared}

    @pytest.mark.parametrize(
        ("rows", "day"),
        [
            ([], 0),
            ([(10, 30, 0)], 0),
            ([(0, None, 0)], 1),
            ([(0, None, 15)], 15),
            # A trial: without a day, and with one.
            ([(0, None, 15), (40, 60, 0)], 15),
            ([(0, None, 15), (40, 60, 20)], 20),
            ([(0, None, 15), (40, 60, 1)], 1),
            ([(0, None, 15), (10, 20, 3), (40, 60, 0)], 15),
            ([(0, None, 15), (10, None, 20), (40, 60, 0)], 20),
            ([(0, 90, 15), (10, None, 20), (40, 60, 0)], 15),
            # What has ended tells the day where nothing else does: the last one.
            ([(10, 30, 15)], 15),
            ([(10, 30, 15), (30, None, 0)], 15),
            ([(0, 45, 15), (10, 30, 20), (45, None, 0)], 15),
            ([(0, None, 0), (60, None, 15)], 1),
        ],
    )
    def test_of_several_days_the_first_counts(self, rows: list[Any], day: int) -> None:
        """A trial without a day, and the end of any assignment, do not move it."""
        for order in permutations(enumerate(rows)):
            made = [
                Assignment(id=pk, plan_id=1, starts_us=start, ends_us=end, anchor=named)
                for pk, (start, end, named) in order
            ]
            assert UserEntry(assignments=tuple(made)).anchor(50) == day

    def test_the_end_of_an_organisations_plan_does_not_move_its_day(self, alice: User) -> None:
        RatePolicy.objects.create(rates="5/month")
        RatePolicy.objects.create(counted_per="tenant", rates="5/month")
        now = timezone.now()
        ended = {"starts_at": now - timedelta(days=2), "ends_at": now - timedelta(days=1)}
        assign("tenant:acme", 9, anchor=15, **ended)

        def days(**who: Any) -> list[int]:
            return [status.bucket.anchor for status in check_caller(user=alice, **who).statuses]

        assert days(identifiers=ACME) == [15, 15]
        assert days() == [1]
        assert days(identifiers=ACME, plan="p9") == [1, 15], "9/hour has no month"


class TestWhatIsShown:
    def explanation(self, **who: Any) -> tuple[str | None, str, Resolution]:
        found = explain_caller(DescribedCaller(**{"user_id": None, "address": None, **who}), scope=None)
        return found.plan and found.plan.name, found.plan_source, found.resolution

    def test_explain_says_when_a_subject_that_is_not_named_may_have_another_plan(
        self, alice: User, settings: Any
    ) -> None:
        pk = str(alice.pk)
        assert self.explanation(user_id=pk)[1] == "no plan is assigned, and there is no default plan"
        assign("tenant:acme", 2)
        other = ", but a request with tenant may be on another plan"
        assert self.explanation(user_id=pk)[1] == "no plan is assigned, and there is no default plan" + other
        assert self.explanation(user_id=pk, identifiers={"tenant": "globex"})[1].endswith("no default plan")
        PlanAssignment.objects.create(user=alice, plan=plan_of(5))
        assert self.explanation(user_id=pk)[1] == "assigned to the user"
        settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["tenant", "user"]}
        assert self.explanation(user_id=pk)[1] == "assigned to the user" + other

    def test_the_usage_api_shows_no_limit_of_a_plan_that_cannot_be_read(self) -> None:
        assign("tenant:acme", 2)
        check_caller()
        with database_down():
            policies.assigned_kinds = None
            assert caller_limits(DescribedCaller(user_id=None, address=None, identifiers=ACME)).limits == ()

    def test_the_tightest_limit_is_left_out_where_only_a_request_shows_the_plan(
        self, alice: User, settings: Any
    ) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["api_key", "user", "ip"]}
        plan_of(9, default_for="authenticated")
        user, key = f"user:{alice.pk}", "api_key:k1"
        assert {name: status.limit for name, status in tightest([user, key]).items()} == {user: 9}
        assign(key, 3)
        found = {name: status.limit for name, status in tightest([user, key]).items()}
        assert found == {user: 9, key: 3}, "with a key she is counted as that key"
        assign("tenant:acme", 2)
        found = {name: status.limit for name, status in tightest([user, key]).items()}
        assert found == {key: 3}, "her tenant is not known"
        PlanAssignment.objects.create(user=alice, plan=plan_of(5))
        found = {name: status.limit for name, status in tightest([user, key]).items()}
        assert found == {user: 5, key: 3}

    @pytest.mark.parametrize(("mode", "known"), [("log", True), ("enforce", False)])
    def test_a_log_only_policy_for_a_plan_hides_no_limit(
        self, alice: User, settings: Any, mode: str, known: bool
    ) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "tests.project.views.plan_of_some"}
        RatePolicy.objects.create(rates="100/hour")
        RatePolicy.objects.create(plan=Plan.objects.create(name="x", slug="x"), rates="5/hour", mode=mode)
        assert (f"user:{alice.pk}" in tightest([f"user:{alice.pk}"])) is known


class TestValidation:
    @pytest.mark.parametrize(
        ("subject", "message"),
        [
            ("user:42", "Choose the user instead of user:42."),
            ("ip:203.0.113.7", WRITE),
            ("203.0.113.0/24", WRITE),
            ("2001:db8::1", WRITE),
            ("acme", WRITE),
            ("tenant:", WRITE),
            ("tenant: acme", "Enter tenant:acme without a space after the colon."),
            ("org:acme", WRITE),
            ("tenant:a\x00b", "A subject cannot contain NUL characters."),
        ],
    )
    def test_other_subjects_are_refused(self, subject: str, message: str) -> None:
        with pytest.raises(ValidationError) as refused:
            PlanAssignment(subject=subject, plan=plan_of(1)).clean_fields()
        assert refused.value.message_dict == {"subject": [message]}

    def test_without_identifiers_only_users_can_be_on_a_plan(self, settings: Any) -> None:
        settings.RATEQUOTA, plan = {}, plan_of(1)
        for subject in ("tenant:acme", "user:"):
            with pytest.raises(ValidationError, match="IDENTIFIERS'\\] is empty"):
                PlanAssignment(subject=subject, plan=plan).clean_fields()
