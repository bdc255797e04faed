"""Before a policy is saved: how its rates treat typical clients, what they would have refused, what is amiss.

The form is posted as it stands, whether it can be saved or not; what comes back is a fragment of the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..engine.rates import BLOCKED, Rate, parse_rates
from ..exceptions import InvalidRate, StoreError
from ..models import Endpoint, RatePolicy
from ..operations.advice import about_endpoint, about_saved
from ..operations.impact import estimate, sentences
from ..operations.impact_audience import NotEstimable
from ..operations.scenarios import Scenario, scenarios
from ..recording.validators import rate_problem
from .base import RecordedAdmin
from .charts import Series, plot
from .formatting import moment, shown
from .permissions import PolicyRights

#: Rates whose scale gets plots of its own.
_MOST_SCALES = 4
#: More warnings than this after one save are counted, not shown.
_MOST_WARNINGS = 10
_FOLDER = "admin/django_ratequota/ratepolicy"


class WarnsOnSave(RecordedAdmin):
    """Says after a save what can be proved to be amiss; nothing is refused for it."""

    def warn(self, request: Any, policies: Iterable[RatePolicy], endpoint: Endpoint | None = None) -> None:
        """Show the advice on what was saved."""
        rows = list(policies)
        told = [] if endpoint is None else [f"{shown(endpoint)}: {text}" for text in about_endpoint(endpoint)]
        if rows:
            advice = zip(rows, about_saved(rows, self._policies_seen(request)), strict=True)
            told += [f"{shown(policy)}: {text}" for policy, texts in advice for text in texts]
        for text in told[:_MOST_WARNINGS]:
            self.message_user(request, text, messages.WARNING)
        more = len(told) - _MOST_WARNINGS
        if more > 0:
            text = ngettext("and %(count)d more warning", "and %(count)d more warnings", more)
            self.message_user(request, text % {"count": more}, messages.WARNING)

    def _policies_seen(self, request: Any) -> Any:
        site = self.admin_site
        if not site.is_registered(RatePolicy):
            return RatePolicy.objects.none()
        return site.get_model_admin(RatePolicy).get_queryset(request)


class WarnsOfPolicies(WarnsOnSave):
    """The same on the page of a plan or an endpoint, on the rows of its table that were edited."""

    def save_related(self, request: Any, form: Any, formsets: Any, change: bool) -> None:
        """Save the table, then say what is amiss."""
        super().save_related(request, form, formsets, change)
        edited = []
        for formset in formsets:
            if formset.model is RatePolicy:
                edited += [*formset.new_objects, *(policy for policy, _fields in formset.changed_objects)]
        self.warn(request, edited, form.instance if isinstance(form.instance, Endpoint) else None)


class Preview(PolicyRights, WarnsOnSave):
    """The preview and the estimate on a policy's page, and the warnings when it is saved."""

    class Media:
        css = {"all": ["django_ratequota/plots.css", "django_ratequota/preview.css"]}
        js = ["django_ratequota/preview.js"]

    def get_urls(self) -> list[Any]:
        """With what the page fetches."""
        name = "django_ratequota_ratepolicy"
        return [
            path("preview/", self.admin_site.admin_view(self.preview_view), name=f"{name}_preview"),
            path("impact/", self.admin_site.admin_view(self.impact_view), name=f"{name}_impact"),
            *super().get_urls(),
        ]

    def render_change_form(
        self, request: Any, context: Any, add: bool = False, change: bool = False, form_url: str = "", obj: Any = None
    ) -> Any:
        """With the preview of what is stored, and where to ask for that of what is typed."""
        query = f"?{urlencode({'object': quote(obj.pk)})}" if obj is not None and obj.pk else ""
        context |= {f"{name}_url": self.page_url(name) + query for name in ("preview", "impact")}
        context["preview"] = _preview(obj) if obj is not None else {}
        if query and request.method == "GET":  # else it is what was typed, and could not be saved
            context["preview"]["advice"] = self._advice(request, obj)
        return super().render_change_form(request, context, add, change, form_url, obj)

    def preview_view(self, request: Any) -> Any:
        """How the rates in the form treat typical clients, and what is amiss with the policy."""
        policy, errors, form = self._posted(request)
        wrong = [*errors.get("rates", ()), *errors.get("algorithm", ())]
        if policy is None or (form is not None and not form.data.get("rates", "").strip()):
            preview = {}
        elif wrong:
            preview = {"errors": wrong}
        else:
            preview = _preview(policy)
            preview["advice"] = [] if errors else self._advice(request, policy)
        return TemplateResponse(request, f"{_FOLDER}/preview.html", {"preview": preview})

    def impact_view(self, request: Any) -> Any:
        """What the policy in the form would have refused of what was recorded."""
        policy, errors, form = self._posted(request)
        context: dict[str, Any] = {}
        if policy is None or errors:
            labels = {} if form is None else {name: field.label for name, field in form.fields.items()}
            context["errors"] = [(labels.get(name, ""), text) for name, texts in errors.items() for text in texts]
        else:
            try:
                impact = estimate(policy)
                context |= {"sentences": sentences(impact), "since": moment(impact.since)}
            except NotEstimable as reason:
                context["sentences"] = [str(reason)]
            except StoreError as error:
                context["store_error"] = error.reason
        return TemplateResponse(request, f"{_FOLDER}/impact.html", context)

    def response_add(self, request: Any, obj: Any, post_url_continue: Any = None) -> Any:
        """Say what is amiss with the new policy."""
        self.warn(request, [obj], obj.endpoint)
        return super().response_add(request, obj, post_url_continue)

    def response_change(self, request: Any, obj: Any) -> Any:
        """Say what is amiss with the policy as it is now."""
        self.warn(request, [obj], obj.endpoint)
        return super().response_change(request, obj)

    def _posted(self, request: Any) -> tuple[Any, dict[str, list[str]], Any]:
        """The policy as the form would make it, not saved; what is wrong with which field; and the form.

        Without fields (operators who may only look have none) the stored policy.
        """
        if not (self.has_view_permission(request) or self.has_add_permission(request)):
            raise PermissionDenied
        given = request.GET.get("object", "")
        stored = self.get_object(request, unquote(given)) if given else None
        if stored is not None and not self.has_view_permission(request, stored):
            raise PermissionDenied
        data = request.POST if request.method == "POST" else request.GET
        if "rates" not in data:
            return stored, {}, None
        # All fields, whoever asks: nothing is saved.
        form_class: Any = self.get_form(request, stored, change=False)
        form_class.operator = None
        form = form_class(data, instance=stored)
        errors = {name: [str(text) for text in texts] for name, texts in form.errors.items()}
        return form.instance, errors, form

    def _advice(self, request: Any, policy: RatePolicy) -> list[str]:
        own = about_saved([policy], self.get_queryset(request))[0]
        return [*own, *(about_endpoint(policy.endpoint) if policy.endpoint else ())]


def _preview(policy: RatePolicy) -> dict[str, Any]:
    """What ``preview.html`` shows of a policy's rates; the reason instead while Redis gives no answer."""
    try:
        rates = parse_rates(policy.rates, policy.algorithm)
    except InvalidRate as error:
        return {"errors": [rate_problem(error)]}
    if isinstance(rates, str):
        text = (
            _("Every request is refused.")
            if rates == BLOCKED
            else _("Every request is admitted, and nothing is counted.")
        )
        return {"sentence": text}
    try:
        scales = [_scale(rates, rate) for rate in rates[:_MOST_SCALES]]
    except StoreError as error:
        return {"store_error": error.reason}
    return {"scales": scales, "together": len(rates) > 1, "left_out": max(0, len(rates) - _MOST_SCALES)}


def _scale(rates: tuple[Rate, ...], scale: Rate) -> dict[str, Any]:
    return {"rate": str(scale), "scenarios": [(_drawn(scale, one), one.sentence) for one in scenarios(rates, scale)]}


def _drawn(scale: Rate, scenario: Scenario) -> Any:
    return plot(
        title=f"{scenario.title}: {scale}",
        labels=scenario.labels,
        series=[
            Series(_("admitted"), "admitted", scenario.admitted),
            Series(_("refused"), "refused", scenario.refused),
        ],
        unit=_("units"),
    )
