"""The subjects that fields of the admin complete: those that the operator may see anyway, as JSON."""

from __future__ import annotations

from typing import Any

from django.http import JsonResponse

from ..models import ListMember, PlanAssignment
from ..operations.subjects import known_subjects, subject_names
from .pages import AdminPage, may_view
from .permissions import may_see_members


class SubjectsPage(AdminPage):
    """Returns known subjects that begin with ``q``, each with its display name, for ``subjects.js``."""

    name = "subjects"

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may see policies, assignments or members of lists."""
        return bool(self._tables(request))

    def view(self, request: Any) -> Any:
        """Return ``{"subjects": [[subject, name], ...]}``; the name is "" where there is none."""
        subjects = self.beginning(request, request.GET.get("q", ""))
        names = subject_names(subjects)
        return JsonResponse({"subjects": [[subject, names.get(subject, "")] for subject in subjects]})

    def beginning(self, request: Any, text: str) -> list[str]:
        """Return the known subjects that begin with the text, as far as the operator may see them."""
        return known_subjects(text, self._tables(request), seen=self.admin.has_view_permission(request))

    def _tables(self, request: Any) -> list[Any]:
        tables = [self.admin.get_queryset(request)] if self.admin.has_view_permission(request) else []
        if may_view(self.site, PlanAssignment, request):
            tables.append(PlanAssignment.objects.all())
        if may_see_members(request.user):
            tables.append(ListMember.objects.all())
        return tables
