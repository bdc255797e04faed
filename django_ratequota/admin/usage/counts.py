"""The counts of Traffic: what the operator selected, its chart, sums and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from django.utils import timezone
from django.utils.formats import date_format
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...monitoring import refusals as recorded_refusals
from ...monitoring import timeline as timelines
from ...monitoring.refusals import Refusal
from ...monitoring.timeline import Counts, Span, Timeline, TopCaller
from ..charts import Plot, Series
from ..formatting import number_text, percent

SPANS: dict[Span, Any] = {"hour": _("last hour"), "day": _("last day"), "week": _("last week")}
_TITLES: dict[Span, Any] = {
    "hour": _("Requests per minute"),
    "day": _("Requests per 15 minutes"),
    "week": _("Requests per hour"),
}
#: Newest refusals that are searched for those of a selected endpoint or policy.
_SEARCHED = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the operator selected: a span of time, and all requests, those of an endpoint, or those of a policy."""

    span: Span = "hour"
    #: 0 = requests that belong to no endpoint; None = all requests.
    endpoint_id: int | None = None
    policy_id: int | None = None
    #: The outcome by which callers are sorted.
    order: str = "admitted"

    def query(self, **changes: Any) -> str:
        """Return the query string of a link to this selection with ``changes``."""
        values = asdict(replace(self, **changes))
        return "?" + urlencode({name.removesuffix("_id"): one for name, one in values.items() if one is not None})


def sum_counts(counts: Iterable[Counts]) -> Counts:
    """Return the sum of the slots."""
    columns = zip(*((slot.admitted, slot.refused, slot.would_refuse) for slot in counts), strict=True)
    return Counts(*map(sum, columns))


def most_refused(sums: Mapping[int, Counts]) -> list[tuple[int, Counts]]:
    """Return (id, sum), the most refused first, then the most admitted."""
    return sorted(sums.items(), key=lambda row: (-row[1].refused, -row[1].would_refuse, -row[1].admitted, row[0]))


def cells(counts: Counts) -> list[str]:
    """Return the numbers of a table row: admitted, of these refused by log mode, refused, and the share refused."""
    numbers = [number_text(number) for number in (counts.admitted, counts.would_refuse, counts.refused)]
    return [*numbers, percent(counts.refused, counts.admitted + counts.refused)]


def totals(counts: Counts) -> list[dict[str, str]]:
    """Return the totals below the chart: all requests, then each outcome with its share."""
    requests = counts.admitted + counts.refused
    outcomes = (
        (gettext("Admitted"), counts.admitted),
        (gettext("Of these, would be refused (log mode)"), counts.would_refuse),
        (gettext("Refused"), counts.refused),
    )
    rows = [(gettext("Requests"), requests, ""), *((*row, percent(row[1], requests)) for row in outcomes)]
    return [{"name": name, "number": number_text(number), "share": share} for name, number, share in rows]


def read_timeline(selection: Selection) -> Timeline:
    """Return the selection's counts over time; raises ``StoreError``."""
    return timelines.timeline(selection.span, endpoint_id=selection.endpoint_id, policy_id=selection.policy_id)


def chart(timeline: Timeline, selection: Selection) -> Plot:
    """Return the chart of the selection's counts."""
    counts = timeline.total
    label_format = "D H:i" if selection.span == "week" else "H:i"
    return Plot(
        title=str(_TITLES[selection.span]),
        labels=[date_format(timezone.localtime(start), label_format) for start in timeline.starts],
        series=[
            Series(gettext("admitted"), "admitted", [max(0, slot.admitted - slot.would_refuse) for slot in counts]),
            Series(gettext("admitted, would be refused"), "would", [slot.would_refuse for slot in counts]),
            Series(gettext("refused"), "refused", [slot.refused for slot in counts]),
        ],
        unit=timezone.get_current_timezone_name(),
        empty=gettext("No requests were counted in this time."),
    )


def top_callers(selection: Selection, most: int) -> dict[str, tuple[TopCaller, ...]]:
    """Return the busiest callers by each outcome; raises ``StoreError``."""
    return timelines.top_callers(
        selection.span, endpoint_id=selection.endpoint_id, policy_id=selection.policy_id, most=most
    )


def newest_refusals(selection: Selection, most: int) -> list[Refusal]:
    """Return the newest refusals of the selected endpoint or policy, of any time; raises ``StoreError``.

    Of a policy also those that it only logged, which have no id.
    """
    endpoint, policy = selection.endpoint_id, selection.policy_id
    found = recorded_refusals.refusals(most if endpoint is None and policy is None else max(most, _SEARCHED))
    own = [
        one
        for one in found
        if (endpoint is None or endpoint in (one.endpoint_ids or (0,)))
        and (policy is None or any(each.refused and each.policy_id == policy for each in one.buckets))
    ]
    if policy is not None:
        own += [replace(one, id="") for one in recorded_refusals.would_be_refusals(policy, most)]
        own.sort(key=attrgetter("at"), reverse=True)
    return own[:most]
