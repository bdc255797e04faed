"""What ``ratequota export`` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.contrib.auth.models import User
from django.core.management import CommandError

from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy
from django_ratequota.policyfile import apply_file
from tests.policyfile.examples import (
    ASSIGNED,
    DOCS,
    SAMPLE,
    document_text,
    export,
    refused,
)
from tests.support.commands import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def test_export_writes_sorted_yaml_or_json_without_defaults(sample: None, tmp_path: Path) -> None:
    assert run("export") == SAMPLE
    assert run("export", "--assignments") == SAMPLE + ASSIGNED
    document = json.loads(run("export", "--assignments", "--format", "json"))
    assert document == json.loads(document_text(yaml.safe_load(SAMPLE + ASSIGNED), "json"))
    assert run("export", "--output", str(tmp_path / "a.yaml")) == ""
    assert (tmp_path / "a.yaml").read_bytes() == SAMPLE.encode()
    with pytest.raises(CommandError, match="cannot be written: No such file or directory"):
        run("export", "--output", str(tmp_path / "missing" / "a.yaml"))


@pytest.mark.parametrize("more", [0, 20])
def test_query_count_does_not_depend_on_rows(sample: None, more: int, django_assert_num_queries: Any) -> None:
    for number in range(more):
        user = User.objects.create(username=f"u{number}")
        plan = Plan.objects.create(name=f"n{number}", slug=f"s{number}")
        RatePolicy.objects.create(user=user, endpoint=Endpoint.objects.create(name=f"e{number}"), rates="1/s")
        PlanAssignment.objects.create(user=user, plan=plan)
    with django_assert_num_queries(6):
        text = export(assignments=True)
    with django_assert_num_queries(7):
        assert not apply_file(text, prune=True, dry_run=True).changes


def test_the_example_in_the_docs_is_an_export(alice: User) -> None:
    found = re.search(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    assert found
    assert len(apply_file(found[1]).of("create")) == 14
    assert export(assignments=True) == found[1]
    bad = found[1].replace("- plan: free\n    rates: 100/min", "- plan: free\n    rates: 100/mn")
    assert f"ratequota.yaml:{refused(bad)[0]}" in DOCS
    diff = list(apply_file(found[1].replace("rates: 10/min", "rates: 20/min")).lines())
    assert f"    {diff[0]}\n    0 created, 1 changed, 0 deleted\n" in DOCS
    assert len(diff) == 1
