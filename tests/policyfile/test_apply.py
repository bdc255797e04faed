"""What an import writes, records and publishes."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.db import connection, models
from django.test.utils import CaptureQueriesContext

from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from django_ratequota.runtime import default_limiter
from tests.policyfile.examples import SAMPLE, export, refused
from tests.support.commands import run
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def test_an_import_publishes_once_and_applies_at_once(sample: None, alice: User, published: list[int | None]) -> None:
    assert check_from(alice, scope="search").allowed
    published.clear()
    apply_file(SAMPLE.replace("rates: 50/min", "rates: blocked").replace("rates: 10/min", "rates: blocked"))
    assert published == [default_limiter().stored_revision()]
    assert not check_from(alice, scope="search").allowed


def test_an_import_needs_no_redis(sample: None, settings: Any, file: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 5.0, "STATISTICS_SECONDS": 0}
    assert "0 created, 1 changed, 0 deleted" in run("import", file(SAMPLE.replace("10/min", "20/min")))
    assert "a policy change is saved but could not be published" in caplog.text
    assert export() == SAMPLE.replace("10/min", "20/min")


def test_prune_deletes_unnamed_objects_of_the_file_sections(sample: None, file: Any) -> None:
    lines = run("import", file("version: 1\npolicies: []\n"), "--prune").splitlines()
    assert lines == [
        "- policy everyone × all endpoints per ip: rates 5/s, mode log",
        "- policy user alice × all endpoints from 2026-01-01T00:00:00Z until 2026-02-01T00:00:00.000005Z: "
        "rates 1000/min, reason OPS-7: #1",
        "- policy ip:203.0.113.0/24 × reports: rates blocked",
        "- policy free × search: rates 10/min",
        "- policy pro × search: rates 50/min, algorithm gcra, on_error deny",
        "0 created, 0 changed, 5 deleted",
        f"To undo it: manage.py ratequota undo {PolicyChange.objects.all()[0].change_id}",
    ]
    assert (Plan.objects.count(), Endpoint.objects.count(), PlanAssignment.objects.count()) == (2, 2, 1)
    apply_file("version: 1\nassignments: []\n", prune=True)
    assert not PlanAssignment.objects.exists()
    apply_file("version: 1\n", prune=True)
    assert (Plan.objects.count(), Endpoint.objects.count()) == (2, 2)
    apply_file("version: 1\nendpoints: []\nplans: []", prune=True)
    assert not Plan.objects.exists()
    assert not Endpoint.objects.exists()


@pytest.mark.parametrize("names", ["abc", "bac", "bca", "cab", "cba"])
@pytest.mark.parametrize("defaults", [("authenticated", "anonymous", ""), ("", "authenticated", "anonymous")])
def test_plans_swap_names_and_defaults(names: str, defaults: tuple[str, str, str]) -> None:
    for slug, default in zip("xyz", ("anonymous", "", "authenticated"), strict=True):
        Plan.objects.create(slug=slug, name="abc"["xyz".index(slug)], default_for=default)
    before = {plan.slug: (plan.name, plan.default_for) for plan in Plan.objects.all()}
    expected = {slug: (name, default) for slug, name, default in zip("xyz", names, defaults, strict=True)}
    plans = [{"slug": slug, "name": name, "default_for": default} for slug, (name, default) in expected.items()]
    history = PolicyChange.objects.count()
    apply_file(json.dumps({"version": 1, "plans": plans}))
    assert {plan.slug: (plan.name, plan.default_for) for plan in Plan.objects.all()} == expected
    recorded = {
        change.after["slug"]: tuple((state["name"], state["default_for"]) for state in (change.before, change.after))
        for change in PolicyChange.objects.order_by("pk")[history:]
    }
    assert recorded == {slug: (before[slug], expected[slug]) for slug in before if before[slug] != expected[slug]}
    assert PolicyChange.objects.count() - history == len(recorded)


def test_an_import_sets_the_fields_that_differ() -> None:
    odd = Endpoint.objects.create(name="odd", routes=" /a \r\n\r\n/b")
    apply_file(export().replace("name: odd", "name: odd\n    cost: 2"))
    odd.refresh_from_db()
    assert (odd.cost, odd.routes) == (2, " /a \r\n\r\n/b")


NEWER = (
    SAMPLE.replace("10/min", "20/min")
    .replace("    cost: 2\n", "")
    .replace("name: Pro", "name: Gold")
    .replace("policies:\n", "policies:\n  - endpoint: search\n    rates: 1/s\n    plan: pro\n    counted_per: ip\n")
)


def test_edits_of_many_objects_take_few_queries() -> None:
    """Regression: an update of each row made a file of 5,000 edits 5,120 queries, with all rows locked."""
    policies = [RatePolicy(subject=f"ip:203.0.113.{host}", counted_per="ip", rates="1/s") for host in range(200)]
    RatePolicy.objects.bulk_create(policies)
    numbers = count(2)
    text = re.sub("rates: 1/s", lambda match: f"rates: {next(numbers)}/s", export())
    with CaptureQueriesContext(connection) as queries:
        apply_file(text)
    assert len(queries) < 50
    assert export() == text
    assert PolicyChange.objects.filter(action="update").count() == 200


def test_only_new_leaves_what_operators_have_changed(sample: None, file: Any, published: list[int | None]) -> None:
    name, before, history = file(NEWER), export(), PolicyChange.objects.count()
    left = """\
= plan pro: name Pro (file: Gold)
= endpoint search: cost 2 (file: 1)
= policy free × search: rates 10/min (file: 20/min)
"""
    added = "+ policy pro × search per ip: rates 1/s\n"
    published.clear()
    dry = run("import", name, "--only-new", "--dry-run")
    assert dry == f"{left}{added}Dry run: 1 to create, 0 to change, 0 to delete. No changes were made.\n"
    assert (export(), PolicyChange.objects.count(), published) == (before, history, [])
    lines = run("import", name, "--only-new", "--reason", "release 2")
    change = PolicyChange.objects.order_by("pk").last()
    undo = f"To undo it: manage.py ratequota undo {change.change_id}\n"
    assert lines == f"{left}{added}1 created, 0 changed, 0 deleted\n{undo}"
    assert (change.action, change.reason, PolicyChange.objects.count()) == ("create", "release 2", history + 1)
    assert len(published) == 1
    added_entry = "  - endpoint: search\n    plan: pro\n    counted_per: ip\n    rates: 1/s\n"
    assert export() == before + added_entry
    again = run("import", name, "--only-new")
    assert again == f"{left}No changes, because the database has all objects of {name}\n"
    assert (PolicyChange.objects.count(), len(published)) == (history + 1, 1)


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_only_new_creates_deleted_objects_again(sample: None, file: Any, form: str) -> None:
    before = export(form, assignments=True)
    name = file(before)
    Plan.objects.get(slug="pro").delete()
    Endpoint.objects.get(name="reports").delete()
    assert run("import", name, "--only-new").splitlines()[-2] == "5 created, 0 changed, 0 deleted"
    assert export(form, assignments=True) == before


def test_only_new_compares_unique_values_with_what_stays(sample: None, file: Any) -> None:
    text = "version: 1\nplans:\n- {slug: free, name: Free, default_for: authenticated}\n"
    Plan.objects.filter(slug="free").update(name="Basic", default_for="")
    Plan.objects.filter(slug="pro").update(name="Free", default_for="authenticated")
    assert not apply_file(text, only_new=True).changes
    text += "- {slug: basic, name: Basic}\n- {slug: team, name: Team, default_for: authenticated}\n"
    assert refused(text, only_new=True) == [
        "4: plans[1].name: is already used by plan 'free', which this import does not change. "
        "Change one or merge them",
        "5: plans[2].default_for: is already used by plan 'pro', which this import does not change. "
        "Change one or merge them",
    ]


def test_only_new_validates_entries_that_exist(sample: None) -> None:
    assert len(refused("version: 1\npolicies:\n- {plan: free, endpoint: search, rates: x}\n", only_new=True)) == 1


def test_only_new_refuses_prune(sample: None, file: Any) -> None:
    with pytest.raises(CommandError, match="Write it without --prune, or --prune alone"):
        run("import", file("version: 1\nplans: []\n"), "--only-new", "--prune")
    assert Plan.objects.count() == 2


def test_compared_rows_are_locked(sample: None) -> None:
    with CaptureQueriesContext(
        connection,
    ) as queries:
        apply_file(SAMPLE)
    locked = [query["sql"] for query in queries if "FOR UPDATE" in query["sql"]]
    assert len(locked) == (5 if connection.features.has_select_for_update else 0)


def test_a_conflicting_concurrent_edit_rolls_the_import_back(sample: None, file: Any) -> None:
    inserted = []

    def insert_first(execute: Any, sql: str, *statement: Any) -> Any:
        if sql.startswith("UPDATE") and not inserted:
            inserted.append(Plan(slug="late", name="New"))
            models.QuerySet(Plan).bulk_create(inserted)
        return execute(sql, *statement)

    name = file("version: 1\nplans:\n- {slug: free, name: F}\n- {slug: new, name: New}\n")
    before = export()
    conflict = pytest.raises(CommandError, match="Another change conflicts with this file")
    with connection.execute_wrapper(insert_first), conflict:
        run("import", name)
    assert inserted
    assert export() == before
