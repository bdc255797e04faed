"""Warnings after a save, for policies and endpoints without the effect one would expect. Nothing is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib import messages
from django.utils.translation import ngettext

from ..models import Endpoint, RatePolicy
from .base import RecordedAdmin
from .formatting import shown

#: Warnings after one save that are shown; more are counted.
_MAX_WARNINGS = 10


class WarnsOnSave(RecordedAdmin):
    """A model admin that can warn about saved policies."""

    def warn(self, request: Any, policies: Iterable[RatePolicy], endpoint: Endpoint | None = None) -> None:
        """Show the advice on the saved policies, and on the endpoint."""
        from ..operations.advice import about_endpoint, about_saved  # which setting up Django does not need

        rows = list(policies)
        warnings = [] if endpoint is None else [f"{shown(endpoint)}: {text}" for text in about_endpoint(endpoint)]
        if rows:
            advice = zip(rows, about_saved(rows, self._visible_policies(request)), strict=True)
            warnings += [f"{shown(policy)}: {text}" for policy, texts in advice for text in texts]
        for text in warnings[:_MAX_WARNINGS]:
            self.message_user(request, text, messages.WARNING)
        more = len(warnings) - _MAX_WARNINGS
        if more > 0:
            text = ngettext("and %(count)d more warning", "and %(count)d more warnings", more)
            self.message_user(request, text % {"count": more}, messages.WARNING)

    def _visible_policies(self, request: Any) -> Any:
        """Return the policies that the operator may see: advice names no others."""
        if not self.admin_site.is_registered(RatePolicy):
            return RatePolicy.objects.none()
        return self.admin_site.get_model_admin(RatePolicy).get_queryset(request)
