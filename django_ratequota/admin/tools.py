"""The tool bar of all pages of the app, and which models its index lists next to it."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint, Plan, PolicyChange, RatePolicy, SubjectList
from .pages import may_view, model_url

#: The model and the name of each page, in the order of the bar.
_TOOLS: tuple[tuple[Any, str, Any], ...] = (
    (RatePolicy, "explain", _("Explain")),
    (RatePolicy, "traffic", _("Traffic")),
    (RatePolicy, "health", _("Health")),
    (RatePolicy, "quotas", _("Quotas")),
    (RatePolicy, "invoices", _("Invoices")),
    (Plan, "matrix", _("Matrix")),
    # In lower case, because the catalogue of Django's admin has another translation of "History".
    (PolicyChange, "changelist", _("history")),
)


def tools(site: Any, request: Any) -> list[dict[str, Any]]:
    """Return the pages of the bar that the operator may open: address, text, and whether it is this page."""
    return [
        {"url": url, "text": capfirst(text), "current": _current(url, request.path)}
        for model, name, text in _TOOLS
        if site.is_registered(model) and (url := model_url(site, model, name)) and _opens(site, model, name, request)
    ]


def _opens(site: Any, model: Any, name: str, request: Any) -> bool:
    if name == "changelist":
        return may_view(site, model, request)
    return bool(site.get_model_admin(model).page(name).has_permission(request))


def _current(url: str, path: str) -> str:
    """Return the value of ``aria-current``: page, true for a page below it, "" for others."""
    if path == url:
        return "page"
    return "true" if path.startswith(url) else ""


class Unlisted(admin.ModelAdmin):  # type: ignore[type-arg]
    """A model admin that links and the tool bar lead to, so that the index and sidebars leave it out."""

    def get_model_perms(self, request: Any) -> dict[str, bool]:
        """Return no permissions, unless the operator may open none of the models that are listed."""
        listed = any(may_view(self.admin_site, model, request) for model in (Plan, RatePolicy, Endpoint, SubjectList))
        return {} if listed else super().get_model_perms(request)
