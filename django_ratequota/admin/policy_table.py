"""The plans' and the endpoints' pages have a table of their policies, and their lists a number of them."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminTextInputWidget, RelatedFieldWidgetWrapper
from django.db.models import Count, F, QuerySet
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint, RatePolicy
from .base import AutocompleteAdmin
from .formatting import when
from .pages import may_view, model_url
from .policy_forms import RowForm, StoredRows
from .warnings import WarnsOnSave
from .widgets import RowAutocomplete

#: What a policy without the related object applies to.
WITHOUT = {"endpoint": _("all endpoints"), "plan": _("everyone")}
#: The columns of the constraint that allows one policy without dates.
_UNIQUE = ("endpoint_id", "user_id", "subject", "subject_list_id", "plan_id", "counted_per")
#: Most stored rows of the table, and most rows with the new ones. A row has up to eight fields, and Django accepts
#: 1,000 in a form (DATA_UPLOAD_MAX_NUMBER_FIELDS).
_MAX_STORED, _MAX_ROWS = 100, 120
#: Most options of a select in each row; with more, operators who may not search the objects write an id instead.
_MAX_CHOICES = 100


class PolicyFormSet(StoredRows, forms.BaseInlineFormSet):  # type: ignore[type-arg]
    """The first policies of a plan or an endpoint; the others are edited in the list of policies."""

    #: Address of the list with all of them; "" where the operator may not see it.
    list_url = ""

    def get_queryset(self) -> QuerySet[Any]:
        """Return the first rows; on submission, the rows that the page had."""
        if not hasattr(self, "_queryset"):
            rows = super().get_queryset()
            self._queryset = rows.filter(pk__in=self._submitted()) if self.is_bound else rows[:_MAX_STORED]
        return self._queryset

    def _submitted(self) -> list[int]:
        stored = range(min(self.initial_form_count(), self.total_form_count()))
        ids = [self.data.get(f"{self.add_prefix(number)}-{RatePolicy._meta.pk.name}", "") for number in stored]
        return [int(pk) for pk in ids if pk.isascii() and pk.isdigit() and len(pk) < 19]

    @cached_property
    def count(self) -> int:
        """Number of policies where the table leaves some out; else 0."""
        rows = len(self.get_queryset())
        count = self.queryset.count() if rows >= _MAX_STORED else 0  # type: ignore[union-attr]
        return count if count > rows else 0

    @property
    def shown(self) -> int:
        """Number of policies that the table shows."""
        return len(self.get_queryset())

    def add_fields(self, form: Any, index: int | None) -> None:
        """Label the box that deletes a row, as the other fields are."""
        super().add_fields(form, index)
        if "DELETE" in form.fields:
            form.fields["DELETE"].widget.attrs["aria-label"] = form.fields["DELETE"].label

    def clean(self) -> None:
        """Refuse two policies without dates for the same audience and endpoint, as the database would.

        The forms cannot, because the constraint has columns that they leave out. It must hold after each save of a
        row, and new rows are saved last: a new row may replace a deleted one, but two rows cannot swap.
        """
        super().clean()
        undated = self.queryset.filter(starts_at__isnull=True, ends_at__isnull=True)  # type: ignore[union-attr]
        taken = {tuple(key): pk for pk, *key in undated.values_list("pk", *_UNIQUE)}
        for form in self.forms:
            policy = form.instance
            deleted = self.can_delete and self._should_delete_form(form)  # type: ignore[attr-defined]
            if not deleted and (not form.is_valid() or (policy.pk is None and not form.has_changed())):
                continue
            taken = {key: pk for key, pk in taken.items() if pk is None or pk != policy.pk}
            if deleted or policy.starts_at or policy.ends_at:
                continue
            key = tuple(getattr(policy, name) for name in _UNIQUE)
            if key in taken:
                (rule,) = (c for c in RatePolicy._meta.constraints if c.name == "ratequota_policy_one_undated")
                form.add_error(None, str(rule.get_violation_error_message()))
            else:
                taken[key] = policy.pk


class PolicyInline(AutocompleteAdmin, admin.TabularInline):  # type: ignore[type-arg]
    """The table: one row per policy, its rates as text."""

    model = RatePolicy
    form = RowForm
    formset = PolicyFormSet
    template = "admin/django_ratequota/policies.html"
    extra = 0
    max_num = _MAX_ROWS
    show_change_link = True
    # Dates, reason and rarer fields are on the policy's own page, a click away.
    readonly_fields = [when]  # type: ignore[list-item]

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Return the policies; those for all endpoints or for everyone come first, on every database."""
        order = [F(f"{name}__name").asc(nulls_first=True) for name in ("endpoint", "plan")]
        return super().get_queryset(request).select_related("endpoint", "plan", "subject_list").order_by(*order, "pk")

    def get_formset(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        """Return the formset, with the address of the list of all policies of the object."""
        formset: Any = super().get_formset(request, obj, **kwargs)
        if obj is not None:
            # The class was made for this request.
            formset.list_url = list_url(self.admin_site, request, {f"{formset.fk.name}__id__exact": str(obj.pk)})
        return formset

    def formfield_for_dbfield(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        """Return the field without the icons that add or edit the other object: they take a line in every row."""
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None and isinstance(field.widget, RelatedFieldWidgetWrapper):
            if db_field.name in self.get_autocomplete_fields(request):
                choices = field.widget.choices
                field.widget = RowAutocomplete(db_field, self.admin_site, placeholder=WITHOUT[db_field.name])
                field.widget.choices = choices
            else:
                field.widget = field.widget.widget
                options = list(field.choices)[1:]
                if len(options) > _MAX_CHOICES:
                    field.widget = AdminTextInputWidget(attrs={"placeholder": WITHOUT[db_field.name], "size": 12})
                else:
                    field.choices = [("", WITHOUT[db_field.name]), *options]  # read once for all rows
        return field


class PolicyTableAdmin(WarnsOnSave):
    """The admin of an object with a policy table. It warns about the edited rows."""

    ordering = ["name"]  # repeated here, because a query that counts drops the model's
    show_facets = admin.ShowFacets.ALWAYS

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Return the objects with the number of their policies."""
        queryset: QuerySet[Any] = super().get_queryset(request).annotate(policy_count=Count("policies"))
        return queryset

    @admin.display(description=_("policies"), ordering="policy_count")
    def policy_count(self, row: Any) -> int:
        """Return the number of policies, overrides included."""
        return int(row.policy_count)

    def save_related(self, request: Any, form: Any, formsets: Any, change: bool) -> None:
        """Save the table, then warn."""
        super().save_related(request, form, formsets, change)
        edited = []
        for formset in formsets:
            if formset.model is RatePolicy:
                edited += [*formset.new_objects, *(policy for policy, _fields in formset.changed_objects)]
        self.warn(request, edited, form.instance if isinstance(form.instance, Endpoint) else None)


def list_url(site: admin.AdminSite, request: Any, filters: dict[str, str]) -> str:
    """Return the address of the list of policies, filtered; "" where the operator may not see it."""
    allowed = may_view(site, RatePolicy, request)
    return model_url(site, RatePolicy, "changelist", query=filters) if allowed else ""
