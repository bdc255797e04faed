"""Rows of one user or subject: plan assignments, and members of subject lists."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _

from ..changes.validators import canonical_subject
from ..models import ListMember, PlanAssignment
from ..utils.addresses import networks_around
from .base import AutocompleteAdmin, RecordedAdmin, user_search_fields
from .filters import ActiveFilter, RelatedFilter, is_active
from .formatting import reason_text, time_column, when
from .names import with_display_name
from .permissions import RowPermissions
from .tools import Unlisted

_CREATED_AT = time_column("created_at", _("created at"))


class UserOrSubjectAdmin(RowPermissions, Unlisted, AutocompleteAdmin, RecordedAdmin):
    """A model with ``user``, ``subject``, ``who``, dates and a reason."""

    search_fields = [*user_search_fields(), "subject", "reason"]

    @admin.display(description=_("user or subject"))
    def who(self, row: Any) -> str:
        """Return the user or the subject."""
        return with_display_name(row, row.who)

    @admin.display(description=_("active"), boolean=True)
    def active(self, row: Any) -> bool:
        """Return whether the row counts now."""
        return is_active(row)


@admin.register(PlanAssignment)
class PlanAssignmentAdmin(UserOrSubjectAdmin):
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
    search_fields = [*UserOrSubjectAdmin.search_fields, "plan__name"]
    show_facets = admin.ShowFacets.ALWAYS
    fields = ["user", "subject", "plan", "starts_at", "ends_at", "anchor", "reason", "created_by", _CREATED_AT]
    readonly_fields = ["created_by", _CREATED_AT]

    def get_fields(self, request: Any, obj: Any = None) -> list[Any]:
        """Return the fields; those about the assignment's creation once it is created."""
        fields = super().get_fields(request, obj)
        return [name for name in fields if obj is not None or name not in self.readonly_fields]

    def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
        """Record who made the assignment."""
        if not change:
            obj.created_by = request.user
        super().save_model(request, obj, form, change)


@admin.register(ListMember)
class ListMemberAdmin(UserOrSubjectAdmin):
    """The members of all lists."""

    list_display = ["who", "subject_list", when, "active", reason_text]
    list_filter = [ActiveFilter, ("subject_list", RelatedFilter)]
    list_select_related = ["user", "subject_list"]
    show_full_result_count = False
    fields = ["subject_list", "user", "subject", "starts_at", "ends_at", "reason"]

    def get_search_results(self, request: Any, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
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
