"""What the pages of Live usage read from the query string."""

from __future__ import annotations

import re
from typing import Any

from django.contrib import messages
from django.utils.translation import gettext_lazy as _

from ...monitoring.timeline import Span
from ..formatting import shown
from ..pages import AdminPage
from .counts import SPANS, Selection
from .labels import VisibleNames

_ID = re.compile("[0-9]{1,18}")


class SelectionPage(AdminPage):
    """A page about what the query string selects."""

    def selection(self, request: Any) -> tuple[Selection, VisibleNames]:
        """Return the selection and the names for it; warns of parameters that are ignored."""
        names = VisibleNames(self.admin, request)
        params = {name: request.GET.get(name, "") for name in ("span", "endpoint", "policy")}
        span: Span = next((span for span in SPANS if span == params["span"]), "hour")
        ids = {name: int(params[name]) if _ID.fullmatch(params[name]) else None for name in ("endpoint", "policy")}
        if ids["policy"] is not None and not names.may_select(ids["policy"]):
            ids["policy"] = None
        known = {"span": params["span"] in SPANS, **{name: pk is not None for name, pk in ids.items()}}
        for name, value in params.items():
            if value and not known[name]:
                text = _("%(name)s=%(value)s was ignored: unknown value.")
                words = {"name": name, "value": shown(value)[:60]}
                self.admin.message_user(request, text % words, messages.WARNING)
        if None not in ids.values():
            ids["endpoint"] = None
            text = _(
                "The endpoint was ignored: requests are counted by endpoint or by policy, not by both. "
                "These are the policy's counts."
            )
            self.admin.message_user(request, text, messages.WARNING)
        refresh = request.GET.get("refresh") == "1"
        return Selection(span=span, endpoint_id=ids["endpoint"], policy_id=ids["policy"], refresh=refresh), names
