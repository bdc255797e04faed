"""Plans, each with its policies as a table; their list has an order of its own, and counts subscribers."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count, Max
from django.utils import timezone
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import settings
from ..models import Plan, PlanAssignment
from .formatting import about
from .pages import may_view, model_url
from .policy_table import PolicyInline, PolicyTableAdmin

#: Distance between the positions of two plans, so that one that moves leaves the others.
_STEP = 10


@admin.register(Plan)
class PlanAdmin(PolicyTableAdmin):
    """Plans."""

    pages = ("matrix.MatrixPage", "copy_plan.CopyPlanPage", "pasted_lines.AssignPage")
    ordering = ["position", "name"]  # repeated here, because a query that counts drops the model's
    list_display = ["shown_name", "position", "slug", "subscribers", "policy_count", about]
    list_filter = ["default_for"]
    list_per_page = 250
    search_fields = ["name", "slug", "description"]
    prepopulated_fields = {"slug": ["name"]}
    inlines = [PolicyInline]

    def get_changeform_initial_data(self, request: Any) -> dict[str, Any]:
        """Put a new plan after all others."""
        last = Plan.objects.aggregate(last=Max("position"))["last"]
        position = 0 if last is None else last + _STEP
        return {"position": position, **super().get_changeform_initial_data(request)}

    def get_changelist_instance(self, request: Any) -> Any:
        """Return the list, its plans with their active assignments, counted in one query."""
        changelist = super().get_changelist_instance(request)
        now = timezone.now()
        active = PlanAssignment.objects.filter(starts_at__lte=now).exclude(ends_at__lte=now)
        counts = dict(active.order_by().values_list("plan").annotate(number=Count("*")))
        sees = may_view(self.admin_site, PlanAssignment, request)
        for plan in changelist.result_list:
            plan.assigned = counts.get(plan.pk, 0)
            plan.assigned_url = self._assigned_url(plan) if sees else ""
        return changelist

    def _assigned_url(self, plan: Plan) -> str:
        """Return the address of the list of the plan's active assignments."""
        query = {"plan__id__exact": plan.pk, "time": "active"}
        return model_url(self.admin_site, PlanAssignment, "changelist", query=query)

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the links of the pages, and those to the plan's assignments."""
        found, site = super().links(request, obj), self.admin_site
        if not site.is_registered(PlanAssignment):
            return found
        if may_view(site, PlanAssignment, request):
            found.append((self._assigned_url(obj), _("Customers")))
        if site.get_model_admin(PlanAssignment).has_add_permission(request):
            found.append((model_url(site, PlanAssignment, "add", query={"plan": obj.pk}), _("Assign this plan")))
        return found

    @admin.display(description=_("customers"))
    def subscribers(self, plan: Any) -> str:
        """Return the number of active assignments, and who else is on the plan, in words."""
        text = number_format(plan.assigned, force_grouping=True)
        if plan.assigned_url:
            text = format_html('<a href="{}">{}</a>', plan.assigned_url, text)
        by_code = settings.plan_resolver and gettext("customers from PLAN_RESOLVER")
        for others in filter(None, (by_code, plan.default_for and plan.get_default_for_display())):
            text = format_html(gettext("{count} and {others}"), count=text, others=others)
        return text
