"""Plan assignments: which user is on which plan, from when until when."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from ..models import PlanAssignment
from .base import AutocompleteAdmin, RecordedAdmin, user_search_fields
from .filters import ActiveFilter, RelatedFilter, is_active
from .formatting import time_column
from .search import SearchesRelated

_CREATED_AT = time_column("created_at", _("created at"))


@admin.register(PlanAssignment)
class PlanAssignmentAdmin(AutocompleteAdmin, SearchesRelated, RecordedAdmin):
    """Plan assignments."""

    list_display = [
        "user",
        "plan",
        time_column("starts_at", _("starts at")),
        time_column("ends_at", _("ends at")),
        "active",
        "reason",
        "created_by",
    ]
    list_filter = [ActiveFilter, ("plan", RelatedFilter)]
    list_select_related = ["user", "plan", "created_by"]
    list_per_page = 50
    show_facets = admin.ShowFacets.ALWAYS
    fields = ["user", "plan", "starts_at", "ends_at", "reason", "created_by", _CREATED_AT]
    readonly_fields = ["created_by", _CREATED_AT]

    def get_search_fields(self, request: Any) -> list[str]:
        """Return the lookups that find a user, a plan or a reason."""
        return [*user_search_fields(), "plan__name", "reason"]

    def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
        """Record who made the assignment."""
        if not change:
            obj.created_by = request.user
        super().save_model(request, obj, form, change)

    @admin.display(description=_("active"), boolean=True)
    def active(self, assignment: PlanAssignment) -> bool:
        """Whether it counts now."""
        return is_active(assignment)
