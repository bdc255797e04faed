"""The matrix page: plans × endpoints, each cell the rates in force now, read in one query."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django import forms
from django.core.paginator import Paginator
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.utils import timezone
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import settings
from ..engine.rates import BLOCKED, UNLIMITED
from ..models import Endpoint, Plan, RatePolicy
from ..policies.facts import NOBODY, UNREADABLE, PlanFacts, PolicyFacts, endpoint_facts, policy_facts
from ..policies.requests.caller import DescribedCaller
from ..policies.resolver import EvaluationContext, resolve_uncached
from ..policies.snapshot import Snapshot, regrouped
from .filters import not_ended, started
from .formatting import moment, shown, when
from .names import endpoint_text
from .pages import AdminPage, model_url, page_numbers
from .permissions import FOR_CHOSEN, may

_WORDS = {UNLIMITED: _("unlimited"), BLOCKED: _("blocked")}
#: Most plans on a page. Endpoints are as many as make about ``_CELLS`` cells with them, within the two bounds: some
#: 250 bytes each, and more where several policies apply in one.
_MOST_PLANS, _CELLS, _FEWEST_ENDPOINTS, _MOST_ENDPOINTS = 20, 450, 20, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What the operator looks for: the parameters of the page's form, by their names."""

    #: Parts of the names of endpoints, and of plans; "" = all.
    q: str
    plan: str
    #: Whether to leave out endpoints without policies for a plan or everyone, and plans that inherit everything.
    own_endpoints: bool
    own_plans: bool

    @classmethod
    def of(cls, params: Any) -> Search:
        """Read the query string."""
        texts = {name: params.get(name, "").replace("\x00", "").strip() for name in ("q", "plan")}
        flags = {name: params.get(name) == "1" for name in ("own_endpoints", "own_plans")}
        return cls(**texts, **flags)

    def query(self, **pages: int) -> str:
        """Return the query string of a link to these pages of the same search."""
        flags = {"own_endpoints": self.own_endpoints and "1", "own_plans": self.own_plans and "1"}
        others = {name: number for name, number in pages.items() if number > 1}
        params = {"q": self.q, "plan": self.plan, **flags, **others}
        return "?" + urlencode({name: value for name, value in params.items() if value})

    def endpoints(self) -> QuerySet[Endpoint]:
        """Return the endpoints found."""
        found = Endpoint.objects.filter(name__icontains=self.q) if self.q else Endpoint.objects.all()
        if not self.own_endpoints:
            return found
        of_plans = Q(plan__isnull=True) | Q(plan__name__icontains=self.plan) if self.plan else Q()
        return found.filter(Exists(_own_policies().filter(of_plans, endpoint=OuterRef("pk"))))

    def plans(self) -> QuerySet[Plan]:
        """Return the plans found; of several policies of their own, one at the endpoints found will do."""
        found = Plan.objects.filter(name__icontains=self.plan) if self.plan else Plan.objects.all()
        if not self.own_plans:
            return found
        at_endpoints = Q(endpoint__name__icontains=self.q) if self.q else Q()
        return found.filter(Exists(_own_policies().filter(at_endpoints, plan=OuterRef("pk"))))


class Cells:
    """Makes the cells of the page's rows, from one query."""

    def __init__(self, site: Any, user: Any, rows: list[Endpoint | None], plans: list[Plan]) -> None:
        self.site = site
        self.now_us = time.time_ns() // 1000
        self.sees = site.is_registered(RatePolicy)
        self.changes = self.sees and may(user, "change", override=False)
        self.adds = self.sees and may(user, "add", override=False)
        #: The columns after the one for everyone.
        self._columns = [(None, gettext("everyone")), *((plan, shown(plan.name)) for plan in plans)]
        # Translated once for hundreds of cells.
        self._label = gettext("%(plan)s at %(endpoint)s")
        self._inherited = gettext("%(place)s, inherited from everyone")
        #: (endpoint id, plan id) -> number of policies that have not ended.
        self.own: Counter[tuple[int | None, int | None]] = Counter()
        self.remarks: dict[int, tuple[str, ...]] = {}
        found: list[PolicyFacts] = []
        for policy in _own_policies().filter(_of(rows), Q(plan__isnull=True) | Q(plan__in=plans)).order_by("pk"):
            facts = policy_facts(policy)
            found.append(facts)
            self.own[facts.endpoint_id, facts.plan_id] += 1
            self.remarks[facts.id] = tuple(_remarks(policy, facts))
        # Without default plans, so that the column for everyone shows callers without a plan.
        known = {plan.pk: PlanFacts(id=plan.pk, name=plan.name, slug=plan.slug) for plan in plans}
        groups = regrouped({}, {facts.id: facts for facts in found})
        self._snapshot = Snapshot(revision=0, plans=known, groups=groups)

    def row(self, endpoint: Endpoint | None) -> list[dict[str, Any]]:
        """Return the cells of everyone and of each plan at the endpoint; None = all endpoints."""
        name = endpoint_text(endpoint)
        return [
            self._cell(endpoint, plan, self._label % {"plan": plan_name, "endpoint": name})
            for plan, plan_name in self._columns
        ]

    def _cell(self, endpoint: Endpoint | None, plan: Plan | None, label: str) -> dict[str, Any]:
        """Return the limits of a plan's callers at an endpoint; ``label`` names the two for screen readers.

        ``others`` are the cell's policies that have not ended but do not apply now. ``add`` leads to a policy counted
        per caller; "" where there is one, or adding is not allowed.
        """
        winners = self._winners(endpoint, plan)
        several = len(winners) > 1
        inherited = [plan is not None and winner.plan_id is None for winner in winners]
        others = self.own[_key(endpoint), plan.pk if plan else None] - inherited.count(False)
        audience = {"plan__id__exact": plan.pk} if plan else {"audience": "everyone"}
        full = (endpoint and endpoint.exempt) or "caller" in (winner.counted_per for winner in winners)
        return {
            "label": label,
            "in_force": [
                {
                    "rates": str(_WORDS.get(policy.text, policy.text)),
                    "label": self._inherited % {"place": label} if of_everyone else label,
                    # Shown unless it is the cell's only policy and counted per caller.
                    "counted_per": policy.counted_per if several or policy.counted_per != "caller" else "",
                    "remarks": self.remarks[policy.id],
                    "inherited": of_everyone,
                    "blocked": policy.rates == BLOCKED,
                    "link": self._link(policy, endpoint, plan if of_everyone else None),
                }
                for policy, of_everyone in zip(winners, inherited, strict=True)
            ],
            "others": others,
            "others_link": self.list_url(audience, endpoint) if others else "",
            "add": "" if full else self._add(endpoint, plan, "caller"),
        }

    def _winners(self, endpoint: Endpoint | None, plan: Plan | None) -> list[PolicyFacts]:
        """Return the endpoint's policies that apply to a caller on the plan who has every identifier."""
        identifiers = dict.fromkeys(settings.identifiers, "any")
        caller = DescribedCaller(
            user_id=None, address=None, identifiers=identifiers, plan_slug=plan.slug if plan else None
        )
        endpoints = (endpoint_facts(endpoint),) if endpoint else ()
        context = EvaluationContext(caller, NOBODY, endpoints, None, self._snapshot, self.now_us)
        winners = [winner for winner in resolve_uncached(context).winners if winner.endpoint_id == _key(endpoint)]
        return sorted(winners, key=lambda winner: winner.counted_per)

    def list_url(self, query: dict[str, Any], endpoint: Endpoint | None) -> str:
        """Return the address of the list of policies at the endpoint; "" where the site has none."""
        if not self.sees:
            return ""
        filters = {"endpoint__id__exact": endpoint.pk} if endpoint else {"endpoint__isnull": "True"}
        return model_url(self.site, RatePolicy, "changelist", query={**query, **filters})

    def _link(self, policy: PolicyFacts, endpoint: Endpoint | None, heir: Plan | None) -> str:
        """Return the policy's page, or the page that adds one for its heir; "" where that is not allowed."""
        if heir is not None:
            return self._add(endpoint, heir, policy.counted_per)
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

    path = "matrix/"
    name = "matrix"
    media = forms.Media(css={"all": ["django_ratequota/matrix.css"]})

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may look at policies other than overrides."""
        return any(may(request.user, verb, override=False) for verb in ("view", "change"))

    def view(self, request: Any) -> Any:
        """Show a page of plans as columns, and a page of endpoints as rows."""
        search = Search.of(request.GET)
        plans = Paginator(search.plans(), _MOST_PLANS).get_page(request.GET.get("pp"))
        # The same on each page of plans, also where the last one has fewer.
        columns = 1 + min(plans.paginator.count, _MOST_PLANS)
        most = min(_MOST_ENDPOINTS, max(_FEWEST_ENDPOINTS, _CELLS // columns))
        endpoints = Paginator(search.endpoints(), most).get_page(request.GET.get("p"))
        cells = Cells(self.site, request.user, [None, *endpoints], list(plans))
        overrides = count_overrides([None, *endpoints])
        context = {
            "title": _("Rates in force by plan"),
            "original": gettext("Matrix"),
            "search": search,
            "searched": search.query() != "?",
            "plan_count": plans.paginator.count,
            "endpoint_count": endpoints.paginator.count,
            "pages": [
                (gettext("Plans"), page_numbers(plans, lambda page: search.query(pp=page, p=endpoints.number))),
                (gettext("Endpoints"), page_numbers(endpoints, lambda page: search.query(pp=plans.number, p=page))),
            ],
            # Translated once for hundreds of cells.
            "add_here": gettext("Add"),
            "may_edit": cells.changes or cells.adds,
            "plans": [
                {
                    "name": shown(plan.name),
                    "default_for": plan.get_default_for_display() if plan.default_for else "",
                    "link": self.object_url(request, Plan, plan.pk, plan),
                }
                for plan in plans
            ],
            "rows": [self._row(request, endpoint, cells, overrides) for endpoint in (None, *endpoints)],
        }
        return self.render(request, "matrix.html", context)

    def _row(
        self, request: Any, endpoint: Endpoint | None, cells: Cells, overrides: dict[int | None, tuple[int, int]]
    ) -> dict[str, Any]:
        count, blocks = overrides.get(None if endpoint is None else endpoint.pk, (0, 0))
        return {
            "endpoint": endpoint_text(endpoint),
            "statuses": endpoint.charged_statuses if endpoint else "",
            "exempt": endpoint is not None and endpoint.exempt,
            "link": self.object_url(request, Endpoint, endpoint.pk) if endpoint else "",
            "overrides": count,
            "blocks": blocks,
            "overrides_link": cells.list_url({"audience": "override", "time": "active"}, endpoint),
            "cells": cells.row(endpoint),
        }


def _own_policies() -> QuerySet[RatePolicy]:
    """Return the policies for plans and for everyone that have not ended."""
    return RatePolicy.objects.filter(~FOR_CHOSEN & not_ended(timezone.now())).order_by()


def _key(endpoint: Endpoint | None) -> int | None:
    return None if endpoint is None else endpoint.pk


def _of(rows: Iterable[Endpoint | None]) -> Q:
    return Q(endpoint__isnull=True) | Q(endpoint__in=[endpoint.pk for endpoint in rows if endpoint])


def count_overrides(rows: Iterable[Endpoint | None]) -> dict[int | None, tuple[int, int]]:
    """Return endpoint id -> (number of overrides in their dates, number of these that block)."""
    now = timezone.now()
    overrides = RatePolicy.objects.filter(_of(rows) & FOR_CHOSEN & started(now) & not_ended(now)).order_by()
    blocks = Count("pk", filter=Q(rates=BLOCKED, mode=RatePolicy.Mode.ENFORCE))
    counts = overrides.values("endpoint").annotate(count=Count("pk"), blocks=blocks)
    return {row["endpoint"]: (row["count"], row["blocks"]) for row in counts}


def _remarks(policy: RatePolicy, facts: PolicyFacts) -> Iterator[str]:
    if facts.rates == UNREADABLE:
        yield gettext("cannot be read, “on error” applies")
    if policy.mode == RatePolicy.Mode.LOG:
        yield gettext("log only")
    if policy.starts_at and not policy.ends_at:
        yield gettext("since %(start)s") % {"start": moment(policy.starts_at)}
    elif policy.ends_at:
        yield when(policy)
