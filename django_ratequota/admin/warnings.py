"""Warnings after a save, for policies and endpoints without the effect one would expect. Every save is accepted."""

from __future__ import annotations

from itertools import islice
from typing import Any

from django.contrib import messages
from django.utils.translation import ngettext

from ..models import Endpoint, RatePolicy
from .base import RecordedAdmin
from .formatting import shown

#: Maximum number of warnings after one save.
_MAX_WARNINGS = 10
#: Policies that a warning names; more are counted.
_MAX_NAMES = 3


class WarnsOnSave(RecordedAdmin):
    """The admin of a policy, or of an object with a table of policies."""

    def save_related(self, request: Any, form: Any, formsets: Any, change: bool) -> None:
        """Save the tables; then show the advice on the saved policies, and on the endpoint: each sentence once."""
        from ..operations.advice import about_endpoint, about_saved  # which setting up Django does not need

        super().save_related(request, form, formsets, change)
        saved = form.instance
        rows = [saved] if isinstance(saved, RatePolicy) else []
        for formset in formsets:
            if formset.model is RatePolicy:
                rows += [*formset.new_objects, *(policy for policy, _fields in formset.changed_objects)]
        endpoint = saved if isinstance(saved, Endpoint) else getattr(saved, "endpoint", None)
        advice: list[tuple[Any, list[str]]] = [] if endpoint is None else [(endpoint, about_endpoint(endpoint))]
        advice += zip(rows, about_saved(rows), strict=True)
        named: dict[str, list[str]] = {}
        for row, texts in advice:
            for text in texts:
                named.setdefault(text, []).append(shown(row))
        for text, names in islice(named.items(), _MAX_WARNINGS):
            listed, more = ", ".join(names[:_MAX_NAMES]), len(names) - _MAX_NAMES
            if more > 0:
                listed += f" {ngettext('and %(count)d more', 'and %(count)d more', more)}" % {"count": more}
            self.message_user(request, f"{listed}: {text}", messages.WARNING)
