"""Subject lists."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count, OuterRef, Subquery
from django.utils.translation import gettext_lazy as _

from ..models import ListMember, SubjectList
from .formatting import about
from .permissions import may_see_members
from .policy_table import PolicyInline, PolicyTableAdmin


@admin.register(SubjectList)
class SubjectListAdmin(PolicyTableAdmin):
    """Subject lists. Their members, up to 100,000 and more, have a separate list."""

    pages = ("pasted_lines.AddMembersPage", "pasted_lines.RemoveMembersPage")
    list_display = ["shown_name", "member_count", "policy_count", about]
    search_fields = ["name", "description"]
    inlines = [PolicyInline]

    def get_queryset(self, request: Any) -> Any:
        """Return the lists with the number of their members."""
        # A subquery, because a second join would multiply members by policies.
        own = ListMember.objects.filter(subject_list=OuterRef("pk")).order_by().values("subject_list")
        counts = Subquery(own.annotate(count=Count("pk")).values("count"))
        return super().get_queryset(request).annotate(members_held=counts)

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may see lists: also those who may edit members, to find their list."""
        return super().has_view_permission(request, obj) or may_see_members(request.user)

    @admin.display(description=_("members"), ordering="members_held")
    def member_count(self, row: Any) -> int:
        """Return the number of members, those that have ended included."""
        return int(row.members_held or 0)
