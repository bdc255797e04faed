"""The matrix page: plans × endpoints, each cell the rates in force now."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django import forms
from django.core.paginator import Paginator
from django.db.models import Count, Q
from django.utils import timezone
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..engine.rates import BLOCKED, UNLIMITED
from ..models import Endpoint, Plan, RatePolicy
from ..policies.facts import UNREADABLE, PolicyFacts
from ..policies.precedence import strongest
from ..policies.snapshot import Group
from ..policies.unreadable import readable_facts
from .filters import not_ended, started
from .formatting import moment, shown, when
from .pages import AdminPage, model_url
from .permissions import FOR_CHOSEN, may

#: Endpoints on one page; 50 plans make 5,000 cells of them.
_PAGE = 100
_PLACEHOLDER = "primary-key"
_WORDS = {UNLIMITED: _("unlimited"), BLOCKED: _("blocked")}


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """A policy that applies in a cell."""

    rates: str
    #: Shown unless it is the cell's only policy and counted per caller; else "".
    counted_per: str
    #: Log mode and dates, in words.
    remarks: tuple[str, ...]
    inherited: bool
    blocked: bool
    #: Its page; of an inherited policy the page that adds one for this plan. "" where neither is allowed.
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The limits of a plan's callers at an endpoint."""

    #: Plan and endpoint, for screen readers.
    label: str
    in_force: tuple[InForce, ...]
    #: Number of the cell's policies that have not ended but do not apply now; ``others_link`` lists them.
    others: int
    others_link: str
    #: The page that adds a policy counted per caller; "" where there is one, or adding is not allowed.
    add: str


class MatrixPage(AdminPage):
    """All plans at all endpoints; read-only, each cell links to the policy that sets it."""

    path = "matrix/"
    name = "matrix"
    media = forms.Media(css={"all": ["django_ratequota/matrix.css"]})

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may look at policies other than overrides."""
        return any(may(request.user, verb, override=False) for verb in ("view", "change"))

    def view(self, request: Any) -> Any:
        """Show the plans as columns, and a page of endpoints as rows."""
        query = request.GET.get("q", "").replace("\x00", "").strip()
        endpoints = Endpoint.objects.filter(name__icontains=query) if query else Endpoint.objects.all()
        page = Paginator(endpoints, _PAGE).get_page(request.GET.get("p"))
        rows: list[Endpoint | None] = [None, *page.object_list]
        plans = list(Plan.objects.all())
        columns = [(None, gettext("everyone")), *((plan, shown(plan.name)) for plan in plans)]
        cells = _Cells(self.site, request.user, rows)
        overrides = _overrides(rows)
        context = {
            "title": _("Rates in force by plan"),
            "original": gettext("Matrix"),
            "query": query,
            "page": page,
            "pages": page.paginator.get_elided_page_range(page.number),
            "ellipsis": page.paginator.ELLIPSIS,
            # Translated once for thousands of cells.
            "inherited": gettext("inherited from everyone"),
            "add_here": gettext("Add"),
            "may_edit": cells.changes or cells.adds,
            "plans": [
                {
                    "name": name,
                    "default_for": plan.get_default_for_display() if plan.default_for else "",
                    "link": self.object_url(request, Plan, plan.pk, plan),
                }
                for plan, name in columns
                if plan
            ],
            "rows": [self._row(request, endpoint, columns, cells, overrides) for endpoint in rows],
        }
        return self.render(request, "matrix.html", context)

    def _row(
        self,
        request: Any,
        endpoint: Endpoint | None,
        columns: list[tuple[Plan | None, str]],
        cells: _Cells,
        overrides: dict[int | None, tuple[int, int]],
    ) -> dict[str, Any]:
        name = gettext("all endpoints") if endpoint is None else shown(endpoint.name)
        return {
            "endpoint": name,
            "statuses": endpoint.charged_statuses if endpoint else "",
            "exempt": endpoint is not None and endpoint.exempt,
            "link": self.object_url(request, Endpoint, endpoint.pk) if endpoint else "",
            "overrides": overrides.get(_key(endpoint), (0, 0))[0],
            "blocks": overrides.get(_key(endpoint), (0, 0))[1],
            "overrides_link": cells.list_url({"audience": "override", "time": "active"}, endpoint),
            "cells": [
                cells.cell(endpoint, plan, cells.label % {"plan": plan_name, "endpoint": name})
                for plan, plan_name in columns
            ],
        }


class _Cells:
    """Makes the cells of the page's rows, from one query."""

    def __init__(self, site: Any, user: Any, rows: list[Endpoint | None]) -> None:
        self.site = site
        self.now_us = time.time_ns() // 1000
        registered = site.is_registered(RatePolicy)
        self.sees = registered
        self.changes = registered and may(user, "change", override=False)
        self.adds = registered and may(user, "add", override=False)
        # Translated once for thousands of cells.
        self.label = gettext("%(plan)s at %(endpoint)s")
        self._bases: dict[str, str] = {}
        #: endpoint id -> counted_per -> the policies that compete there.
        self.groups: dict[int | None, dict[str, Group]] = {}
        #: (endpoint id, plan id) -> number of policies that have not ended.
        self.own: Counter[tuple[int | None, int | None]] = Counter()
        self.remarks: dict[int, tuple[str, ...]] = {}
        own = _of(rows) & ~FOR_CHOSEN & not_ended(timezone.now())
        found: dict[int | None, dict[str, list[PolicyFacts]]] = {}
        for policy in RatePolicy.objects.filter(own).order_by("pk"):
            facts = readable_facts(policy)
            found.setdefault(facts.endpoint_id, {}).setdefault(facts.counted_per, []).append(facts)
            self.own[facts.endpoint_id, facts.plan_id] += 1
            self.remarks[facts.id] = tuple(_remarks(policy, facts))
        for endpoint_id, groups in found.items():
            self.groups[endpoint_id] = {per: Group(policies) for per, policies in groups.items()}

    def cell(self, endpoint: Endpoint | None, plan: Plan | None, label: str) -> Cell:
        """Return the cell of the plan (None = everyone) at the endpoint (None = all endpoints)."""
        winners: list[PolicyFacts] = []
        exempt = endpoint is not None and endpoint.exempt
        for _per, group in () if exempt else sorted(self.groups.get(_key(endpoint), {}).items()):
            winner = strongest([*(group.by_plan.get(plan.pk, ()) if plan else ()), *group.everyone], self.now_us)
            if winner is not None:
                winners.append(winner)
        own = self.own[_key(endpoint), plan.pk if plan else None]
        several = len(winners) > 1
        in_force = tuple(self._in_force(winner, endpoint, plan, several) for winner in winners)
        others = own - sum(not policy.inherited for policy in in_force)
        audience = {"plan__id__exact": plan.pk} if plan else {"audience": "everyone"}
        return Cell(
            label=label,
            in_force=in_force,
            others=others,
            others_link=self.list_url(audience, endpoint) if others else "",
            add=""
            if exempt or "caller" in (winner.counted_per for winner in winners)
            else self._add(endpoint, plan, "caller"),
        )

    def list_url(self, query: dict[str, Any], endpoint: Endpoint | None) -> str:
        """Return the address of the list of policies at the endpoint; "" where the site has none."""
        if not self.sees:
            return ""
        filters = {"endpoint__id__exact": endpoint.pk} if endpoint else {"endpoint__isnull": "True"}
        return f"{self._url('changelist')}?{urlencode({**query, **filters})}"

    def _url(self, page: str, *args: Any) -> str:
        """Return the address of a page of the policies' admin."""
        # reverse() takes 20 µs, and there are thousands of cells.
        base = self._bases.get(page)
        if base is None:
            base = self._bases[page] = model_url(self.site, RatePolicy, page, *[_PLACEHOLDER for _arg in args])
        return base.replace(_PLACEHOLDER, str(args[0])) if args else base

    def _in_force(self, policy: PolicyFacts, endpoint: Endpoint | None, plan: Plan | None, several: bool) -> InForce:
        inherited = plan is not None and policy.plan_id is None
        if inherited:
            link = self._add(endpoint, plan, policy.counted_per)
        else:
            link = self._url("change", policy.id) if self.changes else ""
        return InForce(
            rates=str(_WORDS.get(policy.text, policy.text)),
            counted_per=policy.counted_per if several or policy.counted_per != "caller" else "",
            remarks=self.remarks[policy.id],
            inherited=inherited,
            blocked=policy.rates == BLOCKED,
            link=link,
        )

    def _add(self, endpoint: Endpoint | None, plan: Plan | None, counted_per: str) -> str:
        if not self.adds:
            return ""
        query: dict[str, Any] = {"plan": plan.pk} if plan else {}
        if endpoint:
            query["endpoint"] = endpoint.pk
        return f"{self._url('add')}?{urlencode({**query, 'counted_per': counted_per})}"


def _key(endpoint: Endpoint | None) -> int | None:
    return None if endpoint is None else endpoint.pk


def _of(rows: Iterable[Endpoint | None]) -> Q:
    return Q(endpoint__isnull=True) | Q(endpoint__in=[endpoint.pk for endpoint in rows if endpoint])


def _overrides(rows: Iterable[Endpoint | None]) -> dict[int | None, tuple[int, int]]:
    """Return endpoint id -> (number of overrides in their dates, number of these that block)."""
    now = timezone.now()
    overrides = RatePolicy.objects.filter(_of(rows) & FOR_CHOSEN & started(now) & not_ended(now)).order_by()
    blocks = Count("pk", filter=Q(rates=BLOCKED, mode=RatePolicy.Mode.ENFORCE))
    counts = overrides.values("endpoint").annotate(count=Count("pk"), blocks=blocks)
    return {row["endpoint"]: (row["count"], row["blocks"]) for row in counts}


def _remarks(policy: RatePolicy, facts: PolicyFacts) -> Iterator[str]:
    if facts.rates == UNREADABLE:
        yield gettext("cannot be read, “on error” applies")
    elif facts.unread is not None:
        yield gettext("in place of %(text)s, which cannot be read") % {"text": shown(facts.unread)}
    if policy.mode == RatePolicy.Mode.LOG:
        yield gettext("log only")
    if policy.starts_at and not policy.ends_at:
        yield gettext("since %(start)s") % {"start": moment(policy.starts_at)}
    elif policy.ends_at:
        yield when(policy)
