"""Undoing a save: what comes back, what stays as it is and why, and that the undo is itself one save."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from django_ratequota.changes.writer import changed_by, field_values, write_reset
from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList
from django_ratequota.operations.undo import Undo, plan_undo, undo

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "tenants")]

MODELS = (Plan, Endpoint, RatePolicy, PlanAssignment, SubjectList, ListMember)


def state() -> dict[Any, dict[str, Any]]:
    """Return the fields of all objects."""
    return {(model.__name__, row.pk): field_values(row) for model in MODELS for row in model.objects.all()}


def last_save() -> Any:
    return PolicyChange.objects.all()[0].change_id


def undone(change_id: Any = None, *, overwrite: bool = False) -> Undo:
    """Undo the save, by default the last one; return the plan."""
    with transaction.atomic():
        plan = plan_undo(change_id or last_save(), lock=True)
        undo(plan, actor=None, reason="Undone", overwrite=overwrite)
    return plan


def left(plan: Undo) -> list[tuple[str, bool, str]]:
    """Return the kinds of objects that stay as they are, whether they were edited, and what is in the way."""
    return [(step.kind, step.edited, step.obstacle) for step in plan.steps if not step.applies(False)]


def plan(name: str, **fields: Any) -> Plan:
    return Plan.objects.create(name=name, slug=name.lower(), **fields)


@pytest.fixture
def scene() -> dict[str, Any]:
    """Return two plans, an endpoint, policies, assignments and lists, by name."""
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
    """Create, edit and delete objects of all kinds."""
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


def swap(scene: dict[str, Any]) -> None:
    """Swap the names and the policies of two plans, with their slugs and the default, and of two lists."""
    plans: Any = Plan.objects
    plans.filter(pk=scene["free"].pk).update(name="x", slug="x", default_for="")
    plans.filter(pk=scene["pro"].pk).update(name="Free", slug="free", default_for="anonymous")
    plans.filter(pk=scene["free"].pk).update(name="Pro", slug="pro")
    lists: Any = SubjectList.objects
    lists.filter(pk=scene["bots"].pk).update(name="x")
    lists.filter(pk=scene["beta"].pk).update(name="Bots")
    lists.filter(pk=scene["bots"].pk).update(name="Beta")
    policies: Any = RatePolicy.objects
    for one, other, field in (("free", "pro", "plan"), ("bots", "beta", "subject_list")):
        policies.filter(pk=scene[f"{one}_all"].pk).update(**{"counted_per": "ip", field: scene[other]})
        policies.filter(pk=scene[f"{other}_all"].pk).update(**{field: scene[one]})
        policies.filter(pk=scene[f"{one}_all"].pk).update(counted_per="caller")


def replace(scene: dict[str, Any]) -> None:
    """Replace the plan Pro by another one of the same name, which takes its policy and its assignment."""
    old = scene["pro"]
    Plan.objects.filter(pk=old.pk).update(name="Old", slug="old")
    new = plan("Pro")
    RatePolicy.objects.filter(plan=old).update(plan=new)
    PlanAssignment.objects.filter(plan=old).update(plan=new)


def swap_members(scene: dict[str, Any]) -> None:
    """Move each of the three members of a list into the place of another."""
    members = list(scene["bots"].members.order_by("pk"))
    rows: Any = [ListMember.objects.filter(pk=member.pk) for member in members]
    for number, row in enumerate(rows):
        row.update(user=None, subject=f"tenant:{number}")
    for row, member in zip(rows, members[1:] + members[:1], strict=True):
        row.update(user=member.user, subject=member.subject)


EDITS = {
    "mixed": mixed,
    "swap": swap,
    "members swapped": swap_members,
    "a list deleted": lambda scene: scene["bots"].delete(),
    "members changed": lambda scene: (
        ListMember.objects.filter(subject="ip:192.0.2.7").delete(),
        ListMember.objects.create(subject_list=scene["beta"], subject="ip:192.0.2.7"),
        ListMember.objects.update(reason="Ticket 4711"),
    ),
    "created": lambda scene: RatePolicy.objects.create(plan=plan("Team"), rates="1/s"),
    "deleted": lambda scene: scene["free"].delete(),
    "several deleted": lambda scene: Plan.objects.all().delete(),
    "an endpoint deleted": lambda scene: scene["search"].delete(),
    "a subject moved to another plan": lambda scene: PlanAssignment.objects.filter(subject="tenant:acme").update(
        plan=scene["free"], anchor=None, subject="tenant:beta"
    ),
    "updated": lambda scene: RatePolicy.objects.update(mode="off", reason="Ticket 4711"),
    "dated": lambda scene: RatePolicy.objects.update(ends_at=timezone.now().replace(microsecond=5000)),
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
        step for step in undone().steps if step.edited or step.obstacle or (step.done and step.verb != "delete")
    ]
    assert state() == before
    rows = PolicyChange.objects.order_by("pk")[history:]
    assert len({row.change_id for row in rows}) == len(published) == (0 if before == after else 1)
    assert {row.reason for row in rows} <= {"Undone"}
    assert len({(row.model, row.object_id) for row in rows}) == len(rows), "one row per object"
    if before != after:
        undone()
        assert state() == after


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


def test_a_value_that_is_taken_by_now_is_refused_with_a_message(scene: dict[str, Any]) -> None:
    with transaction.atomic():
        Plan.objects.filter(pk=scene["pro"].pk).update(name="Team")
        RatePolicy.objects.update(mode="log")
    change_id = last_save()
    Plan.objects.create(name="Pro", slug="p")
    before = state()
    with pytest.raises(ValidationError, match=r"Pro: name: Plan with this Name already exists\."):
        undone(change_id)
    assert state() == before
    free = scene["free_all"]
    free.delete()
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
        write_reset("everyone", [])
    assert undone().steps == []


def test_what_is_forbidden_is_left_as_it_is(scene: dict[str, Any]) -> None:
    pk = scene["pro"].pk
    with transaction.atomic():
        mixed(scene)

    def forbidden(now: Any, then: Any) -> str:
        return "no" if isinstance(now or then, Plan) and then is not None else ""

    with transaction.atomic():
        plan = plan_undo(last_save(), lock=True, forbidden=forbidden)
        undo(plan, actor=None, reason="")
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
    with django_assert_max_num_queries(80):
        undone()
    assert state() == before
