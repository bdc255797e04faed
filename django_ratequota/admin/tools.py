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
    found = []
    for model, name, text in _TOOLS:
        if site.is_registered(model) and (url := model_url(site, model, name)):
            own = site.get_model_admin(model)
            opens = own.has_view_permission if name == "changelist" else own.page(name).has_permission
            if opens(request):
                # The value of aria-current: true is for a page below the tool's.
                current = "page" if url == request.path else "true" if request.path.startswith(url) else ""
                found.append({"url": url, "text": capfirst(text), "current": current})
    return found


class Unlisted(admin.ModelAdmin):  # type: ignore[type-arg]
    """A model admin that links and the tool bar lead to, so that the index and sidebars leave it out."""

    def get_model_perms(self, request: Any) -> dict[str, bool]:
        """Return no permissions, unless the operator may open none of the models that are listed."""
        listed = any(may_view(self.admin_site, model, request) for model in (Plan, RatePolicy, Endpoint, SubjectList))
        return {} if listed else super().get_model_perms(request)
