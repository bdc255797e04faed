"""Grants boosts of all policies that refused a caller in the last day, on one page, in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.forms.models import modelform_factory
from django.utils import timezone
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...changes.databases import policy_alias
from ...models import RatePolicy
from ...monitoring import refusals
from ...operations import boosts
from ...operations.boosts import Proposal
from ...operations.explain import Explanation
from ..formatting import moment, shown
from ..names import audience_text, caller_names, described_callers
from ..pages import reply, unanswered
from .boost import BOOST_LENGTHS, BoostPage, warnings_about
from .dated import LENGTHS, dated_form


class BoostAllPage(BoostPage):
    """Shows what each policy would change, with one end and one reason for all, and grants what is left filled in."""

    path = "boost-all/"
    name = "boost_all"

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the form; grant the boosts (POST), or show the form with its errors."""
        caller = explanation.customer
        found, error = reply(lambda: refusals.caller_refusals(caller))
        proposals, without = boosts.propose_boosts(found.refusals if found else ())
        if not proposals:
            self._say_why(request, error, without)
            return None
        return self._ask(request, proposals, without, {"back": back, "who": described_callers([caller])[caller]})

    def _say_why(self, request: Any, error: str, without: dict[str, str]) -> None:
        if error:
            text = unanswered(error, gettext("What refused this caller cannot be looked up. Try again later."))
        else:
            text = gettext("Nothing that refused this caller in the last day can be boosted.")
        reasons = [f"{shown(name)}: {why}" for name, why in without.items()]
        self.admin.message_user(request, " ".join([text, *reasons]), messages.ERROR)

    def _ask(self, request: Any, proposals: list[Proposal], without: dict[str, str], context: dict[str, Any]) -> Any:
        """Return the page; None once the boosts are granted."""
        data = request.POST if request.method == "POST" else None
        until = request.GET.get("until", "")
        initial = {"until": until if until in (*BOOST_LENGTHS, "date") else "hour"}
        form_class = dated_form(self.admin, request, {}, BOOST_LENGTHS)
        # Any rates: each row checks its own.
        start = proposals[0].boost.starts_at
        form = form_class(data, initial=initial, instance=RatePolicy(rates="1/s", starts_at=start))
        rows = self._rows(request, data, proposals)
        if data is not None and self._valid(data, form, rows):
            return self._grant_all(request, form, [(row, one) for row, one in rows if row.is_bound])
        default = LENGTHS.get(initial["until"], LENGTHS["hour"])[0]
        end = form.cleaned_data.get("ends_at") if data is not None else None
        names = caller_names(proposal.boost.subject for proposal in proposals)
        context |= {
            "title": _("Boost all that refused"),
            "form": form,
            "invalid": data is not None,
            "rows": [self._row(row, proposal, end or timezone.now() + default, names) for row, proposal in rows],
            "without": [(shown(name), why) for name, why in without.items()],
        }
        return self.render(request, "boost_all.html", context, form)

    def _rows(self, request: Any, data: Any, proposals: list[Proposal]) -> list[tuple[Any, Proposal]]:
        """Return the form of each policy's rates; with ``data``, it is bound where rates are filled in."""

        def formfield(field: Any, **kwargs: Any) -> Any:
            return self.admin.formfield_for_dbfield(field, request=request, **kwargs)

        row_form: Any = modelform_factory(
            RatePolicy, form=self.admin.form, fields=["rates"], formfield_callback=formfield
        )
        rows = []
        for proposal in proposals:
            filled = data is not None and data.get(f"{proposal.key}-rates", "").strip()
            row = row_form(data if filled else None, prefix=proposal.key, instance=proposal.boost)
            # Not required by the browser: an empty field leaves the policy out.
            row.fields["rates"].widget.is_required = False
            row.fields["rates"].widget.attrs["aria-label"] = gettext("Rates instead of %(rates)s (policy %(id)s)") % {
                "rates": shown(proposal.winner.rates),
                "id": proposal.winner.pk,
            }
            rows.append((row, proposal))
        return rows

    def _valid(self, data: Any, form: Any, rows: list[tuple[Any, Proposal]]) -> bool:
        """Return whether everything can be granted; else the forms have the errors."""
        filled = {name.removesuffix("-rates") for name in data if name.endswith("-rates") and data[name].strip()}
        if not filled:
            form.add_error(None, _("Enter rates for at least one policy."))
        elif filled - {proposal.key for _row, proposal in rows}:
            form.add_error(None, _("Another policy applies by now. Check the rates below, then grant them again."))
        rows_valid = [row.is_valid() for row, _proposal in rows if row.is_bound]
        return bool(form.is_valid() and all(rows_valid))

    def _row(self, row: Any, proposal: Proposal, end: Any, names: Mapping[str, str]) -> dict[str, Any]:
        """Return a row of the table: what is in force, for whom and where, and what the boost would replace."""
        winner, boost = proposal.winner, proposal.boost
        # What is shown is what was proposed: an invalid form may have changed the boost.
        proposed = boosts.propose_boost(proposal.explanation, winner)
        proposed.ends_at = end
        outlook = boosts.outlook(proposal.explanation.context, proposed)
        return {
            "policy": winner.pk,
            "who": audience_text(boost, names),
            "endpoint": shown(winner.endpoint.name) if winner.endpoint else _("all endpoints"),
            "rates_now": shown(winner.rates),
            "rates": row["rates"],
            "errors": row.errors if row.is_bound else {},
            "warnings": warnings_about(outlook),
        }

    def _grant_all(self, request: Any, form: Any, rows: list[tuple[Any, Proposal]]) -> None:
        end, reason = form.cleaned_data["ends_at"], form.cleaned_data["reason"]
        with transaction.atomic(using=policy_alias(RatePolicy)):
            for row, proposal in rows:
                row.instance.ends_at, row.instance.reason = end, reason
                boost = row.save()
                words = {"rates": boost.rates, "end": moment(end), "before": proposal.winner.rates}
                text = gettext("Boost granted: %(rates)s until %(end)s, instead of %(before)s (policy %(id)s).")
                self.admin.log_addition(request, boost, text % {**words, "id": proposal.winner.pk})
        text = ngettext(
            "%(count)d boost granted until %(end)s: %(rates)s.",
            "%(count)d boosts granted until %(end)s: %(rates)s.",
            len(rows),
        )
        rates = "; ".join(f"{one.winner.rates} → {row.instance.rates}" for row, one in rows)
        words = {"count": len(rows), "end": moment(end), "rates": shown(rates)}
        self.admin.message_user(request, text % words, messages.SUCCESS)
