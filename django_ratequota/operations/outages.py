"""When Redis gave no decisions, and what became of the requests: the rows of all workers, joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..models import Outage
from ..monitoring.outages import GAP

#: Rows that are read, the newest first: one for each worker and outage.
_MOST_ROWS = 5_000


@dataclass(slots=True, kw_only=True)
class Away:
    """A time in which Redis gave no decisions to some workers."""

    began_at: datetime
    ended_at: datetime
    workers: set[str] = field(default_factory=set)
    #: Why, such as timeout.
    reasons: set[str] = field(default_factory=set)
    #: Requests by the ``on_error`` that decided them: allow, deny or local.
    requests: Counter[str] = field(default_factory=Counter)
    #: Policy id -> the same for the policy.
    policies: dict[int, Counter[str]] = field(default_factory=dict)

    def join(self, row: Outage) -> None:
        """Add what a worker saw."""
        self.ended_at = max(self.ended_at, row.ended_at)
        self.workers.add(row.worker)
        self.reasons.add(row.reason)
        self.requests.update(allow=row.allow, deny=row.deny, local=row.local)
        for pk, counts in row.policies.items():
            self.policies.setdefault(int(pk), Counter()).update(counts)

    def most(self, number: int) -> list[int]:
        """Return the ids of the policies that decided most."""
        return sorted(self.policies, key=lambda pk: -self.policies[pk].total())[:number]


def outages(since: datetime, policy_ids: Collection[int] | None = None) -> list[Away]:
    """Return the outages that had not ended by ``since``, the newest first.

    With ``policy_ids``, those in which one of these policies decided by its ``on_error``.
    """
    rows: Any = Outage._default_manager.filter(ended_at__gte=since).order_by("-began_at")[:_MOST_ROWS]
    found: list[Away] = []
    for row in reversed(rows):
        if not found or row.began_at > found[-1].ended_at + GAP:
            found.append(Away(began_at=row.began_at, ended_at=row.ended_at))
        found[-1].join(row)
    return [one for one in reversed(found) if policy_ids is None or not one.policies.keys().isdisjoint(policy_ids)]
