"""The matrix page: plans × endpoints, each cell the rates in force now, read in one query."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from django.core.paginator import Paginator
from django.db.models import Q
from django.utils import timezone
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import not_ended
from ..conf import settings
from ..engine.rates import BLOCKED, UNLIMITED
from ..models import Endpoint, Plan, RatePolicy
from ..policies.facts import UNREADABLE, PlanFacts, PolicyFacts, endpoint_facts, policy_facts
from ..policies.matching import Where
from ..policies.requests.caller import DescribedCaller
from ..policies.resolve_for import Own, resolve_for
from ..policies.snapshot import Snapshot, regrouped
from .formatting import moment, shown, when
from .names import endpoint_text
from .pages import AdminPage, model_url, page_numbers
from .permissions import FOR_CHOSEN, may

_WORDS = {UNLIMITED: _("unlimited"), BLOCKED: _("blocked")}
#: Most plans on a page. Endpoints are as many as make about ``_CELLS`` cells with them, within the two bounds: some
#: 250 bytes each, and more where several policies apply in one.
_MOST_PLANS, _CELLS, _FEWEST_ENDPOINTS, _MOST_ENDPOINTS = 20, 450, 20, 100


class Cells:
    """Makes the cells of the page's rows, from one query."""

    def __init__(self, site: Any, user: Any, rows: list[Endpoint | None], plans: list[Plan]) -> None:
        self.site = site
        self.now_us = time.time_ns() // 1000
        sees = site.is_registered(RatePolicy)
        self.changes = sees and may(user, "change", override=False)
        self.adds = sees and may(user, "add", override=False)
        #: The columns after the one for everyone.
        self._columns = [(None, gettext("everyone")), *((plan, shown(plan.name)) for plan in plans)]
        # Translated once for hundreds of cells.
        self._label = gettext("%(plan)s for %(endpoint)s")
        self._inherited = gettext("%(place)s, inherited from everyone")
        here = Q(endpoint__isnull=True) | Q(endpoint__in=[endpoint.pk for endpoint in rows if endpoint])
        own = ~FOR_CHOSEN & not_ended(timezone.now()) & (Q(plan__isnull=True) | Q(plan__in=plans))
        policies = {policy.pk: policy for policy in RatePolicy.objects.filter(own, here).order_by("pk")}
        facts = {pk: policy_facts(policy) for pk, policy in policies.items()}
        self._remarks = {pk: tuple(_remarks(policies[pk], facts[pk])) for pk in policies}
        # Without default plans, so that the column for everyone shows callers without a plan.
        known = {plan.pk: PlanFacts(id=plan.pk, name=plan.name, slug=plan.slug) for plan in plans}
        self._snapshot = Snapshot(revision=0, plans=known, groups=regrouped({}, facts))

    def row(self, endpoint: Endpoint | None) -> list[dict[str, Any]]:
        """Return the cells of everyone and of each plan at the endpoint; None = all endpoints."""
        name = endpoint_text(endpoint)
        return [
            self._cell(endpoint, plan, self._label % {"plan": plan_name, "endpoint": name})
            for plan, plan_name in self._columns
        ]

    def _cell(self, endpoint: Endpoint | None, plan: Plan | None, label: str) -> dict[str, Any]:
        """Return the limits of a plan's callers at an endpoint; ``label`` names the two for screen readers.

        ``add`` leads to a policy counted per caller; "" where there is one, or adding is not allowed.
        """
        winners = self._winners(endpoint, plan)
        names = [winner.counted_per for winner in winners]
        full = (endpoint and endpoint.limits == Endpoint.Limits.NONE) or "caller" in names
        return {
            "label": label,
            "in_force": [
                {
                    "rates": str(_WORDS.get(policy.text, policy.text)),
                    "label": self._inherited % {"place": label} if inherited else label,
                    # Shown unless it is the cell's only policy and counted per caller.
                    "counted_per": "" if names == ["caller"] else policy.counted_per,
                    "remarks": self._remarks[policy.id],
                    "inherited": inherited,
                    "blocked": policy.rates == BLOCKED,
                    "link": self._add(endpoint, plan, policy.counted_per) if inherited else self._change(policy),
                }
                for policy in winners
                for inherited in [plan is not None and policy.plan_id is None]
            ],
            "add": "" if full else self._add(endpoint, plan, "caller"),
        }

    def _winners(self, endpoint: Endpoint | None, plan: Plan | None) -> list[PolicyFacts]:
        """Return the endpoint's policies that apply to a caller on the plan who has every identifier."""
        identifiers = dict.fromkeys(settings.identifiers, "any")
        caller = DescribedCaller(
            user_id=None, address=None, identifiers=identifiers, plan_slug=plan.slug if plan else None
        )
        where = Where(endpoints=(endpoint_facts(endpoint),) if endpoint else ())
        _context, resolution = resolve_for(caller, where, self._snapshot, self.now_us, Own())
        here = endpoint.pk if endpoint else None
        winners = [winner for winner in resolution.winners if winner.endpoint_id == here]
        return sorted(winners, key=lambda winner: winner.counted_per)

    def _change(self, policy: PolicyFacts) -> str:
        return model_url(self.site, RatePolicy, "change", policy.id) if self.changes else ""

    def _add(self, endpoint: Endpoint | None, plan: Plan | None, counted_per: str) -> str:
        if not self.adds:
            return ""
        query: dict[str, Any] = {"plan": plan.pk} if plan else {}
        if endpoint:
            query["endpoint"] = endpoint.pk
        return model_url(self.site, RatePolicy, "add", query={**query, "counted_per": counted_per})


class MatrixPage(AdminPage):
    """All plans at all endpoints; read-only, each cell links to the policy that sets it."""

    name = "matrix"
    css = ("django_ratequota/matrix.css",)

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may look at policies other than overrides."""
        return any(may(request.user, verb, override=False) for verb in ("view", "change"))

    def view(self, request: Any) -> Any:
        """Show a page of plans as columns, and a page of endpoints as rows."""
        search = {name: request.GET.get(name, "").replace("\x00", "").strip() for name in ("q", "plan")}

        def query(**pages: int) -> str:
            others = {name: str(number) for name, number in pages.items() if number > 1}
            return "?" + urlencode({name: value for name, value in {**search, **others}.items() if value})

        found = Plan.objects.filter(name__icontains=search["plan"])
        plans = Paginator(found, _MOST_PLANS).get_page(request.GET.get("pp"))
        # The same on each page of plans, also where the last one has fewer.
        columns = 1 + min(plans.paginator.count, _MOST_PLANS)
        most = min(_MOST_ENDPOINTS, max(_FEWEST_ENDPOINTS, _CELLS // columns))
        rows = Endpoint.objects.filter(name__icontains=search["q"])
        endpoints = Paginator(rows, most).get_page(request.GET.get("p"))
        cells = Cells(self.site, request.user, [None, *endpoints], list(plans))
        context = {
            "title": _("Rates in force by plan"),
            "original": gettext("Matrix"),
            "search": search,
            "searched": any(search.values()),
            "plan_count": plans.paginator.count,
            "endpoint_count": endpoints.paginator.count,
            "pages": [
                (gettext("Plans"), page_numbers(plans, lambda page: query(pp=page, p=endpoints.number))),
                (gettext("Endpoints"), page_numbers(endpoints, lambda page: query(pp=plans.number, p=page))),
            ],
            # Translated once for hundreds of cells.
            "add_here": gettext("Add"),
            "may_edit": cells.changes or cells.adds,
            "plans": [(plan, self.object_url(request, Plan, plan.pk, plan)) for plan in plans],
            "rows": [
                {
                    "endpoint": endpoint,
                    "name": endpoint_text(endpoint),
                    "link": self.object_url(request, Endpoint, endpoint.pk) if endpoint else "",
                    "cells": cells.row(endpoint),
                }
                for endpoint in (None, *endpoints)
            ],
        }
        return self.render(request, "matrix.html", context)


def _remarks(policy: RatePolicy, facts: PolicyFacts) -> Iterator[str]:
    if facts.rates == UNREADABLE:
        yield gettext("cannot be read (“on error” applies)")
    if policy.mode == RatePolicy.Mode.LOG:
        yield gettext("log only")
    if policy.starts_at and not policy.ends_at:
        yield gettext("since %(start)s") % {"start": moment(policy.starts_at)}
    elif policy.ends_at:
        yield when(policy)
