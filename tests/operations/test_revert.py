"""Taking changes back: which objects and fields are set, which stay as they are, and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from django_ratequota.changes.writer import field_values
from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList
from django_ratequota.operations.revert import Revert, apply, of_object, of_save, plan
from tests.support.properties import thorough_after

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "tenants")]

DAY, DATE = timedelta(days=1), datetime(2026, 1, 2, tzinfo=UTC)
MODELS = (Plan, Endpoint, RatePolicy, PlanAssignment, SubjectList, ListMember)


def state() -> dict[Any, dict[str, Any]]:
    return {(model.__name__, row.pk): field_values(row) for model in MODELS for row in model.objects.all()}


def last_save() -> Any:
    return PolicyChange.objects.all()[0].change_id


def reverted(rows: Any, undoes: Any = None, **options: Any) -> Revert:
    """Take the rows back; return the plan."""
    with transaction.atomic():
        revert = plan(rows, lock=True, **options)
        apply(revert, actor=None, reason="Undone", undoes=undoes)
    return revert


def undone(change_id: Any = None, **options: Any) -> Revert:
    """Undo the save, by default the last one; return the plan."""
    change_id = change_id or last_save()
    return reverted(of_save(change_id), change_id, **options)


def left(revert: Revert) -> list[tuple[str, tuple[str, ...], str]]:
    """Return the kinds of objects that stay as they are, their fields that were changed since, and the obstacle."""
    return [(step.kind, tuple((step.later and step.later.after) or ()), step.obstacle) for step in revert.left]


# --- Any saves, undone in any order. ---

PLAN_FIELDS = {"description": ["", "a", "b"], "position": [0, 1, 2]}
POLICY_FIELDS = {"rates": ["1/s", "2/s", "3/s"], "mode": ["enforce", "log", "off"]}
#: (model, pk) -> its fields, of the objects that exist.
World = dict[tuple[Any, int], dict[str, Any]]


def world() -> World:
    plans = {(Plan, row.pk): {name: getattr(row, name) for name in PLAN_FIELDS} for row in Plan.objects.all()}
    policies = {
        (RatePolicy, row.pk): {name: getattr(row, name) for name in ("plan_id", *POLICY_FIELDS)}
        for row in RatePolicy.objects.all()
    }
    return plans | policies


def edit(random: Random, number: int) -> None:
    """Create, change or delete an object."""
    model: Any = random.choice([Plan, RatePolicy])
    row = random.choice([*model.objects.all(), None])
    plans = list(Plan.objects.all())
    if row is None and model is Plan:
        Plan.objects.create(name=f"P{number}", slug=f"p{number}")
    elif row is None:
        if plans:  # dated, so that any number may be for one plan
            RatePolicy.objects.create(plan=random.choice(plans), rates="1/s", starts_at=DATE)
    elif random.random() < 0.2:
        row.delete()
    else:
        values = PLAN_FIELDS if model is Plan else {**POLICY_FIELDS, "plan": plans}
        for name in random.sample(list(values), random.randint(1, 2)):
            setattr(row, name, random.choice(values[name]))
        row.save()


def after_undo(now: World, before: World, after: World) -> World:
    """Return what undoing a save, which led from ``before`` to ``after``, makes of the world."""
    then = {key: dict(fields) for key, fields in now.items()}
    touched = sorted({*before, *after}, key=lambda key: (key[0] is RatePolicy, key[1]))
    for key in (key for key in touched if before.get(key) != after.get(key) and key in before):
        wanted, own = before[key], after.get(key, {})
        if key not in now and own:  # deleted since then
            continue
        changed = {name: value for name, value in wanted.items() if own.get(name, ...) != value}
        if key in now:
            changed = {name: value for name, value in changed.items() if now[key][name] == own.get(name, ...)}
        if "plan_id" not in changed or (Plan, changed["plan_id"]) in then:
            then[key] = {**now.get(key, {}), **changed}
    created = [key for key in touched if key in after and key not in before and key in now]
    for key in sorted(created, key=lambda key: key[0] is Plan):
        refers = any(fields.get("plan_id") == key[1] for fields in then.values())
        if now[key] == after[key] and not (key[0] is Plan and refers):
            del then[key]
    return then


@pytest.mark.parametrize("seed", thorough_after(6, range(100)))
def test_any_saves_are_undone_in_any_order(seed: int) -> None:
    """Undos are saves as well: they are undone among the others."""
    random = Random(seed)
    saves: list[tuple[Any, World, World]] = []
    for number in range(24):
        before, newest = world(), PolicyChange.objects.count()
        if number < 8 or random.random() < 0.2:
            with transaction.atomic():
                for one in range(random.randint(1, 4)):
                    edit(random, 10 * number + one)
        else:
            change_id, *states = random.choice(saves)
            undone(change_id)
            assert world() == after_undo(before, *states), number
        if PolicyChange.objects.count() > newest:
            saves.append((last_save(), before, world()))


# --- A save of objects that depend on each other. ---


def new_plan(name: str, **fields: Any) -> Plan:
    return Plan.objects.create(name=name, slug=name.lower(), **fields)


def subject_list(name: str, *subjects: str) -> SubjectList:
    created: SubjectList = SubjectList.objects.create(name=name)
    for subject in subjects:
        ListMember.objects.create(subject_list=created, subject=subject)
    return created


@pytest.fixture
def scene() -> dict[str, Any]:
    free, pro = new_plan("Free", default_for="anonymous"), new_plan("Pro")
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


def mixed(scene: dict[str, Any]) -> None:
    team = new_plan("Team")
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
    """Replace the plan Pro by another one of the same name, which takes its policy and its assignments."""
    old = scene["pro"]
    Plan.objects.filter(pk=old.pk).update(name="Old", slug="old")
    new = new_plan("Pro")
    RatePolicy.objects.filter(plan=old).update(plan=new)
    PlanAssignment.objects.filter(plan=old).update(plan=new)


EDITS = {
    "mixed": mixed,
    "moved on": move_on,
    "replaced": replace,
    "members changed": lambda scene: (
        ListMember.objects.filter(subject="ip:192.0.2.7").delete(),
        ListMember.objects.create(subject_list=scene["beta"], subject="ip:192.0.2.7"),
        ListMember.objects.update(reason="Ticket 4711"),
    ),
    "several deleted": lambda scene: (Plan.objects.all().delete(), scene["bots"].delete(), scene["search"].delete()),
    "deleted and created": lambda scene: (
        scene["pro_all"].delete(),
        RatePolicy.objects.create(plan=scene["pro"], rates="4/s"),
    ),
}


@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS)
def test_a_save_is_undone_and_the_undo_too(scene: dict[str, Any], edits: Any, published: list[Any]) -> None:
    before = state()
    with transaction.atomic():
        edits(scene)
    after, saved, history = state(), last_save(), PolicyChange.objects.count()
    published.clear()
    assert left(undone()) == []
    assert state() == before
    rows = PolicyChange.objects.order_by("pk")[history:]
    assert len({row.change_id for row in rows}) == len(published) == (0 if before == after else 1)
    assert {(row.reason, row.undoes) for row in rows} <= {("Undone", saved)}
    assert len({(row.model, row.object_id) for row in rows}) == len(rows), "one row per object"
    if before != after:
        undone()
        assert state() == after


def test_what_is_forbidden_is_left_and_what_needs_it_too(scene: dict[str, Any]) -> None:
    pk = scene["pro"].pk
    with transaction.atomic():
        mixed(scene)
    revert = undone(forbidden=lambda now, then: "no" if isinstance(now or then, Plan) and then is not None else "")
    on_deleted_plan = f"The plan with the id {pk} is deleted. Restore or create it first."
    assert {(kind, text) for kind, _later, text in left(revert)} == {
        ("plan", "no"),
        ("ratepolicy", on_deleted_plan),
        ("planassignment", on_deleted_plan),
        ("plan", "1 of the plan assignments refer to it now. Delete or move these first."),
    }
    assert set(Plan.objects.values_list("name", flat=True)) == {"Gratis", "Team"}
    assert not Endpoint.objects.filter(name="exports").exists()


def test_what_others_refer_to_stays_until_they_refer_to_another(scene: dict[str, Any]) -> None:
    with transaction.atomic():
        team = new_plan("Team")
        for name, fields in (("pro_all", {"plan": team}), ("free_search", {"mode": "log"})):
            RatePolicy.objects.filter(pk=scene[name].pk).update(**fields)
    saved = last_save()
    RatePolicy.objects.filter(pk=scene["free_search"].pk).update(plan=team)
    text = "%d of the rate policies refer to it now. Delete or move these first."
    moved = undone(saved, forbidden=lambda now, then: "no" if now == scene["pro_all"] else "")
    assert left(moved) == [("plan", (), text % 2), ("ratepolicy", (), "no")]
    assert left(undone(saved)) == [("plan", (), text % 1)]


def test_values_that_others_have_by_now_refuse_the_whole_undo(scene: dict[str, Any]) -> None:
    with transaction.atomic():
        scene["free_all"].delete()
        scene["pro_all"].delete()
    saved = last_save()
    RatePolicy.objects.create(plan=scene["free"], rates="4/s")
    before = state()
    with transaction.atomic():
        revert = plan(of_save(saved), lock=True)
        with pytest.raises(ValidationError, match="A policy without dates already has the same audience"):
            apply(revert, actor=None, reason="")
        assert state() == before


# --- Later changes. ---


def test_fields_that_only_make_sense_together_stay_together(scene: dict[str, Any]) -> None:
    alice, bob = User.objects.get(username="alice"), User.objects.create(username="bob")
    policy = RatePolicy.objects.filter(pk=scene["free_all"].pk)
    policy.update(plan=None, user=alice)
    saved = last_save()
    policy.update(user=bob)
    ((kind, later, obstacle),) = left(undone(saved))
    assert (kind, later, "Choose only one audience" in obstacle) == ("ratepolicy", ("user",), True)


def test_later_changes_are_those_of_the_same_fields(scene: dict[str, Any]) -> None:
    policy = RatePolicy.objects.filter(pk=scene["free_all"].pk)
    policy.update(rates="2/s")
    saved = last_save()
    policy.update(mode="log")
    assert left(undone(saved)) == []
    assert policy.values_list("rates", "mode").get() == ("1/s", "log")
    policy.delete()
    [(_kind, _later, obstacle)] = left(undone(saved))
    assert obstacle == "It was deleted since then. Restore it first."


# --- A version of one object. ---


def edited_everything(scene: dict[str, Any]) -> list[tuple[Any, dict[str, Any]]]:
    """Return an object of each model with every field set, to the microsecond, and an edit of each field."""
    alice, bob = User.objects.get(username="alice"), User.objects.create(username="bob")
    now = timezone.now().replace(microsecond=123_456)
    dates = {"starts_at": now - DAY, "ends_at": now + DAY, "reason": "A trial"}
    made = {"description": "Reports", "routes": "reports:*\n/api/*", "methods": "GET POST", "cost": 7}
    reports = Endpoint.objects.create(name="reports", charged_statuses="4xx", limits="none", **made)
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
        (reports, {"name": "r", "charged_statuses": "", "limits": "besides", "cost": 1}),
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
        change = last("update")
        if deleted:
            rows.delete()
        published.clear()
        reverted(of_object(change))
        (found,) = rows.values()
        assert found == before
        assert len(published) == 1
        newest = PolicyChange.objects.filter(model=change.model)[0]
        assert (newest.action, newest.undoes) == ("create" if deleted else "update", None)
        assert (newest.before, newest.after) == (None if deleted else change.after, change.before)
        assert reverted(of_object(change)).done == []


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"colour": "red"}, "This version has fields that no longer exist (colour)"),
        ({"rates": "10/fortnight"}, "is no longer valid"),
        ({"counted_per": "tenants"}, "'tenants' is not a choice for “counted per”"),
        ({"mode": None}, "mode: This field cannot be null."),
        ({"plan": 4711}, "The plan with the id 4711 is deleted. Restore or create it first."),
    ],
)
def test_a_version_that_is_not_valid_any_more_is_refused(
    scene: dict[str, Any], recorded: dict[str, Any], message: str
) -> None:
    RatePolicy.objects.filter(pk=scene["free_all"].pk).update(rates="7/s")
    change = last("update")
    PolicyChange.objects.filter(pk=change.pk).update(before={**change.before, **recorded})
    for _ in range(2):
        before = state()
        (step,) = reverted(of_object(change)).steps
        assert message in step.obstacle
        assert state() == before
        RatePolicy.objects.filter(pk=scene["free_all"].pk).delete()


def test_fields_that_the_version_lacks_keep_their_values(scene: dict[str, Any]) -> None:
    rows = RatePolicy.objects.filter(pk=scene["free_all"].pk)
    rows.update(rates="2/s", on_error="local")
    change = last("update")
    known = {name: value for name, value in change.before.items() if name != "on_error"}
    PolicyChange.objects.filter(pk=change.pk).update(before=known)
    Endpoint.objects.update_or_create(pk=change.object_id, defaults={"description": "the same key"})
    assert [step.kind for step in reverted(of_object(change)).steps] == ["ratepolicy"]
    assert rows.values_list("rates", "on_error").get() == ("1/s", "local")


def test_an_assignment_comes_back_without_its_deleted_creator(scene: dict[str, Any]) -> None:
    bob = User.objects.create(username="bob")
    made = PlanAssignment.objects.create(subject="tenant:beta", plan=scene["free"], created_by=bob)
    made.delete()
    bob.delete()
    reverted(of_object(last("delete")))
    assert PlanAssignment.objects.get(subject="tenant:beta").created_by is None


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
