"""Counts for the live usage page: what is chosen, what was counted of it, and its sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...monitoring import refusals as recorded_refusals
from ...monitoring import timeline as timelines
from ...monitoring.refusals import Refusal
from ...monitoring.timeline import Counts, Span, Timeline, TopCaller
from ...policies.facts import endpoint_facts
from ...policies.matching import match_endpoints
from ...policies.requests.methods import handling_of_view
from ...policies.requests.routes import known_views
from ...policies.snapshot import Snapshot
from ..charts import Plot, Series, plot
from ..formatting import number_text, percent

SPANS: dict[Span, Any] = {"hour": _("last hour"), "day": _("last day"), "week": _("last week")}
_STEPS: dict[Span, Any] = {
    "hour": _("Requests per minute"),
    "day": _("Requests per 15 minutes"),
    "week": _("Requests per hour"),
}
OUTCOMES: tuple[Literal["admitted", "refused", "would_refuse"], ...] = ("admitted", "refused", "would_refuse")
_NOTHING = Counts()
#: Refusals that are looked through at least, where an endpoint or a policy is chosen.
_SEARCHED = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What the operator looks at."""

    span: Span = "hour"
    #: 0 = requests that belong to no endpoint; None = all requests.
    endpoint_id: int | None = None
    policy_id: int | None = None
    #: Whether the page asks again by itself.
    refresh: bool = False

    def query(self, **changes: Any) -> str:
        """The choice as the query of a link, changed so."""
        chosen = replace(self, **changes)
        given = {"span": chosen.span, "endpoint": chosen.endpoint_id, "policy": chosen.policy_id}
        if chosen.refresh:
            given["refresh"] = 1
        return "?" + urlencode({name: value for name, value in given.items() if value is not None})

    @property
    def slug(self) -> str:
        """The choice as a part of a file's name."""
        ids = {"endpoint": self.endpoint_id, "policy": self.policy_id}
        return "-".join([f"last-{self.span}", *(f"{name}-{pk}" for name, pk in ids.items() if pk is not None)])

    def of(self, timeline: Timeline) -> tuple[Counts, ...]:
        """The counts of what is chosen."""
        counts: tuple[Counts, ...] | None = timeline.total
        if self.policy_id is not None:
            counts = timeline.policies.get(self.policy_id)
        elif self.endpoint_id is not None:
            counts = timeline.endpoints.get(self.endpoint_id)
        return counts or (_NOTHING,) * len(timeline.starts)


def summed(counts: Iterable[Counts]) -> Counts:
    """All of them together."""
    admitted = refused = would_refuse = 0
    for one in counts:
        admitted += one.admitted
        refused += one.refused
        would_refuse += one.would_refuse
    return Counts(admitted, refused, would_refuse)


def sums(rows: Mapping[int, tuple[Counts, ...]]) -> list[tuple[int, Counts]]:
    """Each one's sum by id: the most refused first, then the most used."""
    found = {pk: summed(counts) for pk, counts in rows.items()}
    order = sorted(found, key=lambda pk: (-found[pk].refused, -found[pk].would_refuse, -found[pk].admitted, pk))
    return [(pk, found[pk]) for pk in order]


def cells(counts: Counts) -> list[str]:
    """The numbers of a row: admitted, of these only logged, refused, and the part that was refused."""
    numbers = [number_text(number) for number in (counts.admitted, counts.would_refuse, counts.refused)]
    return [*numbers, percent(counts.refused, counts.admitted + counts.refused)]


def totals(counts: Counts) -> list[dict[str, str]]:
    """The sums of the whole time."""
    everything = counts.admitted + counts.refused
    named = [
        (_("Requests"), everything),
        (_("Admitted"), counts.admitted),
        (_("Of these, would be refused (log mode)"), counts.would_refuse),
        (_("Refused"), counts.refused),
    ]
    return [
        {"name": str(name), "number": number_text(number), "share": percent(number, everything) if at else ""}
        for at, (name, number) in enumerate(named)
    ]


def drawn(timeline: Timeline, chosen: Chosen) -> Plot:
    """The plot of what is chosen."""
    counts = chosen.of(timeline)
    form = "D H:i" if chosen.span == "week" else "H:i"
    return plot(
        title=str(_STEPS[chosen.span]),
        labels=[date_format(timezone.localtime(start), form) for start in timeline.starts],
        series=[
            Series(gettext("admitted"), "admitted", [max(0, one.admitted - one.would_refuse) for one in counts]),
            Series(gettext("admitted, would be refused"), "would", [one.would_refuse for one in counts]),
            Series(gettext("refused"), "refused", [one.refused for one in counts]),
        ],
        empty=gettext("No requests were counted in this time."),
    )


def tops(chosen: Chosen, most: int) -> dict[str, tuple[TopCaller, ...]]:
    """The busiest callers by each of the three counts; raises ``StoreError``."""
    return timelines.top_callers(chosen.span, endpoint_id=chosen.endpoint_id, policy_id=chosen.policy_id, most=most)


def refusals(chosen: Chosen, endpoints: Mapping[int, Any], most: int) -> list[Refusal]:
    """The newest refusals of what is chosen, whenever they were; raises ``StoreError``."""
    if chosen.policy_id is None and chosen.endpoint_id is None:
        return list(recorded_refusals.refusals(most))
    found = recorded_refusals.refusals(max(most, _SEARCHED))
    if chosen.policy_id is not None:
        return [one for one in found if any(b.refused and b.policy_id == chosen.policy_id for b in one.buckets)][
            :most
        ]
    facts = {pk: endpoint_facts(endpoint) for pk, endpoint in endpoints.items()}
    snapshot = Snapshot(revision=0, plans={}, defaults={}, endpoints=facts, groups={})
    views = {route: (name or None, view) for route, name, view in known_views()}
    belonging = []
    for one in found:
        name, view = views.get(one.route, (None, None))
        matched = match_endpoints(
            snapshot,
            scope=one.scope or None,
            route=one.route or None,
            name=name,
            method=one.method,
            handling=handling_of_view(view, one.method),
        )
        if chosen.endpoint_id in ([endpoint.id for endpoint in matched] or [0]):
            belonging.append(one)
    return belonging[:most]
