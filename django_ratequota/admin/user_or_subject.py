"""Lists whose rows belong to a user or to a subject: plan assignments, and members of subject lists."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from .base import AutocompleteAdmin, RecordedAdmin, user_search_fields
from .filters import ConditionFilter, is_active
from .formatting import shown
from .names import with_display_name
from .search import SearchesRelated


class UserOrSubjectFilter(ConditionFilter):
    """Filter by whether a row belongs to a user or to a subject."""

    title = _("user or subject")
    parameter_name = "who"

    def conditions(self) -> dict[str, tuple[Any, Any]]:
        """Return which of the two is there; SQLite would look up the rows without the other one, and sort them."""
        return {"user": (_("a user"), Q(user__isnull=False)), "subject": (_("a subject"), Q(subject__isnull=False))}


class SubjectOrder(ChangeList):
    """A list that is sorted by subject as the index is: sorting half a million users without one takes seconds."""

    def get_ordering(self, request: Any, queryset: Any) -> list[Any]:
        """Return the order, in which equal subjects ascend with the others; Django lets their keys descend."""
        ordering = super().get_ordering(request, queryset)
        return ["subject", "pk"] if ordering == ["subject", "-pk"] else ordering


class UserOrSubjectAdmin(AutocompleteAdmin, SearchesRelated, RecordedAdmin):
    """A model with ``user``, ``subject``, ``who``, dates and a reason."""

    list_per_page = 50

    def get_search_fields(self, request: Any) -> list[str]:
        """Return the lookups that find a user, a subject or a reason."""
        return [*user_search_fields(), "subject", "reason"]

    def get_changelist(self, request: Any, **kwargs: Any) -> Any:
        """Return the class of the list."""
        return SubjectOrder

    @admin.display(description=_("user or subject"), ordering="subject")
    def who(self, row: Any) -> str:
        """Return the user or the subject."""
        return with_display_name(row, row.who)

    @admin.display(description=_("active"), boolean=True)
    def active(self, row: Any) -> bool:
        """Return whether the row counts now."""
        return is_active(row)

    @admin.display(description=_("reason"), ordering="reason")
    def reason_text(self, row: Any) -> str:
        """Return the reason."""
        return shown(row.reason)
