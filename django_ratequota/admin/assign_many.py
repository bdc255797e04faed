"""The page that assigns a plan to many customers."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from ..conf import settings
from ..operations.assign_many import assign
from ..operations.pasted_lines import Line
from .pasted_lines import LinesPage, in_words


class AssignPage(LinesPage):
    """Assigns the plan to customers from now on."""

    path = "<path:object_id>/assign/"
    name = "assign"
    title = _("Assign customers to plan %(name)s")
    link = _("Assign customers")
    label = _("Customers, one per line")
    help_text = _(
        "A login name or a subject such as tenant:acme, optionally followed by until 2026-12-31 and # reason. Choose "
        "a file for more than 2 MB."
    )

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether assignments decide who is on a plan, and the operator may add some, and see the plan."""
        may_add = request.user.has_perm("django_ratequota.add_planassignment")
        return may_add and not settings.plan_resolver and self.admin.has_view_permission(request, obj)

    def apply(self, request: Any, obj: Any, lines: list[Line], reason: str) -> str:
        """Assign the plan; the reason of the change is that of lines without one."""
        done = assign(obj, lines, reason=reason, created_by=request.user)
        return in_words(
            (done.new, ngettext_lazy("%d customer was assigned.", "%d customers were assigned.")),
            (
                done.later,
                ngettext_lazy(
                    "%d stays on another plan until the assignment there ends.",
                    "%d stay on another plan until the assignment there ends.",
                ),
            ),
            (done.present, ngettext_lazy("%d was on this plan already.", "%d were on this plan already.")),
        )
