"""Which limits apply to a caller and why, how much of them is used, and what was decided when they were refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django import forms
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...models import Plan, RatePolicy
from ...monitoring import refusals
from ...monitoring.refusals import Refusal
from ...operations.boosts import any_boostable
from ...operations.explain import Explanation
from ...operations.explain_query import ExplainQuery
from ...policies.explain import Candidate, others_in_words
from ..formatting import clock_and_wait, shown
from ..names import audience_text, caller_names, described, endpoint_text
from ..pages import AdminPage, reply, unanswered
from ..permissions import is_override, may
from ..usage.outages import outage_texts
from .block import BlockLinks
from .boost import BoostForm
from .counter_rows import counter_rows
from .form import ExplainForm, data_of, explain_form, find_caller, form_data
from .override import LENGTHS
from .refusals import find_refusal, latest_refusals, refusal_details, refused_places

#: All winners are listed, and other candidates up to this many rows: a caller may have as many dated ones.
_MAX_CANDIDATES = 200


class ExplainPage(AdminPage):
    """Asks for a caller and a request in the query string, and explains; it consumes nothing."""

    path = "explain/"
    name = "explain"
    media = forms.Media(css={"all": ["django_ratequota/explain.css"]})

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link from an override to the limits of its caller."""
        if not is_override(obj):
            return []
        params = {"caller": obj.subject if obj.user_id is None else f"user:{obj.user_id}"}
        if obj.endpoint:
            params["endpoint"] = obj.endpoint.name
        return [(self.url(query=params), _("Explain"))]

    def view(self, request: Any) -> Any:
        """Show the form, what applies now, and refusals; redirect from a caller's name to the caller."""
        wanted = request.GET.get("id", "").strip()
        refusal, store_error = find_refusal(wanted)
        if refusal is None and wanted and (found := find_caller(self.admin, request, wanted)):
            return HttpResponseRedirect(self.url(query=found))
        data = data_of(request.GET) or (refusal and form_data(ExplainQuery.from_refusal(refusal)))
        form = explain_form(self.admin, request, data)
        explanation = form.explain()
        params = form.params()
        if refusal is not None:
            params["id"] = refusal.id
        users = caller_names(_subjects(refusal, explanation))
        context = {
            "title": _("Explain"),
            "form": form,
            "wanted": shown(wanted),
            "here": self.url(),
            "subjects": self.admin.page_url("subjects"),
            "lost": bool(wanted) and refusal is None and not store_error,
            "refusal": refusal and refusal_details(self.admin, request, refusal, users),
            "refusals": [] if form.is_bound else latest_refusals(self.admin),
            "given": params,
            "store_error": store_error
            and unanswered(store_error, _("The refusal cannot be looked up. Try again later.")),
        }
        if explanation is not None:
            context |= self._answer(request, explanation, form, params, users)
            context |= self._refused(request, explanation, refusal, params)
            context["caller"] = described(explanation.customer, users)
        return self.render(request, "explain.html", context, form)

    def _refused(
        self, request: Any, explanation: Explanation, refusal: Refusal | None, params: dict[str, str]
    ) -> dict[str, Any]:
        """Return what refused the caller in the last day, and the links to boosts and blocks."""
        caller, ip = explanation.customer, explanation.context.caller.subject("ip", None) or ""
        pairs = [(caller, ip), *([(refusal.caller, refusal.ip)] if refusal else ())]
        blocks = BlockLinks(self.admin, request, pairs)
        found, error = reply(lambda: refusals.caller_refusals(caller))
        boosts = found and may(request.user, "add", override=True) and any_boostable(found.refusals)
        lengths = [(name, LENGTHS[name][1]) for name in BoostForm.lengths]
        own = {name: text for name, text in params.items() if name not in ("id", "path", "method", "cost")}
        return {
            **refused_places(self.admin, caller, found, error),
            "past": self.admin.page_url("quota_history", query={"subject": caller}) if caller else "",
            "boost_all": [
                (self.admin.page_url("boost", query={**own, "until": name}), text)
                for name, text in (*lengths, ("date", _("until a date")))
                if boosts
            ],
            "block_caller": blocks.link(caller, ip, params.get("endpoint", "")),
            "block_refused": refusal and blocks.link(refusal.caller, refusal.ip, params.get("endpoint", "")),
        }

    def _answer(
        self,
        request: Any,
        explanation: Explanation,
        form: ExplainForm,
        params: dict[str, str],
        users: Mapping[str, str],
    ) -> dict[str, Any]:
        """Return the caller's plan, counters and candidates; ``users`` has their names (see ``caller_names``)."""
        decision, plan = explanation.decision, explanation.plan
        left_out = len(explanation.candidates) - _MAX_CANDIDATES
        listed = _listed(explanation.candidates)
        rows = self._candidates(request, listed, users)
        boosts = may(request.user, "add", override=True)
        resets = self.admin.has_reset_permission(request)
        endpoints = {row["id"]: row["endpoint"] for row in rows}
        everywhere = not (form.query.endpoint or form.query.path)

        def boost_url(policy_id: int) -> str:
            return str(self.admin.page_url("boost", query={**params, "policy": policy_id}))

        counters = counter_rows(explanation, endpoints, users, boost_url if boosts else None)
        return {
            "answered": True,
            "plan": plan and {"name": shown(plan.name), "link": self.object_url(request, Plan, plan.id)},
            "plan_source": explanation.plan_source,
            "everywhere": everywhere,
            "verdict": _verdict(explanation, everywhere=everywhere),
            "computed": form.query.computes_cost(),
            "admitted": decision.allowed,
            "degraded": decision.error
            and unanswered(
                decision.error, _("Usage cannot be shown. Until Redis answers, the policies' “on error” decides.")
            ),
            "outages": outage_texts(48, explanation.resolution.policy_ids),
            "counters": counters,
            "acts": resets or boosts,
            "own": resets and any(not row.get("shared_reason") and "id" in row for row in counters),
            "candidates": rows,
            "unseen": len(listed) - len(rows),
            "left_out": max(0, left_out),
            "others": others_in_words(explanation.others),
            "endpoints": [shown(endpoint.name) for endpoint in explanation.context.endpoints]
            or [_("%(name)s (built-in limit)") % {"name": shown(bucket.scope)} for bucket in explanation.built_in],
            "counters_url": self.admin.page_url("counters"),
        }

    def _candidates(self, request: Any, listed: list[Candidate], users: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the rows of the candidates; those that the operator may not see only where they won."""
        rows = RatePolicy.objects.select_related("user", "subject_list", "plan", "endpoint")
        policies = rows.in_bulk([candidate.policy.id for candidate in listed])
        found = []
        for candidate in listed:
            policy, row = candidate.policy, policies.get(candidate.policy.id)
            seen = row is not None and self.admin.has_view_permission(request, row)
            if candidate.won or seen:
                found.append(
                    {
                        "id": policy.id,
                        "link": self.admin.page_url("change", policy.id) if seen else "",
                        # None = deleted since the snapshot was taken.
                        "audience": audience_text(row, users) if row else "—",
                        "endpoint": endpoint_text(row.endpoint if row else None),
                        "counted_per": shown(policy.counted_per),
                        "rates": shown(policy.text),
                        "mode": RatePolicy.Mode(policy.mode).label if policy.mode != "enforce" else "",
                        "won": candidate.won,
                        "reason": shown(candidate.reason),
                    }
                )
        return found


def _listed(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """Return all winners and the first of the others, in their order."""
    room = _MAX_CANDIDATES - sum(candidate.won for candidate in candidates)
    listed = []
    for candidate in candidates:
        if candidate.won or room > 0:
            listed.append(candidate)
        room -= not candidate.won
    return listed


def _subjects(refusal: Refusal | None, explanation: Explanation | None) -> set[str]:
    """Return the subjects that the page names."""
    subjects = {refusal.caller, *(bucket.subject for bucket in refusal.buckets)} if refusal else set()
    if explanation is not None:
        subjects |= {explanation.customer, *(bucket.subject for bucket in explanation.resolution.buckets)}
        subjects |= {candidate.policy.subject for candidate in explanation.candidates[:_MAX_CANDIDATES]}
    return subjects


def _verdict(explanation: Explanation, *, everywhere: bool) -> str:
    """Return in words whether the next request would be admitted, and else when to try again.

    ``everywhere``: no endpoint was chosen, so that only the policies for all endpoints were checked.
    """
    decision, cost = explanation.decision, explanation.resolution.cost
    units = ngettext("The next request, of %(count)d unit,", "The next request, of %(count)d units,", cost)
    words = {"request": units % {"count": cost}, "by": shown(", ".join(decision.violated))}
    if explanation.exempt:
        return gettext("Nothing limits this request: %(why)s.") % {"why": shown(explanation.exempt)}
    if decision.allowed and decision.degraded:
        text = gettext("%(request)s would be admitted, because “on error” decides while Redis does not answer.")
        if everywhere:
            text = gettext(
                "The policies for all endpoints would admit the request, because “on error” decides while Redis does "
                "not answer. Choose an endpoint to check its own too."
            )
        return text % words
    if decision.allowed and everywhere:
        text = ngettext(
            "The policies for all endpoints have room for %(count)d unit. Choose an endpoint to check its own too.",
            "The policies for all endpoints have room for %(count)d units. Choose an endpoint to check its own too.",
            cost,
        )
        return text % {"count": cost}
    if decision.allowed:
        return gettext("%(request)s would be admitted.") % words
    if decision.retry_after_us is None:
        return gettext("%(request)s would be refused by %(by)s, and waiting does not help.") % words
    if decision.degraded:
        return gettext("%(request)s would be refused by %(by)s.") % words
    words["until"] = clock_and_wait(decision.at_us, decision.retry_after_us)
    return gettext("%(request)s would be refused by %(by)s, until %(until)s.") % words
