"""Plan assignments: which user or subject is on which plan, from when until when."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint, PlanAssignment
from .base import CONFIRM_FIELD
from .filters import ActiveFilter, RelatedFilter
from .formatting import isolated, number_text, time_column
from .fresh_fields import FreshForm
from .names import endpoint_text
from .tools import Unlisted
from .user_or_subject import UserOrSubjectAdmin

_CREATED_AT = time_column("created_at", _("created at"))


class AssignmentForm(FreshForm):
    """The form of an assignment. It comes back once where counts would start again, with a box to tick."""

    def full_clean(self) -> None:
        """Add what would start again to the errors, unless the operator has confirmed it."""
        super().full_clean()
        asks = self.is_bound and not self.errors and CONFIRM_FIELD not in self.data
        if asks and (texts := _restarting(self.instance)):
            self.add_error(None, texts)
            self.fields[CONFIRM_FIELD] = forms.BooleanField(label=_("Restart these counters"), required=False)


@admin.register(PlanAssignment)
class PlanAssignmentAdmin(Unlisted, UserOrSubjectAdmin):
    """Plan assignments."""

    form = AssignmentForm
    list_display = [
        "who",
        "plan",
        time_column("starts_at", _("starts at")),
        time_column("ends_at", _("ends at")),
        "active",
        "anchor",
        "reason_text",
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

    def render_delete_form(self, request: Any, context: Any) -> Any:
        """Say which counts start again."""
        for text in _restarting(context["object"], deleted=True):
            self.message_user(request, text, messages.WARNING)
        return super().render_delete_form(request, context)


def _restarting(assignment: PlanAssignment, **how: bool) -> list[str]:
    """Return a sentence for each count that starts again, but those for an endpoint that was deleted."""
    from ..operations.restarts import restarts  # which setting up Django does not need

    text = gettext("%(used)s of %(limit)s used (%(endpoint)s, %(rate)s). The counter restarts on %(date)s.")
    endpoints = {None: None, **Endpoint.objects.in_bulk()}
    return [
        text
        % {
            "used": number_text(window.used),
            "limit": number_text(window.limit),
            "date": on,
            "endpoint": endpoint_text(endpoints[window.endpoint_id]),
            "rate": isolated(window.rate),
        }
        for window, on in restarts(assignment, **how)
        if window.endpoint_id in endpoints
    ]
