"""Plans, each with its policies as a table."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.admin.widgets import AdminTextareaWidget
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..models import Plan
from .copy_plan import CopyPlanPage
from .formatting import about, shown, when
from .matrix import MatrixPage
from .policy_table import PolicyInline, PolicyTableAdmin


class PlanPolicyInline(PolicyInline):
    """The plan's policies."""

    fields = ["endpoint", "rates", "mode", "counted_per", "algorithm", when]  # type: ignore[list-item]
    empty_value_display = _("all endpoints")


@admin.register(Plan)
class PlanAdmin(PolicyTableAdmin):
    """Plans."""

    pages = (MatrixPage, CopyPlanPage)
    list_display = ["plan_name", "slug", "default_for", "policy_count", about]
    list_filter = ["default_for"]
    search_fields = ["name", "slug", "description"]
    formfield_overrides = {models.TextField: {"widget": AdminTextareaWidget(attrs={"rows": 2})}}
    prepopulated_fields = {"slug": ["name"]}
    inlines = [PlanPolicyInline]

    @admin.display(description=_("name"), ordering="name")
    def plan_name(self, plan: Plan) -> str:
        """Return the name, with characters that would reverse the text around it disarmed."""
        return shown(plan.name)
