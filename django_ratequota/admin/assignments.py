"""Plan assignments: which user or subject is on which plan, from when until when."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from ..models import PlanAssignment
from .filters import ActiveFilter, RelatedFilter
from .formatting import reason_text, time_column
from .tools import Unlisted
from .user_or_subject import UserOrSubjectAdmin

_CREATED_AT = time_column("created_at", _("created at"))


@admin.register(PlanAssignment)
class PlanAssignmentAdmin(Unlisted, UserOrSubjectAdmin):
    """Plan assignments."""

    list_display = [
        "who",
        "plan",
        time_column("starts_at", _("starts at")),
        time_column("ends_at", _("ends at")),
        "active",
        "anchor",
        reason_text,
        "created_by",
    ]
    list_filter = [ActiveFilter, ("plan", RelatedFilter)]
    list_select_related = ["user", "plan", "created_by"]
    show_facets = admin.ShowFacets.ALWAYS
    fields = ["user", "subject", "plan", "starts_at", "ends_at", "anchor", "reason", "created_by", _CREATED_AT]
    readonly_fields = ["created_by", _CREATED_AT]

    def get_fields(self, request: Any, obj: Any = None) -> list[Any]:
        """Return the fields; those about the assignment's creation once it is created."""
        fields = super().get_fields(request, obj)
        return [name for name in fields if obj is not None or name not in self.readonly_fields]

    def get_search_fields(self, request: Any) -> list[str]:
        """Return the lookups that find a user, a subject, a plan or a reason."""
        return [*super().get_search_fields(request), "plan__name"]

    def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
        """Record who made the assignment."""
        if not change:
            obj.created_by = request.user
        super().save_model(request, obj, form, change)
