"""Asks, then enforces a log-only policy in place of the one that was enforced there."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import quote
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import RatePolicy
from ..operations.roll_out import replaced_by, roll_out, state_of
from .base import ChangeReasonForm
from .formatting import shown
from .pages import AdminPage
from .revert import missing_permission


class RollOutPage(AdminPage):
    """Shows what a roll-out enforces and what it deletes, and does it once that is confirmed."""

    path = "<path:object_id>/roll-out/"
    name = "roll_out"
    link = _("Roll out")

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may change the policy, and delete those it replaces."""
        edits = [] if obj is None else [(obj, obj), *((one, None) for one in replaced_by(obj))]
        lacks = any(missing_permission(self.site, request, *edit) for edit in edits)
        return bool(self.admin.has_change_permission(request, obj) and not lacks)

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link, on the form of a log-only policy."""
        return super().links(request, obj) if obj.mode == RatePolicy.Mode.LOG else []

    def view(self, request: Any, policy: RatePolicy) -> Any:
        """GET asks, POST rolls out."""
        back = HttpResponseRedirect(self.admin.page_url("change", quote(policy.pk)))
        if policy.mode != RatePolicy.Mode.LOG:
            self.admin.message_user(request, gettext("The policy is not log only."), messages.ERROR)
            return back
        form = ChangeReasonForm(request.POST if request.method == "POST" else None)
        try:
            if form.is_valid():
                self.admin.log_deletions(request, roll_out(policy, request.POST.get("seen", "")))
                text = gettext("Rolled out: the policy is enforced now.")
                self.admin.log_change(request, policy, text)
                self.admin.message_user(request, text, messages.SUCCESS)
                return back
        except ValidationError as error:
            form.add_error(None, error)
        replaced = list(replaced_by(policy))
        context = {
            "title": _("Roll out"),
            "policy": shown(policy),
            "replaced": [shown(one) for one in replaced],
            "seen": state_of([policy, *replaced]),
            "button": _("Roll out"),
            "back": back.url,
        }
        return self.render(request, "roll_out.html", context, form)
