"""Subject lists, and their members."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Count, OuterRef, QuerySet, Subquery
from django.utils.translation import gettext_lazy as _

from ..changes.validators import canonical_subject
from ..models import ListMember, SubjectList
from ..utils.addresses import networks_around
from .filters import ActiveFilter, RelatedFilter
from .formatting import about, reason_text, when
from .permissions import may_see_members
from .policy_table import PolicyInline, PolicyTableAdmin
from .tools import Unlisted
from .user_or_subject import UserOrSubjectAdmin


@admin.register(SubjectList)
class SubjectListAdmin(PolicyTableAdmin):
    """Subject lists. Their members have a list of their own, because there may be 100,000."""

    pages = ("list_members.AddMembersPage", "list_members.RemoveMembersPage")
    list_display = ["shown_name", "member_count", "policy_count", about]
    search_fields = ["name", "description"]
    inlines = [PolicyInline]

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Return the lists with the number of their members."""
        # A subquery, because a second join would multiply members by policies.
        own = ListMember.objects.filter(subject_list=OuterRef("pk")).order_by().values("subject_list")
        counts = Subquery(own.annotate(count=Count("pk")).values("count"))
        queryset: QuerySet[Any] = super().get_queryset(request).annotate(members_held=counts)
        return queryset

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may see lists: also those who may edit members, to find their list."""
        return super().has_view_permission(request, obj) or may_see_members(request.user)

    @admin.display(description=_("members"), ordering="members_held")
    def member_count(self, row: Any) -> int:
        """Return the number of members, those that have ended included."""
        return int(row.members_held or 0)


@admin.register(ListMember)
class ListMemberAdmin(Unlisted, UserOrSubjectAdmin):
    """The members of all lists."""

    list_display = ["who", "subject_list", when, "active", reason_text]
    list_filter = [ActiveFilter, ("subject_list", RelatedFilter)]
    list_select_related = ["user", "subject_list"]
    show_full_result_count = False
    fields = ["subject_list", "user", "subject", "starts_at", "ends_at", "reason"]

    def get_search_results(
        self, request: Any, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Return what the search finds, and for an address or a network also the networks that contain it."""
        found, duplicates = super().get_search_results(request, queryset, search_term)
        around = _around(search_term)
        return (found | queryset.filter(subject__in=around) if around else found), duplicates


def _around(text: str) -> list[str]:
    """Return the subjects of the address or network, and of all networks around it; none for other texts."""
    try:
        network = ip_network(canonical_subject(text).removeprefix("ip:"))
    except (ValidationError, ValueError):
        return []
    found = networks_around(network)
    # A single address is stored with or without its prefix length.
    return [*found, f"ip:{network.network_address}"] if network.num_addresses == 1 else found
