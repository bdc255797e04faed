"""The estimate on a policy's form: a fragment of it, fetched by its button."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from ..exceptions import StoreError
from ..models import RatePolicy
from ..operations.advice import about_endpoint, about_saved
from ..operations.impact import Impact, NotEstimable, estimate, sentences
from .formatting import moment
from .names import caller_names, caller_text, explain_url
from .pages import AdminPage, unanswered


class ImpactPage(AdminPage):
    """Estimate the requests of the last day that the policy in the form would have refused; save nothing."""

    name = "impact"

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may open a policy's form."""
        return bool(self.admin.has_view_permission(request) or self.admin.has_add_permission(request))

    def view(self, request: Any) -> Any:
        """Return the fragment of the page: advice on the policy, the estimate in sentences, and whom it would hit."""
        policy, form = self._read_form(request)
        context: dict[str, Any] = {"form": form}
        if policy is not None:
            advice = about_saved([policy])[0]
            context["advice"] = [*advice, *(about_endpoint(policy.endpoint) if policy.endpoint else ())]
            try:
                impact = estimate(policy)
                context |= {
                    "sentences": sentences(impact),
                    "since": moment(impact.since),
                    # Callers are named to those who may open Explain.
                    "hit": self._hit(policy, impact) if self.admin.has_view_permission(request) else [],
                }
            except NotEstimable as reason:
                context["sentences"] = [str(reason)]
            except StoreError as error:
                then = _("The impact cannot be estimated. Try again later.")
                context["store_error"] = unanswered(error.reason, then)
        return TemplateResponse(request, "admin/django_ratequota/ratepolicy/estimate.html", context)

    def _hit(self, policy: RatePolicy, impact: Impact) -> list[tuple[Any, ...]]:
        """Return the callers affected most, with links to Explain, and their requests."""
        names = caller_names(one.caller for one in impact.hit)
        endpoint = policy.endpoint.name if policy.endpoint else ""
        return [
            (caller_text(one.caller, names), explain_url(self.site, one.caller, endpoint), one) for one in impact.hit
        ]

    def _read_form(self, request: Any) -> tuple[Any, Any]:
        """Return the policy in the form, and the form.

        Without fields (operators who may only view have none), the stored policy and None.
        """
        object_id = request.GET.get("object", "")
        stored = self.admin.get_object(request, unquote(object_id)) if object_id else None
        if stored is not None and not self.admin.has_view_permission(request, stored):
            raise PermissionDenied
        if "rates" not in request.POST:
            return stored, None
        # All fields, whatever the operator may edit: nothing is saved.
        form_class: Any = self.admin.get_form(request, stored, change=False)
        form_class.operator = None
        form = form_class(request.POST, instance=stored)
        return form.instance if form.is_valid() else None, form
