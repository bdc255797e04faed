"""Rate policies: the list of all of them, and the page of each."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.widgets import RelatedFieldWidgetWrapper
from django.utils.html import format_html
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy as _

from ..conf import settings
from ..models import RatePolicy
from .base import AutocompleteAdmin, WarnsOnSave, user_search_fields
from .filters import ActiveFilter, AudienceFilter, RelatedFilter, is_active
from .formatting import when
from .names import endpoint_text, with_display_name
from .permissions import PolicyPermissions
from .policy_forms import ListedForm, PolicyForm, StoredRows

#: The same as in static/django_ratequota/policy.js.
_AUDIENCE = ["plan", "user", "subject", "subject_list"]
#: Fields that operators rarely need.
_ADVANCED = ["starts_at", "counted_per", "algorithm", "on_error", "durable", "leads_headers"]


@admin.register(RatePolicy)
class RatePolicyAdmin(PolicyPermissions, AutocompleteAdmin, WarnsOnSave):
    """All policies; mode is edited in the list."""

    pages = (
        "explain.page.ExplainPage",
        "explain.overrides.BoostPage",
        "explain.overrides.BlockPage",
        "reset.CountersPage",
        "reset.WindowPage",
        "roll_out.RollOutPage",
        "estimate.ImpactPage",
        "usage.traffic.TrafficPage",
        "usage.status.HealthPage",
        "quotas.QuotasPage",
        "subjects.SubjectsPage",
        "quota_history.QuotaHistoryPage",
        "invoices.InvoicesPage",
    )
    form = PolicyForm
    #: A button makes another policy of the values on the page.
    save_as, save_as_continue = True, False
    list_display = ["audience", "endpoint_name", "counted_per", "rates", "mode", "on_outage", "when", "active"]
    list_editable = ["mode"]
    list_filter = [
        "mode",
        "on_error",
        AudienceFilter,
        ActiveFilter,
        "counted_per",
        ("plan", RelatedFilter),
        ("subject_list", RelatedFilter),
        ("endpoint", RelatedFilter),
    ]
    list_select_related = ["user", "subject_list", "plan", "endpoint"]
    search_fields = [*user_search_fields(), "subject", "reason", "subject_list__name", "plan__name", "endpoint__name"]
    show_facets = admin.ShowFacets.ALWAYS
    fieldsets = [
        (
            None,
            {
                "fields": [*_AUDIENCE, "endpoint", "rates", "mode", "ends_at", "reason"],
                # With a name of its own, as themes draw descriptions in other places.
                "description": format_lazy(
                    '<span id="ratequota-who-help">{}</span>',
                    _(
                        "Fill in at most one of plan, user, subject and list. If all are empty, the policy is for "
                        "everyone."
                    ),
                ),
            },
        ),
    ]

    class Media:
        css = {"all": ["django_ratequota/estimate.css"]}
        js = ["django_ratequota/policy.js", "django_ratequota/estimate.js"]

    def get_fieldsets(self, request: Any, obj: Any = None) -> Any:
        """Return the fields; those that an operator rarely needs are folded, unless one of them is set."""
        plain, values = RatePolicy(), request.GET if obj is None else vars(obj)
        default = all(values.get(name, getattr(plain, name)) == getattr(plain, name) for name in _ADVANCED)
        folded = {"fields": _ADVANCED, "classes": ["collapse"] if default else []}
        return [*super().get_fieldsets(request, obj), (_("Advanced"), folded)]

    def formfield_for_dbfield(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        """Return the field without the icons that add or edit a related object, each of which has its own page."""
        field: Any = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None and isinstance(field.widget, RelatedFieldWidgetWrapper):
            field.widget = field.widget.widget
        return field

    def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form, which needs the operator's permissions."""
        form: Any = super().get_form(request, obj, change, **kwargs)
        form.operator = request.user  # the class was made for this request
        return form

    def get_changelist_form(self, request: Any, **kwargs: Any) -> Any:
        """Return the form of a row of the list."""
        form: Any = super().get_changelist_form(request, **{**kwargs, "form": ListedForm})
        form.operator = request.user
        return form

    def get_changelist_formset(self, request: Any, **kwargs: Any) -> Any:
        """Return the formset of the list's rows."""
        return super().get_changelist_formset(request, **{**kwargs, "formset": StoredRows})

    @admin.display(description=_("audience"), ordering="plan__name")
    def audience(self, policy: RatePolicy) -> str:
        """Return the policy's audience."""
        return with_display_name(policy, policy.audience)

    @admin.display(description=_("endpoint"), ordering="endpoint__name")
    def endpoint_name(self, policy: RatePolicy) -> str:
        """Return the endpoint's name."""
        return endpoint_text(policy.endpoint)

    @admin.display(description=_("on error"), ordering="on_error")
    def on_outage(self, policy: RatePolicy) -> str:
        """Return what happens while Redis does not answer, by the setting where the policy leaves that open."""
        choices: dict[Any, Any] = dict(RatePolicy._meta.get_field("on_error").flatchoices)
        return str(choices[policy.on_error or settings.on_error])

    @admin.display(description=_("when"), ordering="ends_at")
    def when(self, policy: RatePolicy) -> str:
        """Return its dates, and in log mode a link to what it would have refused."""
        if policy.mode != RatePolicy.Mode.LOG:
            return when(policy)
        link = self.page_url("traffic", query={"span": "day", "policy": policy.pk})
        return format_html('{}<br><a href="{}">{}</a>', when(policy), link, _("Log-only refusals"))

    @admin.display(description=_("active"), boolean=True)
    def active(self, policy: RatePolicy) -> bool:
        """Return whether the policy applies now."""
        return policy.mode != RatePolicy.Mode.OFF and is_active(policy)
