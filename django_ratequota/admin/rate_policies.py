"""Rate policies: the list of all of them, and the page of each."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..conf import settings
from ..models import RatePolicy
from .base import AutocompleteAdmin, user_search_fields
from .filters import ActiveFilter, AudienceFilter, RelatedFilter, is_active
from .formatting import when
from .names import endpoint_text, with_display_name
from .permissions import PolicyPermissions
from .policy_forms import PolicyForm, RowForm, StoredRows
from .search import SearchesRelated
from .warnings import WarnsOnSave


@admin.register(RatePolicy)
class RatePolicyAdmin(PolicyPermissions, AutocompleteAdmin, SearchesRelated, WarnsOnSave):
    """All policies; mode is edited in the list."""

    pages = (
        "explain.page.ExplainPage",
        "explain.boost.BoostPage",
        "explain.block.BlockPage",
        "reset.CallerCountersPage",
        "reset.ResetPage",
        "rollout.RolloutPage",
        "preview.PreviewPage",
        "preview.ImpactPage",
        "usage.traffic.TrafficPage",
        "usage.health.HealthPage",
        "quotas.QuotasPage",
        "subjects.SubjectsPage",
        "quota_history.QuotaHistoryPage",
        "invoices.InvoicesPage",
    )
    form = PolicyForm
    actions = ["reset_usage"]
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
    list_per_page = 50
    show_facets = admin.ShowFacets.ALWAYS
    fieldsets = [
        (
            _("Who"),
            {
                "fields": ["user", "subject", "subject_list", "plan"],
                "description": _("Choose at most one; none = everyone."),
            },
        ),
        (_("What"), {"fields": ["endpoint", "counted_per"]}),
        (_("How much"), {"fields": ["rates", "algorithm", "mode", "on_error", "durable", "leads_headers"]}),
        (_("When and why"), {"fields": ["starts_at", "ends_at", "reason"]}),
    ]

    class Media:
        css = {"all": ["django_ratequota/plots.css", "django_ratequota/preview.css"]}
        js = ["django_ratequota/preview.js"]

    def get_search_fields(self, request: Any) -> list[str]:
        """Return the lookups of the search: users by name, and the policy's own texts."""
        return [*user_search_fields(), "subject", "reason", "subject_list__name", "plan__name", "endpoint__name"]

    def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form, which needs the operator's permissions."""
        form: Any = super().get_form(request, obj, change, **kwargs)
        form.operator = request.user  # the class was made for this request
        return form

    def get_changelist_form(self, request: Any, **kwargs: Any) -> Any:
        """Return the form of a row of the list."""
        form: Any = super().get_changelist_form(request, **{**kwargs, "form": RowForm})
        form.operator = request.user
        return form

    def get_changelist_formset(self, request: Any, **kwargs: Any) -> Any:
        """Return the formset of the list's rows."""
        return super().get_changelist_formset(request, **{**kwargs, "formset": StoredRows})

    @admin.action(permissions=["reset"], description=_("Reset the counters of the selected overrides"))
    def reset_usage(self, request: Any, queryset: Any) -> Any:
        """Ask, then give units back or reset; the list is shown again afterwards."""
        policies = queryset.select_related("user", "subject_list", "plan", "endpoint")
        back = self.page_url("changelist")
        return self.page("reset").ask(request, policies, back, action="reset_usage")

    def response_add(self, request: Any, obj: Any, post_url_continue: Any = None) -> Any:
        """Warn about the new policy."""
        self.warn(request, [obj], obj.endpoint)
        return super().response_add(request, obj, post_url_continue)

    def response_change(self, request: Any, obj: Any) -> Any:
        """Warn about the policy as it is now."""
        self.warn(request, [obj], obj.endpoint)
        return super().response_change(request, obj)

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
        link = self.page_url("rollout", policy.pk)
        return format_html('{}<br><a href="{}">{}</a>', when(policy), link, _("Would-be refusals"))

    @admin.display(description=_("active"), boolean=True)
    def active(self, policy: RatePolicy) -> bool:
        """Return whether the policy applies now."""
        return policy.mode != RatePolicy.Mode.OFF and is_active(policy)
