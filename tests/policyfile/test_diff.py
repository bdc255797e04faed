"""What an import would change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota.models import Endpoint, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from django_ratequota.runtime import default_limiter
from tests.policyfile.examples import ASSIGNED, EDITED, SAMPLE, export
from tests.support.commands import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DIFF = """\
~ plan free: default_for authenticated -> none
~ endpoint search: cost 2 -> 1
~ endpoint search: description none -> new
~ policy free × search: rates 10/min -> 20/min
+ policy pro × all endpoints: rates 1/s
"""

LEFT = "Kept although the file does not name them: 1 policy; --prune deletes them\n"


def test_dry_run_prints_the_changes_of_the_import(sample: None, file: Any) -> None:
    history, revision, before = PolicyChange.objects.count(), default_limiter().stored_revision(), export()
    assert run("import", file(EDITED), "--dry-run") == (
        f"{DIFF}Dry run: 1 to create, 3 to change, 0 to delete; nothing was changed\n{LEFT}"
    )
    assert (history, revision, before) == (
        PolicyChange.objects.count(),
        default_limiter().stored_revision(),
        export(),
    )
    assert run("import", file(EDITED), "--reason", "OPS-9") == f"{DIFF}1 created, 3 changed, 0 deleted\n{LEFT}"
    written = PolicyChange.objects.order_by("pk")[history:]
    assert [(change.model, change.action, change.reason, change.actor) for change in written] == [
        ("plan", "update", "OPS-9", None),
        ("endpoint", "update", "OPS-9", None),
        ("ratepolicy", "update", "OPS-9", None),
        ("ratepolicy", "create", "OPS-9", None),
    ]
    assert written[2].before["rates"] == "10/min"
    assert written[2].after["rates"] == "20/min"
    assert default_limiter().stored_revision() > revision


def test_an_equal_file_changes_nothing(sample: None, file: Any) -> None:
    history, revision = PolicyChange.objects.count(), default_limiter().stored_revision()
    name = file(SAMPLE + ASSIGNED)
    assert run("import", name, "--prune") == f"Nothing to do: the database equals {name}\n"
    assert (history, revision) == (PolicyChange.objects.count(), default_limiter().stored_revision())


def test_cascading_deletions_are_shown(sample: None) -> None:
    text = "version: 1\nplans:\n- {slug: free, name: Free, default_for: authenticated}\n"
    text += "endpoints:\n- name: search\n  cost: 2"
    history = PolicyChange.objects.count()
    diff = apply_file(text, prune=True)
    assert list(diff.lines()) == [
        "- plan pro: name Pro, description Paying.\\nPromptly.",
        "- endpoint reports: routes reports:* /api/reports/*, methods GET POST",
        "- policy ip:203.0.113.0/24 × reports: rates blocked",
        "- policy pro × search: rates 50/min, algorithm gcra, on_error deny",
        "- assignment user alice × pro from 2026-01-01T00:00:00Z: reason contract",
    ]
    assert PolicyChange.objects.count() - history == len(diff.deleted) == 5
    assert (RatePolicy.objects.count(), PlanAssignment.objects.count()) == (3, 0)


def test_undated_policies_swap_rates(sample: None) -> None:
    swapped = SAMPLE.replace("plan: free\n    rates: 10", "plan: PRO\n    rates: 10").replace(
        "plan: pro", "plan: free"
    )
    diff = apply_file(swapped.replace("PRO", "pro"), prune=True)
    assert (len(diff.changed), len(diff.changes)) == (2, 2)
    assert set(RatePolicy.objects.filter(plan__isnull=False).values_list("plan__slug", "rates")) == {
        ("free", "50/min"),
        ("pro", "10/min"),
    }
    diff = apply_file(SAMPLE.replace("counted_per: ip", "counted_per: everyone"), prune=True)
    assert [len(found) for found in (diff.created, diff.changed, diff.deleted)] == [1, 2, 1]


def entries(*rates: str) -> str:
    rows = [{"rates": one, "starts_at": "2026-01-01T00:00:00Z"} for one in rates]
    return json.dumps({"version": 1, "policies": rows})


def test_dated_policies_of_one_identity_are_matched_in_order() -> None:
    apply_file(entries("1/s", "1/s", "2/s"))
    first, second, third = RatePolicy.objects.order_by("pk")
    assert not apply_file(entries("1/s", "1/s", "2/s"), prune=True).changes
    # One policy fewer: the others are still matched to their rows.
    diff = apply_file(entries("1/s", "2/s"), prune=True)
    assert (len(diff.deleted), len(diff.changes)) == (1, 1)
    assert set(RatePolicy.objects.all()) in ({first, third}, {second, third})
    # The last one wins, so a change of order is a change.
    assert len(apply_file(entries("2/s", "1/s")).changed) == 2
    assert not apply_file(entries("2/s", "1/s")).changes
    diff = apply_file(entries("2/s", "1/s", "3/s"))
    assert (len(diff.created), len(diff.changes)) == (1, 1)


def test_ending_an_assignment_is_a_change(sample: None, alice: User) -> None:
    ended = ASSIGNED.replace("    reason", "    ends_at: 2026-03-01T00:00:00+01:00\n    reason")
    assert list(apply_file(f"version: 1\n{ended}", prune=True).lines()) == [
        "~ assignment user alice × pro from 2026-01-01T00:00:00Z: ends_at none -> 2026-02-28T23:00:00Z"
    ]
    assert not apply_file(f"version: 1\n{ended}", prune=True).changes


def test_order_of_assignments_is_ignored(sample: None) -> None:
    rows = [
        {
            "user": "alice",
            "plan": "pro",
            "starts_at": "2026-01-01T00:00:00Z",
            "ends_at": f"2026-0{month}-01T00:00:00Z",
        }
        for month in (3, 2, 4)
    ]
    text = json.dumps({"version": 1, "assignments": rows})
    assert len(apply_file(text, prune=True).created) == 2
    assert not apply_file(text, prune=True).changes


def test_long_text_is_cut_before_the_first_difference() -> None:
    Endpoint.objects.create(name="e", description="x" * 10_000 + "y" + "z" * 100)
    text = export().replace("xy", "x\u202ew")
    assert list(apply_file(text).lines()) == [
        f"~ endpoint e: description …{'x' * 15}y{'z' * 44}… -> …{'x' * 15}\\u202ew{'z' * 38}…"
    ]
