"""Taking changes back: which objects and fields are set, which stay as they are, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from django_ratequota.changes.writer import changed_by, field_values, write_counted, write_publication
from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList
from django_ratequota.operations.revert import Revert, apply, plan_restore, plan_undo, versions

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "tenants")]

DAY, DATE = timedelta(days=1), datetime(2026, 1, 2, tzinfo=UTC)
MODELS = (Plan, Endpoint, RatePolicy, PlanAssignment, SubjectList, ListMember)


def state() -> dict[Any, dict[str, Any]]:
    return {(model.__name__, row.pk): field_values(row) for model in MODELS for row in model.objects.all()}


def last_save() -> Any:
    return PolicyChange.objects.all()[0].change_id


def undone(change_id: Any = None, *, overwrite: bool = False) -> Revert:
    """Undo the save, by default the last one; return the plan."""
    with transaction.atomic():
        plan = plan_undo(change_id or last_save(), lock=True)
        apply(plan, actor=None, reason="Undone", chosen=overwrite)
    return plan


def left(plan: Revert) -> list[tuple[str, bool, str]]:
    """Return the kinds of objects that stay as they are, whether they were edited, and what is in the way."""
    return [(step.kind, step.edited, step.obstacle) for step in plan.steps if not step.applies(False)]


def plan(name: str, **fields: Any) -> Plan:
    return Plan.objects.create(name=name, slug=name.lower(), **fields)


@pytest.fixture
def scene() -> dict[str, Any]:
    free, pro = plan("Free", default_for="anonymous"), plan("Pro")
    search = Endpoint.objects.create(name="search")
    return {
        "free": free,
        "pro": pro,
        "search": search,
        "free_all": RatePolicy.objects.create(plan=free, rates="1/s"),
        "free_search": RatePolicy.objects.create(plan=free, endpoint=search, rates="2/s", reason="A trial"),
        "pro_all": RatePolicy.objects.create(plan=pro, rates="3/s"),
        "assignment": PlanAssignment.objects.create(user=User.objects.create(username="alice"), plan=pro),
        "acme": PlanAssignment.objects.create(subject="tenant:acme", plan=pro, anchor=31),
        "bots": (bots := subject_list("Bots", "ip:203.0.113.0/24", "ip:192.0.2.7")),
        "member": ListMember.objects.create(subject_list=bots, user=User.objects.get(username="alice")),
        "beta": (beta := subject_list("Beta", "ip:198.51.100.7")),
        "bots_all": RatePolicy.objects.create(subject_list=bots, rates="blocked"),
        "beta_all": RatePolicy.objects.create(subject_list=beta, rates="9/s"),
    }


def subject_list(name: str, *subjects: str) -> SubjectList:
    created: SubjectList = SubjectList.objects.create(name=name)
    for subject in subjects:
        ListMember.objects.create(subject_list=created, subject=subject)
    return created


def mixed(scene: dict[str, Any]) -> None:
    team = plan("Team")
    RatePolicy.objects.create(plan=team, rates="5/s")
    exports = Endpoint.objects.create(name="exports")
    RatePolicy.objects.create(plan=scene["pro"], endpoint=exports, rates="6/s")
    RatePolicy.objects.filter(pk=scene["free_all"].pk).update(rates="9/s", mode="log")
    scene["search"].name = "find"
    scene["search"].save()
    scene["assignment"].plan = team
    scene["assignment"].save()
    scene["pro"].delete()
    Plan.objects.filter(pk=scene["free"].pk).update(name="Gratis", default_for="")


def move_on(scene: dict[str, Any]) -> None:
    """Give the default, a name and a list's place of one object to another, as an import may in one save."""
    plans: Any = Plan.objects
    plans.filter(pk=scene["free"].pk).update(name="Basic", slug="basic", default_for="")
    plans.filter(pk=scene["pro"].pk).update(name="Free", default_for="anonymous")
    lists: Any = SubjectList.objects
    lists.filter(pk=scene["bots"].pk).update(name="Old")
    lists.filter(pk=scene["beta"].pk).update(name="Bots")
    policies: Any = RatePolicy.objects
    policies.filter(pk=scene["free_all"].pk).update(counted_per="ip")
    policies.filter(pk=scene["pro_all"].pk).update(plan=scene["free"], mode="log")


def replace(scene: dict[str, Any]) -> None:
    """Replace the plan Pro by another one of the same name, which takes its policy and its assignment."""
    old = scene["pro"]
    Plan.objects.filter(pk=old.pk).update(name="Old", slug="old")
    new = plan("Pro")
    RatePolicy.objects.filter(plan=old).update(plan=new)
    PlanAssignment.objects.filter(plan=old).update(plan=new)


EDITS = {
    "mixed": mixed,
    "moved on": move_on,
    "a list deleted": lambda scene: scene["bots"].delete(),
    "members changed": lambda scene: (
        ListMember.objects.filter(subject="ip:192.0.2.7").delete(),
        ListMember.objects.create(subject_list=scene["beta"], subject="ip:192.0.2.7"),
        ListMember.objects.update(reason="Ticket 4711"),
    ),
    "several deleted": lambda scene: Plan.objects.all().delete(),
    "an endpoint deleted": lambda scene: scene["search"].delete(),
    "a subject moved to another plan": lambda scene: PlanAssignment.objects.filter(subject="tenant:acme").update(
        plan=scene["free"], anchor=None, subject="tenant:beta"
    ),
    "updated": lambda scene: RatePolicy.objects.update(mode="off", reason="Ticket 4711"),
    "dated": lambda scene: RatePolicy.objects.update(ends_at=timezone.now()),
    "created and deleted": lambda scene: plan("Team").delete(),
    "deleted and created": lambda scene: (
        scene["pro_all"].delete(),
        RatePolicy.objects.create(plan=scene["pro"], rates="4/s"),
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_save_is_undone_and_the_undo_too(scene: dict[str, Any], edit: Any, published: list[Any]) -> None:
    before = state()
    with transaction.atomic():
        edit(scene)
    after = state()
    history = PolicyChange.objects.count()
    published.clear()
    # The save itself has created and deleted these.
    assert not [
        step for step in undone().steps if step.edited or step.obstacle or (step.done and step.now is not None)
    ]
    assert state() == before
    rows = PolicyChange.objects.order_by("pk")[history:]
    assert len({row.change_id for row in rows}) == len(published) == (0 if before == after else 1)
    assert {row.reason for row in rows} <= {"Undone"}
    assert len({(row.model, row.object_id) for row in rows}) == len(rows), "one row per object"
    if before != after:
        undone()
        assert state() == after


def test_an_undo_is_recorded_as_one_of_its_save(scene: dict[str, Any]) -> None:
    RatePolicy.objects.update(mode="log")
    change_id = last_save()
    undone()
    assert {row.undoes for row in PolicyChange.objects.filter(change_id=last_save())} == {change_id}
    RatePolicy.objects.update(mode="off")
    assert PolicyChange.objects.all()[0].undoes is None


def test_a_replaced_plan_whose_name_is_needed_again_is_refused(scene: dict[str, Any]) -> None:
    """The new plan is deleted last, when the policies are on the old one again; so it still has the name."""
    with transaction.atomic():
        replace(scene)
    before = state()
    with pytest.raises(ValidationError, match="Plan with this Name already exists"):
        undone()
    assert state() == before
    Plan.objects.filter(name="Pro").update(name="New", slug="new")
    change_id = PolicyChange.objects.filter(object_text="Old")[0].change_id
    undone(change_id, overwrite=True)
    assert set(Plan.objects.values_list("name", flat=True)) == {"Free", "Pro"}
    assert {row.plan for row in PlanAssignment.objects.all()} == {scene["pro"]}


def test_later_edits_of_other_fields_stay(scene: dict[str, Any]) -> None:
    policy = RatePolicy.objects.filter(pk=scene["free_all"].pk)
    policy.update(rates="9/s")
    change_id = last_save()
    policy.update(mode="log")
    assert left(undone(change_id)) == []
    assert policy.values_list("rates", "mode").get() == ("1/s", "log")


@pytest.mark.parametrize("overwrite", [False, True])
def test_later_edits_of_the_same_fields_stay_unless_they_are_overwritten(
    scene: dict[str, Any], overwrite: bool
) -> None:
    RatePolicy.objects.filter(plan=scene["free"]).update(rates="9/s")
    change_id = last_save()
    RatePolicy.objects.filter(pk=scene["free_all"].pk).update(rates="10/s")
    assert left(undone(change_id, overwrite=overwrite)) == [("ratepolicy", True, "")]
    rates = RatePolicy.objects.filter(plan=scene["free"]).order_by("pk").values_list("rates", flat=True)
    assert list(rates) == ["1/s" if overwrite else "10/s", "2/s"]


def test_an_object_that_is_as_before_already_is_left(scene: dict[str, Any]) -> None:
    policy = RatePolicy.objects.filter(pk=scene["free_all"].pk)
    policy.update(rates="9/s")
    change_id = last_save()
    policy.update(rates="1/s")
    history = PolicyChange.objects.count()
    assert left(undone(change_id)) == [("ratepolicy", False, "")]
    assert PolicyChange.objects.count() == history


def test_a_created_plan_that_others_refer_to_is_never_deleted(scene: dict[str, Any]) -> None:
    with transaction.atomic():
        RatePolicy.objects.create(plan=plan("Team"), rates="1/s")
    change_id = last_save()
    team = Plan.objects.get(name="Team")
    PlanAssignment.objects.create(user=User.objects.create(username="bob"), plan=team)
    text = "1 of the plan assignments refer to it now. Delete or move these first."
    assert left(undone(change_id, overwrite=True)) == [("plan", False, text)]
    assert Plan.objects.filter(name="Team").exists()
    assert not team.policies.exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_created_plan_stays_with_its_edited_policy(scene: dict[str, Any], overwrite: bool) -> None:
    with transaction.atomic():
        RatePolicy.objects.create(plan=plan("Team"), rates="1/s")
    change_id = last_save()
    RatePolicy.objects.filter(plan__name="Team").update(rates="2/s")
    found = left(undone(change_id, overwrite=overwrite))
    assert found == [("plan", True, ""), ("ratepolicy", True, "")]
    assert Plan.objects.filter(name="Team").exists() is not overwrite


def test_an_object_deleted_since_stays_deleted(scene: dict[str, Any]) -> None:
    RatePolicy.objects.filter(pk=scene["free_all"].pk).update(rates="9/s")
    change_id = last_save()
    scene["free_all"].delete()
    text = "It was deleted since then. Restore it first."
    assert left(undone(change_id, overwrite=True)) == [("ratepolicy", False, text)]


def test_a_policy_that_has_a_successor_is_refused_with_a_message(scene: dict[str, Any]) -> None:
    scene["free_all"].delete()
    change_id = last_save()
    RatePolicy.objects.create(plan=scene["free"], rates="4/s")
    with pytest.raises(ValidationError, match="A policy without dates already has the same audience"):
        undone(change_id)


def test_a_version_that_cannot_be_read_any_more_is_named(scene: dict[str, Any]) -> None:
    RatePolicy.objects.update(rates="9/s")
    rows = PolicyChange.objects.filter(change_id=last_save()).order_by("pk")
    row = rows[0]
    PolicyChange.objects.filter(pk=row.pk).update(before={**row.before, "rates": "10/fortnight"})
    ((kind, edited, text),) = left(undone(rows[1].change_id))
    assert (kind, edited) == ("ratepolicy", False)
    assert "cannot be read any more" in text
    assert sorted(RatePolicy.objects.values_list("rates", flat=True)) == ["2/s", "3/s", "9/s", "9/s", "blocked"]


def test_counters_and_publications_are_not_undone() -> None:
    with changed_by(None, "x"):
        write_counted("everyone", "reset", before={}, after={})
    assert undone().steps == []


def test_what_is_forbidden_is_left_as_it_is(scene: dict[str, Any]) -> None:
    pk = scene["pro"].pk
    with transaction.atomic():
        mixed(scene)

    def forbidden(now: Any, then: Any) -> str:
        return "no" if isinstance(now or then, Plan) and then is not None else ""

    with transaction.atomic():
        plan = plan_undo(last_save(), lock=True, forbidden=forbidden)
        apply(plan, actor=None, reason="")
    on_deleted_plan = f"The plan with the id {pk} is deleted; restore or create that first."
    assert {(kind, text) for kind, _edited, text in left(plan) if text} == {
        ("plan", "no"),
        ("ratepolicy", on_deleted_plan),
        ("planassignment", on_deleted_plan),
        ("plan", "1 of the plan assignments refer to it now. Delete or move these first."),
    }
    assert set(Plan.objects.values_list("name", flat=True)) == {"Gratis", "Team"}
    assert not Endpoint.objects.filter(name="exports").exists()


def test_the_hash_names_the_state_that_was_compared(scene: dict[str, Any]) -> None:
    RatePolicy.objects.update(mode="off")
    change_id = last_save()
    seen = plan_undo(change_id).seen
    assert plan_undo(change_id).seen == seen
    RatePolicy.objects.filter(pk=scene["pro_all"].pk).update(rates="9/s")
    assert plan_undo(change_id).seen != seen


# --- Versions. ---


def edited_everything(scene: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return an object of each model with every field set, to the microsecond, and an edit of each field."""
    alice, bob = User.objects.get(username="alice"), User.objects.create(username="bob")
    now = timezone.now().replace(microsecond=123_456)
    dates = {"starts_at": now - DAY, "ends_at": now + DAY, "reason": "A trial"}
    made = {"description": "Reports", "routes": "reports:*\n/api/*", "methods": "GET POST", "cost": 7}
    reports = Endpoint.objects.create(name="reports", charged_statuses="4xx", exempt=True, **made)
    assignment = PlanAssignment.objects.create(
        user=alice, plan=scene["free"], created_by=bob, created_at=now - DAY, **dates
    )
    policy = RatePolicy.objects.create(
        plan=scene["pro"],
        endpoint=scene["search"],
        counted_per="ip",
        rates="10/s, 1000/hour burst 50",
        algorithm="gcra",
        mode="log",
        on_error="deny",
        **dates,
    )
    undated = {"starts_at": None, "ends_at": None, "reason": ""}
    return [
        (reports, {"name": "r", "charged_statuses": "", "exempt": False, "cost": 1}),
        (reports, {"description": "", "routes": "", "methods": ""}),
        (
            assignment,
            {
                **undated,
                "user": None,
                "subject": "tenant:acme",
                "plan": scene["pro"],
                "anchor": 31,
                "created_by": None,
            }
            | {"starts_at": now},
        ),
        (
            policy,
            {**undated, "plan": None, "user": alice, "endpoint": None, "counted_per": "caller", "rates": "1/s"}
            | {"algorithm": "token_bucket", "mode": "off", "on_error": "", "durable": False},
        ),
        (scene["free"], {"name": "F", "slug": "f", "description": "Few", "default_for": "", "position": 7}),
    ]


def restored(change: PolicyChange, version: Any, *, chosen: bool = False) -> Revert:
    with transaction.atomic():
        plan = plan_restore(change, version, lock=True)
        apply(plan, actor=None, reason="Restored", chosen=chosen)
    return plan


def last(action: str, **fields: Any) -> PolicyChange:
    change = PolicyChange.objects.filter(action=action, **fields).first()
    assert change is not None
    return change


@pytest.mark.parametrize("deleted", [False, True], ids=["edited", "deleted"])
def test_every_field_is_restored_under_the_old_primary_key(
    scene: dict[str, Any], published: list[Any], deleted: bool
) -> None:
    """Times were cut to milliseconds: an import of an older export then created everything dated again."""
    for row, edits in edited_everything(scene):
        rows: Any = type(row).objects.filter(pk=row.pk)
        (before,) = rows.values()
        for name, value in edits.items():
            setattr(row, name, value)
        row.save()
        (after,) = rows.values()
        change = last("update")
        if deleted:
            rows.delete()
        published.clear()
        restored(change, "before")
        (found,) = rows.values()
        assert found == before
        assert len(published) == 1
        newest = PolicyChange.objects.all()[0]
        assert (newest.action, newest.reason) == ("create" if deleted else "update", "Restored")
        assert (newest.before, newest.after) == (None if deleted else change.after, change.before)
        restored(change, "after")
        (found,) = rows.values()
        assert found == after
        assert not [step for step in restored(change, "after").steps if not step.done]


def test_a_deleted_object_comes_back_alone_or_with_what_was_deleted_along(
    scene: dict[str, Any], published: list[Any]
) -> None:
    RatePolicy.objects.filter(pk=scene["free_search"].pk).delete()  # before, by a save of its own
    PlanAssignment.objects.create(user=User.objects.get(username="alice"), plan=scene["free"], starts_at=DATE)
    before = state()
    scene["free"].delete()
    change = last("delete", model="plan")
    plan = plan_restore(change, "before")
    assert [(step.kind, step.verb, step.along) for step in plan.steps] == [
        ("plan", "create", False),
        ("planassignment", "create", True),
        ("ratepolicy", "create", True),
    ]
    published.clear()
    assert plan_restore(change, "before", most=2).too_large == change.change_id
    restored(change, "before")
    found = state()
    assert found == {key: row for key, row in before.items() if key in found}
    assert len(before) - len(found) == 2
    assert len(published) == 1
    Plan.objects.filter(pk=change.object_id).delete()
    restored(change, "before", chosen=True)
    assert not PlanAssignment.objects.filter(plan=change.object_id).exists()  # deleted by another save than the last
    undone(change.change_id)
    assert state() == before


def test_what_was_deleted_along_stays_where_it_exists_again_or_cannot_be_created(scene: dict[str, Any]) -> None:
    assignment, policy = scene["acme"], scene["pro_all"]
    on_search = RatePolicy.objects.create(plan=scene["pro"], endpoint=scene["search"], rates="4/s")
    pks = {"assignment": scene["assignment"].pk, "acme": assignment.pk, "policy": policy.pk, "search": on_search.pk}
    scene["pro"].delete()
    change = last("delete", model="plan")
    scene["search"].delete()
    PlanAssignment.objects.create(pk=pks["acme"], subject="tenant:beta", plan=scene["free"])
    plan = restored(change, "before", chosen=True)
    (obstacle,) = (step.obstacle for step in plan.steps if step.obstacle)
    assert obstacle.startswith("The endpoint with the id")
    assert set(RatePolicy.objects.filter(plan=change.object_id).values_list("pk", flat=True)) == {pks["policy"]}
    assert PlanAssignment.objects.get(pk=pks["assignment"]).plan.name == "Pro"
    assert PlanAssignment.objects.get(pk=pks["acme"]).plan == scene["free"]


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"colour": "red"}, "This version has fields that no longer exist (colour)"),
        ({"rates": "10/fortnight"}, "cannot be read any more"),
        ({"counted_per": "tenants"}, "Nothing is counted per 'tenants'"),
        ({"algorithm": "abacus"}, "is not a valid choice"),
        ({"starts_at": "some day"}, "cannot be read any more"),
        ({"subject": "ip:no address"}, "subject"),
        ({"subject": "ip:::1"}, "Choose one audience"),
        ({"mode": None}, "mode: This field cannot be null."),
        ({"plan": 4711}, "The plan with the id 4711 is deleted; restore or create that first."),
    ],
)
def test_a_version_that_is_not_valid_any_more_is_refused(
    scene: dict[str, Any], recorded: dict[str, Any], message: str
) -> None:
    change = last("create", model="ratepolicy", object_id=str(scene["free_all"].pk))
    PolicyChange.objects.filter(pk=change.pk).update(after={**change.after, **recorded})
    change.refresh_from_db()
    for _ in range(2):
        before = state()
        (step,) = restored(change, "after").steps
        assert message in step.obstacle
        assert state() == before
        RatePolicy.objects.filter(pk=scene["free_all"].pk).delete()


def test_a_value_that_another_object_has_by_now_is_in_the_way(scene: dict[str, Any]) -> None:
    Plan.objects.filter(pk=scene["free"].pk).update(name="F", slug="f", default_for="")
    change = last("update")
    other = Plan.objects.create(name="Free", slug="other")
    assert plan_restore(change, "before").steps[0].obstacle == "name: Plan with this Name already exists."
    Plan.objects.filter(pk=other.pk).update(name="Other", default_for="anonymous")
    assert (
        plan_restore(change, "before").steps[0].obstacle.startswith("Another plan is the default for these callers")
    )


def test_fields_that_the_version_lacks_keep_their_values(scene: dict[str, Any]) -> None:
    rows = RatePolicy.objects.filter(pk=scene["free_all"].pk)
    change = last("create", model="ratepolicy", object_id=str(scene["free_all"].pk))
    known = {name: value for name, value in change.after.items() if name != "on_error"}
    PolicyChange.objects.filter(pk=change.pk).update(after=known)
    change.refresh_from_db()
    rows.update(rates="2/s", on_error="local", mode="log")
    restored(change, "after")
    assert rows.values_list("rates", "on_error", "mode").get() == ("1/s", "local", "enforce")


def test_an_assignment_comes_back_without_its_deleted_creator(scene: dict[str, Any]) -> None:
    bob = User.objects.create(username="bob")
    made = PlanAssignment.objects.create(subject="tenant:beta", plan=scene["free"], created_by=bob)
    made.delete()
    bob.delete()
    restored(last("delete"), "before")
    assert PlanAssignment.objects.get(subject="tenant:beta").created_by is None


def test_versions_that_exist_can_be_restored(scene: dict[str, Any]) -> None:
    scene["free_all"].delete()
    write_publication("by hand")
    found = {row.action: versions(row) for row in (*PolicyChange.objects.all()[:2], last("create"))}
    assert found == {"publish": (), "delete": ("before",), "create": ("after",)}
    RatePolicy.objects.update(mode="log")
    assert versions(last("update")) == ("after", "before")


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["create", "update", "delete"])
def test_many_objects_are_undone_in_batches(
    scene: dict[str, Any], action: str, django_assert_max_num_queries: Any
) -> None:
    before = state()
    policies = [RatePolicy(subject=f"ip:10.0.{n // 250}.{n % 250}", rates="1/s") for n in range(1200)]
    RatePolicy.objects.bulk_create(policies)
    if action != "create":
        before = state()
        many = RatePolicy.objects.filter(plan=None)
        many.update(counted_per="ip", rates="2/s") if action == "update" else many.delete()
    with django_assert_max_num_queries(100):
        undone()
    assert state() == before
