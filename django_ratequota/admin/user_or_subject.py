"""Lists whose rows belong to a user or to a subject: plan assignments, and members of subject lists."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.translation import gettext_lazy as _

from .base import AutocompleteAdmin, RecordedAdmin, user_search_fields
from .filters import is_active
from .names import with_display_name


class UserOrSubjectAdmin(AutocompleteAdmin, RecordedAdmin):
    """A model with ``user``, ``subject``, ``who``, dates and a reason."""

    def get_search_fields(self, request: Any) -> list[str]:
        """Return the lookups that find a user, a subject or a reason."""
        return [*user_search_fields(), "subject", "reason"]

    @admin.display(description=_("user or subject"))
    def who(self, row: Any) -> str:
        """Return the user or the subject."""
        return with_display_name(row, row.who)

    @admin.display(description=_("active"), boolean=True)
    def active(self, row: Any) -> bool:
        """Return whether the row counts now."""
        return is_active(row)
