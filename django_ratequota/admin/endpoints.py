"""Endpoints, each with its policies; the pages know the scopes and routes of the code."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminTextareaWidget, AdminTextInputWidget
from django.db.models import Count, QuerySet
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint
from ..routes import known_routes, known_scopes
from .base import RecordedAdmin
from .policies import PolicyInline


class ScopeInput(AdminTextInputWidget):
    """A text field that offers the scopes of the code that have no endpoint yet."""

    template_name = "django_ratequota/widgets/scope.html"

    def get_context(self, name: str, value: Any, attrs: Any) -> dict[str, Any]:
        """With the scopes on offer."""
        context: dict[str, Any] = super().get_context(name, value, attrs)
        context["widget"]["attrs"]["list"] = f"{context['widget']['attrs'].get('id', name)}_scopes"
        context["scopes"] = unknown_scopes()
        return context


class RoutesInput(AdminTextareaWidget):
    """A text area above the list of the project's routes; a click adds one."""

    template_name = "django_ratequota/widgets/routes.html"

    class Media:
        js = ["django_ratequota/routes.js"]
        css = {"all": ["django_ratequota/admin.css"]}

    def get_context(self, name: str, value: Any, attrs: Any) -> dict[str, Any]:
        """With the routes on offer."""
        context: dict[str, Any] = super().get_context(name, value, attrs)
        context["routes"] = known_routes()
        return context


class EndpointForm(forms.ModelForm):  # type: ignore[type-arg]
    """An endpoint's form."""

    class Meta:
        model = Endpoint
        fields = ["name", "description", "routes", "methods", "cost"]
        widgets = {
            "name": ScopeInput,
            "description": AdminTextareaWidget(attrs={"rows": 2}),
            "routes": RoutesInput(attrs={"rows": 4}),
        }


class EndpointPolicyInline(PolicyInline):
    """The endpoint's policies for plans and for everyone; overrides, maybe thousands, have their own list."""

    fields = ["plan", "counted_per", "rates", "algorithm", "mode", "when"]
    autocomplete_fields = ["plan"]

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Without overrides, and with what each row shows."""
        policies = super().get_queryset(request).filter(user__isnull=True, subject="")
        return policies.select_related("endpoint", "plan")


@admin.register(Endpoint)
class EndpointAdmin(RecordedAdmin):
    """Endpoints."""

    form = EndpointForm
    list_display = ["name", "routes", "methods", "cost", "policy_count", "description"]
    search_fields = ["name", "description", "routes"]
    list_per_page = 50
    inlines = [EndpointPolicyInline]
    change_list_template = "admin/django_ratequota/endpoint/change_list.html"

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """With the number of policies."""
        queryset: QuerySet[Any] = super().get_queryset(request).annotate(policy_count=Count("policies"))
        return queryset

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        """The list, above it the scopes of the code that have no endpoint yet."""
        add = reverse(f"{self.admin_site.name}:django_ratequota_endpoint_add")
        links = [
            (scope, f"{add}?{urlencode({'name': scope})}" if self.has_add_permission(request) else "")
            for scope in unknown_scopes()
        ]
        return super().changelist_view(request, {"unknown_scopes": links, **(extra_context or {})})

    @admin.display(description=_("policies"), ordering="policy_count")
    def policy_count(self, endpoint: Any) -> int:
        """How many policies the endpoint has, overrides included."""
        return int(endpoint.policy_count)


def unknown_scopes() -> list[str]:
    """Scopes that the code names and no endpoint has: until it is created, they match nothing."""
    known = set(Endpoint.objects.values_list("name", flat=True))
    return [scope for scope in known_scopes() if scope not in known]
