"""Endpoints, each with its policies; the pages offer the scopes and routes of the code."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.widgets import AdminTextareaWidget
from django.db.models import QuerySet
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint
from ..policies.requests.routes import known_routes, known_scopes
from .formatting import about, shown
from .fresh_fields import FreshForm
from .permissions import FOR_CHOSEN
from .policy_table import WITHOUT, PolicyInline, PolicyTableAdmin

#: Matching routes that an endpoint's page lists; the others are counted.
_MOST_ROUTES = 20


class RoutePicker(AdminTextareaWidget):
    """A text area above the list of the project's routes; a click adds one."""

    template_name = "django_ratequota/widgets/routes.html"

    class Media:
        js = ["django_ratequota/routes.js"]

    def get_context(self, name: str, value: Any, attrs: Any) -> dict[str, Any]:
        """With the routes on offer."""
        return {**super().get_context(name, value, attrs), "routes": known_routes()}


class EndpointForm(FreshForm):
    """An endpoint's form."""

    class Meta:
        model = Endpoint
        fields = ["name", "description", "routes", "methods", "cost", "charged_statuses", "limits"]
        widgets = {"routes": RoutePicker(attrs={"rows": 4, "dir": "ltr"})}


class EndpointPolicyInline(PolicyInline):
    """The endpoint's policies for plans and for everyone. The others can be thousands: they have their own list."""

    fields = ["plan", "rates", "mode", "counted_per", "details"]
    empty_value_display = WITHOUT["plan"]

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Return the policies without those for users, subjects and lists."""
        return super().get_queryset(request).exclude(FOR_CHOSEN)


@admin.register(Endpoint)
class EndpointAdmin(PolicyTableAdmin):
    """Endpoints."""

    form = EndpointForm
    list_display = ["name", "some_routes", "methods", "cost", "charged_statuses", "limited_by", "policy_count", about]
    list_filter = ["limits"]
    search_fields = ["name", "description", "routes"]
    inlines = [EndpointPolicyInline]
    change_list_template = "admin/django_ratequota/endpoint/change_list.html"

    def get_readonly_fields(self, request: Any, obj: Any = None) -> list[str]:
        """Return what the endpoint matches."""
        return [] if obj is None else ["matches"]

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        """Return the list; above it are the scopes in code that have no endpoint yet."""
        may_add = self.has_add_permission(request)
        # Until an endpoint is created, these match nothing.
        known = set(Endpoint.objects.values_list("name", flat=True))
        scopes = [
            {"name": scope, "link": self.page_url("add", query={"name": scope}) if may_add else ""}
            for scope in known_scopes()
            if scope not in known
        ]
        return super().changelist_view(request, {"unknown_scopes": scopes, **(extra_context or {})})

    @admin.display(description=_("routes"))
    def some_routes(self, endpoint: Any) -> str:
        """Return the first patterns."""
        return shown(endpoint.routes)

    @admin.display(description=_("limits"), ordering="limits")
    def limited_by(self, endpoint: Any) -> str:
        """Return the choice, unless it is that of most endpoints."""
        return "" if endpoint.limits == Endpoint.Limits.BESIDES else endpoint.get_limits_display()

    @admin.display(description=_("matches now"))
    def matches(self, endpoint: Endpoint) -> str:
        """Return the views and routes of this project that the endpoint matches."""
        from ..operations.advice import matched_routes  # which setting up Django does not need

        found = matched_routes(endpoint, known_routes())
        lines = [gettext("Views use it as their scope.")] if endpoint.name in known_scopes() else []
        lines += [f"{route} ({name})" if name else route for route, name in found[:_MOST_ROUTES]]
        more = len(found) - _MOST_ROUTES
        if more > 0:
            lines.append(ngettext("and %d more route", "and %d more routes", more) % more)
        if not lines:
            return gettext("No view in the URLconf has this scope or matches these routes.")
        return format_html(
            '<ul class="ratequota-matches">{}</ul>', format_html_join("", "<li>{}</li>", ([line] for line in lines))
        )
