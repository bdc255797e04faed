"""Filters of the lists whose choices may be thousands of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from .formatting import shown
from .permissions import OVERRIDES
from .widgets import SafeAutocomplete

#: Most objects of a select; an operator who may not search them cannot choose the others.
_MOST_CHOICES = 100
#: What an empty field means, by its name.
_EMPTY = {"endpoint": _("all endpoints"), "plan": _("no plan")}


class RelatedFilter(admin.RelatedFieldListFilter):
    """Filters by a related object that is looked up, and never counts by all of them.

    Such a count is a column each, of which PostgreSQL takes 1,664 and SQLite 2,000.
    """

    template = "admin/django_ratequota/filter.html"

    def __init__(self, field: Any, request: Any, params: Any, model: Any, model_admin: Any, field_path: str) -> None:
        name = f"{field_path}__{field.target_field.name}__exact"
        if params.get(name) == [""]:
            del params[name]  # the form was sent without a choice
        super().__init__(field, request, params, model, model_admin, field_path)
        searches = model_admin.may_search(field.related_model, request)
        widget = SafeAutocomplete(field, model_admin.admin_site) if searches else forms.Select()
        choice = field.formfield(widget=widget, required=False)
        if not searches:
            choice.choices = [("", "---------"), *self._used(request, model_admin)]
        attrs = {"id": f"filter-{name}", "aria-label": str(self.title)}
        #: The field that looks the object up.
        self.chooser = choice.widget.render(name, (self.lookup_val or [""])[-1], attrs)
        #: What else the list is filtered and ordered by: the names and values of hidden fields.
        self.others: list[tuple[str, str]] = []

    def has_output(self) -> bool:
        """Return True: that there is nothing to choose would take a query to find out."""
        return True

    def field_choices(self, field: Any, request: Any, model_admin: Any) -> Any:
        """Return nothing: all objects would be too many."""
        return []

    def choices(self, changelist: Any) -> Iterator[Any]:
        """All rows, and those without such an object."""
        own = self.expected_parameters()
        given = changelist.filter_params.items()
        self.others = [(name, value) for name, values in given if name not in own for value in values]
        yield {
            "selected": self.lookup_val is None and not self.lookup_val_isnull,
            "query_string": changelist.get_query_string(remove=own),
            "display": _("All"),
        }
        if self.include_empty_choice:
            yield {
                "selected": bool(self.lookup_val_isnull),
                "query_string": changelist.get_query_string({self.lookup_kwarg_isnull: "True"}, [self.lookup_kwarg]),
                "display": _EMPTY.get(self.field.name, _("none")),
            }

    def _used(self, request: Any, model_admin: Any) -> list[tuple[Any, str]]:
        """The first of the objects that rows of the list point at."""
        field: Any = self.field
        used = model_admin.get_queryset(request).order_by().values(self.field_path)
        related = field.related_model._default_manager.filter(pk__in=used)
        rows = related.order_by(*self.field_admin_ordering(field, request, model_admin))[:_MOST_CHOICES]
        return [(row.pk, shown(row)) for row in rows]


class ActiveFilter(admin.SimpleListFilter):
    """Whether a dated row counts now, will count, or has ended."""

    title = _("time")
    parameter_name = "time"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """The choices."""
        choices = {
            "active": _("active now"),
            "future": _("not started"),
            "ended": _("ended"),
            "dated": _("has an end"),
        }
        return list(choices.items())

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The rows of the choice."""
        now = timezone.now()
        started = Q(starts_at__isnull=True) | Q(starts_at__lte=now)
        open_ended = Q(ends_at__isnull=True) | Q(ends_at__gt=now)
        condition = {
            "active": started & open_ended,
            "future": Q(starts_at__gt=now),
            "ended": Q(ends_at__lte=now),
            "dated": Q(ends_at__isnull=False),
        }.get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


class AudienceFilter(admin.SimpleListFilter):
    """What kind of audience a policy has."""

    title = _("audience")
    parameter_name = "audience"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """The choices."""
        choices = {"user": _("a user"), "subject": _("a subject"), "plan": _("a plan"), "everyone": _("everyone")}
        return [*choices.items(), ("override", _("a user or a subject"))]

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The rows of the choice."""
        condition = {
            "user": Q(user__isnull=False),
            "subject": ~Q(subject=""),
            "plan": Q(plan__isnull=False),
            "everyone": Q(user__isnull=True, subject="", plan__isnull=True),
            "override": OVERRIDES,
        }.get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


def is_active(row: Any) -> bool:
    """Whether the row's dates include this moment."""
    now = timezone.now()
    return (row.starts_at is None or row.starts_at <= now) and (row.ends_at is None or row.ends_at > now)
