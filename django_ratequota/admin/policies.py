"""Rate policies: their own page, and the table of them on plan and endpoint pages."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminTextInputWidget, RelatedFieldWidgetWrapper
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db.models import F, QuerySet
from django.utils.functional import cached_property
from django.utils.translation import gettext_lazy as _

from ..conf import COUNTED_PER, settings
from ..models import RatePolicy
from .base import Lookups, PatientSelect, user_search_fields
from .explain.actions import Boosts
from .filters import ActiveFilter, AudienceFilter, RelatedFilter, is_active
from .formatting import dates, shown
from .permissions import check_audience, is_override, may
from .preview import Preview
from .reset import ResetUsage
from .usage.labels import page_url
from .usage.page import LiveUsage

#: What a policy without the related object is for.
_WITHOUT = {"endpoint": _("all endpoints"), "plan": _("everyone")}
#: The columns of the constraint that allows one policy without dates.
_PLACE = ("endpoint_id", "user_id", "subject", "plan_id", "counted_per")
#: Stored rows of the table on a plan's or endpoint's page, and rows with the new ones. A row is up to eight fields of
#: the form, and Django takes 1,000 of them (DATA_UPLOAD_MAX_NUMBER_FIELDS).
_MOST_STORED, _MOST_ROWS = 100, 120
#: Objects of a select in each row; more are named by their id where the operator may not search them.
_MOST_CHOICES = 100


class KnownSelect(PatientSelect):
    """An autocomplete that knows its row's object, where the plain one would ask the database for each row."""

    known: Any = None

    def build_attrs(self, base_attrs: Any, extra_attrs: Any = None) -> dict[str, Any]:
        """With what an empty one stands for."""
        attrs = super().build_attrs(base_attrs, extra_attrs)
        return {**attrs, "data-placeholder": str(_WITHOUT.get(self.field.name, ""))}

    def optgroups(self, name: str, value: Any, attrs: Any = None) -> Any:
        """The one option to show: what else there is, autocomplete finds."""
        if self.known is None or [str(one) for one in value] != [str(self.known.pk)]:
            return super().optgroups(name, value, attrs)
        empty = self.create_option(name, "", "", False, 0)
        return [(None, [empty, self.create_option(name, self.known.pk, str(self.known), True, 1)], 0)]


class PolicyForm(forms.ModelForm):  # type: ignore[type-arg]
    """A policy's form, whole or a part of its fields."""

    #: Who edits, where the form may meet overrides (not so in the tables of plans and endpoints).
    operator: Any = None

    class Meta:
        model = RatePolicy
        fields = "__all__"  # noqa: DJ007 - the admin pages name theirs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "counted_per" in self.fields:
            self.fields["counted_per"] = self._counted_per_field()
        for name, field in self.fields.items():
            if isinstance(field.widget, KnownSelect):
                field.widget.known = getattr(self.instance, name)
        if "rates" in self.fields:
            self.fields["rates"].widget.attrs.update({"spellcheck": "false", "class": "vTextField ratequota-rates"})
        stored = self.instance.pk is not None
        if self.operator and stored and not may(self.operator, "change", override=is_override(self.instance)):
            # A row of the list among others that may be edited: shown as text, as Django 6.1 does by itself.
            self.fields.clear()

    def clean(self) -> Any:
        """Refuses an audience that the operator may not give the policy."""
        values = super().clean()
        if self.operator and {"user", "subject"} <= self.cleaned_data.keys():
            override = bool(self.cleaned_data["user"] or self.cleaned_data["subject"])
            check_audience(self.operator, "change" if self.instance.pk else "add", override=override)
        return values

    def _counted_per_field(self) -> forms.ChoiceField:
        plain = self.fields["counted_per"]
        names = [*COUNTED_PER, *settings.identifiers]
        # An identifier that left the settings still shows, and is refused with a sentence when saved.
        if self.instance.counted_per not in names:
            names.append(self.instance.counted_per)
        return forms.ChoiceField(
            choices=[(name, name) for name in names], label=plain.label, help_text=plain.help_text, initial="caller"
        )

    def add_error(self, field: str | None, error: Any) -> None:
        """Errors of fields that this form leaves out stand above it, instead of failing the page; each stands once.

        Rates that cannot be read are told by the field and by ``RatePolicy.clean``.
        """
        if field is None and hasattr(error, "error_dict"):
            shown: dict[str, dict[str, ValidationError]] = {}
            for name, errors in error.error_dict.items():
                place = shown.setdefault(name if name in self.fields else NON_FIELD_ERRORS, {})
                for one in errors:
                    place.setdefault(one.messages[0], one)
            error = ValidationError({name: list(place.values()) for name, place in shown.items()})
        super().add_error(field, error)


class RowForm(PolicyForm):
    """A policy's form as a row of a table: screen readers hear no heads of columns as its fields' names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for field in self.fields.values():
            field.widget.attrs.setdefault("aria-label", field.label)


class StoredRows(forms.BaseModelFormSet):  # type: ignore[type-arg]
    """Rows of policies that others may delete while the page is open."""

    def clean(self) -> None:
        """Says so, where the plain formset would find fault with a field that nobody sees."""
        super().clean()
        if any(form.instance.pk is None for form in self.initial_forms):
            raise ValidationError(
                _("A policy on this page was deleted in the meantime. Open the page again, then repeat the edit.")
            )


class PolicyFormSet(StoredRows, forms.BaseInlineFormSet):  # type: ignore[type-arg]
    """The table of policies on a plan's or endpoint's page: the first of them. The others are edited in the list."""

    #: The list of all of them; "" where it is not the operator's to see.
    list_url = ""

    def get_queryset(self) -> QuerySet[Any]:
        """The first rows; those of the page that was sent, once it was."""
        if not hasattr(self, "_queryset"):
            rows = super().get_queryset()
            self._queryset = rows.filter(pk__in=self._sent()) if self.is_bound else rows[:_MOST_STORED]
        return self._queryset

    def _sent(self) -> list[int]:
        stored = range(min(self.initial_form_count(), self.total_form_count()))
        sent = [self.data.get(f"{self.add_prefix(number)}-{RatePolicy._meta.pk.name}", "") for number in stored]
        return [int(pk) for pk in sent if pk.isascii() and pk.isdigit() and len(pk) < 19]

    @cached_property
    def count(self) -> int:
        """How many policies there are, where the table leaves some out; else 0."""
        rows = len(self.get_queryset())
        count = self.queryset.count() if rows >= _MOST_STORED else 0  # type: ignore[union-attr]
        return count if count > rows else 0

    @property
    def shown(self) -> int:
        """How many of them the table shows."""
        return len(self.get_queryset())

    def add_fields(self, form: Any, index: int | None) -> None:
        """With the box that deletes a row, named like the other fields."""
        super().add_fields(form, index)
        if "DELETE" in form.fields:
            form.fields["DELETE"].widget.attrs["aria-label"] = form.fields["DELETE"].label

    def clean(self) -> None:
        """Refuses what the database would: two policies without dates for the same, at any moment while saving.

        The forms cannot: the constraint has columns that they leave out. Rows are saved in their order, new ones
        last, so that a new row may take the place of one that goes, while two rows cannot trade places.
        """
        super().clean()
        undated = self.queryset.filter(starts_at__isnull=True, ends_at__isnull=True)  # type: ignore[union-attr]
        taken = {tuple(place): pk for pk, *place in undated.values_list("pk", *_PLACE)}
        for form in self.forms:
            policy = form.instance
            leaves = self.can_delete and self._should_delete_form(form)  # type: ignore[attr-defined]
            if not leaves and (not form.is_valid() or (policy.pk is None and not form.has_changed())):
                continue
            taken = {place: pk for place, pk in taken.items() if pk is None or pk != policy.pk}
            if leaves or policy.starts_at or policy.ends_at:
                continue
            place = tuple(getattr(policy, name) for name in _PLACE)
            if place in taken:
                form.add_error(None, _undated_twin())
            else:
                taken[place] = policy.pk


def _undated_twin() -> str:
    """What the database's constraint says of a second policy without dates."""
    (constraint,) = (c for c in RatePolicy._meta.constraints if c.name == "ratequota_policy_one_undated")
    return str(constraint.get_violation_error_message())


class PolicyInline(Lookups, admin.TabularInline):  # type: ignore[type-arg]
    """One row a policy, its rates as text."""

    model = RatePolicy
    form = RowForm
    formset = PolicyFormSet
    template = "admin/django_ratequota/policies.html"
    extra = 0
    max_num = _MOST_ROWS
    show_change_link = True
    # Dates, reason and what else is rare are on the policy's own page, a click away.
    readonly_fields = ["when"]

    class Media:
        css = {"all": ["django_ratequota/admin.css"]}

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """With what each row shows; the policies for all endpoints or everyone come first on every database."""
        order = [F(f"{name}__name").asc(nulls_first=True) for name in ("endpoint", "plan")]
        return super().get_queryset(request).select_related("endpoint", "plan").order_by(*order, "pk")

    def get_formset(self, request: Any, obj: Any = None, **kwargs: Any) -> Any:
        """The table, knowing where all policies of the object are listed."""
        formset: Any = super().get_formset(request, obj, **kwargs)
        if obj is not None:
            # The class was made for this request.
            formset.list_url = list_url(self.admin_site, request, {f"{formset.fk.name}__id__exact": str(obj.pk)})
        return formset

    def formfield_for_dbfield(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        """Without the icons that add or edit the other object: they would take a line in every row."""
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None and isinstance(field.widget, RelatedFieldWidgetWrapper):
            if db_field.name in self.get_autocomplete_fields(request):
                choices = field.widget.choices
                field.widget = KnownSelect(db_field, self.admin_site)
                field.widget.choices = choices
            else:
                field.widget = field.widget.widget
                given = list(field.choices)[1:]
                if len(given) > _MOST_CHOICES:
                    field.widget = AdminTextInputWidget(attrs={"placeholder": _WITHOUT[db_field.name], "size": 12})
                else:
                    field.choices = [("", _WITHOUT[db_field.name]), *given]  # read once for all rows
        return field

    @admin.display(description=_("when"))
    def when(self, policy: RatePolicy) -> str:
        """The policy's dates."""
        return dates(policy)


def list_url(site: admin.AdminSite, request: Any, filters: dict[str, str]) -> str:
    """The address of the list of policies, filtered; "" where it is not the operator's to see."""
    listed = site.is_registered(RatePolicy) and site.get_model_admin(RatePolicy).has_view_permission(request)
    return page_url(site.name, "ratepolicy_changelist", query=filters) if listed else ""


@admin.register(RatePolicy)
class RatePolicyAdmin(Preview, Boosts, LiveUsage, ResetUsage):
    """All policies; mode is edited in the list."""

    form = PolicyForm
    list_display = ["audience", "endpoint_name", "counted_per", "rates", "mode", "when", "active"]
    list_editable = ["mode"]
    list_filter = [
        "mode",
        AudienceFilter,
        ActiveFilter,
        "counted_per",
        ("plan", RelatedFilter),
        ("endpoint", RelatedFilter),
    ]
    list_select_related = ["user", "plan", "endpoint"]
    list_per_page = 50
    show_facets = admin.ShowFacets.ALWAYS
    fieldsets = [
        (_("Who"), {"fields": ["user", "subject", "plan"], "description": _("Choose at most one; none = everyone.")}),
        (_("What"), {"fields": ["endpoint", "counted_per"]}),
        (_("How much"), {"fields": ["rates", "algorithm", "mode", "on_error"]}),
        (_("When and why"), {"fields": ["starts_at", "ends_at", "reason"]}),
    ]

    class Media:
        css = {"all": ["django_ratequota/admin.css"]}

    def get_search_fields(self, request: Any) -> list[str]:
        """The user's name, and what else tells a policy."""
        return [*user_search_fields(), "subject", "reason", "plan__name", "endpoint__name"]

    def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """The form, knowing who edits."""
        form: Any = super().get_form(request, obj, change, **kwargs)
        form.operator = request.user  # the class was made for this request
        return form

    def get_changelist_form(self, request: Any, **kwargs: Any) -> Any:
        """The form of a row of the list: much the same one, so that its errors find their place."""
        form: Any = super().get_changelist_form(request, **{**kwargs, "form": RowForm})
        form.operator = request.user
        return form

    def get_changelist_formset(self, request: Any, **kwargs: Any) -> Any:
        """The rows of the list that are being edited."""
        return super().get_changelist_formset(request, **{**kwargs, "formset": StoredRows})

    @admin.display(description=_("audience"), ordering="plan__name")
    def audience(self, policy: RatePolicy) -> str:
        """Whom the policy is for."""
        return shown(policy.audience)

    @admin.display(description=_("endpoint"), ordering="endpoint__name")
    def endpoint_name(self, policy: RatePolicy) -> str:
        """What it limits."""
        return policy.endpoint.name if policy.endpoint else str(_WITHOUT["endpoint"])

    @admin.display(description=_("when"), ordering="ends_at")
    def when(self, policy: RatePolicy) -> str:
        """The policy's dates."""
        return dates(policy)

    @admin.display(description=_("active"), boolean=True)
    def active(self, policy: RatePolicy) -> bool:
        """Whether it counts now."""
        return policy.mode != RatePolicy.Mode.OFF and is_active(policy)
