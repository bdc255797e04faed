"""What the pages of Live usage read from the query string."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.utils.translation import gettext_lazy as _

from ..pages import AdminPage, is_id
from .counts import SPANS, Selection
from .labels import VisibleNames


class SelectionPage(AdminPage):
    """A page about what the query string selects."""

    def selection(self, request: Any) -> tuple[Selection, VisibleNames]:
        """Return the selection and the names for it; warns of parameters that are ignored."""
        names = VisibleNames(self.admin, request)
        found = self.known_parameters(
            request,
            {
                "span": SPANS.__contains__,
                "endpoint": is_id,
                "policy": lambda text: is_id(text) and names.may_select(int(text)),
            },
        )
        span: Any = found["span"] or "hour"
        ids = {name: int(found[name]) if found[name] else None for name in ("endpoint", "policy")}
        if None not in ids.values():
            ids["endpoint"] = None
            text = _(
                "The endpoint was ignored: requests are counted by endpoint or by policy, not by both. "
                "These are the policy's counts."
            )
            self.admin.message_user(request, text, messages.WARNING)
        refresh = request.GET.get("refresh") == "1"
        return Selection(span=span, endpoint_id=ids["endpoint"], policy_id=ids["policy"], refresh=refresh), names
