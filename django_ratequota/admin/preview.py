"""The preview and the impact estimate on a policy's form: fragments of it, fetched while it is being edited."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from ..engine.rates import BLOCKED, Rate, parse_rates
from ..exceptions import InvalidRate, StoreError
from ..models import RatePolicy
from ..operations.advice import about_endpoint, about_saved
from ..operations.impact import estimate, sentences
from ..operations.impact_audience import NotEstimable
from ..operations.scenarios import number, scenarios
from ..operations.suggest import SHARES, suggest
from ..operations.suggest import sentences as suggestion_sentences
from ..recording.validators import rate_problem
from .charts import Series, plot
from .formatting import moment, shown
from .names import described_callers
from .pages import AdminPage, unanswered

#: Rates that get charts of their own; more are counted.
_MAX_SCALES = 4
_FOLDER = "admin/django_ratequota/ratepolicy"
#: Fields that a suggestion does not depend on.
_NOT_SUGGESTED_BY = {"rates", "mode", "on_error", "starts_at", "ends_at", "reason"}


class _PolicyFormPage(AdminPage):
    """Answers for the policy in the form, which is posted as it stands and never saved."""

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may open a policy's form."""
        return bool(self.admin.has_view_permission(request) or self.admin.has_add_permission(request))

    def change_form_context(self, request: Any, obj: Any) -> dict[str, Any]:
        """Return the address that the form's script posts to."""
        query = {"object": quote(obj.pk)} if obj is not None and obj.pk else None
        return {f"{self.name}_url": self.url(query=query)}

    def form_data(self, request: Any) -> Any:
        """Return the form as it was posted."""
        return request.POST if request.method == "POST" else request.GET

    def read_form(self, request: Any) -> tuple[Any, dict[str, list[str]], Any]:
        """Return the policy in the form, the errors by field, and the form.

        Without fields (operators who may only view have none), the stored policy.
        """
        object_id = request.GET.get("object", "")
        stored = self.admin.get_object(request, unquote(object_id)) if object_id else None
        if stored is not None and not self.admin.has_view_permission(request, stored):
            raise PermissionDenied
        data = self.form_data(request)
        if "rates" not in data:
            return stored, {}, None
        # All fields, whatever the operator may edit: nothing is saved.
        form_class: Any = self.admin.get_form(request, stored, change=False)
        form_class.operator = None
        form = form_class(data, instance=stored)
        errors = {name: [str(text) for text in texts] for name, texts in form.errors.items()}
        return form.instance, errors, form


class PreviewPage(_PolicyFormPage):
    """How the rates treat typical clients, with the advice on the policy."""

    path = "preview/"
    name = "preview"

    def change_form_context(self, request: Any, obj: Any) -> dict[str, Any]:
        """Return the preview of the stored policy, too."""
        preview = {} if obj is None else _preview(obj)
        if obj is not None and obj.pk and request.method == "GET":  # a POST shows what could not be saved
            preview["advice"] = self._advice(request, obj)
        return {**super().change_form_context(request, obj), "preview": preview}

    def view(self, request: Any) -> Any:
        """Return the fragment of the page."""
        policy, errors, form = self.read_form(request)
        wrong = [*errors.get("rates", ()), *errors.get("algorithm", ())]
        if policy is None or (form is not None and not form.data.get("rates", "").strip()):
            preview = {}
        elif wrong:
            preview = {"errors": wrong}
        else:
            preview = _preview(policy)
            preview["advice"] = [] if errors else self._advice(request, policy)
        return TemplateResponse(request, f"{_FOLDER}/preview.html", {"preview": preview})

    def _advice(self, request: Any, policy: RatePolicy) -> list[str]:
        own = about_saved([policy], self.admin.get_queryset(request))[0]
        return [*own, *(about_endpoint(policy.endpoint) if policy.endpoint else ())]


class ImpactPage(_PolicyFormPage):
    """What the policy would have refused of the requests that were recorded."""

    path = "impact/"
    name = "impact"

    def view(self, request: Any) -> Any:
        """Return the fragment of the page."""
        policy, errors, form = self.read_form(request)
        context: dict[str, Any] = {}
        if policy is None or errors:
            context["errors"] = _labelled(errors, form)
        else:
            try:
                impact = estimate(policy)
                context |= {"sentences": sentences(impact), "since": moment(impact.since)}
            except NotEstimable as reason:
                context["sentences"] = [str(reason)]
            except StoreError as error:
                then = _("The impact cannot be estimated. Try again later.")
                context["store_error"] = unanswered(error.reason, then)
        return TemplateResponse(request, f"{_FOLDER}/impact.html", context)


class SuggestPage(_PolicyFormPage):
    """Rates under which most callers would have stayed; a fragment of the form, or a page without scripts."""

    path = "suggest/"
    name = "suggest"

    def form_data(self, request: Any) -> Any:
        """Return the form with a rate that is valid: a suggestion does not depend on what is written there."""
        data = super().form_data(request)
        if "rates" in data:
            data = data.copy()
            data["rates"] = "1/day"
        return data

    def view(self, request: Any) -> Any:
        """Return the fragment for the script, or the page."""
        policy, errors, form = self.read_form(request)
        errors = {name: texts for name, texts in errors.items() if name not in _NOT_SUGGESTED_BY}
        context: dict[str, Any] = {"fillable": request.method == "POST" and form is not None}
        if policy is None or errors:
            context["errors"] = _labelled(errors, form)
        else:
            try:
                found = suggest(policy)
                names = described_callers(row.peak_caller for row in found.rows)
                context |= {
                    "sentences": suggestion_sentences(found),
                    "since": moment(found.since),
                    "rows": [(row, number(row.peak), names[row.peak_caller]) for row in found.rows],
                    "heads": [f"{number(share / 10)} %" for share in SHARES],
                }
            except NotEstimable as reason:
                context["sentences"] = [str(reason)]
            except StoreError as error:
                then = _("No rates can be suggested. Try again later.")
                context["store_error"] = unanswered(error.reason, then)
        if request.method == "POST":
            return TemplateResponse(request, f"{_FOLDER}/suggest.html", context)
        about = "" if policy is None else shown(policy)
        return self.render(request, "suggest_page.html", {"title": _("Suggest rates"), "policy": about, **context})


def _labelled(errors: dict[str, list[str]], form: Any) -> list[tuple[Any, str]]:
    labels = {} if form is None else {name: field.label for name, field in form.fields.items()}
    return [(labels.get(name, ""), text) for name, texts in errors.items() for text in texts]


def _preview(policy: RatePolicy) -> dict[str, Any]:
    """Return what ``preview.html`` shows of the policy's rates, or why Redis did not answer."""
    try:
        rates = parse_rates(policy.rates, policy.algorithm)
    except InvalidRate as error:
        return {"errors": [rate_problem(error)]}
    if isinstance(rates, str):
        admitted = _("Every request is admitted, and nothing is counted.")
        return {"sentence": _("Every request is refused.") if rates == BLOCKED else admitted}
    try:
        scales = [_scale(rates, rate) for rate in rates[:_MAX_SCALES]]
    except StoreError as error:
        then = _("The preview cannot be shown. The policy can still be saved.")
        return {"store_error": unanswered(error.reason, then)}
    return {"scales": scales, "together": len(rates) > 1, "left_out": max(0, len(rates) - _MAX_SCALES)}


def _scale(rates: tuple[Rate, ...], scale: Rate) -> dict[str, Any]:
    rows = []
    unit = _("requests") if scale.counts == "requests" else _("units")
    for scenario in scenarios(rates, scale):
        refused = Series(_("refused"), "refused", scenario.refused)
        series = [Series(_("admitted"), "admitted", scenario.admitted), refused]
        chart = plot(title=f"{scenario.title}: {scale}", labels=scenario.labels, series=series, unit=unit)
        rows.append((chart, scenario.sentence))
    return {"rate": str(scale), "scenarios": rows}
