"""Boosts, temporary overrides for one caller: of one policy, or of all that refused the caller in the last day."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

from django import forms
from django.contrib import messages
from django.core.exceptions import ValidationError
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...models import RatePolicy
from ...monitoring import refusals
from ...operations import boosts
from ...operations.boosts import Proposal
from ...operations.explain import Explanation
from ...policies.facts import to_datetime
from ..formatting import moment, shown
from ..names import audience_text, caller_names, endpoint_text
from ..pages import reply, unanswered
from ..permissions import may
from .form import CallerPage
from .override import OverrideForm, OverridePage


class BoostForm(OverrideForm):
    """The rates of each proposal; a proposal whose rates are emptied is left out."""

    def __init__(self, request: Any, model_admin: Any, proposals: Iterable[Proposal]) -> None:
        self.proposals = {f"{proposal.key}-rates": proposal for proposal in proposals}
        rates = {name: _rates_field(request, model_admin, proposal) for name, proposal in self.proposals.items()}
        super().__init__(request, model_admin, rates)

    def chosen(self, values: dict[str, Any]) -> Iterator[tuple[str, RatePolicy]]:
        """Yield the boosts whose rates are filled in."""
        filled = {name for name in self.data if name.endswith("-rates") and self.data[name].strip()}
        if not filled:
            self.add_error(None, _("Enter rates for at least one policy."))
        elif filled - self.proposals.keys():
            self.add_error(None, _("Another policy applies by now. Check the rates below, then grant them again."))
        for name, proposal in self.proposals.items():
            if name in filled:
                boost = copy(proposal.boost)
                boost.rates = values[name]
                yield name, boost

    def text(self, field: str, override: RatePolicy) -> str:
        """Return what the boost grants, and what it replaces."""
        before = self.proposals[field].winner
        words = {"rates": override.rates, "end": moment(override.ends_at), "before": before.rates, "id": before.pk}
        return gettext("Boost granted: %(rates)s until %(end)s, instead of %(before)s (policy %(id)s).") % words

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each proposal: what is in force, for whom and where, and what follows the boost."""
        names = caller_names(proposal.boost.subject for proposal in self.proposals.values())
        for name, proposal in self.proposals.items():
            winner, boost = proposal.winner, copy(proposal.boost)
            boost.ends_at = self.ends_at()
            at_us, after = boosts.replaced_by(proposal.explanation.context, boost)
            yield {
                "policy": winner.pk,
                "who": audience_text(boost, names),
                "endpoint": endpoint_text(winner.endpoint),
                "counted_per": shown(winner.counted_per),
                "rates_now": shown(winner.rates),
                "field": self[name],
                "until": moment(to_datetime(at_us)),
                "rates_after": shown(after.text) if after else gettext("no limit here"),
                "policy_after": after and after.id,
            }

    def asked(self) -> Iterable[forms.BoundField]:
        """Return the fields but those of the rows."""
        return [field for field in self if field.name not in self.proposals]


class BoostPage(CallerPage, OverridePage):
    """Proposes twice the rates: of ``policy``, or without one of all that refused the caller in the last day."""

    path = "boost/"
    name = "boost"

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may grant overrides."""
        return may(request.user, "add", override=True) and super().has_permission(request, obj)

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page; None once the boosts are granted, or with a message why there are none."""
        one = request.GET.get("policy")
        try:
            proposals, without = self._all(explanation) if one is None else ([boosts.propose(explanation, one)], {})
        except ValidationError as error:
            self.admin.message_user(request, " ".join(error.messages), messages.ERROR)
            return None
        form = BoostForm(request, self.admin, proposals)
        context = {
            "title": _("Boost all that refused") if one is None else _("Boost"),
            "lead": _("Temporary overrides. They end by themselves. Units already used stay counted."),
            "without": [(shown(name), why) for name, why in without.items()],
            "yes": _("Yes, grant them"),
            "back": back,
        }
        return self.confirm(request, form, context)

    def _all(self, explanation: Explanation) -> tuple[list[Proposal], dict[str, str]]:
        """Return a proposal for each policy that refused the caller, and other limits with why they have none.

        Raises ``ValidationError`` where nothing can be boosted.
        """
        found, error = reply(lambda: refusals.caller_refusals(explanation.customer))
        if error:
            then = gettext("What refused this caller cannot be looked up. Try again later.")
            raise ValidationError(unanswered(error, then))
        proposals, without = boosts.propose_boosts(found.refusals if found else ())
        if not proposals:
            text = gettext("Nothing that refused this caller in the last day can be boosted.")
            raise ValidationError([text, *(f"{shown(name)} – {why}" for name, why in without.items())])
        return proposals, without


def _rates_field(request: Any, model_admin: Any, proposal: Proposal) -> Any:
    """Return the field of the proposal's rates."""
    field = model_admin.formfield_for_dbfield(
        RatePolicy._meta.get_field("rates"), request=request, required=False, initial=proposal.boost.rates
    )
    words = {"rates": shown(proposal.winner.rates), "id": proposal.winner.pk}
    label = gettext("Rates instead of %(rates)s (policy %(id)s)") % words
    attrs = {"aria-label": label, "class": "vTextField ratequota-rates", "dir": "ltr", "spellcheck": "false"}
    field.widget.attrs |= attrs
    return field
