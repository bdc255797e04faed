"""The plans' and the endpoints' pages have a table of their policies, and their lists a number of them."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminTextareaWidget, RelatedFieldWidgetWrapper
from django.db import models
from django.db.models import Count, F, QuerySet
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..models import RatePolicy
from ..operations.roll_out import PLACE
from .base import AutocompleteAdmin, WarnsOnSave
from .formatting import shown, when
from .pages import may_view, model_url
from .policy_forms import RowForm, StoredRows
from .widgets import RowAutocomplete

#: Words for a policy without the related object.
WITHOUT = {"endpoint": _("all endpoints"), "plan": _("everyone")}
#: Maximum number of stored rows of a table, and of all rows with the new ones. A row has up to eight
#: fields, and Django accepts 1,000 in a form (DATA_UPLOAD_MAX_NUMBER_FIELDS). 75 rows are 250 kB.
_MOST_STORED, _MOST_ROWS = 75, 100


class PolicyFormSet(StoredRows, forms.BaseInlineFormSet):  # type: ignore[type-arg]
    """The policies of a plan or an endpoint."""

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
        taken = {_unique(policy): policy.pk for policy in undated}
        for form in self.forms:
            policy = form.instance
            deleted = self.can_delete and self._should_delete_form(form)  # type: ignore[attr-defined]
            if not deleted and (not form.is_valid() or (policy.pk is None and not form.has_changed())):
                continue
            taken = {key: pk for key, pk in taken.items() if pk is None or pk != policy.pk}
            if deleted or policy.starts_at or policy.ends_at:
                continue
            key = _unique(policy)
            if key in taken:
                (rule,) = (c for c in RatePolicy._meta.constraints if c.name == "ratequota_policy_one_undated")
                form.add_error(None, str(rule.get_violation_error_message()))
            else:
                taken[key] = policy.pk


def _unique(policy: RatePolicy) -> tuple[Any, ...]:
    """Return what only one policy without dates may have."""
    return *(getattr(policy, name) for name in PLACE), policy.mode == RatePolicy.Mode.LOG


class PolicyInline(AutocompleteAdmin, admin.TabularInline):  # type: ignore[type-arg]
    """The table: one row per policy, its rates as text. Rarer fields are on the policy's own page."""

    model = RatePolicy
    form = RowForm
    formset = PolicyFormSet
    extra = 0
    max_num = _MOST_ROWS
    fields = ["endpoint", "rates", "mode", "counted_per", "details"]
    empty_value_display = WITHOUT["endpoint"]
    readonly_fields = ["details"]

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Return the policies; those for all endpoints or for everyone come first, on every database."""
        order = [F(name).asc(nulls_first=True) for name in ("endpoint__name", "plan__position", "plan__name")]
        return super().get_queryset(request).select_related("endpoint", "plan", "subject_list").order_by(*order, "pk")

    def formfield_for_dbfield(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        """Return the field without the icons that add or edit the other object: they take a line in every row."""
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None and isinstance(field.widget, RelatedFieldWidgetWrapper):
            choices = field.widget.choices
            field.widget = RowAutocomplete(db_field, self.admin_site, placeholder=WITHOUT[db_field.name])
            field.widget.choices = choices
        return field

    @admin.display(description=_("details"))
    def details(self, policy: RatePolicy) -> str:
        """Return a link to the policy's own page, and its dates if it has any."""
        if policy.pk is None:
            return ""
        dates = when(policy) if policy.starts_at or policy.ends_at else ""
        url = model_url(self.admin_site, RatePolicy, "change", policy.pk)
        link = '<a href="{}" aria-label="{}">{}</a> {}'
        text = gettext("Open")
        return format_html(link, url, f"{text}: {shown(policy)}", text, dates) if url else dates


class PolicyTableAdmin(WarnsOnSave):
    """The admin of an object with a policy table. It warns about the edited rows."""

    ordering = ["name"]  # repeated here, because a query that counts drops the model's
    show_facets = admin.ShowFacets.ALWAYS
    formfield_overrides = {models.TextField: {"widget": AdminTextareaWidget(attrs={"rows": 2})}}

    class Media:
        css = {"all": ["django_ratequota/plans.css"]}

    def get_queryset(self, request: Any) -> Any:
        """Return the objects with the number of their policies."""
        return super().get_queryset(request).annotate(policy_count=Count("policies"))

    @admin.display(description=_("name"), ordering="name")
    def shown_name(self, row: Any) -> str:
        """Return the name, with characters that would reverse the text around it disarmed."""
        return shown(row.name)

    @admin.display(description=_("policies"), ordering="policy_count")
    def policy_count(self, row: Any) -> int:
        """Return the number of policies, overrides included."""
        return int(row.policy_count)

    def get_inline_instances(self, request: Any, obj: Any = None) -> list[Any]:
        """Return the table, unless it would be too long, or the operator cannot search for what its rows apply to.

        One that was sent is read, even if rows were added meanwhile.
        """
        found: list[Any] = super().get_inline_instances(request, obj)
        tables = [one for one in found if one.fields[0] in one.get_autocomplete_fields(request)]
        if obj is None or "policies-TOTAL_FORMS" in request.POST:
            return tables
        own = {self._field: obj}
        return [one for one in tables if one.get_queryset(request).filter(**own).count() <= _MOST_STORED]

    @property
    def _field(self) -> str:
        """The field of policies for this model."""
        return next(field.name for field in RatePolicy._meta.concrete_fields if field.related_model is self.model)

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the links, and one to all policies, because tables leave out overrides and are bounded."""
        found = super().links(request, obj)
        if url := self._policies_url(request, obj):
            text = ngettext("%(count)d policy", "%(count)d policies", obj.policy_count)
            found.append((url, text % {"count": obj.policy_count}))
        return found

    def _policies_url(self, request: Any, obj: Any) -> str:
        """Return the address of the list of the object's policies; "" where the operator may not see it."""
        query = {f"{self._field}__id__exact": obj.pk}
        allowed = may_view(self.admin_site, RatePolicy, request)
        return model_url(self.admin_site, RatePolicy, "changelist", query=query) if allowed else ""

    def render_change_form(self, request: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Link to the list of the policies where their table is left out."""
        obj = kwargs.get("obj")
        if obj is not None and super().get_inline_instances(request, obj) and not context["inline_admin_formsets"]:
            context["table_url"] = self._policies_url(request, obj)
        return super().render_change_form(request, context, *args, **kwargs)
