"""Any content of the database survives export and import."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import models
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from tests.policyfile.examples import JANUARY, delete_all_rows, export, slugs, texts
from tests.support.properties import examples

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "tenants")]


names = texts.filter(lambda text: 0 < len(text) <= 100)
moments = st.one_of(
    st.none(),
    st.sampled_from([JANUARY, JANUARY + timedelta(days=1)]),
    st.datetimes(datetime(1000, 1, 2), datetime(9998, 12, 31), timezones=st.just(UTC)),
)

routes = st.lists(
    st.sampled_from(["/", "reports:*", "/a/<int:pk>/", "yes", "1e3", "#", "-", "/é/*", "*"]), max_size=3
)


@st.composite
def contents(draw: Any) -> dict[type[models.Model], list[dict[str, Any]]]:
    """Return rows of valid objects by model; references are numbers."""
    plans = draw(st.lists(st.tuples(slugs, names), max_size=4, unique_by=(lambda p: p[0], lambda p: p[1])))
    defaults = draw(st.permutations(["authenticated", "anonymous", "", ""]))
    endpoints = draw(st.lists(slugs, max_size=4, unique=True))
    users = draw(st.lists(names, min_size=1, max_size=3, unique=True))

    def policy() -> dict[str, Any]:
        audience = draw(st.sampled_from(["", "plan", "user", "subject"]))
        starts, ends = draw(moments), draw(moments)
        if starts and ends and ends <= starts:
            ends = None
        return {
            "endpoint": draw(st.sampled_from([None, *range(len(endpoints))])),
            "plan": draw(st.sampled_from([*range(len(plans)), None])) if audience == "plan" else None,
            "user": draw(st.sampled_from(range(len(users)))) if audience == "user" else None,
            "subject": draw(st.sampled_from(["ip:203.0.113.7", "ip:2001:db8::/64"])) if audience == "subject" else "",
            "counted_per": draw(st.sampled_from(["caller", "ip", "plan", "everyone"])),
            "rates": draw(st.sampled_from(["10/min", "1/s, 2/month", "unlimited", "blocked", "5/30s", "7/day gcra"])),
            "algorithm": draw(st.sampled_from(["token_bucket", "leaky_bucket", "gcra"])),
            "mode": draw(st.sampled_from(["enforce", "log", "off"])),
            "on_error": draw(st.sampled_from(["", "allow", "deny", "local"])),
            "starts_at": starts,
            "ends_at": ends,
            "reason": draw(texts)[:200],
        }

    def assignment() -> dict[str, Any]:
        starts = draw(moments) or JANUARY
        ends = draw(moments)
        of_user = draw(st.booleans())
        return {
            "user": draw(st.sampled_from(range(len(users)))) if of_user else None,
            "subject": None
            if of_user
            else draw(st.sampled_from(["tenant:acme", "tenant:y: #", "tenant:\U0001f642"])),
            "plan": draw(st.sampled_from(range(len(plans)))),
            "starts_at": starts,
            "ends_at": ends if ends and ends > starts else None,
            "anchor": draw(st.sampled_from([None, 1, 31])),
            "reason": draw(texts)[:200],
        }

    policies: dict[Any, dict[str, Any]] = {}
    for number in range(draw(st.integers(0, 8))):
        row = policy()
        place = tuple(row[name] for name in ("endpoint", "plan", "user", "subject", "counted_per"))
        policies[number if row["starts_at"] or row["ends_at"] else place] = row
    return {
        User: [{"username": name} for name in users],
        Plan: [
            {
                "slug": slug,
                "name": name,
                "position": draw(st.sampled_from([0, 1, 20, 10**9])),
                "default_for": default,
                "description": draw(texts),
            }
            for (slug, name), default in zip(plans, defaults, strict=False)
        ],
        Endpoint: [
            {
                "name": name,
                "routes": "\n".join(draw(routes)),
                "methods": " ".join(draw(st.permutations(["GET", "POST", "PUT"]))[: draw(st.integers(0, 3))]),
                "cost": draw(st.sampled_from([1, 2, 10**12])),
                "charged_statuses": draw(st.sampled_from(["", "401, 5xx"])),
                "exempt": draw(st.booleans()),
                "description": draw(texts),
            }
            for name in endpoints
        ],
        RatePolicy: list(policies.values()),
        PlanAssignment: [assignment() for _ in range(draw(st.integers(0, 4)) if plans else 0)],
    }


def fill(content: dict[type[models.Model], list[dict[str, Any]]]) -> None:
    """Store these rows and no others."""
    delete_all_rows()
    models.QuerySet(User)._raw_delete("default")
    made: dict[str, list[Any]] = {}
    for model, rows in content.items():
        made[str(model._meta.model_name)] = [
            model(
                **{
                    name: made[name][value] if name in ("user", "plan", "endpoint") and value is not None else value
                    for name, value in row.items()
                }
            )
            for row in rows
        ]
        models.QuerySet(model).bulk_create(made[str(model._meta.model_name)])


def rank(row: dict[str, Any]) -> str:
    """Return what decides which policy wins, except the id."""
    dated = row["starts_at"] is not None or row["ends_at"] is not None
    names = ("endpoint__name", "plan__slug", "user__username", "subject", "counted_per", "starts_at")
    return str(([row[name] for name in names], dated))


def fields() -> dict[str, list[tuple[Any, ...]]]:
    """Return all stored rows in the order of their ids, without ids, authors and times."""
    policy = [f.name for f in RatePolicy._meta.concrete_fields if f.name not in ("id", "endpoint", "plan", "user")]
    named = ("endpoint__name", "plan__slug", "user__username")
    return {
        "plans": sorted(models.QuerySet(Plan).values_list("slug", "name", "position", "default_for", "description")),
        "endpoints": sorted(
            models.QuerySet(Endpoint).values_list(
                "name", "routes", "methods", "cost", "charged_statuses", "exempt", "description"
            )
        ),
        "policies": sorted(
            models.QuerySet(RatePolicy).order_by("pk").values_list(*named, *policy),
            key=lambda row: rank(dict(zip((*named, *policy), row, strict=True))),
        ),
        "assignments": sorted(
            models.QuerySet(PlanAssignment).values_list(
                "user__username", "subject", "plan__slug", "starts_at", "ends_at", "anchor", "reason"
            ),
            key=str,
        ),
    }


EXAMPLES = 60


@given(contents(), st.sampled_from(["yaml", "json"]))
@examples(EXAMPLES)
def test_any_content_survives_export_and_import(
    content: dict[type[models.Model], list[dict[str, Any]]], form: str
) -> None:
    fill(content)
    before, text = fields(), export(form, assignments=True)
    assert not apply_file(text, prune=True).changes
    assert not PolicyChange.objects.exists()
    delete_all_rows()
    diff = apply_file(text)
    assert len(diff.created) == len(diff.changes) == sum(map(len, before.values()))
    assert fields() == before
    assert export(form, assignments=True) == text
    for model in (Plan, Endpoint, RatePolicy, PlanAssignment):
        for row in model.objects.all():
            row.full_clean()


@given(contents(), contents())
@examples(EXAMPLES)
def test_an_import_turns_any_content_into_any_other(one: Any, other: Any) -> None:
    other[User] = one[User] = [{"username": name} for name in ("a", "b", "c")]
    fill(other)
    expected, text = fields(), export(assignments=True)
    fill(one)
    apply_file(text, prune=True)
    assert {name: sorted(map(str, rows)) for name, rows in fields().items()} == {
        name: sorted(map(str, rows)) for name, rows in expected.items()
    }
    assert not apply_file(text, prune=True).changes
