"""The user admin of a project: a link to what applies to a user, and a delete page that stays small."""

from __future__ import annotations

from typing import Any

from .deletion import CountsDeleted


class QuotaLinkMixin(CountsDeleted):
    """Mixin before a ModelAdmin of users: adds a *Quota* link, to Explain, to the change page.

    The delete page counts a user's policies, assignments and list entries.
    """

    def render_change_form(self, request: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the page that the other classes render in a template that extends theirs, whichever it is."""
        response = super().render_change_form(request, context, *args, **kwargs)  # type: ignore[misc]
        if hasattr(response, "resolve_template"):  # a class may return a response that is rendered already
            response.context_data["ratequota_extended"] = response.resolve_template(response.template_name)
            response.template_name = "admin/django_ratequota/user_change_form.html"
        return response
