"""What ids of callers, endpoints and policies are called on operators' pages, and where they lead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.urls import NoReverseMatch, reverse
from django.utils.functional import cached_property
from django.utils.http import urlencode
from django.utils.translation import gettext

from ...models import Endpoint
from ...monitoring.refusals import Refusal
from ...monitoring.timeline import Counts, Timeline
from ..formatting import shown
from ..names import caller_text, deleted
from ..permissions import PolicyRights
from .counts import SPANS, Chosen, sums

#: Policies of a table that are named; what is more is counted.
SHOWN = 50


class Names:
    """Endpoints and policies by id, as far as the operator may see them, read in a fixed number of queries."""

    def __init__(self, model_admin: PolicyRights, request: Any) -> None:
        site = model_admin.admin_site
        self._site = site.name
        self._visible = model_admin.get_queryset(request).select_related("user", "plan", "endpoint")
        #: Whether policies that are gone may be told from those that are not the operator's to see.
        self.sees_all = model_admin.sees_all_policies(request)
        self._opens_endpoints = site.is_registered(Endpoint) and site.get_model_admin(Endpoint).has_view_permission(
            request
        )
        #: Sums of the policies that the operator may see: the most refused first.
        self.policy_sums: list[tuple[int, Counts]] = []
        #: Policies of the page by id; None = deleted.
        self.policies: dict[int, Any] = {}

    @cached_property
    def endpoints(self) -> dict[int, Endpoint]:
        """All of them by id, in the order of their names."""
        return {endpoint.pk: endpoint for endpoint in Endpoint.objects.order_by("name")}

    def may_choose(self, policy_id: int) -> bool:
        """Whether the policy's counts are the operator's to see."""
        return self.sees_all or bool(self._visible.filter(pk=policy_id).exists())

    def read(
        self,
        chosen: Chosen,
        timeline: Timeline | None = None,
        refusals: Iterable[Refusal] = (),
        most: int | None = SHOWN,
    ) -> None:
        """Read the policies that a page or a file names, ``most`` of the timeline's: two queries at most."""
        self.policy_sums = sums(timeline.policies) if timeline else []
        if not self.sees_all:
            counted = [pk for pk, _counts in self.policy_sums]
            theirs = set(self._visible.filter(pk__in=counted).values_list("pk", flat=True))
            self.policy_sums = [(pk, counts) for pk, counts in self.policy_sums if pk in theirs]
        wanted = [pk for pk, _counts in self.policy_sums[:most]]
        wanted += [] if chosen.policy_id is None else [chosen.policy_id]
        wanted += [b.policy_id for one in refusals for b in one.buckets if b.policy_id is not None]
        found = self._visible.in_bulk(wanted)
        self.policies = {pk: found.get(pk) for pk in dict.fromkeys(wanted) if pk in found or self.sees_all}

    def endpoint(self, pk: int) -> str:
        """Its name; that of no endpoint for 0."""
        if not pk:
            return gettext("no endpoint")
        return shown(self.endpoints[pk]) if pk in self.endpoints else deleted(pk)

    def policy(self, pk: int) -> str:
        """Audience, endpoint and rates."""
        policy = self.policies.get(pk)
        return deleted(pk) if policy is None else shown(policy)

    def endpoint_url(self, pk: int) -> str:
        """Its page; "" where there is none, or none for this operator."""
        known = self._opens_endpoints and pk in self.endpoints
        return page_url(self._site, "endpoint_change", pk) if known else ""

    def policy_url(self, pk: int) -> str:
        """Its page; "" where there is none."""
        return page_url(self._site, "ratepolicy_change", pk) if self.policies.get(pk) else ""

    def title(self, chosen: Chosen) -> str:
        """What is chosen, in words."""
        words = [str(SPANS[chosen.span])]
        if chosen.endpoint_id is not None:
            named = gettext("endpoint %s") % self.endpoint(chosen.endpoint_id)
            words.append(named if chosen.endpoint_id else self.endpoint(0))
        if chosen.policy_id is not None:
            words.append(gettext("policy %s") % self.policy(chosen.policy_id))
        return ", ".join(words)


def caller_cell(caller: str, users: Mapping[str, str], site: str, endpoint: str = "") -> dict[str, str]:
    """A caller's name and the way to what applies to it."""
    return {"text": caller_text(caller, users), "explain": explain_url(site, caller, endpoint)}


def explain_url(site: str, caller: str, endpoint: str = "") -> str:
    """Where the caller's limits, those at the endpoint of this name say, are explained; "" where nothing can be."""
    kind, _colon, value = caller.partition(":")
    if not value:
        return ""
    asked = {kind: value} if kind in ("user", "ip") else {"kind": kind, "value": value}
    if endpoint:
        asked["endpoint"] = endpoint
    return page_url(site, "ratepolicy_explain", query=asked)


def page_url(site: str, name: str, *args: Any, query: Mapping[str, str] | None = None) -> str:
    """The address of a page of this app's admin; "" where the site has none."""
    try:
        url = reverse(f"{site}:django_ratequota_{name}", args=args)
    except NoReverseMatch:
        return ""
    return f"{url}?{urlencode(query)}" if query else url
