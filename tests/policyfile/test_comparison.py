"""What an import would change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from django_ratequota.models import PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from django_ratequota.runtime import default_limiter
from tests.policyfile.examples import EDITED, export
from tests.support.commands import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DIFF = """\
~ plan free: default_for authenticated -> none
~ endpoint search: cost 2 -> 1
~ endpoint search: description none -> new
~ policy free × search: rates 10/min -> 20/min
+ policy pro × all endpoints: rates 1/s
"""

LEFT = "Kept although the file does not contain them: 1 policy. Delete them with --prune.\n"


def test_dry_run_prints_the_changes_of_the_import(sample: None, file: Any) -> None:
    history, revision, before = PolicyChange.objects.count(), default_limiter().stored_revision(), export()
    assert run("import", file(EDITED), "--dry-run") == (
        f"{DIFF}Dry run: 1 to create, 3 to change, 0 to delete. No changes were made.\n{LEFT}"
    )
    assert (history, revision, before) == (
        PolicyChange.objects.count(),
        default_limiter().stored_revision(),
        export(),
    )
    imported = run("import", file(EDITED), "--reason", "OPS-9")
    undone = f"To undo it: manage.py ratequota undo {PolicyChange.objects.all()[0].change_id}\n"
    assert imported == f"{DIFF}1 created, 3 changed, 0 deleted\n{LEFT}{undone}"
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


def test_a_changed_switch_is_shown_as_in_the_file(sample: None) -> None:
    diff = apply_file("version: 1\nendpoints:\n- name: search\n  limits: none\n", dry_run=True)
    assert "~ endpoint search: limits besides -> none" in diff.lines()


def test_cascading_deletions_are_shown(sample: None) -> None:
    members = "members:\n- {subject_list: Bots, user: alice}\n- {subject_list: Bots, subject: ip:198.51.100.0/24}"
    policies = "policies:\n- {subject_list: Bots, rates: blocked}"
    apply_file(f"version: 1\nsubject_lists:\n- name: Bots\n{members}\n{policies}")
    text = "version: 1\nplans:\n- {slug: free, name: Free, default_for: authenticated}\n"
    text += "endpoints:\n- name: search\n  cost: 2\nsubject_lists: []"
    history = PolicyChange.objects.count()
    diff = apply_file(text, prune=True)
    assert list(diff.lines()) == [
        "- plan pro: name Pro, description Paying.\\nPromptly.",
        "- endpoint reports: routes reports:* /api/reports/*, methods GET POST",
        "- subject_list Bots",
        "- member ip:198.51.100.0/24 of list Bots",
        "- member user alice of list Bots",
        "- policy list Bots × all endpoints: rates blocked",
        "- policy ip:203.0.113.0/24 × reports: rates blocked",
        "- policy pro × search: rates 50/min, algorithm gcra, on_error deny",
        "- assignment user alice × pro from 2026-01-01T00:00:00Z: reason contract",
    ]
    assert PolicyChange.objects.count() - history == len(diff.of("delete")) == 9
    assert (RatePolicy.objects.count(), PlanAssignment.objects.count()) == (3, 0)


def entries(*rates: str) -> str:
    rows = [{"rates": one, "starts_at": "2026-01-01T00:00:00Z"} for one in rates]
    return json.dumps({"version": 1, "policies": rows})


def test_dated_policies_of_one_identity_are_matched_in_order() -> None:
    apply_file(entries("1/s", "1/s", "2/s"))
    first, second, _third = RatePolicy.objects.order_by("pk")
    assert not apply_file(entries("1/s", "1/s", "2/s"), prune=True).changes
    # One policy fewer: rows take the rates in their order, and the last row goes.
    diff = apply_file(entries("1/s", "2/s"), prune=True)
    assert (len(diff.of("change")), len(diff.of("delete")), len(diff.changes)) == (1, 1, 2)
    assert list(RatePolicy.objects.order_by("pk").values_list("pk", "rates")) == [
        (first.pk, "1/s"),
        (second.pk, "2/s"),
    ]
    # The last one wins, so a change of order is a change.
    assert len(apply_file(entries("2/s", "1/s")).of("change")) == 2
    assert not apply_file(entries("2/s", "1/s")).changes
    diff = apply_file(entries("2/s", "1/s", "3/s"))
    assert (len(diff.of("create")), len(diff.changes)) == (1, 1)


def test_only_the_end_and_the_anchor_of_an_assignment_change(tenants: None) -> None:
    rows = "  - {subject: tenant:a, plan: p, starts_at: 2026-01-01T00:00:00Z, anchor: 31}\n"
    text = f"version: 1\nplans: [{{slug: p, name: P}}]\nassignments:\n{rows}{rows.replace('tenant:a', 'tenant:b')}"
    apply_file(text)
    key = PlanAssignment.objects.get(subject="tenant:a").pk
    edited = text.replace("31}", "1, ends_at: 2026-03-01T00:00:00+01:00}", 1).replace("tenant:b", "tenant:c")
    assert list(apply_file(edited, prune=True).lines()) == [
        "- assignment tenant:b × p from 2026-01-01T00:00:00Z: anchor 31",
        "~ assignment tenant:a × p from 2026-01-01T00:00:00Z: ends_at none -> 2026-02-28T23:00:00Z",
        "~ assignment tenant:a × p from 2026-01-01T00:00:00Z: anchor 31 -> 1",
        "+ assignment tenant:c × p from 2026-01-01T00:00:00Z: anchor 31",
    ]
    assert PlanAssignment.objects.get(subject="tenant:a").pk == key
    assert not apply_file(edited, prune=True).changes
