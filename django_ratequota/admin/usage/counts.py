"""The counts of Traffic: sums and refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from django.utils.translation import gettext_lazy as _

from ...monitoring import refusals as recorded_refusals
from ...monitoring.refusals import Refusal
from ...monitoring.timeline import Counts, Span
from ..formatting import number_text, percent

SPANS: dict[Span, Any] = {"hour": _("last hour"), "day": _("last 24 hours"), "week": _("last week")}
#: Newest refusals that are searched for those of a selected endpoint or policy.
_SEARCHED = 500


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


def newest_refusals(endpoint: int | None, policy: int | None, most: int) -> list[Refusal]:
    """Return the newest refusals of an endpoint or a policy, None = all, of any time; raises ``StoreError``.

    Of a policy also those that it only logged, which have no id. Endpoint 0 = requests that belong to none.
    """
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
