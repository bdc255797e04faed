"""The preview and the impact estimate on a policy's form: fragments of it, fetched by its buttons."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..engine.rates import BLOCKED, parse_rates
from ..exceptions import StoreError
from ..models import RatePolicy
from ..operations.advice import about_endpoint, about_saved
from ..operations.impact import estimate, sentences
from ..operations.impact_audience import NotEstimable
from ..operations.scenarios import fastest, stream
from .charts import Plot, Series
from .formatting import moment
from .pages import AdminPage, unanswered


class _PolicyFormPage(AdminPage):
    """Answers for the policy in the form, which is posted as it stands and never saved."""

    #: What follows the reason where Redis did not answer.
    then: Any

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may open a policy's form."""
        return bool(self.admin.has_view_permission(request) or self.admin.has_add_permission(request))

    def change_form_context(self, request: Any, obj: Any) -> dict[str, Any]:
        """Return the address that the form's script posts to."""
        query = {"object": quote(obj.pk)} if obj is not None and obj.pk else None
        return {f"{self.name}_url": self.url(query=query)}

    def view(self, request: Any) -> Any:
        """Return the fragment of the page."""
        policy, form = self._read_form(request)
        context: dict[str, Any] = {}
        if policy is None or (form is not None and form.errors):
            context["errors"] = _labelled(form)
        else:
            try:
                context = self.answer(request, policy)
            except NotEstimable as reason:
                context["sentences"] = [str(reason)]
            except StoreError as error:
                context["store_error"] = unanswered(error.reason, self.then)
        return TemplateResponse(request, "admin/django_ratequota/ratepolicy/preview.html", context)

    def answer(self, request: Any, policy: RatePolicy) -> dict[str, Any]:
        """Return the context of the fragment; raises ``NotEstimable`` and ``StoreError``."""
        raise NotImplementedError

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


class PreviewPage(_PolicyFormPage):
    """How the rates treat a typical client, with the advice on the policy."""

    path = "preview/"
    name = "preview"
    then = gettext_lazy("The preview cannot be shown. The policy can still be saved.")

    def answer(self, request: Any, policy: RatePolicy) -> dict[str, Any]:
        """Return a chart, or a sentence, and the advice."""
        advice = about_saved([policy], self.admin.get_queryset(request))[0]
        endpoint = about_endpoint(policy.endpoint) if policy.endpoint else ()
        return {"advice": [*advice, *endpoint], **_drawn(policy)}


class ImpactPage(_PolicyFormPage):
    """What the policy would have refused of the requests that were recorded."""

    path = "impact/"
    name = "impact"
    then = gettext_lazy("The impact cannot be estimated. Try again later.")

    def answer(self, request: Any, policy: RatePolicy) -> dict[str, Any]:
        """Return the estimate in sentences."""
        impact = estimate(policy)
        return {"sentences": sentences(impact), "since": moment(impact.since)}


def _labelled(form: Any) -> list[tuple[Any, str]]:
    """Return the form's errors with the labels of their fields; none without a form."""
    errors = {} if form is None else form.errors
    return [
        (form.fields[name].label if name in form.fields else "", text) for name in errors for text in errors[name]
    ]


def _drawn(policy: RatePolicy) -> dict[str, Any]:
    rates = parse_rates(policy.rates, policy.algorithm)
    if isinstance(rates, str):
        admitted = _("Every request is admitted, and nothing is counted.")
        return {"sentences": [_("Every request is refused.") if rates == BLOCKED else admitted]}
    scenario = stream(rates, fastest(rates))
    series = [Series(_("admitted"), "admitted", scenario.admitted), Series(_("refused"), "refused", scenario.refused)]
    chart = Plot(title=f"{scenario.title}: {policy.rates}", labels=scenario.labels, series=series, unit=_("units"))
    return {"plot": chart, "sentences": [scenario.sentence]}
