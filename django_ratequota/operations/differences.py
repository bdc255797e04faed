"""The fields in which the two states of a recorded change differ, and their values in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from django.contrib.auth import get_user_model
from django.db import models
from django.utils.dateparse import parse_datetime
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..changes.validators import primary_key, visible
from ..models import PolicyChange, RatePolicy
from .states import KINDS
from .texts import isolated, moment

#: (field name, the field or None if the model no longer has it, before, after)
Difference = tuple[str, Any, Any, Any]
#: Characters of a value in a sentence, and newest changes of an object that are searched for those of its fields.
_CHARACTERS, _MOST_CHANGES = 100, 100
#: The user with whose key an object's text begins: of a policy, an assignment, a list member, counters.
_USER = re.compile(r"user:(.+?)(?= × |: | \(|$)")


def differences(change: PolicyChange) -> list[Difference]:
    """Return the fields that the change changed, or every counter of a reset or grant."""
    before, after = change.before or {}, change.after or {}
    fields = KINDS[change.model]._meta.concrete_fields if change.model in KINDS else ()
    known = {field.name: field for field in fields}
    counted = change.model == "counter"
    found = []
    # In the model's order, because PostgreSQL keeps no order of JSON keys.
    for name in dict.fromkeys([*known, *before, *after]):
        field = known.get(name)
        states = [state.get(name) for state in (before, after)]
        changed = (states[0] or "") != (states[1] or "") and not (field and field.primary_key)
        if changed or counted:
            found.append((name, field, states[0], states[1]))
    return found


class Words:
    """The changes in words, with today's names of related objects, looked up in one query per model."""

    def __init__(self, changes: Iterable[PolicyChange]) -> None:
        # By identity, because they may be unsaved.
        self._rows = {id(change): differences(change) for change in changes}
        wanted: dict[Any, set[Any]] = {}
        for _name, field, *values in (row for rows in self._rows.values() for row in rows):
            if field is not None and field.is_relation:
                wanted.setdefault(field.related_model, set()).update(one for one in values if one not in (None, ""))
        self._names = {model: object_names(model, keys) for model, keys in wanted.items()}

    def table(self, change: PolicyChange) -> list[tuple[Any, str, str]]:
        """Return the label of each field that differs, and its values before and after; "" for a missing value."""
        return [
            (field.verbose_name if field else name, self._text(field, before), self._text(field, after))
            for name, field, before, after in self._rows[id(change)]
        ]

    def _text(self, field: Any, value: Any) -> str:
        if field is not None and field.is_relation and value not in (None, ""):
            value, field = self._names[field.related_model].get(str(value)) or deleted(value), None
        return visible(_in_words(field, value))


def _in_words(field: Any, value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, dict) and value.keys() >= {"used", "remaining"}:
        return _("%(used)s used, %(remaining)s left") % value
    if isinstance(field, models.DateTimeField):
        return moment(parse_datetime(value)) or str(value)
    if isinstance(value, bool):
        return _("yes") if value else _("no")
    # Without a field it is one of an earlier version.
    return str(dict(field.flatchoices).get(value, value) if field else value)


def who_changed(change: PolicyChange, since: int = 0) -> list[str]:
    """Return in sentences who changed the fields of an unsaved change, from one state to another, last and when.

    ``since`` is the primary key of the change that left the first state; 0 = unknown.
    """
    rows = PolicyChange.objects.filter(model=change.model, object_id=change.object_id, pk__gt=since)
    last: dict[str, PolicyChange] = {}
    for row in rows.select_related("actor")[:_MOST_CHANGES]:
        last = {name: row for name, *_states in differences(row)} | last
    found = []
    for (name, *_states), (label, *values) in zip(differences(change), Words([change]).table(change), strict=True):
        before, after = (isolated(Truncator(value or _("empty")).chars(_CHARACTERS)) for value in values)
        words = {"field": label, "before": before, "after": after}
        text = _("%(field)s was changed from %(before)s to %(after)s.")
        if name in last:  # else it was changed by SQL, or by a bulk write that records no rows
            text = _("%(actor)s changed %(field)s from %(before)s to %(after)s at %(at)s.")
            actor = visible(last[name].actor or _("Code or a command"))
            words |= {"actor": actor, "at": moment(last[name].at)}
        found.append(text % words)
    return found


def name_users(rows: Iterable[Any]) -> None:
    """Put today's names of users into the ``object_text`` of these rows, which are not to be saved; in one query."""
    found = [(row, match) for row in rows if (match := _USER.match(row.object_text))]
    names = object_names(get_user_model(), {match[1] for _row, match in found})
    for row, match in found:
        if match[1] in names:
            row.object_text = _("user %s") % visible(names[match[1]]) + row.object_text[match.end() :]


def object_name(model: type[models.Model], pk: Any) -> str:
    """The object's name and id; the id alone where the model cannot have it."""
    if primary_key(model, pk) is None:
        return str(pk)
    name = object_names(model, [pk]).get(str(pk))
    return deleted(pk) if name is None else _("%(object)s (id %(pk)s)") % {"object": name, "pk": pk}


def deleted(pk: Any) -> str:
    """Return the text in place of a deleted object's name."""
    return _("deleted (id %(pk)s)") % {"pk": pk}


def policies_by_id(
    ids: Iterable[int | None], among: models.QuerySet[RatePolicy] | None = None
) -> dict[int, RatePolicy]:
    """Return the policies with these ids that still exist, with the objects that their texts name, in one query.

    With ``among`` only those of them.
    """
    found = RatePolicy.objects.all() if among is None else among
    return found.select_related("user", "subject_list", "plan", "endpoint").in_bulk({pk for pk in ids if pk})


def object_names(model: type[models.Model], ids: Iterable[Any], name: Callable[[Any], str] = str) -> dict[str, str]:
    """Return id as text -> name of the model's objects, in one query; ``name`` makes the name from the object.

    Deleted objects, and ids that the model cannot have (a project may have changed its user model), are left out.
    """
    keys = {key for key in (primary_key(model, pk) for pk in ids) if key is not None}
    return {str(row.pk): name(row) for row in model._base_manager.filter(pk__in=keys)} if keys else {}
