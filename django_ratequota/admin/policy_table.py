"""The plans' and the endpoints' pages have a table of their policies, and their lists a number of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminTextInputWidget, RelatedFieldWidgetWrapper
from django.core.paginator import Paginator
from django.db.models import Count, F, QuerySet
from django.utils.functional import cached_property
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint, RatePolicy
from .base import AutocompleteAdmin
from .formatting import when
from .pages import may_view, model_url, page_numbers
from .policy_forms import RowForm, StoredRows
from .warnings import WarnsOnSave
from .widgets import RowAutocomplete

#: What a policy without the related object applies to.
WITHOUT = {"endpoint": _("all endpoints"), "plan": _("everyone")}
#: The columns of the constraint that allows one policy without dates.
_UNIQUE = ("endpoint_id", "user_id", "subject", "subject_list_id", "plan_id", "counted_per")
#: Stored rows on a page of the table, and most rows with the new ones. A row has up to eight fields, and Django
#: accepts 1,000 in a form (DATA_UPLOAD_MAX_NUMBER_FIELDS). Fifty rows are 200 kB.
_PAGE, _MAX_ROWS = 50, 70
#: Most names that are suggested to operators who may not search the objects.
_MAX_NAMES = 1_000
#: The table's page, and a part of a name to find in it: parameters of the address.
_PAGE_VAR, _FIND_VAR = "policies_page", "policies_find"
_LIST_VAR = "_changelist_filters"


class PolicyFormSet(StoredRows, forms.BaseInlineFormSet):  # type: ignore[type-arg]
    """A page of the policies of a plan or an endpoint; those of other pages are neither read nor written."""

    #: Address of the list with all of them; "" where the operator may not see it.
    list_url = ""
    #: The parameters of the address that choose the page.
    chosen: dict[str, str] = {}
    #: Names for operators who may not search for endpoints (in a plan's table) or for plans.
    names: Iterable[str] = ()

    def get_queryset(self) -> QuerySet[Any]:
        """Return the rows of the page; on submission, the rows that the page had."""
        if not hasattr(self, "_queryset"):
            if self.is_bound:
                self._queryset = super().get_queryset().filter(pk__in=self._submitted())
            else:
                self._queryset = self.page.object_list
        return self._queryset

    @cached_property
    def page(self) -> Any:
        """The chosen page of the policies, of those with the chosen part of a name if there is one."""
        rows: Any = self.queryset
        if self.find:
            other = "plan" if self.fk.name == "endpoint" else "endpoint"
            rows = rows.filter(**{f"{other}__name__icontains": self.find})
        return Paginator(rows, _PAGE).get_page(self.chosen.get(_PAGE_VAR))

    @property
    def find(self) -> str:
        """The chosen part of a name; "" = all."""
        return self.chosen.get(_FIND_VAR, "")

    @property
    def chosen_list(self) -> str:
        """The filters of the list that the operator came from."""
        return self.chosen.get(_LIST_VAR, "")

    @property
    def pages(self) -> list[dict[str, Any]]:
        """The numbers of the pages and their addresses."""
        return page_numbers(self.page, lambda number: f"?{urlencode(self.chosen | {_PAGE_VAR: str(number)})}")

    def _submitted(self) -> list[int]:
        stored = range(min(self.initial_form_count(), self.total_form_count()))
        ids = [self.data.get(f"{self.add_prefix(number)}-{RatePolicy._meta.pk.name}", "") for number in stored]
        return [int(pk) for pk in ids if pk.isascii() and pk.isdigit() and len(pk) < 19]

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
    fields = ["endpoint", "rates", "mode", "counted_per", "algorithm", when]  # type: ignore[list-item]
    empty_value_display = WITHOUT["endpoint"]
    # Dates, reason and rarer fields are on the policy's own page, a click away.
    readonly_fields = [when]  # type: ignore[list-item]

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Return the policies; those for all endpoints or for everyone come first, on every database."""
        order = [F(name).asc(nulls_first=True) for name in ("endpoint__name", "plan__position", "plan__name")]
        return super().get_queryset(request).select_related("endpoint", "plan", "subject_list").order_by(*order, "pk")

    def get_formset(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        """Return the formset, with the address of the list of all policies of the object, and the chosen page."""
        formset: Any = super().get_formset(request, obj, **kwargs)
        if obj is not None:
            # The class was made for this request.
            formset.list_url = list_url(self.admin_site, request, {f"{formset.fk.name}__id__exact": str(obj.pk)})
            formset.chosen = chosen_page(request)
        related = RatePolicy._meta.get_field("plan" if formset.fk.name == "endpoint" else "endpoint")
        if related.name not in self.get_autocomplete_fields(request):
            formset.names = related.related_model._default_manager.values_list("name", flat=True)[:_MAX_NAMES]  # type: ignore[union-attr]
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
                # One list of names for the page, because a select of them in each row would be most of the page.
                field.to_field_name = "name"
                attrs = {"placeholder": WITHOUT[db_field.name], "size": 12, "list": "ratequota-names"}
                field.widget = AdminTextInputWidget(attrs=attrs)
                field.error_messages["invalid_choice"] = _("There is no such name here: choose one of the list.")
        return field


class PolicyTableAdmin(WarnsOnSave):
    """The admin of an object with a policy table. It warns about the edited rows."""

    ordering = ["name"]  # repeated here, because a query that counts drops the model's
    show_facets = admin.ShowFacets.ALWAYS

    class Media:
        css = {"all": ["django_ratequota/plans.css"]}

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

    def render_change_form(self, request: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Send the form to the address of the table's page, because Django leaves it out of one with filters."""
        if chosen := chosen_page(request):
            kwargs["form_url"] = f"?{urlencode(chosen)}"
        return super().render_change_form(request, context, *args, **kwargs)


def chosen_page(request: Any) -> dict[str, str]:
    """Return the parameters that choose a page of the table, and those that lead back to the list."""
    names = (_LIST_VAR, _FIND_VAR, _PAGE_VAR)
    values = {name: request.GET.get(name, "").replace("\x00", "").strip() for name in names}
    return {name: value for name, value in values.items() if value}


def list_url(site: admin.AdminSite, request: Any, filters: dict[str, str]) -> str:
    """Return the address of the list of policies, filtered; "" where the operator may not see it."""
    allowed = may_view(site, RatePolicy, request)
    return model_url(site, RatePolicy, "changelist", query=filters) if allowed else ""
