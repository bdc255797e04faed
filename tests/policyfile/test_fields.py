"""Each field of each model in the file survives export and import."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import models

from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from django_ratequota.policyfile import apply_file
from tests.policyfile.examples import JANUARY, delete_all_rows, export

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "tenants")]

MODELS = (Plan, Endpoint, SubjectList, ListMember, RatePolicy, PlanAssignment)
#: By what a row that another refers to is found again, as its key is a new one.
NAMES = {
    "plan": "plan__slug",
    "endpoint": "endpoint__name",
    "subject_list": "subject_list__name",
    "user": "user__username",
}
#: Of these, each object has only one.
AUDIENCE = ("user", "subject", "subject_list", "plan")
#: Values of fields that do not take any text.
VALUES = {
    "subject": "tenant:acme",
    "counted_per": "ip",
    "rates": "7/day, 9/month",
    "routes": "reports:*\n/api/*",
    "methods": "GET POST",
    "charged_statuses": "401, 5xx",
    "ends_at": JANUARY + timedelta(days=1),
}


def fields_of(model: type[models.Model]) -> list[Any]:
    return [field for field in model._meta.fields if field.concrete and field.editable and not field.primary_key]


def another_value(field: Any, objects: dict[str, Any]) -> Any:
    """Return a valid value that is not the field's default."""
    if field.name in VALUES or field.is_relation:
        return {**VALUES, **objects}[field.name]
    if field.choices:
        return next(key for key, _label in field.choices if key not in ("", field.get_default()))
    if isinstance(field, models.BooleanField):
        return not field.get_default()
    if isinstance(field, models.IntegerField):
        return 7
    return JANUARY if isinstance(field, models.DateTimeField) else field.name


def stored() -> list[list[dict[str, Any]]]:
    """Return the values of all editable fields of all rows."""
    names = [[NAMES.get(field.name, field.name) for field in fields_of(model)] for model in MODELS]
    return [sorted(model.objects.values(*of), key=str) for model, of in zip(MODELS, names, strict=True)]


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_each_editable_field_survives_export_and_import(alice: User, form: str) -> None:
    objects: dict[str, Any] = {"user": alice}
    for model in MODELS:
        values = {field.name: another_value(field, objects) for field in fields_of(model)}
        # A member has its list, and an assignment its plan, besides a user or a subject.
        exclusive = AUDIENCE if model is RatePolicy else AUDIENCE[:2]
        for only in [name for name in exclusive if name in values] or [""]:
            made = model(**{name: value for name, value in values.items() if name == only or name not in exclusive})
            made.full_clean()
            made.save()
            objects.setdefault("subject_list" if model is SubjectList else made._meta.model_name, made)
    before, text = stored(), export(form, assignments=True)
    for model, rows in zip(MODELS, before, strict=True):
        for field in fields_of(model):
            assert {row[NAMES.get(field.name, field.name)] for row in rows} - {field.get_default()}, field
    delete_all_rows()
    apply_file(text)
    assert stored() == before
    assert export(form, assignments=True) == text
