"""Names of the endpoints, policies and callers on the Live usage page, and the links to their pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.utils.functional import cached_property
from django.utils.translation import gettext

from ...changes.writer import in_batches
from ...models import Endpoint, RatePolicy
from ...monitoring.refusals import Refusal
from ...monitoring.timeline import Counts, Timeline
from ..formatting import moment, number_text, shown
from ..names import caller_text, deleted, limits_text
from ..pages import may_view, model_url
from .counts import SPANS, Selection, most_refused

#: Rows of a table; the others are counted.
MOST_LISTED = 50
#: Policies looked up by one query; SQLite takes 32,766 parameters.
_BATCH = 5_000


class VisibleNames:
    """Endpoints and policies by id, as far as the operator may see them, read in a fixed number of queries."""

    def __init__(self, model_admin: Any, request: Any) -> None:
        self._site = model_admin.admin_site
        self._visible = model_admin.get_queryset(request).select_related("user", "subject_list", "plan", "endpoint")
        #: Whether the operator sees every policy, so that a policy that is not found is a deleted one.
        self.sees_all = model_admin.sees_all_policies(request)
        self._opens_endpoints = may_view(self._site, Endpoint, request)
        #: Sums of the policies that the operator may see: the most refused first.
        self.policy_sums: list[tuple[int, Counts]] = []
        #: Policies of the page by id; None = deleted.
        self.policies: dict[int, Any] = {}

    @cached_property
    def endpoints(self) -> dict[int, Endpoint]:
        """All endpoints by id, in the order of their names."""
        return {endpoint.pk: endpoint for endpoint in Endpoint.objects.order_by("name")}

    def may_select(self, policy_id: int) -> bool:
        """Return whether the operator may see the policy's counts."""
        return self.sees_all or bool(self._visible.filter(pk=policy_id).exists())

    def read(self, selection: Selection, timeline: Timeline | None = None, refusals: Iterable[Refusal] = ()) -> None:
        """Read the policies that the page names, in at most two queries."""
        self.policy_sums = self.visible_sums(timeline) if timeline else []
        wanted = [pk for pk, _counts in self.policy_sums[:MOST_LISTED]]
        wanted += [] if selection.policy_id is None else [selection.policy_id]
        wanted += [b.policy_id for refusal in refusals for b in refusal.buckets if b.policy_id is not None]
        found = self._visible.in_bulk(wanted)
        self.policies = {pk: found.get(pk) for pk in dict.fromkeys(wanted) if pk in found or self.sees_all}

    def visible_sums(self, timeline: Timeline) -> list[tuple[int, Counts]]:
        """Return the sums of the policies that the operator may see, the most refused first."""
        sums = most_refused(timeline.policies)
        if self.sees_all:
            return sums
        visible = self._visible.order_by().values_list("pk", flat=True)
        batches = in_batches([pk for pk, _counts in sums], _BATCH)
        seen = {pk for batch in batches for pk in visible.filter(pk__in=batch)}
        return [(pk, counts) for pk, counts in sums if pk in seen]

    def place(self, selection: Selection) -> Endpoint | None:
        """Return the endpoint selected, or that of the policy selected; None = all."""
        policy = self.policies.get(selection.policy_id or 0)
        return policy.endpoint if policy else self.endpoints.get(selection.endpoint_id or 0)

    def endpoint(self, pk: int) -> str:
        """Return the endpoint's name; "no endpoint" for 0."""
        if not pk:
            return gettext("no endpoint")
        return shown(self.endpoints[pk]) if pk in self.endpoints else deleted(pk)

    def policy(self, pk: int) -> str:
        """Return the policy's audience, endpoint and rates."""
        policy = self.policies.get(pk)
        return deleted(pk) if policy is None else shown(policy)

    def endpoint_url(self, pk: int) -> str:
        """Return the endpoint's page; "" where the operator has none."""
        known = self._opens_endpoints and pk in self.endpoints
        return model_url(self._site, Endpoint, "change", pk) if known else ""

    def policy_url(self, pk: int) -> str:
        """Return the policy's page; "" where the operator has none."""
        return model_url(self._site, RatePolicy, "change", pk) if self.policies.get(pk) else ""

    def title(self, selection: Selection) -> str:
        """Return the selection in words."""
        words = [str(SPANS[selection.span])]
        if selection.endpoint_id is not None:
            name = self.endpoint(selection.endpoint_id)
            words.append(gettext("endpoint %s") % name if selection.endpoint_id else name)
        if selection.policy_id is not None:
            words.append(gettext("policy %s") % self.policy(selection.policy_id))
        return ", ".join(words)


def explain_url(site: Any, caller: str, endpoint: str = "") -> str:
    """Return the link to Explain for the caller, at the endpoint of this name; "" for a caller without a value."""
    kind, _colon, value = caller.partition(":")
    if not value:
        return ""
    query = {kind: value} if kind in ("user", "ip") else {"caller": caller}
    return model_url(site, RatePolicy, "explain", query={**query, "endpoint": endpoint} if endpoint else query)


def refusal_row(site: Any, refusal: Refusal, names: Mapping[str, str]) -> dict[str, Any]:
    """Return what a table shows of a refusal; ``names`` are those of its caller (see ``caller_names``)."""
    return {
        "id": refusal.id,
        "explain": model_url(site, RatePolicy, "explain", query={"id": refusal.id}),
        "at": moment(refusal.at, seconds=True),
        "count": number_text(refusal.count),
        "caller": caller_text(refusal.caller, names),
        "url": explain_url(site, refusal.caller),
        "what": shown(f"{refusal.method} {refusal.scope or refusal.route}"),
        "cost": number_text(refusal.cost),
        "violated": limits_text(refusal.limits),
    }
