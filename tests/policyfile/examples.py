"""Files, and helpers for the tests of policy files."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.db import models
from hypothesis import strategies as st

from django_ratequota.exceptions import InvalidFile
from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList
from django_ratequota.policyfile import FORMATS, apply_file, export_chunks

DOCS = (Path(__file__).parents[2] / "docs" / "policies-as-code.md").read_text()

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)

#: Text that YAML reads as something else, or that careless writing changes.
HOSTILE = (
    *"yes no on null ~ 1e3 1_000 0x10 0o17 010 1:30 2026-01-01 .inf = << y".split(" "),
    *"- a|a: b|a #b|#|'|\"|\\|{a}|[a|*a|&a|!a|>|%a|@|`|---|...|- |:|?|,|: ".split("|"),
    *"|||a|a |a^|^a|a^^ b| a^b|a ^b|a\r^b|\t|a\tb^|^|^^| ^ |^ a|a\x85b|^\t^".replace("^", "\n").split("|"),
    *"🙂 👨\u200d👩 é e\u0301 \u202eabc \u2028 \xa0 \ufeff \x1b[31m \x7f \ufffe \U0010ffff".split(" "),
    "|",
    "\\ud83d\\ude42",
    "\\🙂🙂\\",
    "x" * 10_240,
    "x y\n" * 2_560,
)

SAMPLE = """\
version: 1

plans:
  - slug: free
    name: Free
    default_for: authenticated
  - slug: pro
    name: Pro
    description: |-
      Paying.
      Promptly.

endpoints:
  - name: reports
    routes:
      - reports:*
      - /api/reports/*
    methods:
      - GET
      - POST
  - name: search
    cost: 2

subject_lists: []

members: []

policies:
  - counted_per: ip
    rates: 5/s
    mode: log
  - user: alice
    rates: 1000/min
    starts_at: 2026-01-01T00:00:00Z
    ends_at: 2026-02-01T00:00:00.000005Z
    reason: 'OPS-7: #1'
  - endpoint: reports
    subject: ip:203.0.113.0/24
    rates: blocked
  - endpoint: search
    plan: free
    rates: 10/min
  - endpoint: search
    plan: pro
    rates: 50/min
    algorithm: gcra
    on_error: deny
"""

ASSIGNED = """
assignments:
  - user: alice
    plan: pro
    starts_at: 2026-01-01T00:00:00Z
    reason: contract
"""

EDITED = (
    SAMPLE.replace("rates: 10/min", "rates: 20 / 60sec")
    .replace("cost: 2", "description: new")
    .replace("    default_for: authenticated\n", "")
    .replace("  - counted_per: ip\n    rates: 5/s\n    mode: log\n", "  - rates: 1/s\n    plan: pro\n")
)


def export(form: str = "yaml", *, assignments: bool = False) -> str:
    return "".join(export_chunks(form, assignments=assignments))


def document_text(document: dict[str, Any], form: str = "yaml") -> str:
    return "".join(FORMATS[form](document))


def refused(text: str, **options: Any) -> list[str]:
    """Return the problems of a file that is refused, as ``LINE: path: message``."""
    before = export(assignments=True), PolicyChange.objects.count()
    with pytest.raises(InvalidFile) as caught:
        apply_file(text, **options)
    assert (export(assignments=True), PolicyChange.objects.count()) == before
    return [f"{line}: {path}: {message}" for line, path, message in caught.value.problems]


def delete_all_rows() -> None:
    """Delete all plans, endpoints, lists, policies, assignments and changes, without recording that."""
    for model in (PolicyChange, PlanAssignment, RatePolicy, ListMember, SubjectList, Endpoint, Plan):
        models.QuerySet(model)._raw_delete("default")


texts = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
)

slugs = st.one_of(
    st.sampled_from(["yes", "null", "1e3", "0x10", "2026-01-01", "-", "_", "0", "1_000", "y", "A", "a"]),
    st.from_regex(r"[a-zA-Z0-9_-]{1,9}", fullmatch=True),
).filter(lambda slug: slug != "all")
