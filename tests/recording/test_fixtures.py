"""``loaddata`` of a dump by ``dumpdata``: the history is loaded too, and loading is recorded in addition."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core import serializers
from django.core.management import call_command
from django.db import transaction

from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policies.cache import PolicyCache
from django_ratequota.runtime import default_limiter

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

HISTORY = "django_ratequota.policychange"


def rows() -> dict[int, Any]:
    """Return the history by id, without times, because JSON rounds them to milliseconds."""
    fields = [field.name for field in PolicyChange._meta.concrete_fields if field.name != "at"]
    return {row["id"]: row for row in PolicyChange.objects.values(*fields)}


def rates_by_endpoint(process: PolicyCache) -> dict[int | None, list[str]]:
    """Return the rate texts of the process's policies by endpoint, after it has loaded the last revision."""
    snapshot = process.reload(default_limiter().stored_revision())
    return {
        endpoint: sorted(policy.text for policy in groups["caller"].policies)
        for endpoint, groups in snapshot.groups.items()
    }


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    """A dump of the app and its users, mostly history, as there were many edits."""
    call_command("flush", interactive=False, verbosity=0)  # ids begin at 1, as they do when the dump is loaded
    alice = User.objects.create(username="alice")
    for number in range(3):
        plan = Plan.objects.create(name=f"p{number}", slug=f"p{number}")
        endpoint = Endpoint.objects.create(name=f"e{number}")
        RatePolicy.objects.create(plan=plan, endpoint=endpoint, rates="5/hour")
        PlanAssignment.objects.create(user=alice, plan=plan)
    for limit in range(6, 16):
        RatePolicy.objects.update(rates=f"{limit}/hour")
    file = tmp_path / "dump.json"
    call_command("dumpdata", User._meta.label, "django_ratequota", output=str(file), verbosity=0)
    return file


def ordered(dump: Path, last: bool) -> Path:
    """Move the history to the end of the dump, or to its beginning."""
    objects = json.loads(dump.read_text())
    objects.sort(key=lambda row: (row["model"] == HISTORY) is last)
    dump.write_text(json.dumps(objects))
    return dump


@pytest.mark.parametrize("last", [False, True], ids=["history first", "history last"])
def test_a_dump_loads_into_an_empty_database(dumped: Path, last: bool) -> None:
    """On PostgreSQL, rows recorded while loading took ids of the dump: "duplicate key value violates ..."."""
    process = PolicyCache()
    before, objects, expected = rows(), list(RatePolicy.objects.values()), rates_by_endpoint(process)
    call_command("flush", interactive=False, verbosity=0)
    assert rates_by_endpoint(process) == {}
    call_command("loaddata", str(ordered(dumped, last)), verbosity=0)
    after = rows()
    assert {pk: after[pk] for pk in before} == before, "the history of the dump is unchanged"
    assert list(RatePolicy.objects.values()) == objects
    written = [row for pk, row in sorted(after.items()) if pk not in before]
    assert [row["action"] for row in written] == ["create"] * 12
    assert min(row["id"] for row in written) > max(before)
    assert rates_by_endpoint(process) == expected
    assert rates_by_endpoint(PolicyCache()) == expected


def test_edits_after_loading_are_recorded_and_published(dumped: Path) -> None:
    process = PolicyCache()
    call_command("flush", interactive=False, verbosity=0)
    rates_by_endpoint(process)
    call_command("loaddata", str(dumped), verbosity=0)
    newest = max(rows())
    RatePolicy.objects.update(rates="99/hour")
    Plan.objects.create(name="new", slug="new")
    assert min(pk for pk in rows() if pk > newest) == newest + 1
    assert {text for texts in rates_by_endpoint(process).values() for text in texts} == {"99/hour"}


@pytest.mark.parametrize("last", [False, True], ids=["history first", "history last"])
def test_a_dump_loaded_over_later_edits_applies(dumped: Path, last: bool) -> None:
    process = PolicyCache()
    expected = rates_by_endpoint(process)
    RatePolicy.objects.update(rates="99/hour")
    assert rates_by_endpoint(process) != expected
    count = len(rows())
    call_command("loaddata", str(ordered(dumped, last)), verbosity=0)
    assert rates_by_endpoint(process) == expected
    assert len(rows()) == count + 3, "changes by loading are recorded"


def test_a_loaded_dump_can_be_dumped_and_loaded_again(dumped: Path) -> None:
    for _ in range(3):
        call_command("flush", interactive=False, verbosity=0)
        call_command("loaddata", str(dumped), verbosity=0)
        before = rows()
        call_command("dumpdata", User._meta.label, "django_ratequota", output=str(dumped), verbosity=0)
    assert {row["action"] for row in before.values()} == {"create", "update"}


def test_history_in_a_separate_file_is_loaded(dumped: Path, tmp_path: Path) -> None:
    objects = json.loads(dumped.read_text())
    files = []
    for name, own in (("policies", False), ("history", True)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps([row for row in objects if (row["model"] == HISTORY) is own]))
    before = rows()
    call_command("flush", interactive=False, verbosity=0)
    call_command("loaddata", *map(str, files), verbosity=0)
    after = rows()
    assert {pk: after[pk] for pk in before} == before
    assert len(after) == len(before) + 12


def test_deserialized_objects_can_be_edited(dumped: Path) -> None:
    """Without ``loaddata`` nothing resets PostgreSQL's sequences: the next edit must not reuse ids of moved rows."""
    call_command("flush", interactive=False, verbosity=0)
    with transaction.atomic():
        for loaded in serializers.deserialize("json", ordered(dumped, last=True).read_text()):
            loaded.save()
    RatePolicy.objects.update(rates="99/hour")
    assert PolicyChange.objects.filter(after__rates="99/hour").count() == 3


def test_a_difference_below_a_millisecond_is_not_recorded(tmp_path: Path) -> None:
    """JSON has milliseconds: 12:00:00.0004 is dumped as "12:00:00.000Z", and after loading that as "12:00:00Z"."""
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    plan = Plan.objects.create(name="Free", slug="free")
    user = User.objects.create(username="alice")
    PlanAssignment.objects.create(user=user, plan=plan, starts_at=noon.replace(microsecond=400))
    file = tmp_path / "dump.json"
    call_command("dumpdata", "django_ratequota.planassignment", output=str(file), verbosity=0)
    count = len(rows())
    call_command("loaddata", str(file), verbosity=0)
    assert PlanAssignment.objects.get().starts_at == noon
    assert len(rows()) == count


def test_moving_history_rows_takes_few_queries(dumped: Path, django_assert_max_num_queries: Any) -> None:
    """Each loaded row takes Django's own queries; moving rows adds queries per fixture, not per row."""
    history = [row for row in json.loads(dumped.read_text()) if row["model"] == HISTORY]
    many = [{**history[0], "pk": pk} for pk in range(1, 401)]
    call_command("flush", interactive=False, verbosity=0)
    objects = [row for row in json.loads(dumped.read_text()) if row["model"] != HISTORY]
    dumped.write_text(json.dumps([*objects, *many]))
    with django_assert_max_num_queries(2 * 400 + 200):
        call_command("loaddata", str(dumped), verbosity=0)
