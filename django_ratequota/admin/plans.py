"""Plans, each with its policies as a table."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.widgets import AdminTextareaWidget
from django.db import models
from django.db.models import Count, QuerySet
from django.utils.translation import gettext_lazy as _

from ..models import Plan
from .copy_plan import CopyPlanPage
from .formatting import about, shown
from .matrix import MatrixPage
from .policy_table import PolicyInline
from .warnings import WarnsOnInlineSave


class PlanPolicyInline(PolicyInline):
    """The plan's policies."""

    fields = ["endpoint", "counted_per", "rates", "algorithm", "mode", "when"]
    empty_value_display = _("all endpoints")


@admin.register(Plan)
class PlanAdmin(WarnsOnInlineSave):
    """Plans."""

    pages = (MatrixPage, CopyPlanPage)
    list_display = ["plan_name", "slug", "default_for", "policy_count", about]
    list_filter = ["default_for"]
    ordering = ["name"]  # repeated here, because a query that counts drops the model's
    search_fields = ["name", "slug", "description"]
    formfield_overrides = {models.TextField: {"widget": AdminTextareaWidget(attrs={"rows": 2})}}
    prepopulated_fields = {"slug": ["name"]}
    show_facets = admin.ShowFacets.ALWAYS
    inlines = [PlanPolicyInline]

    class Media:
        css = {"all": ["django_ratequota/admin.css"]}

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Return the plans with the number of their policies."""
        queryset: QuerySet[Any] = super().get_queryset(request).annotate(policy_count=Count("policies"))
        return queryset

    @admin.display(description=_("name"), ordering="name")
    def plan_name(self, plan: Plan) -> str:
        """Return the name, with characters that would reverse the text around it disarmed."""
        return shown(plan.name)

    @admin.display(description=_("policies"), ordering="policy_count")
    def policy_count(self, plan: Any) -> int:
        """Return the number of policies."""
        return int(plan.policy_count)
