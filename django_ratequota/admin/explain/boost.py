"""Boosts: temporary overrides with higher rates for one caller, of one policy or of several."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...models import RatePolicy
from ...operations.explain import Explanation
from ...operations.overrides import boosts_in_force, propose_boosts, refuse_lower
from ..formatting import moment, shown
from ..names import audience_text, caller_names, endpoint_text
from ..permissions import lacking, may
from .form import CallerPage
from .override import OverrideForm, OverridePage, in_force


class BoostPage(CallerPage, OverridePage):
    """Proposes twice the rates of each ``policy`` in the query; one whose rates are emptied is left out."""

    name = "boost"
    ended = _("The boost of %(audience)s has ended.")
    gone = _("That boost has already ended.")

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may grant overrides."""
        return may(request.user, "add", override=True) and super().has_permission(request, obj)

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page; None once the boosts are granted, or with a message why there are none."""
        ids = request.GET.getlist("policy")
        granted = {
            pk: boost
            for pk, boost in boosts_in_force(explanation, ids).items()
            if not lacking(request.user, "change", boost)
        }
        names = caller_names(boost.subject for boost in granted.values())
        if "end" in request.POST:
            own = [granted[pk] for pk in request.POST.getlist("end") if pk in granted]
            self.end(request, own, names)
            return None
        try:
            found = propose_boosts(explanation, ids)
        except ValidationError as error:
            if not granted or request.method == "POST":
                self.admin.message_user(request, " ".join(error.messages), messages.ERROR)
                return None
            found = []  # such as an unlimited one, which can be ended
        proposals = {f"{winner.pk}-rates": (winner, boost) for winner, boost in found}
        form = OverrideForm(request, {name: self._rates(request, *pair) for name, pair in proposals.items()})
        if form.is_valid():
            boosts = {name: boost for name, (_winner, boost) in proposals.items() if form.cleaned_data[name]}
            for name, boost in boosts.items():
                boost.rates = form.cleaned_data[name]
                try:
                    refuse_lower(boost, proposals[name][0])
                except ValidationError as error:
                    form.add_error(name, error.messages)
            if not boosts:
                form.add_error(None, _("Enter rates for at least one policy."))
            elif form.is_valid() and self.add(request, form, boosts):
                return None
        names |= caller_names(boost.subject for _winner, boost in found)
        context = {
            "in_force": [
                in_force(
                    pk,
                    boost,
                    f"{endpoint_text(boost.endpoint)}: {audience_text(boost, names)}",
                    gettext("Boosted until %(end)s") % {"end": moment(boost.ends_at)},
                )
                for pk, boost in granted.items()
            ],
            "title": _("Boost"),
            "lead": _("Temporary overrides. They end by themselves. Units already used stay used."),
            "rows": [
                {
                    "winner": winner,
                    "who": audience_text(boost, names),
                    "endpoint": endpoint_text(winner.endpoint),
                    "field": form[name],
                }
                for name, (winner, boost) in proposals.items()
            ],
            "fields": [field for field in form if field.name not in proposals],
            "button": _("Yes, boost") if found else "",
            "back": back,
        }
        return self.render(request, "override.html", context, form)

    def text(self, override: RatePolicy) -> str:
        """Return what the boost grants."""
        endpoint, end = endpoint_text(override.endpoint), moment(override.ends_at)
        words = {"endpoint": endpoint, "rates": override.rates, "end": end}
        return gettext("Boost granted for %(endpoint)s: %(rates)s until %(end)s.") % words

    def _rates(self, request: Any, winner: RatePolicy, boost: RatePolicy) -> Any:
        """Return the field of the boost's rates."""
        field = self.admin.formfield_for_dbfield(
            RatePolicy._meta.get_field("rates"), request=request, required=False, initial=boost.rates
        )
        words = {"rates": shown(winner.rates), "id": winner.pk}
        label = gettext("Rates instead of %(rates)s (policy %(id)s)") % words
        attrs = {"aria-label": label, "class": "vTextField ratequota-rates", "dir": "ltr", "spellcheck": "false"}
        field.widget.attrs |= attrs
        return field
