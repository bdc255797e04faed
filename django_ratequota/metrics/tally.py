"""Decisions by endpoint and by policy since the process began, added up from the collector's records."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ..monitoring.collector import listeners
from ..monitoring.packing import Records
from ..policies.cache import policies
from ..utils import forks

#: Most combinations of labels. Further ones are counted as one, because operators may rename endlessly.
MAX_SERIES = 5_000
#: Labels that are no possible name of an endpoint or plan.
NONE, ANY, OTHER, OVERRIDES = "(none)", "(any)", "(other)", "(overrides)"


class Tally(forks.Renewed):
    """Counts that only grow, as monitoring systems want them."""

    def clear(self) -> None:
        """Set all counts to zero: for a forked child, and for tests."""
        self._lock = forks.lock()
        self._endpoints: Counter[tuple[str, ...]] = Counter()
        self._policies: Counter[tuple[str, ...]] = Counter()
        # Deleted ones are kept, because their last decisions may be counted just afterwards.
        self._endpoint_names: dict[int, str] = {}
        self._policy_names: dict[int, tuple[str, str]] = {}
        self._named: tuple[object, ...] = ()

    def by_endpoint(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Return ((endpoint, outcome), requests)."""
        with self._lock:
            return list(self._endpoints.items())

    def by_policy(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Return ((endpoint, policy, outcome), requests)."""
        with self._lock:
            return list(self._policies.items())

    def add(self, records: Records) -> None:
        """Count records, each as often as it was made."""
        # Grouped by everything but the caller first: there are few such groups.
        groups: Counter[tuple[Any, ...]] = Counter()
        for record, times in records:
            groups[record.result] += times
        with self._lock:
            self._learn_names()
            for (endpoint_ids, policy_ids, allowed, against), times in groups.items():
                outcome = "refused" if not allowed else "would_refuse" if against else "admitted"
                for name in [self._endpoint_names.get(endpoint_id, OTHER) for endpoint_id in endpoint_ids] or [NONE]:
                    _count(self._endpoints, (name, outcome), times)
                for policy_id in policy_ids:
                    # A refusal by another policy is no count of this one.
                    if allowed or policy_id in against:
                        names = self._policy_names.get(policy_id, (ANY, OVERRIDES))
                        _count(self._policies, (*names, outcome if policy_id in against else "admitted"), times)

    def _learn_names(self) -> None:
        snapshot = policies.current()
        if snapshot is None:
            return
        named = (snapshot.plans, snapshot.endpoints, snapshot.lists, snapshot.groups)
        if len(self._named) == len(named) and all(map(operator.is_, named, self._named)):
            return
        self._named = named
        self._endpoint_names |= {endpoint.id: endpoint.name for endpoint in snapshot.endpoints.values()}
        for endpoint_id, groups in snapshot.groups.items():
            endpoint = "all" if endpoint_id is None else self._endpoint_names.get(endpoint_id, OTHER)
            # Only policies of plans, lists and everyone: one label per subject would show subjects, and be too many.
            for group in groups.values():
                for policy in group.without_subject(group.having("list"), group.having("plan")):
                    plan = None if policy.plan_id is None else snapshot.plans.get(policy.plan_id)
                    name = snapshot.lists.get(policy.list_id or 0) or (plan.slug if plan else "everyone")
                    self._policy_names[policy.id] = (endpoint, f"{name}-{policy.id}")


def _count(counts: Counter[tuple[str, ...]], labels: tuple[str, ...], times: int) -> None:
    if labels not in counts and len(counts) >= MAX_SERIES:
        labels = (*[OTHER] * (len(labels) - 1), labels[-1])
    counts[labels] += times


#: This process's.
tally = Tally()
listeners.append(tally.add)
