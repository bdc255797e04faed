"""What an import would change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from django_ratequota.exceptions import InvalidFile
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


def pair(*modes: str, rates: str = "9/min", dates: dict[str, str] | None = None) -> str:
    rows = [{"rates": rates, "mode": mode, **(dates or {})} for mode in modes]
    return json.dumps({"version": 1, "policies": rows})


def by_mode() -> dict[str, tuple[int, str]]:
    return {mode: (pk, rates) for pk, mode, rates in RatePolicy.objects.values_list("pk", "mode", "rates")}


@pytest.mark.parametrize("dates", [{}, {"starts_at": "2026-01-01T00:00:00Z"}], ids=["undated", "dated"])
def test_a_log_only_policy_is_not_taken_for_the_enforced_one_of_its_place(dates: dict[str, str]) -> None:
    apply_file(pair("enforce", "log", rates="1/s", dates=dates))
    own = {mode: pk for mode, (pk, _rates) in by_mode().items()}
    before = export()
    for mode, other in (("enforce", "log"), ("log", "enforce")):
        diff = apply_file(pair(mode, rates="2/s", dates=dates))
        assert [(change.row.pk, change.new_values) for change in diff.changes] == [(own[mode], {"rates": "2/s"})]
        assert len(diff.of("keep")) == 1, "the other one stays"
        assert by_mode()[other][0] == own[other]
        assert not apply_file(pair("log", "enforce", rates="2/s", dates=dates), only_new=True).changes
        apply_file(before)
    assert not apply_file(pair("log", "enforce", rates="1/s", dates=dates), prune=True).changes
    diff = apply_file(pair("log", rates="1/s", dates=dates), prune=True)
    assert [change.row.pk for change in diff.of("delete")] == [own["enforce"]]
    assert by_mode() == {"log": (own["log"], "1/s")}


def test_a_mode_is_changed_where_one_policy_stands_there() -> None:
    apply_file(pair("log"))
    (pk,) = RatePolicy.objects.values_list("pk", flat=True)
    for mode in ("enforce", "off", "log", "enforce"):
        assert not apply_file(pair(mode), only_new=True).changes
        assert [change.verb for change in apply_file(pair(mode), prune=True).changes] == ["change"]
        assert by_mode() == {mode: (pk, "9/min")}
    diff = apply_file(pair("log", "enforce"))
    assert [change.verb for change in diff.changes] == ["create"]
    assert by_mode()["enforce"] == (pk, "9/min")


def test_a_file_rolls_out_a_limit_on_trial() -> None:
    """The enforced policy takes the rates, and the log-only one stays unless it is pruned."""
    apply_file(json.dumps({"version": 1, "policies": [{"rates": "30/min"}, {"rates": "10/min", "mode": "log"}]}))
    before = by_mode()
    diff = apply_file(pair("enforce", rates="10/min"))
    assert list(diff.lines()) == ["~ policy everyone × all endpoints: rates 30/min -> 10/min"]
    assert by_mode() == {"enforce": (before["enforce"][0], "10/min"), "log": before["log"]}
    apply_file(pair("enforce", rates="10/min"), prune=True)
    assert by_mode() == {"enforce": (before["enforce"][0], "10/min")}


def test_the_order_of_a_place_s_policies_is_the_same_on_every_database() -> None:
    texts = []
    for modes in (("enforce", "log"), ("log", "enforce")):
        RatePolicy.objects.all().delete()
        apply_file(pair(*modes))
        texts.append(export())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("modes", [("log", "log"), ("enforce", "off"), ("log", "enforce", "off")])
def test_two_policies_that_the_database_refuses_are_a_problem_of_the_file(modes: tuple[str, ...]) -> None:
    with pytest.raises(InvalidFile, match="without dates is already used by policies"):
        apply_file(pair(*modes))


def test_a_changed_log_only_policy_is_told_apart() -> None:
    apply_file(pair("enforce", "log", rates="1/s"))
    (line,) = apply_file(pair("log", rates="2/s"), dry_run=True).lines()
    assert line == "~ policy everyone × all endpoints (log only): rates 1/s -> 2/s"
