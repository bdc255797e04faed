"""Plan assignments of subjects in files."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User

from django_ratequota.models import Plan, PlanAssignment
from django_ratequota.policyfile import apply_file
from tests.policyfile.examples import ASSIGNED, SAMPLE, delete_all_rows, export, refused

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

ASSIGNMENTS = """\
assignments:
  - subject: api_key:k_7
    plan: pro
    starts_at: 2026-01-01T00:00:00Z
  - subject: tenant:acme
    plan: pro
    starts_at: 2026-01-01T00:00:00Z
    anchor: 31
    reason: OPS-8
  - user: alice
    plan: pro
    starts_at: 2026-01-01T00:00:00Z
    anchor: 15
"""
FILE = f"version: 1\n\nplans:\n  - slug: pro\n    name: Pro\n\n{ASSIGNMENTS}"


@pytest.fixture(autouse=True)
def identifiers(settings: Any) -> None:
    names = dict.fromkeys(("tenant", "api_key"), "tests.project.views.tenant")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": names}


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_assignments_of_subjects_survive_export_and_import(alice: User, form: str) -> None:
    assert len(apply_file(FILE).created) == 4
    text = export(form, assignments=True)
    assert form == "json" or text.endswith(ASSIGNMENTS)
    delete_all_rows()
    assert list(apply_file(text).lines()) == [
        "+ plan pro: name Pro",
        "+ assignment api_key:k_7 × pro from 2026-01-01T00:00:00Z",
        "+ assignment tenant:acme × pro from 2026-01-01T00:00:00Z: anchor 31, reason OPS-8",
        "+ assignment user alice × pro from 2026-01-01T00:00:00Z: anchor 15",
    ]
    assert export(form, assignments=True) == text
    assert not apply_file(text, prune=True).changes
    rows = PlanAssignment.objects.order_by("pk").values_list("subject", "user__username", "anchor")
    assert list(rows) == [("api_key:k_7", None, None), ("tenant:acme", None, 31), (None, "alice", 15)]


def test_files_without_subjects_and_anchors_are_still_read(sample: None) -> None:
    assert not apply_file(SAMPLE + ASSIGNED, prune=True).changes


def test_another_anchor_or_end_is_a_change_and_another_subject_is_not(alice: User) -> None:
    apply_file(FILE)
    key = PlanAssignment.objects.get(subject="tenant:acme").pk
    edited = FILE.replace("anchor: 31", "anchor: 1").replace("k_7", "k_8")
    assert list(apply_file(edited, prune=True).lines()) == [
        "- assignment api_key:k_7 × pro from 2026-01-01T00:00:00Z",
        "~ assignment tenant:acme × pro from 2026-01-01T00:00:00Z: anchor 31 -> 1",
        "+ assignment api_key:k_8 × pro from 2026-01-01T00:00:00Z",
    ]
    assert PlanAssignment.objects.get(subject="tenant:acme").pk == key
    assert apply_file(edited.replace("    anchor: 1\n", "", 1)).changed
    assert PlanAssignment.objects.get(pk=key).anchor is None


def test_pruning_a_plan_deletes_its_assignments_of_subjects(alice: User) -> None:
    apply_file(FILE)
    assert len(apply_file("version: 1\nplans: []", prune=True).deleted) == 4
    assert not Plan.objects.exists()


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (("  - user: alice\n    plan", "  - plan"), "16: assignments[2]: Choose a user, or write a subject"),
        (("  - user: alice\n", "  - user: alice\n    subject: tenant:b\n"), "16: assignments[2]: Choose a user, or"),
        (
            ("subject: tenant:acme", "subject: user:7"),
            "11: assignments[1].subject: Choose the user instead of user:7.",
        ),
        (("subject: tenant:acme", "subject: ip:::1"), "11: assignments[1].subject: An address cannot be on a plan."),
        (("anchor: 15", "anchor: 0"), "19: assignments[2].anchor: Ensure this value is greater than or equal to 1."),
        (("anchor: 15", "anchor: 32"), "19: assignments[2].anchor: Ensure this value is less than or equal to 31."),
        (("anchor: 15", "anchor: 15th"), "19: assignments[2].anchor: this must be a whole number, not '15th'"),
    ],
)
def test_a_bad_assignment_is_refused_with_its_line(alice: User, edit: tuple[str, str], problem: str) -> None:
    assert FILE.count(edit[0]) == 1
    (found,) = refused(FILE.replace(*edit))
    assert found.startswith(problem)
