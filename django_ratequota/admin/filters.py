"""Filters of the admin's lists: by related object, by time and by audience."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from ..changes.databases import not_ended, started
from .permissions import FOR_CHOSEN
from .widgets import SafeAutocomplete

#: Names of an empty value, by field.
_EMPTY = {"endpoint": _("all endpoints"), "plan": _("no plan"), "subject_list": _("no list")}


class RelatedFilter(admin.RelatedFieldListFilter):
    """Filters by a related object, found by autocomplete.

    Facet counts are left out: each would be a column, and PostgreSQL takes 1,664 of them, SQLite 2,000.
    """

    template = "admin/django_ratequota/filter.html"

    def __init__(self, field: Any, request: Any, params: Any, model: Any, model_admin: Any, field_path: str) -> None:
        name = f"{field_path}__{field.target_field.name}__exact"
        if params.get(name) == [""]:
            del params[name]  # the form was sent empty
        super().__init__(field, request, params, model, model_admin, field_path)
        choice = field.formfield(widget=SafeAutocomplete(field, model_admin.admin_site), required=False)
        attrs = {"id": f"filter-{name}", "aria-label": str(self.title)}
        #: The rendered field that finds the object; "" for operators who may not search for it.
        self.chooser = ""
        if model_admin.may_search(field.related_model, request):
            self.chooser = choice.widget.render(name, (self.lookup_val or [""])[-1], attrs)
        #: The list's other filters and its order: names and values of hidden fields.
        self.others: list[tuple[str, str]] = []

    def has_output(self) -> bool:
        """Return True: to find out that there are no choices would take a query."""
        return True

    def field_choices(self, field: Any, request: Any, model_admin: Any) -> Any:
        """Return nothing: a list of all objects would be too long."""
        return []

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield the links for all rows, and for rows without a related object."""
        own = self.expected_parameters()
        params = changelist.filter_params.items()
        self.others = [(name, value) for name, values in params if name not in own for value in values]
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


class ConditionFilter(admin.SimpleListFilter):
    """Filter by one of a few conditions."""

    def conditions(self) -> dict[str, tuple[Any, Any]]:
        """Return value in the address -> (text of the choice, condition of its rows)."""
        raise NotImplementedError

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the choices."""
        return [(value, text) for value, (text, _condition) in self.conditions().items()]

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the choice."""
        chosen = self.conditions().get(self.value() or "")
        return queryset.filter(chosen[1]) if chosen else queryset


class ActiveFilter(ConditionFilter):
    """Filter by whether a row is active now, has not started, or has ended."""

    title = _("time")
    parameter_name = "time"

    def conditions(self) -> dict[str, tuple[Any, Any]]:
        """Compare the dates with this moment."""
        now = timezone.now()
        return {
            "active": (_("active now"), started(now) & not_ended(now)),
            "future": (_("not started"), Q(starts_at__gt=now)),
            "ended": (_("ended"), Q(ends_at__lte=now)),
            "dated": (_("has an end"), Q(ends_at__isnull=False)),
        }


class AudienceFilter(ConditionFilter):
    """Filter by the kind of audience."""

    title = _("audience")
    parameter_name = "audience"

    def conditions(self) -> dict[str, tuple[Any, Any]]:
        """Look at the fields of the audience."""
        return {
            "user": (_("a user"), Q(user__isnull=False)),
            "subject": (_("a subject"), ~Q(subject="")),
            "list": (_("a subject list"), Q(subject_list__isnull=False)),
            "plan": (_("a plan"), Q(plan__isnull=False)),
            "everyone": (_("everyone"), Q(plan__isnull=True) & ~FOR_CHOSEN),
            "override": (_("a user, a subject or a list"), FOR_CHOSEN),
        }


def is_active(row: Any) -> bool:
    """Return whether the row's dates include this moment."""
    now = timezone.now()
    return (row.starts_at is None or row.starts_at <= now) and (row.ends_at is None or row.ends_at > now)
