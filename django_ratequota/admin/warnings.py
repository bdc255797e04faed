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
#: Policies that a warning names; more are counted.
_MAX_NAMES = 3


class WarnsOnSave(RecordedAdmin):
    """A model admin that can warn about saved policies."""

    def warn(self, request: Any, policies: Iterable[RatePolicy], endpoint: Endpoint | None = None) -> None:
        """Show the advice on the saved policies, and on the endpoint: each sentence once."""
        from ..operations.advice import about_endpoint, about_saved  # which setting up Django does not need

        rows = list(policies)
        advice: list[tuple[Any, list[str]]] = [] if endpoint is None else [(endpoint, about_endpoint(endpoint))]
        if rows:
            advice += zip(rows, about_saved(rows, self._visible_policies(request)), strict=True)
        named: dict[str, list[str]] = {}
        for row, texts in advice:
            for text in texts:
                named.setdefault(text, []).append(shown(row))
        for text, names in list(named.items())[:_MAX_WARNINGS]:
            self.message_user(request, f"{_listed(names)}: {text}", messages.WARNING)
        more = len(named) - _MAX_WARNINGS
        if more > 0:
            text = ngettext("and %(count)d more warning", "and %(count)d more warnings", more)
            self.message_user(request, text % {"count": more}, messages.WARNING)

    def _visible_policies(self, request: Any) -> Any:
        """Return the policies that the operator may see: advice names no others."""
        if not self.admin_site.is_registered(RatePolicy):
            return RatePolicy.objects.none()
        return self.admin_site.get_model_admin(RatePolicy).get_queryset(request)


def _listed(names: list[str]) -> str:
    """Return the first names, and how many more there are."""
    text, more = ", ".join(names[:_MAX_NAMES]), len(names) - _MAX_NAMES
    if more > 0:
        text += f" {ngettext('and %(count)d more', 'and %(count)d more', more)}" % {"count": more}
    return text
