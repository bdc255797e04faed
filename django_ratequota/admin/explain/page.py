"""Which limits apply to a caller and why, how much of them is used, and what was decided when they were refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...models import Endpoint, Plan, RatePolicy
from ...monitoring import refusals
from ...monitoring.refusals import Refusal
from ...operations.explain import MOST_ENDPOINTS, ExplainQuery, Explanation, idle_policies, many_clients
from ...operations.overrides import boostable
from ...operations.recorded import policies_by_id
from ...operations.subjects import policies_in
from ...policies.limit_names import limit_names
from ...policies.reasons import others_in_words
from ..formatting import clock_and_wait, shown
from ..names import audience_text, caller_names, caller_text, endpoint_text, explain_url, limits_text
from ..pages import AdminPage, reply, unanswered
from ..permissions import is_override, may
from ..usage.status import outage_texts
from .counter_rows import counter_rows, fullest_first
from .form import data_of, explain_form, find_caller
from .overrides import block_links
from .refusals import find_refusal, refusal_details, refused_places

#: Maximum number of policies listed, winners first, because a caller may have that many dated ones.
_MAX_CANDIDATES = 200


class ExplainPage(AdminPage):
    """Asks for a caller and a request in the query string, and explains; it consumes nothing."""

    name = "explain"
    css = ("django_ratequota/explain.css",)

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link from an override to the limits of its caller."""
        if not is_override(obj):
            return []
        caller = obj.subject if obj.user_id is None else f"user:{obj.user_id}"
        return [(explain_url(self.site, caller, obj.endpoint.name if obj.endpoint else ""), _("Explain"))]

    def view(self, request: Any) -> Any:
        """Show the form, what applies now, and refusals; redirect from what was searched for to its page."""
        wanted = request.GET.get("id", "").strip()
        refusal, store_error = find_refusal(wanted)
        several = ""
        try:
            if refusal is None and wanted and (found := self._found(request, wanted)):
                return HttpResponseRedirect(found)
        except ValidationError as error:
            [several] = error.messages
        data = data_of(request.GET) or (refusal and ExplainQuery.from_refusal(refusal).params())
        network = many_clients((data or {}).get("ip", "").strip())
        form = explain_form(self.admin, request, None if network else data)
        explanation = form.explain()
        params = form.params()
        if refusal is not None:
            params["id"] = refusal.id
        users = caller_names(_subjects(refusal, explanation))
        context = {
            "title": _("Explain"),
            "wanted": shown(wanted),
            "here": self.url(),
            "subjects": self.admin.page_url("subjects"),
            "several": several,
            "lost": bool(wanted) and refusal is None and not (store_error or several),
            "refusal": refusal,
            "then": refusal and refusal_details(self.admin, request, refusal, users),
            "given": params,
            "route_left_out": shown(refusal.route) if refusal and "path" not in params else "",
            "store_error": store_error
            and unanswered(store_error, _("The refusal cannot be looked up. Try again later.")),
        }
        if explanation is not None:
            context["caller"] = caller_text(explanation.customer, users)
            context |= self._answer(request, explanation)
            context |= self._counters(request, explanation, users, params)
            context |= self._refused(request, explanation, refusal, params)
        elif network:
            context |= self._network(request, f"ip:{network}")
        return self.render(request, "explain.html", context, form)

    def _found(self, request: Any, wanted: str) -> str:
        """Return the address of the caller's page or of the endpoint with this name; "" = there is neither.

        Raises ``ValidationError`` where the name is that of several callers.
        """
        if caller := find_caller(self.admin, request, wanted):
            return self.url(query=caller)
        endpoint = Endpoint.objects.filter(name=wanted.replace("\x00", "")).first()
        return self.object_url(request, Endpoint, endpoint.pk, endpoint) if endpoint else ""

    def _network(self, request: Any, network: str) -> dict[str, Any]:
        """Return the policies for addresses of a network, the link to its block, and its refusals."""
        return {
            **refused_places(self.admin, network, *reply(lambda: refusals.caller_refusals(network))),
            "caller": network,
            "network": policies_in(network, self.admin.get_queryset(request)),
            "block_caller": block_links(self.admin, request, [(network, "")]).get((network, "")),
        }

    def _refused(
        self, request: Any, explanation: Explanation, refusal: Refusal | None, params: dict[str, str]
    ) -> dict[str, Any]:
        """Return what refused the caller in the last day, and the links to boosts and blocks."""
        caller, ip = explanation.customer, explanation.context.caller.subject("ip", None) or ""
        pairs = [(caller, ip), *([(refusal.caller, refusal.ip)] if refusal else ())]
        blocks = block_links(self.admin, request, pairs)
        found, error = reply(lambda: refusals.caller_refusals(caller))
        granting = may(request.user, "add", override=True)
        boosts = boostable(explanation, found.refusals) if found and granting else ()
        return {
            **refused_places(self.admin, caller, found, error),
            "past": self.admin.page_url("quota_history", query={"subject": caller}) if caller else "",
            "boost_all": self.admin.page_url("boost", query={**params, "policy": boosts}) if boosts else "",
            "block_caller": blocks.get((caller, ip)),
            "block_refused": refusal and blocks.get((refusal.caller, refusal.ip)),
        }

    def _answer(self, request: Any, explanation: Explanation) -> dict[str, Any]:
        """Return the caller's plan, the verdict, and where it holds."""
        decision, plan = explanation.decision, explanation.plan
        return {
            "plan": plan and {"name": shown(plan.name), "link": self.object_url(request, Plan, plan.id)},
            "explanation": explanation,
            "verdict": _verdict(explanation),
            "degraded": decision.error
            and unanswered(
                decision.error,
                _("Usage cannot be shown. Until Redis answers, the “on error” of each policy applies."),
            ),
            "outages": outage_texts(48, explanation.resolution.policy_ids),
            "endpoints": [shown(endpoint.name) for endpoint in explanation.context.endpoints]
            or [_("%(name)s (built-in limit)") % {"name": shown(bucket.scope)} for bucket in explanation.built_in],
            "more_endpoints": MOST_ENDPOINTS if explanation.more else 0,
        }

    def _counters(
        self, request: Any, explanation: Explanation, users: Mapping[str, str], params: dict[str, str]
    ) -> dict[str, Any]:
        """Return the counters, and the policies that do not apply; ``users`` has names (see ``caller_names``)."""
        policies = self._policies(request, explanation, users)
        boosts = may(request.user, "add", override=True)
        resets = self.admin.has_reset_permission(request)

        def boost_url(policy_id: int) -> str:
            return str(self.admin.page_url("boost", query={**params, "policy": policy_id}))

        counters = counter_rows(explanation, users, policies, boost_url if boosts else None)
        if explanation.everywhere:
            counters.sort(key=fullest_first)
            for counter in counters:
                if counter["scope"]:
                    counter["explain"] = self.url(query={**params, "endpoint": counter["scope"]})
        return {
            "counters": counters,
            "acts": resets or boosts,
            "own": resets and any("slots" in row or ("id" in row and not row.get("shared")) for row in counters),
            "lost_policies": [policy for policy in policies.values() if not policy["won"]],
            "idle_policies": [
                self._policy(row.pk, row, users, row.rates, why, seen=True)
                for row, why in idle_policies(explanation)
                if self.admin.has_view_permission(request, row)
            ],
            "nothing": not explanation.candidates and not explanation.built_in,
            "left_out": len(explanation.candidates) - len(policies),
            "others": others_in_words(explanation.others),
        }

    def _policies(self, request: Any, explanation: Explanation, users: Mapping[str, str]) -> dict[int, Any]:
        """Return what the page shows of each policy by id; of those that the operator may not see, only winners."""
        listed = sorted(explanation.candidates, key=lambda one: not one.won)[:_MAX_CANDIDATES]
        rows = policies_by_id(one.policy.id for one in listed)
        found = {}
        for one in listed:
            pk, row = one.policy.id, rows.get(one.policy.id)  # None = deleted since the snapshot was taken
            seen = row is not None and self.admin.has_view_permission(request, row)
            if one.won or seen:
                found[pk] = self._policy(pk, row, users, one.policy.text, one.reason, seen=seen) | {"won": one.won}
        return found

    def _policy(
        self, pk: int, row: RatePolicy | None, users: Mapping[str, str], rates: str, reason: str, *, seen: bool
    ) -> dict[str, Any]:
        return {
            "id": pk,
            "link": self.admin.page_url("change", pk) if seen else "",
            "audience": audience_text(row, users) if row else "—",
            "what": f"{endpoint_text(row.endpoint if row else None)}: {shown(rates)}",
            "reason": shown(reason),
        }


def _subjects(refusal: Refusal | None, explanation: Explanation | None) -> set[str]:
    """Return the subjects that the page names."""
    subjects = {refusal.caller, *(bucket.subject for bucket in refusal.buckets)} if refusal else set()
    if explanation is not None:
        subjects |= {explanation.customer, *(bucket.subject for bucket in explanation.resolution.buckets)}
        subjects |= {candidate.policy.subject for candidate in explanation.candidates[:_MAX_CANDIDATES]}
    return subjects


def _verdict(explanation: Explanation) -> str:
    """Return in words whether the next request would be admitted, and else when to try again."""
    decision, cost = explanation.decision, explanation.resolution.cost
    units = ngettext("The next request (%(count)d unit)", "The next request (%(count)d units)", cost)
    names = limit_names(decision.violated, explanation.resolution.buckets)
    words = {"request": units % {"count": cost}, "by": limits_text(names), "why": shown(explanation.exempt)}
    if explanation.exempt:
        text = gettext("This request is not limited (%(why)s).")
    elif decision.allowed and decision.degraded:
        text = gettext("%(request)s would be admitted, because “on error” applies while Redis does not answer.")
    elif explanation.everywhere:
        text = gettext("Refused now by %(by)s.") if names else gettext("This customer has room in every limit.")
    elif decision.allowed:
        text = gettext("%(request)s would be admitted.")
    elif decision.retry_after_us is None:
        text = gettext("%(request)s would be refused by %(by)s. Waiting does not help.")
    elif decision.degraded or (decision.binding and decision.binding.bucket.rate.concurrent):
        text = gettext("%(request)s would be refused by %(by)s.")  # nobody knows until when
    else:
        words["until"] = clock_and_wait(decision.at_us, decision.retry_after_us)
        text = gettext("%(request)s would be refused by %(by)s until %(until)s.")
    return text % words
