"""The matrix page: plans × endpoints, each cell the rates in force now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django import forms
from django.core.paginator import Paginator
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import Endpoint, Plan, RatePolicy
from .filters import not_ended
from .formatting import shown
from .matrix_cells import Cells, count_overrides
from .names import endpoint_text
from .pages import AdminPage, page_numbers
from .permissions import FOR_CHOSEN, may

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
