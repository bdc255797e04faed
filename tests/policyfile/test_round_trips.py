"""Any content of the database survives export and import, in every field of every model."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from unicodedata import combining, normalize

import pytest
from django.contrib.auth.models import User
from django.db import models
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, PolicyChange, RatePolicy, SubjectList
from django_ratequota.policyfile import apply_file
from tests.policyfile.examples import JANUARY, delete_all_rows, export, slugs, texts
from tests.support.properties import examples
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "tenants")]

MODELS = (Plan, Endpoint, SubjectList, ListMember, RatePolicy, PlanAssignment)
#: By what a row that another refers to is found again, as its key is a new one.
NAMES = {
    "plan": "plan__slug",
    "endpoint": "endpoint__name",
    "subject_list": "subject_list__name",
    "user": "user__username",
}
USERS = ["a", "yes", "\U0001f642"]
SUBJECTS = ["tenant:acme", "tenant:y: #", "tenant:\U0001f642"]
names = texts.filter(lambda text: 0 < len(text) <= 100)
routes = st.sampled_from(["/", "reports:*", "/a/<int:pk>/", "yes", "1e3", "#", "-", "/é/*", "*"])
moments = st.one_of(
    st.none(),
    st.sampled_from([JANUARY, JANUARY + timedelta(days=1)]),
    st.datetimes(datetime(1000, 1, 2), datetime(9998, 12, 31), timezones=st.just(UTC)),
)
#: Values by field; those of choices, booleans and times follow from the field.
VALUES = {
    "slug": slugs,
    "name": names,
    "description": texts,
    "position": st.sampled_from([0, 1, 10**9]),
    "routes": st.lists(routes, max_size=3).map("\n".join),
    "methods": st.sampled_from(["", "GET", "PUT GET"]),
    "cost": st.sampled_from([1, 2, 10**12]),
    "charged_statuses": st.sampled_from(["", "401, 5xx"]),
    "counted_per": st.sampled_from(["caller", "ip", "plan", "everyone"]),
    "rates": st.sampled_from(
        ["10/min", "1/s, 2/month", "unlimited", "blocked", "5/30s, 2 concurrent", "7/day leaky_bucket"]
    ),
    "anchor": st.sampled_from([None, 1, 31]),
    "reason": texts.map(lambda text: text[:200]),
}
Rows = list[dict[str, Any]]


def fields_of(model: type[models.Model]) -> list[Any]:
    return [field for field in model._meta.fields if field.editable and not field.primary_key]


def values_of(field: Any) -> Any:
    if field.choices:
        return st.sampled_from([key for key, _label in field.choices])
    if isinstance(field, models.BooleanField):
        return st.booleans()
    return moments if isinstance(field, models.DateTimeField) else VALUES[field.name]


def rows_of(model: type[models.Model], *, most: int = 5, **more: Any) -> Any:
    """Return a strategy for rows without references and subjects, whose ends lie after their starts."""
    own = [field for field in fields_of(model) if not field.is_relation and field.name != "subject"]

    def in_order(row: dict[str, Any]) -> dict[str, Any]:
        starts, ends = row.get("starts_at"), row.get("ends_at")
        return row | {"ends_at": None} if starts and ends and ends <= starts else row

    fields = {field.name: values_of(field) for field in own} | more
    return st.lists(st.fixed_dictionaries(fields).map(in_order), max_size=most)


def stored() -> list[list[dict[str, Any]]]:
    """Return the values of all editable fields of all rows."""
    columns = [[NAMES.get(field.name, field.name) for field in fields_of(model)] for model in MODELS]
    return [sorted(model.objects.values(*of), key=str) for model, of in zip(MODELS, columns, strict=True)]


def unique(rows: Rows, *names: str) -> Rows:
    """Leave out rows without dates that have the same values as another one."""
    found = {}
    for number, row in enumerate(rows):
        dated = bool(row.get("starts_at") or row.get("ends_at"))
        key = (*(_collated(row.get(name)) for name in names), row.get("mode") == "log")
        found[number if dated and "rates" in row else key] = row
    return list(found.values())


def _collated(value: Any) -> Any:
    """Return what is equal for all texts that MariaDB's collations may take for the same name."""
    if not isinstance(value, str):
        return value
    letters = (letter for letter in normalize("NFKD", value).casefold() if not combining(letter))
    return "".join(letter if letter.isascii() else "?" for letter in letters).rstrip()


@st.composite
def contents(draw: Any) -> dict[Any, Rows]:
    """Return rows of valid objects by model; they name the objects that they refer to."""
    plans = unique(unique(draw(rows_of(Plan)), "slug"), "name")
    for plan, default in zip(plans, ("", "anonymous", "authenticated", "", ""), strict=False):
        plan["default_for"] = default
    endpoints = unique(draw(rows_of(Endpoint, name=slugs)), "name")
    lists = unique(draw(rows_of(SubjectList, most=3)), "name")
    owners = [{"user": user} for user in USERS] + [{"subject": subject} for subject in SUBJECTS]
    listed = [{"subject_list": row["name"]} for row in lists]
    tiers = [{"plan": row["slug"]} for row in plans]
    audiences = st.sampled_from([{}, *owners, {"subject": "ip:2001:db8::/64"}, *tiers, *listed])
    places = st.sampled_from([None, *(row["name"] for row in endpoints)])
    policies = draw(rows_of(RatePolicy, most=8, endpoint=places, audience=audiences))
    owner = st.sampled_from(owners)
    members = draw(rows_of(ListMember, to=st.sampled_from(listed), owner=owner)) if listed else []
    assignments = draw(rows_of(PlanAssignment, to=st.sampled_from(tiers), owner=owner)) if tiers else []
    for row in (*policies, *members, *assignments):
        for name in ("audience", "to", "owner"):
            row.update(row.pop(name, {}))
    for row in assignments:
        row["starts_at"] = row["starts_at"] or JANUARY
        row["ends_at"] = row["ends_at"] if row["ends_at"] and row["ends_at"] > row["starts_at"] else None
    place = ("endpoint", "user", "subject", "subject_list", "plan", "counted_per")
    return {
        Plan: plans,
        Endpoint: endpoints,
        SubjectList: lists,
        ListMember: unique(members, "subject_list", "user", "subject"),
        RatePolicy: unique(policies, *place),
        PlanAssignment: assignments,
    }


def fill(content: dict[Any, Rows]) -> None:
    """Store these rows and no others."""
    delete_all_rows()
    objects: dict[str, dict[Any, Any]] = {"user": {user.username: user for user in User.objects.all()}}
    for model, rows in content.items():
        made = [
            model(**{name: objects.get(name, {}).get(value, value) for name, value in row.items()}) for row in rows
        ]
        models.QuerySet(model).bulk_create(made)
        singular = "subject_list" if model is SubjectList else str(model._meta.model_name)
        objects[singular] = {getattr(one, "slug", getattr(one, "name", None)): one for one in made}


@pytest.fixture(autouse=True)
def users() -> None:
    User.objects.bulk_create(User(username=name) for name in USERS)


@given(contents(), contents(), st.sampled_from(["yaml", "json"]))
@examples(60)
def test_an_import_turns_any_content_into_any_other(one: dict[Any, Rows], other: dict[Any, Rows], form: str) -> None:
    fill(one)
    for model in MODELS:
        for row in model.objects.all():
            row.full_clean()
    expected, text = stored(), export(form, assignments=True)
    assert not apply_file(text, prune=True).changes
    assert not PolicyChange.objects.exists()
    fill(other)
    apply_file(text, prune=True)
    assert stored() == expected
    delete_all_rows()
    diff = apply_file(text)
    assert len(diff.of("create")) == len(diff.changes) == sum(map(len, expected))
    assert (stored(), export(form, assignments=True)) == (expected, text)


# --- Where only the order of creation says which policy or plan wins. ---


def limits_of(user: User) -> list[int]:
    """Return the limits of the policies that win, here and in a copy of this database."""
    limits = []
    for copy in (False, True):
        if copy:
            text = export(assignments=True)
            delete_all_rows()
            apply_file(text)
            assert export(assignments=True) == text
        limits += [status.limit for status in check_from(user).statuses]
    return limits


LATER = {"ends_at": JANUARY + timedelta(days=9999)}


@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("of", [{}, {"starts_at": JANUARY}, LATER, "assignments", "one audience"], ids=str)
def test_of_equals_the_newest_wins(alice: User, names: str, of: Any) -> None:
    for number, name in enumerate(names, start=1):
        if of == "one audience":
            RatePolicy.objects.create(rates=f"{number}/min", starts_at=JANUARY)
        elif of == "assignments":
            plan = Plan.objects.create(name=name, slug=name)
            RatePolicy.objects.create(plan=plan, rates=f"{number}/min")
            PlanAssignment.objects.create(user=alice, plan=plan, starts_at=JANUARY)
        else:
            listed = SubjectList.objects.create(name=name)
            ListMember.objects.create(subject_list=listed, subject="ip:203.0.113.7")
            RatePolicy.objects.create(subject_list=listed, rates=f"{number}/min", **of)
    assert limits_of(alice) == [2, 2]
