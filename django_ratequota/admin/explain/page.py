"""What applies to a caller and why, how their counters stand, and what was decided when they were refused."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.translation import gettext_lazy as _

from ...engine.types import Bucket, BucketStatus
from ...exceptions import StoreError
from ...models import Plan, RatePolicy
from ...monitoring import statistics
from ...operations.boosts import why_no_boost
from ...operations.counters import peek
from ...operations.explain import Explanation
from ...operations.explain_query import ExplainQuery
from ...policies.resolver import Candidate
from ..base import Lookups, shown
from ..permissions import is_override, may
from .counters import counter, named_callers, verdict
from .form import ExplainForm, answers
from .refusals import Refusals, find

_TEMPLATES = "admin/django_ratequota/ratepolicy"
#: Winners are listed, and others up to so many: thousands of tenants may have an override of their own.
_MAX_CANDIDATES = 200


class Explain(Lookups, Refusals):
    """A page that asks who and where, and answers; whoever may look at policies may open it. It consumes nothing."""

    class Media:
        css = {"all": ["django_ratequota/explain.css"]}

    def get_urls(self) -> list[Any]:
        """With the page."""
        view = self.admin_site.admin_view(self.explain_view)
        own = path("explain/", view, name="django_ratequota_ratepolicy_explain")
        return [own, *super().get_urls()]

    def render_change_form(
        self, request: Any, context: Any, add: bool = False, change: bool = False, form_url: str = "", obj: Any = None
    ) -> Any:
        """With the way from an override to its caller."""
        if obj is not None and is_override(obj):
            caller = obj.subject if obj.user_id is None else f"user:{obj.user_id}"
            context["explain_url"] = self.page_url(
                "explain", query={"caller": caller, **({"endpoint": obj.endpoint.name} if obj.endpoint else {})}
            )
        return super().render_change_form(request, context, add, change, form_url, obj)

    def explain_view(self, request: Any) -> Any:
        """Everything is in the query string, so that the page can be shared and bookmarked."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        wanted = request.GET.get("id", "").strip()
        refusal, store_error = find(wanted)
        form = self._form(request, _data(request.GET, refusal))
        explanation = form.question.explain() if form.is_bound and form.is_valid() else None
        given = form.given() if form.is_bound else {}
        if refusal is not None:
            given["id"] = refusal.id
        context = {
            "title": _("Explain"),
            "form": form,
            "wanted": shown(wanted),
            "here": self.page_url("explain"),
            "lost": bool(wanted) and refusal is None and not store_error,
            "refusal": refusal and self._told(request, refusal),
            "refusals": self._refusals(explanation, given) if not form.errors else [],
            "given": given,
            "store_error": store_error,
        }
        if explanation is not None:
            context |= self._answer(request, explanation, given)
        return self._show(request, "explain.html", context, form)

    def _form(self, request: Any, data: Any) -> ExplainForm:
        user: Any = self.formfield_for_foreignkey(RatePolicy._meta.get_field("user"), request)
        return ExplainForm(data or None, user=user)

    def _show(self, request: Any, template: str, context: dict[str, Any], *forms: Any) -> TemplateResponse:
        request.current_app = self.admin_site.name
        media = self.media
        for form in forms:
            media += form.media
        context = {
            **self.admin_site.each_context(request),
            "original": str(context["title"]),  # the end of the breadcrumbs; unfold wants no lazy text here
            "opts": self.opts,
            "media": media,
            "has_view_permission": True,
            **context,
        }
        return TemplateResponse(request, f"{_TEMPLATES}/{template}", context)

    def _answer(self, request: Any, explanation: Explanation, given: dict[str, str]) -> dict[str, Any]:
        """What the page says of the caller: plan, counters, candidates."""
        decision, plan = explanation.decision, explanation.plan
        statuses = _live(explanation)
        left_out = len(explanation.candidates) - _MAX_CANDIDATES
        listed = _listed(explanation.candidates)
        policies = RatePolicy.objects.select_related("user", "plan", "endpoint").in_bulk(
            [candidate.policy.id for candidate in listed]
        )
        seen = {pk for pk, policy in policies.items() if self.has_view_permission(request, policy)}
        rows = [
            self._candidate(candidate, policies.get(candidate.policy.id), candidate.policy.id in seen)
            for candidate in listed
            # What an operator may not look at is told where it is in force, and nowhere else.
            if candidate.won or candidate.policy.id in seen
        ]
        boosts = may(request.user, "add", override=True)
        names = named_callers([bucket.subject for bucket in explanation.resolution.buckets])
        counters = []
        for candidate in explanation.candidates:
            why = why_no_boost(explanation, candidate.policy) if candidate.won and boosts else ""
            link = (
                self.page_url("boost", query={**given, "policy": str(candidate.policy.id)})
                if boosts and not why
                else ""
            )
            for bucket in candidate.buckets:
                row = counter(bucket, statuses.get(bucket), decision.at_us, names)
                counters.append({**row, "policy": candidate.policy.id, "boost": link, "why_no_boost": why})
            if candidate.won and not candidate.buckets:
                name = next((row["endpoint"] for row in rows if row["id"] == candidate.policy.id), "")
                counters.append(
                    {
                        "title": name,
                        "word": candidate.policy.text,
                        "policy": candidate.policy.id,
                        "boost": link,
                        "why_no_boost": why,
                        "logs": candidate.policy.mode == "log",
                    }
                )
        counters += [counter(bucket, statuses.get(bucket), decision.at_us, names) for bucket in explanation.built_in]
        resets = self.has_reset_permission(request)
        return {
            "answered": True,
            "plan": plan and {"name": shown(plan.name), "link": self._link(request, Plan, plan.id)},
            "plan_source": explanation.plan_source,
            "verdict": verdict(explanation),
            "admitted": decision.allowed,
            "degraded": decision.error,
            "counters": counters,
            "acts": resets or boosts,
            "own": resets and any(not row.get("why_shared") and "id" in row for row in counters),
            "candidates": rows,
            "unseen": len(listed) - len(rows),
            "left_out": max(0, left_out),
            "endpoints": [shown(endpoint.name) for endpoint in explanation.context.endpoints]
            or [
                _("%(name)s (a limit that is built in)") % {"name": shown(bucket.scope)}
                for bucket in explanation.built_in
            ],
            "grant_url": self.page_url("grant"),
            "reset_url": self.page_url("reset_counters"),
        }

    def _candidate(self, candidate: Candidate, row: RatePolicy | None, seen: bool) -> dict[str, Any]:
        policy = candidate.policy
        return {
            "id": policy.id,
            "link": self.page_url("change", policy.id) if seen else "",
            # None = deleted since the snapshot was taken.
            "audience": shown(row.audience) if row else "—",
            "endpoint": shown(row.endpoint.name) if row and row.endpoint else _("all endpoints"),
            "counted_per": shown(policy.counted_per),
            "rates": shown(policy.text),
            "mode": RatePolicy.Mode(policy.mode).label if policy.mode != "enforce" else "",
            "won": candidate.won,
            "reason": shown(candidate.reason),
        }

    def _link(self, request: Any, model: Any, pk: Any) -> str:
        """The object's own page, where the operator may open it; else ""."""
        if not self.admin_site.is_registered(model):
            return ""
        other = self.admin_site.get_model_admin(model)
        name = f"{self.admin_site.name}:{model._meta.app_label}_{model._meta.model_name}_change"
        return reverse(name, args=[pk]) if other.has_view_permission(request) else ""

    def _back(self, given: dict[str, str]) -> HttpResponseRedirect:
        return HttpResponseRedirect(self.page_url("explain", query=given))


def _data(given: Any, refusal: statistics.Refusal | None) -> Any:
    """What fills in the form: its own fields; or, on the way from other pages, ``caller`` as counters name them."""
    if "caller" in given:
        # Which plan it is on, where PLAN_RESOLVER says so, only the operator may know.
        about = {
            name: text for name, text in answers(ExplainQuery.for_caller(given["caller"])).items() if name != "plan"
        }
        return {**about, **{name: text for name, text in given.items() if text}}
    if "user" in given or ExplainForm.base_fields.keys() & given.keys():
        return given
    return refusal and answers(ExplainQuery.from_refusal(refusal))


def _live(explanation: Explanation) -> dict[Bucket, BucketStatus]:
    """How the counters stand; none where Redis gives no answer."""
    decision = explanation.decision
    if decision.degraded:
        return {}
    if decision.blocked_by:
        # A blocked caller's other counters were not asked for.
        try:
            return peek(explanation.resolution.buckets)
        except StoreError:
            return {}
    return {status.bucket: status for status in decision.statuses}


def _listed(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    """All winners, and the first of the others, in their order."""
    room = _MAX_CANDIDATES - sum(candidate.won for candidate in candidates)
    listed = []
    for candidate in candidates:
        if candidate.won or room > 0:
            listed.append(candidate)
        room -= not candidate.won
    return listed
